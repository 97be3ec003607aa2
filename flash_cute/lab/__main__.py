"""``flash-cute lab list | check | progression``: the laboratory's kernels on this GPU; without the
command line ``python -m flash_cute.lab``."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from flash_cute import lab
from flash_cute.lab import progression
from flash_cute.lab.kernel_configs import DType, get_kernels_to_build


def list_kernels(_: argparse.Namespace) -> int:
    """Prints the configs of this build."""
    for config in get_kernels_to_build():
        print(config)
    return 0


def check(options: argparse.Namespace) -> int:
    """Compares every kernel of this build with the fp64 reference; returns 1 if one is wrong."""
    wrong = 0
    for config in get_kernels_to_build():
        share, used = progression.check_config(config, options.seed), lab.usage(config)
        verdict = "ok" if share <= 1.0 else "WRONG"
        wrong += share > 1.0
        print(
            f"{verdict:5} {share:5.2f} of the bound, {used.registers:3} registers, "
            f"{used.local_bytes} spilled, {used.ctas_per_sm} CTAs an SM  {config}",
            flush=True,
        )
    print(f"{wrong} wrong")
    return int(wrong > 0)


def measure(options: argparse.Namespace) -> int:
    """Measures the progression, or every kernel of this build for the problem's head dim."""
    if options.plot and find_spec("matplotlib") is None:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib")
    dtype = DType.from_string(options.dtype)
    problem = progression.Problem(options.batch, options.seq_len, options.heads, options.d_head)
    configs = None
    if options.every or options.d_head != 128:
        built = get_kernels_to_build(dtypes=(dtype,))
        configs = [config for config in built if config.d_head == options.d_head]
        if not configs:
            raise SystemExit(f"this build has no {dtype.value} kernel of d_head {options.d_head}")
    result = progression.measure_progression(dtype, problem, options.rounds, configs)
    print(progression.table(result))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        progression.plot(result, options.plot)
    return 0


def main(argv: list[str] | None = None, prog: str = "python -m flash_cute.lab") -> int:
    """The command; 0 if all is well."""
    parser = argparse.ArgumentParser(prog=prog, description="The laboratory's kernels on this GPU.")
    commands = parser.add_subparsers(required=True)
    listing = commands.add_parser("list", help="the configs of this build")
    listing.set_defaults(run=list_kernels)
    checking = commands.add_parser("check", help="compare every kernel with the fp64 reference")
    checking.add_argument("--seed", type=int, help="seed of the inputs (default: a random one)")
    checking.set_defaults(run=check)
    steps = commands.add_parser("progression", help="measure the progression, step by step")
    steps.add_argument("--every", action="store_true", help="measure all kernels of this build")
    steps.add_argument("--dtype", default="bf16", help="bf16 or fp16 (default: bf16)")
    default = progression.Problem()
    steps.add_argument("--batch", type=int, default=default.batch)
    steps.add_argument("--seq-len", type=int, default=default.seq_len)
    steps.add_argument("--heads", type=int, default=default.n_heads)
    steps.add_argument("--d-head", type=int, default=default.d_head, choices=(64, 128))
    steps.add_argument("--rounds", type=int, default=9, help="measurements per kernel (default: 9)")
    steps.add_argument("--json", type=Path, help="write what was measured to this file")
    steps.add_argument("--plot", type=Path, help="write a plot to this file (needs matplotlib)")
    steps.set_defaults(run=measure)
    options = parser.parse_args(argv)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
