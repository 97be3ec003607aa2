"""Calls over caches of 8 bits, and checks against the oracle over the numbers they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cute.testing import bounds
from flash_cute.testing.kvcache import CacheCase, CacheInputs, cache_oracle, make_cache_inputs

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {E4M3: 448.0, INT8: 127.0}
KINDS = ("heads", "tokens", "none")
"""Descales of each sequence and kv head, of each token and kv head, and None, in e4m3 alone."""


@dataclass(frozen=True)
class QuantizedInputs:
    """The arguments of one call of the op, by name, and the same call over caches in fp64."""

    arguments: dict[str, Any]
    wide: CacheInputs

    def run(self) -> tuple[Tensor, Tensor]:
        """(out, softmax_lse) of the op, in memory that held NaN before."""
        q, v_cache = self.arguments["q"], self.arguments["v_cache"]
        shapes = ((*q.shape[:-1], v_cache.shape[-1]), q.shape[:-1])
        dtypes = (q.dtype, torch.float32)
        before = [
            torch.full(shape, torch.nan, dtype=dtype, device=q.device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        del before
        return torch.ops.flash_cute.attend_quantized_kvcache(**self.arguments)


def make_quantized_inputs(
    case: CacheCase,
    device: torch.device | str,
    dtype: torch.dtype,
    kinds: tuple[str, str] = ("heads", "heads"),
    seed: int = 0,
) -> QuantizedInputs:
    """Fresh normal values for ``case``, which appends nothing, with descales of ``kinds`` for K and
    V. Rows that are not in use, and descales of such tokens, are NaN where the dtype has it."""
    inputs = make_cache_inputs(case, device, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    given: dict[str, Tensor | None] = {}
    wide: dict[str, Tensor] = {}
    for name, kind in zip(("k", "v"), kinds, strict=True):
        cache = inputs[f"{name}_cache"]
        codes, descale = _quantized(cache, dtype, kind, len(case.lengths), generator)
        given |= {f"{name}_cache": codes, f"{name}_descale": descale}
        factor: Tensor | float = 1.0
        if descale is not None:
            factor = (descale if kind == "tokens" else _of_pages(descale, inputs)).double()[
                ..., None
            ]
        wide[f"{name}_cache"] = codes.double() * factor
    left_out = ("k", "v", "cu_seqlens_k_new")
    named = {name: x for name, x in inputs.arguments.items() if name not in left_out}
    return QuantizedInputs(named | given, inputs.changed(**wide))


def check(inputs: QuantizedInputs) -> tuple[Tensor, Tensor]:
    """Runs the op, and asserts out and softmax_lse against the oracle. Kernels round weights to
    fp16. Raises AssertionError with the worst coordinate."""
    out, lse = inputs.run()
    verify(inputs, out, lse)
    return out, lse


def verify(inputs: QuantizedInputs, out: Tensor, lse: Tensor) -> float:
    """What :func:`check` asserts, of these results; returns the largest error, as a fraction of its
    bound."""
    q = inputs.arguments["q"]
    oracle, _ = cache_oracle(inputs.wide, torch.float16 if q.is_cuda else q.dtype)
    return bounds.check_forward(out, lse, oracle)


def _quantized(
    cache: Tensor, dtype: torch.dtype, kind: str, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Codes of a cache (pages, rows, heads_k, dim), and a descale that makes them normal again,
    within a factor of 3."""
    if kind == "none":
        return cache.to(E4M3), None
    unit = 3 / LARGEST[dtype]
    scaled = (cache.float() / unit).clamp(-LARGEST[dtype], LARGEST[dtype])
    codes = scaled.to(E4M3) if dtype == E4M3 else scaled.round().nan_to_num(127.0).to(INT8)
    shape = cache.shape[:3] if kind == "tokens" else (batch, cache.shape[2])
    descale = (unit * (0.5 + torch.rand(shape, generator=generator))).to(cache.device)
    return codes, descale.masked_fill_(
        cache[..., 0].isnan(), torch.nan
    ) if kind == "tokens" else descale


def _of_pages(descale: Tensor, inputs: CacheInputs) -> Tensor:
    """A descale of sequences and heads for each page, (pages, 1, heads_k)."""
    pages, batch = len(inputs["k_cache"]), len(descale)
    table = (
        inputs["block_table"] if inputs["block_table"] is not None else inputs["cache_batch_idx"]
    )
    if table is None:
        table = torch.arange(batch, device=descale.device)
    table = table.long().view(batch, -1)
    found = descale.new_ones(pages, descale.shape[1])
    found[table] = descale[:, None].expand(batch, table.shape[1], -1)
    return found[:, None]
