"""Runs the shell commands of the documentation: ``try_commands.py [--gpu] [--seconds 240]``.

They run in a new virtual environment with torch for the CPU, and in a copy of the files that git
tracks, page by page; repeated lines run once. A block under ``<!-- gpu -->`` needs --gpu, one under
``<!-- not in CI: reason -->`` never runs. It fails if a command fails, if the blocks take longer
than --seconds, or a process more than 4 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/install.md", "docs/index.md", "docs/cli.md")
TORCH = "torch==2.13.0"  # as the Makefile's
MOST_BYTES = 4 << 30
BLOCK = re.compile(r"^(?:<!-- (gpu|not in CI)(?:: [^\n]+)? -->\n)?```sh\n(.*?)^```$", re.M | re.S)
_COMMENT = re.compile(r" +# .*")


def blocks(page: str, gpu: bool) -> list[str]:
    """The blocks of a page that run here."""
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [body for mark, body in found if mark == "" or (gpu and mark == "gpu")]


def copy_tracked(folder: Path) -> None:
    """Copies the files that git tracks, with uncommitted changes."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def environment(folder: Path, torch: str) -> dict[str, str]:
    """The variables of a new virtual environment with torch, without the caller's checkout."""
    subprocess.run([sys.executable, "-I", "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", torch], check=True)
    hidden = ("PYTHONPATH", "FLASH_CUTE_LIBRARY", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "PATH": f"{folder / 'bin'}{os.pathsep}{kept['PATH']}"}


def run(folder: Path, variables: dict[str, str], gpu: bool) -> str:
    """Runs the blocks of all pages; returns the failure, or ""."""
    done: set[str] = set()
    for page in PAGES:
        for body in blocks(page, gpu):
            lines = [_COMMENT.sub("", line) for line in body.splitlines()]
            lines = [line for line in lines if line not in done]
            done.update(lines)
            started = time.monotonic()
            command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
            ended = subprocess.run(command, cwd=folder, env=variables)
            print(f"== {page}: {lines}, {time.monotonic() - started:.0f} s", flush=True)
            if ended.returncode != 0:
                return f"{page}: {body}ended with {ended.returncode}"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="run the blocks that need a GPU, too")
    parser.add_argument("--seconds", type=float, default=240, help="that the blocks may take")
    parser.add_argument("--torch", default=TORCH, help="what pip installs first")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "flash_cute"
        folder.mkdir()
        copy_tracked(folder)
        variables = environment(Path(name) / "venv", options.torch)
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        started = time.monotonic()
        failure = run(folder, variables, options.gpu)
        took = time.monotonic() - started
    most = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
    print(f"{took:.0f} s, at most {most / 1e9:.1f} GB a process")
    if not failure and took > options.seconds:
        failure = f"the commands took {took:.0f} s, more than {options.seconds:.0f}"
    if not failure and most > MOST_BYTES:
        failure = f"a command took {most / 1e9:.1f} GB"
    if failure:
        print(failure)
    return int(bool(failure))


if __name__ == "__main__":
    sys.exit(main())
