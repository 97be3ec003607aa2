"""Which kernel a call runs, on GPUs that need not be there, and why no other does.

python examples/explain_a_call.py [--gpu a100] [--seqlen 4096]
"""

from __future__ import annotations

import argparse

from flash_cute import kernels


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gpu", choices=sorted(kernels.GPUS), default="h100", help="default: %(default)s"
    )
    parser.add_argument("--seqlen", type=int, default=4096, help="default: %(default)s")
    options = parser.parse_args(argv)
    sizes = {"batch": 4, "heads": 32, "heads_k": 8, "seqlen_q": options.seqlen, "causal": True}
    for op in ("fwd", "bwd"):
        problem = kernels.Problem(op, **sizes)  # type: ignore[arg-type]
        print(f"{problem} on {options.gpu}\n  runs {kernels.plan(problem, options.gpu)}")
        others = [row for row in kernels.explain(problem, options.gpu) if row.verdict == "fits"]
        for row in others[:3]:
            print(f"  not {row.id}: {row.reason}")
    chunk = kernels.Problem("decode", heads=32, heads_k=8, seqlen_q=1, seqlen_k=options.seqlen)
    print(f"{chunk} on {options.gpu}\n  runs {kernels.plan(chunk, options.gpu)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
