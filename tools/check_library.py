"""Checks a built library: ``check_library.py LIBRARY [--all-kernels]``.

It must depend only on torch's stable ABI, export nothing, stay small, and with ``--all-kernels``
hold every row of the kernels' families.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

MAX_MEGABYTES = 64
KERNELS = Path(__file__).resolve().parent.parent / "csrc" / "kernels"

# Mangled names of these namespaces change between releases of torch and Python's C API between
# versions of Python; the stable ABI is C functions (aoti_torch_*, torch_*).
UNSTABLE = re.compile(r"^(_ZNK?(3c10|2at|5torch|6caffe2)|_ZT[IVS]N(3c10|2at|5torch)|_?Py[A-Z_])")
NEEDED = re.compile(
    r"^(libtorch|libstdc\+\+|libm|libgcc_s|libc|ld-linux-x86-64|libdl|librt|libpthread)\.so"
)


def config_ids(text: str) -> set[str]:
    """The ids of the rows of a rows.def, as ``torch.ops.flash_cute.kernels()`` gives them."""
    ids = set()
    for row in re.findall(r"^KERNEL\(([^)]*)\)", text, re.MULTILINE):
        op, arch, dtype, tier, *numbers = (field.strip() for field in row.split(","))
        head_dim, head_dim_v, m, n, stages, warps, ctas, cluster, *kinds = numbers
        kind = f"{op}_{arch}_{dtype}_{tier}".lower()
        suffix = f"_x{cluster}" if int(arch[2:]) >= 90 else ""
        names = (kind.partition("::")[2].lower() for kind in kinds if kind != "TileKind::Interval")
        suffix += "".join(f"_{name}" for name in names)
        ids.add(f"{kind}_d{head_dim}x{head_dim_v}_m{m}_n{n}_s{stages}_w{warps}_c{ctas}{suffix}")
    return ids


def problems(library: Path, all_kernels: bool) -> list[str]:
    """The problems of the library."""
    found = []
    for line in _run("nm", "-D", "--undefined-only", str(library)):
        symbol = line.split()[-1].partition("@")[0]
        if UNSTABLE.match(symbol):
            found.append(f"unstable symbol: {symbol}")
    exported = _run("nm", "-DC", "--defined-only", str(library))  # torch only runs initialisers
    found += [f"exports {line.partition(' ')[2]}" for line in exported]
    needed = _needed(library)
    found += [f"needs {name}" for name in needed if not NEEDED.match(name)]
    megabytes = library.stat().st_size / 2**20
    if megabytes > MAX_MEGABYTES:
        found.append(f"{megabytes:.1f} MB; at most {MAX_MEGABYTES} are allowed")
    if all_kernels:
        found += [
            f"kernel {name} is missing"
            for table in sorted(KERNELS.rglob("rows.def"))
            for name in config_ids(table.read_text()) - _kernels(library)
        ]
    return found


def _needed(library: Path) -> list[str]:
    lines = _run("readelf", "-d", str(library))
    return [m[1] for line in lines if (m := re.search(r"\(NEEDED\).*\[(.*)\]", line))]


def _kernels(library: Path) -> set[str]:
    import torch

    torch.ops.load_library(str(library))
    return set(torch.ops.flash_cute.kernels().split())


def _run(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--all-kernels", action="store_true", help="it holds every row")
    options = parser.parse_args(arguments)
    library = options.library
    found = problems(library, options.all_kernels)
    print(
        f"{library.name}: {library.stat().st_size / 2**20:.1f} MB, {len(_kernels(library))} kernels"
    )
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
