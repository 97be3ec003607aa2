"""Checks that repeated calls give the same bits: ``python -m flash_cute.testing.repeats``.

It prints as JSON how often each call was repeated, and how many repeats differed from the first
call. The exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from flash_cute.native import library
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs
from flash_cute.testing.kvcache import CacheCase, make_cache_inputs

BF16 = torch.bfloat16
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_LENGTHS = (257, 0, 640, 1)

CASES: dict[str, Case | VarlenCase] = {
    "dense": Case(
        heads=8, heads_k=2, seqlen_q=700, seqlen_k=700, dim=128, is_causal=True, dtype=BF16
    ),
    "rich": Case(
        heads=4, seqlen_q=300, seqlen_k=520, softcap=9.0, alibi="heads", sink=True, dropout_p=0.2,
        dtype=BF16,
    ),
    "fp32": Case(heads=4, seqlen_q=260, seqlen_k=300),
    "varlen": VarlenCase(
        lengths_q=_LENGTHS, lengths_k=_LENGTHS, heads=8, heads_k=2, dim=128, is_causal=True,
        dtype=BF16,
    ),
}  # fmt: skip
CACHED = CacheCase(
    lengths=(3000, 0, 700), seqlens_new=1, page_size=64, heads=8, heads_k=2, dim=128, dtype=BF16,
    is_causal=True, rotary="halves",
)  # fmt: skip


def calls(device: str) -> dict[str, Callable[[], list[Tensor]]]:
    """The calls by name; each returns its results that must be repeatable."""
    cache = make_cache_inputs(CACHED, device)
    found: dict[str, Callable[[], list[Tensor]]] = {"cached": lambda: list(cache.run())}
    for name, case in CASES.items():
        inputs = make_inputs(case, device)
        found[f"{name} forward"] = partial(forward, inputs)
        found[f"{name} backward"] = partial(backward, inputs, *forward(inputs))
    return found


def forward(inputs: Inputs) -> list[Tensor]:
    return list(inputs.forward()[:2])


def backward(inputs: Inputs, out: Tensor, lse: Tensor) -> list[Tensor]:
    return list(inputs.backward(out, lse, deterministic=True).values())


def differences(call: Callable[[], list[Tensor]], times: int) -> int:
    """How many of ``times`` repeats differ from the first call, compared on the device."""
    expected = [_bits(x) for x in call()]
    different = torch.zeros((), dtype=torch.int64, device=expected[0].device)
    for _ in range(times):
        same = [(_bits(x) == y).all() for x, y in zip(call(), expected, strict=True)]
        different += ~torch.stack(same).all()
    return int(different)


def _bits(x: Tensor) -> Tensor:
    return x.view(_INTEGERS[x.element_size()])


def main(argv: list[str] | None = None) -> int:
    """The command; 1 if anything differed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=1000, help="repeats of each call")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if library.can_use_cuda() else "cpu")
    found = {name: differences(call, options.times) for name, call in calls(device).items()}
    print(json.dumps({"times": options.times, "different": found}))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
