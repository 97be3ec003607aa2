"""A call sees what the stream has written before it, whichever kernel begins early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_cute

RUNS = 40  # each has other numbers, at the addresses of the run before
SEQUENCES, CAPACITY, PAGE = 5, 64, 16


class Numbers:
    """What a run draws on the CPU, and copies to the device right before the call."""

    def __init__(self, seed: int, device: str) -> None:
        self.draw, self.device = torch.Generator().manual_seed(seed), device

    def normal(self, *shape: int) -> Tensor:
        x = torch.randn(*shape, generator=self.draw)
        return x.to(torch.bfloat16).to(self.device)

    def ints(self, values: Tensor) -> Tensor:
        return values.int().to(self.device)

    def up_to(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most + 1, shape, generator=self.draw)

    def offsets(self, total: int) -> Tensor:
        """Of sequences, of which some are short or empty."""
        cuts = self.up_to(total, SEQUENCES - 1).sort().values
        return torch.cat((torch.tensor([0]), cuts, torch.tensor([total])))

    def pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """K, V and the table of their pages."""
        count = SEQUENCES * CAPACITY // PAGE
        table = torch.randperm(count, generator=self.draw).view(SEQUENCES, -1)
        k, v = (self.normal(count, PAGE, 2, 64) for _ in "kv")
        return k, v, self.ints(table)


def packed(numbers: Numbers) -> list[Tensor]:
    q, k, v, dout = (numbers.normal(90, 4, 64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    offsets = numbers.ints(numbers.offsets(90))
    out = flash_cute.flash_attn_varlen_func(*leaves, offsets, offsets, 90, 90, causal=True)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def packed_over_pages(numbers: Numbers) -> list[Tensor]:
    k, v, table = numbers.pages()
    q = numbers.normal(70, 4, 64)
    lengths = numbers.up_to(CAPACITY, SEQUENCES).cumsum(0)
    offsets = numbers.ints(torch.nn.functional.pad(lengths, (1, 0)))
    rows = numbers.ints(numbers.offsets(70))
    return [
        flash_cute.flash_attn_varlen_func(
            q, k, v, rows, offsets, 70, CAPACITY, causal=True, block_table=table
        )
    ]


def cached(numbers: Numbers, *, paged: bool, appends: bool) -> list[Tensor]:
    options: dict[str, Tensor] = {}
    if paged:
        *caches, options["block_table"] = numbers.pages()
    else:
        caches = [numbers.normal(SEQUENCES, CAPACITY, 2, 64) for _ in "kv"]
    q = numbers.normal(40, 8, 64)
    rows = numbers.offsets(40)
    if appends:
        options |= {name: numbers.normal(40, 2, 64) for name in "kv"}
        options["cu_seqlens_k_new"] = numbers.ints(rows)
    options["cache_seqlens"] = numbers.ints(numbers.up_to(CAPACITY - 40, SEQUENCES))
    out = flash_cute.flash_attn_with_kvcache(
        q, *caches, causal=True, cu_seqlens_q=numbers.ints(rows), max_seqlen_q=40, **options
    )
    return [out, *caches]


CALLS: dict[str, Callable[[Numbers], list[Tensor]]] = {
    "packed": packed,
    "packed over pages": packed_over_pages,
    "cache": lambda numbers: cached(numbers, paged=False, appends=False),
    "cache in pages": lambda numbers: cached(numbers, paged=True, appends=False),
    "append": lambda numbers: cached(numbers, paged=False, appends=True),
    "append in pages": lambda numbers: cached(numbers, paged=True, appends=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_were_copied_right_before_a_call(cuda, name):
    got = [[x.detach().cpu() for x in CALLS[name](Numbers(seed, cuda))] for seed in range(RUNS)]
    for seed, found in enumerate(got):
        expected = CALLS[name](Numbers(seed, "cpu"))
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.float(), y.detach().float(), rtol=0.02, atol=0.02)
