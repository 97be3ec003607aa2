"""Compares the kernels of a build with those of the last GPU check: ``kernel_hash.py [LIBRARY]``.

It prints one line and exits with 0. Only machine code is hashed, without symbol names and in any
order: neither a comment nor a new name is a change.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "gpu_check.json"
PASSES = "passes"  # the id of all kernels that have none of their own

_OPS = ("fwd", "bwd", "decode")
_DTYPES = ("fp16", "bf16", "tf32", "tf32x3", "e4m3", "int8")
_TIERS = ("plain", "rich")
# As C++ mangles KernelConfig{Op, Arch, DType, Tier, 8 integers, TileKind, DType}; zeros at the end
# may be left out.
_CONFIG = re.compile(
    r"12KernelConfig"
    + r"L\w*?E(\d+)E" * 4
    + r"Li(\d+)E" * 8
    + r"(?:L\w*?TileKindE(\d+)E(?:L\w*?_(\d+)E)?)?"
)
# FlashForwardKernelConfig{DType, 12 numbers}; those that are 0 at the end are left out.
_LAB_CONFIG = re.compile(r"24FlashForwardKernelConfigL\w*?E(\d+)E((?:L[ib]\d+E)*)")
# A kernel's instructions and its literals. Bank 0 holds parameters, bank 4 addresses.
_CODE = re.compile(r"\.(?:text|nv\.constant[1235-9])\.(.+)")
_DATA = re.compile(r"\.nv\.(?:constant3|global\.init)")
_STRINGS_AND_COMMENTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


class Code(NamedTuple):
    """Hashes of a library's code for each arch ("sm_90a"): of all of it, and of each kernel id."""

    sass: dict[str, str]
    kernels: dict[str, dict[str, str]]


def digest(parts: Iterable[bytes]) -> str:
    """One hash of all parts, which depends on their order."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def source_hash(root: Path = ROOT) -> str:
    """A hash of the paths and contents of all files that kernels are built from."""
    files = [root / "CMakeLists.txt"]
    for folder in ("csrc", "cmake", "third_party"):
        files += sorted(path for path in (root / folder).rglob("*") if path.is_file())
    return digest(x for file in files for x in (_name(file, root), file.read_bytes()))


def host_hash(root: Path = ROOT) -> str:
    """A hash of C++ that runs on the host, which SASS does not show, without comments and blanks.

    It is all of csrc, except that kernels' files only count from their first cudaError_t on, where
    they launch: everything but .cpp files, and the files that these include, is code for GPUs.
    """
    csrc, kernels = root / "csrc", root / "csrc" / "kernels"
    host = {file for file in kernels.rglob("*") if file.suffix == ".cpp"}
    for file in list(host):
        host |= {csrc / name for name in re.findall(r'^#include "(.+)"', file.read_text(), re.M)}
    parts = []
    for file in sorted(path for path in csrc.rglob("*") if path.is_file()):
        text = _code_alone(file.read_text())
        if kernels in file.parents and file not in host:
            text = "".join(text.partition("cudaError_t")[1:])
        if text:
            parts += [_name(file, root), text.encode()]
    return digest(parts)


def _name(file: Path, root: Path) -> bytes:
    return file.relative_to(root).as_posix().encode()


def _code_alone(text: str) -> str:
    text = _STRINGS_AND_COMMENTS.sub(lambda m: m[0] if m[0].startswith('"') else " ", text)
    return " ".join(text.split())


def cuda_tool(name: str) -> str | None:
    """The path of a program of the CUDA toolkit, or of its package from PyPI, if there is one."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(toolkit)))
    if found := shutil.which(name, path=path):
        return found
    try:
        files = metadata.files(f"nvidia-cuda-{name}") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == name), None)


def library_code(library: Path) -> Code:
    """The hashes of a built library's code; needs cuobjdump, and no GPU.

    Raises:
        RuntimeError: there is no cuobjdump, or it cannot read the library.
    """
    program = cuda_tool("cuobjdump")
    if program is None:
        raise RuntimeError("cuobjdump was not found: pip install nvidia-cuda-cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "-xelf", "all", str(library.resolve())]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if run.returncode != 0 and "does not contain device code" not in run.stdout + run.stderr:
            raise RuntimeError(f"{library}: {run.stdout}{run.stderr}")
        return code_of((path.name, path.read_bytes()) for path in Path(folder).iterdir())


def code_of(cubins: Iterable[tuple[str, bytes]]) -> Code:
    """The hashes of compiled files, each with its name, which ends in ".sm_90a.cubin"."""
    found: dict[str, dict[str, list[bytes]]] = {}
    for name, elf in cubins:
        arch = name.split(".")[-2]
        for symbol, body in _bodies(elf).items():
            found.setdefault(arch, {}).setdefault(kernel_id(symbol), []).append(body)
    sass, kernels = {}, {}
    for arch, bodies in sorted(found.items()):
        sass[arch] = digest(sorted(x for some in bodies.values() for x in some))[:16]
        kernels[arch] = {id: digest(sorted(some))[:12] for id, some in sorted(bodies.items())}
    return Code(sass, kernels)


def _bodies(elf: bytes) -> dict[str, bytes]:
    """The hashes of each symbol's code; "" has data that belong to no kernel."""
    parts: dict[str, list[bytes]] = {}
    for name, content in sorted(_sections(elf)):
        if match := _CODE.fullmatch(name):
            parts.setdefault(match[1], []).append(content)
        elif _DATA.fullmatch(name):
            parts.setdefault("", []).append(content)
    return {symbol: digest(contents).encode() for symbol, contents in parts.items()}


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<2I4Q", elf, table + i * size) for i in range(count)]
    for name, kind, _, _, offset, length in headers:
        start = headers[names][4] + name
        if kind != 8:  # 8: without content in the file
            text = elf[start : elf.index(b"\0", start)].decode()
            yield text, elf[offset : offset + length]


def kernel_id(symbol: str) -> str:
    """The id of the kernel that a symbol belongs to, as KernelConfig::id() in csrc/core/config.h
    or the name in csrc/kernels/lab/config.h has it, or PASSES."""
    if match := _LAB_CONFIG.search(symbol):
        return lab_name(int(match[1]), [int(x) for x in re.findall(r"\d+", match[2])])
    match = _CONFIG.search(symbol)
    if match is None:
        return PASSES
    *given, of_cache = match.groups()
    op, arch, dtype, tier, *numbers, cluster, tiles = (int(x or 0) for x in given)
    cache = dtype if of_cache is None else int(of_cache)
    dim, dim_v, m, n, stages, warps, ctas = numbers
    kind = f"{_OPS[op]}_sm{arch}_{_DTYPES[dtype]}_{_TIERS[tier]}_d{dim}x{dim_v}"
    suffix = (f"_x{cluster}" if arch >= 90 else "") + ("", "_list", "_tokens")[tiles]
    suffix += "" if cache == dtype else f"_{_DTYPES[cache]}"
    return f"{kind}_m{m}_n{n}_s{stages}_w{warps}_c{ctas}{suffix}"


def lab_name(dtype: int, numbers: list[int]) -> str:
    """The name of the laboratory's kernel with these fields."""
    path = ROOT / "flash_cute" / "lab" / "kernel_configs.py"  # needs no torch, unlike its package
    names = runpy.run_path(str(path))
    config = names["FlashForwardKernelConfig"]
    fields = zip(dataclasses.fields(config)[1:], numbers + [0] * 12, strict=False)
    values = [bool(x) if field.type == "bool" else x for field, x in fields]
    return config(list(names["DType"])[dtype], *values).kernel_name()


def archs_of_gpu(archs: Iterable[str], major: int, minor: int) -> list[str]:
    """The archs whose code a GPU runs: the newest of its generation that it supports."""
    numbers = {arch: int(re.sub(r"\D", "", arch)) for arch in archs}
    fit = [n for n in numbers.values() if n // 10 == major and n % 10 <= minor]
    return sorted(arch for arch, n in numbers.items() if fit and n == max(fit))


def changed_kernels(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The ids whose code differs, or that were added or removed."""
    return sorted(id for id in before.keys() | now.keys() if before.get(id) != now.get(id))


def verdict(record: dict[str, Any] | None, source: str, host: str, code: Code | None) -> str:
    """The line that compares a build with the record of the last check."""
    if record is None:
        return "no GPU check has been recorded"
    last = f"the last GPU check (commit {record['commit'] or 'unknown'})"
    notes = [f"failures then: {len(record['failures'])}"] if record["failures"] else []
    if record["not_memchecked"]:
        notes.append(f"without memcheck: {len(record['not_memchecked'])} kernels")
    if source == record["source"]:
        return "; ".join((f"kernels are those of {last}", *notes))
    reasons = ["host code"] if host != record["host"] else []
    built = {} if code is None else code.kernels
    archs = [arch for arch in record["sass"] if arch in built]
    notes += [f"{arch} was not built here" for arch in record["sass"] if arch not in built]
    for arch in archs:
        if code is not None and code.sass[arch] != record["sass"][arch]:
            ids = changed_kernels(record["kernels"][arch], built[arch])
            reasons.append(f"{len(ids)} of {len(built[arch])} for {arch}: {', '.join(ids[:3])}")
    if reasons:
        return "; ".join((f"kernels changed since {last}", *reasons, *notes))
    if not archs:
        return "; ".join((f"sources changed since {last}, and no kernel can be compared", *notes))
    return "; ".join((f"kernels are those of {last}", *notes))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", type=Path, nargs="?", help="left out: kernels were not built")
    library = parser.parse_args(argv).library
    record = json.loads(RECORD.read_text()) if RECORD.exists() else None
    code = None if library is None else library_code(library)
    print(verdict(record, source_hash(), host_hash(), code))
    return 0


if __name__ == "__main__":
    sys.exit(main())
