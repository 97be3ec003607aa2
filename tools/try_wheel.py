"""Tries a wheel without the source tree: ``try_wheel.py WHEEL [--tests tests/ops ...]``.

The wheel is installed into a new virtual environment that sees this Python's packages: torch,
pytest. pip and the first call may take 10 seconds together. With ``--tests``, copies of these tests
and of an example run in a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 10
CALL = """
import flash_cute, pathlib, torch
folder = pathlib.Path(flash_cute.__file__).parent
assert folder.is_relative_to({environment!r}), folder
assert (folder / "py.typed").exists()
q = torch.randn(1, 16, 2, 8)
out = flash_cute.flash_attn_func(q, q, q, causal=True)
print("flash_cute", flash_cute.__version__, "torch", torch.__version__, tuple(out.shape))
"""
EXAMPLE = ("examples/pack_sequences.py", "--device", "cpu", "--longest", "40")


def fresh(environment: Path) -> Path:
    """A virtual environment that sees the packages of this Python; returns its own Python."""
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", environment], check=True)
    places = {"base": environment, "platbase": environment}
    packages = Path(sysconfig.get_path("purelib", scheme="venv", vars=places))
    inherited = [path for path in sys.path if path.endswith("-packages")]
    (packages / "inherited.pth").write_text("\n".join(inherited))
    return environment / "bin" / "python"


def run(folder: Path, *command: str | Path) -> None:
    """Runs a command in a folder, without variables of the source tree; exits if it fails."""
    hidden = ("PYTHONPATH", "FLASH_CUTE_LIBRARY")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    if subprocess.run(command, cwd=folder, env=variables).returncode != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--tests", nargs=argparse.REMAINDER, default=[], metavar="ARGUMENT", help="pytest's"
    )
    options = parser.parse_args(argv)
    wheel = options.wheel.resolve(strict=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        python = fresh(folder / "environment")
        run(folder, python, "-c", "import torch")  # from the disk, once
        started = time.monotonic()
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
        run(folder, *pip, wheel)
        run(folder, python, "-c", CALL.format(environment=str(folder / "environment")))
        seconds = time.monotonic() - started
        print(f"{wheel.name}: {seconds:.1f} s from pip install to the first call", flush=True)
        if seconds > SECONDS:
            sys.exit(f"that is too long: {SECONDS} s are allowed")
        if options.tests:
            for copied in ("tests", "examples"):
                shutil.copytree(ROOT / copied, folder / copied)
            run(folder, python, "-m", "pytest", "-q", "-rs", *options.tests)
            run(folder, python, *EXAMPLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
