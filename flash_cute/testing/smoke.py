"""Every kernel, dense and varlen, on small ragged problems: what ``tools/sanitize.sh`` watches.

``python -m flash_cute.testing.smoke PART`` runs those kernels alone whose id contains PART. Each
backward kernel needs a forward one among them: ``_sm80_`` has them, ``_sm90_`` has none for dropout
at 256 dims. With whole ids, any number of them, others help. A line says which kernel has run.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flash_cute import kernels, lab, ops
from flash_cute.lab.kernel_configs import get_kernels_to_build
from flash_cute.lab.test.utils import generate_qkv
from flash_cute.native import library
from flash_cute.ops.typed import OPS, BwdCall
from flash_cute.sparse.lists import tile_lists
from flash_cute.testing.kernels import Kernel, parse
from flash_cute.testing.kvcache import CacheCase, make_cache_inputs
from flash_cute.testing.quantized_kvcache import make_quantized_inputs

HEADS = 4


def rules(dropout: bool) -> dict[str, Any]:
    """Every option of the Rich tier that the kernel has, and a sink."""
    options = {
        "softcap": 10.0,
        "alibi_slopes": torch.rand(HEADS, device="cuda"),
        "sink": torch.randn(HEADS, device="cuda"),
    }
    if dropout:
        options |= {"dropout_p": 0.3, "rng": torch.tensor([1, 2], device="cuda")}
    return options


def dense(dtype: torch.dtype, dim: int, dim_v: int, options: dict[str, Any]) -> None:
    """Causal, grouped heads, lengths that end inside a tile; dQ is summed up in both orders."""
    q = torch.randn(1, 150, HEADS, dim, device="cuda", dtype=dtype)
    k = torch.randn(1, 133, 2, dim, device="cuda", dtype=dtype)
    v = torch.randn(1, 133, 2, dim_v, device="cuda", dtype=dtype)
    out, softmax_lse, _, _ = ops.fwd(
        q, k, v, is_causal=True, return_softmax=True, return_row_max=True, **options
    )
    for deterministic in (False, True):
        ops.bwd(
            out, q, k, v, out, softmax_lse, is_causal=True, deterministic=deterministic, **options
        )


def varlen(dtype: torch.dtype, dim: int, dim_v: int, options: dict[str, Any]) -> None:
    """An empty sequence, and rows that belong to none."""
    cu_seqlens = torch.tensor([0, 70, 70, 130], device="cuda", dtype=torch.int32)
    q = torch.randn(150, HEADS, dim, device="cuda", dtype=dtype)
    k = torch.randn(150, 2, dim, device="cuda", dtype=dtype)
    v = torch.randn(150, 2, dim_v, device="cuda", dtype=dtype)
    sequences = (cu_seqlens, cu_seqlens, 70, 70)
    out, softmax_lse, _, _ = ops.varlen_fwd(q, k, v, *sequences, **options)
    ops.varlen_bwd(out, q, k, v, out, softmax_lse, *sequences, **options)


def paged(dtype: torch.dtype, dim: int, dim_v: int, options: dict[str, Any]) -> None:
    """Keys that are copied out of their pages, as lengths in use of queries ask for."""
    cu_seqlens = torch.tensor([0, 70, 70, 130], device="cuda", dtype=torch.int32)
    used = torch.tensor([50, 0, 60], device="cuda", dtype=torch.int32)
    table = torch.randperm(15, device="cuda").int().view(3, 5)
    q = torch.randn(150, HEADS, dim, device="cuda", dtype=dtype)
    k = torch.randn(15, 16, 2, dim, device="cuda", dtype=dtype)
    v = torch.randn(15, 16, 2, dim_v, device="cuda", dtype=dtype)
    sequences = (cu_seqlens, cu_seqlens, 70, 70, used)
    ops.varlen_fwd(q, k, v, *sequences, block_table=table, return_softmax=True, **options)


def cached(name: str, dtype: torch.dtype, dim: int, dim_v: int) -> None:
    """A paged cache, new keys with rotary embedding, parts of keys, every rule of scores."""
    case = CacheCase(
        lengths=(70, 0, 133), seqlens_q=(3, 1, 30), seqlens_new=(3, 0, 5), page_size=16, heads=4,
        heads_k=2, dim=dim, dim_v=dim_v, dtype=dtype, softcap=10.0, alibi="heads", sink=True,
        is_causal=True, rotary="halves", leftpad=True,
    )  # fmt: skip
    with library.only(name):
        parts = ({"num_splits": 3}, {"split_size": 64}) if "_sm80_" in name else ()
        for splits in ({}, *parts):
            make_cache_inputs(case, "cuda").changed(**splits).run()


def cached_in_8_bits(kernel: Kernel, missing: int) -> None:
    """A paged cache of 8 bits, with descales of heads and of tokens, in head dims that miss some of
    the kernel's, and parts of keys."""
    assert kernel.cache_dtype is not None
    case = CacheCase(
        lengths=(70, 0, 133), seqlens_q=(3, 1, 8), page_size=16, heads=4, heads_k=2,
        dim=kernel.dim - missing, dim_v=kernel.dim_v - missing, dtype=kernel.dtype, softcap=10.0,
        alibi="heads", sink=True, is_causal=True, leftpad=True,
    )  # fmt: skip
    with library.only(kernel.id):
        parts = ({"num_splits": 3}, {"split_size": 64}) if kernel.arch == 80 else ()
        for splits in ({}, *parts):
            for kinds in (("heads", "tokens"), ("tokens", "heads")):
                given = replace(case, **splits)
                make_quantized_inputs(given, "cuda", kernel.cache_dtype, kinds).run()


def of_e4m3(kernel: Kernel, missing: int) -> None:
    """Grouped heads, every kind of descale, dense and packed, and keys in pages that are read in
    place or gathered; head dims that miss some of the kernel's; sums in one level and in two."""
    dim, dim_v = kernel.dim - missing, kernel.dim_v - missing
    cu_seqlens = torch.tensor([0, 70, 70, 203], device="cuda", dtype=torch.int32)
    q = torch.randn(1, 230, HEADS, dim, device="cuda").to(kernel.dtype)
    k = torch.randn(1, 240, 2, dim, device="cuda").to(kernel.dtype)
    v = torch.randn(1, 240, 2, dim_v, device="cuda").to(kernel.dtype)
    rows, channels = (
        torch.rand(1, 230, HEADS, device="cuda"),
        torch.rand(3, 2, dim_v, device="cuda"),
    )
    of_keys, of_heads = torch.rand(1, 240, 2, device="cuda"), torch.rand(3, 2, device="cuda")
    for two_level in (False, True):
        options: dict[str, Any] = {"two_level": two_level, "is_causal": True}
        OPS.fp8_fwd(q, k, v, rows, of_keys, channels[:1], window_size_left=60, **options)
        options |= {"q_descale": of_heads, "v_descale": channels, "softmax_scale": -0.1}
        packed: Any = partial(OPS.fp8_varlen_fwd, q[0])
        sequences = (cu_seqlens, cu_seqlens, 133, 133)
        packed(k[0], v[0], *sequences, k_descale=of_keys, **options)
        for size in (16, 5):
            pages = [x.view(-1, size, *x.shape[2:]) for x in (k, v, of_keys)]
            table = torch.randperm(240 // size, device="cuda").int().view(3, -1)
            packed(*pages[:2], *sequences, block_table=table, k_descale=pages[2], **options)


def sparse(kernel: Kernel, options: dict[str, Any]) -> None:
    """Causal, grouped heads, lengths that end inside a tile; lists for each kv head, with parts of
    tiles and token masks; a few entries name tiles, or masks, that are not there."""
    q = torch.randn(1, 333, HEADS, kernel.dim, device="cuda", dtype=kernel.dtype)
    k = torch.randn(1, 300, 2, kernel.dim, device="cuda", dtype=kernel.dtype)
    v = torch.randn(1, 300, 2, kernel.dim_v, device="cuda", dtype=kernel.dtype)
    codes = torch.randint(0, 16, (1, 2, 3, 3), device="cuda", dtype=torch.int32)
    codes[..., 0] = torch.arange(1, 7, device="cuda").view(1, 2, 3) * 16 + 15
    bits = torch.randint(-(2**31), 2**31, (5, 128, 4), device="cuda", dtype=torch.int32)
    lists = tile_lists(codes)
    lists[0, 0, 2, -1, 0] = 2**30
    of_lists: dict[str, Any] = {"tile_lists": lists, "tile_bits": bits, "is_causal": True}
    out, softmax_lse, _, _ = ops.fwd(q, k, v, **of_lists, **options)
    lists, ranks = torch.ops.flash_cute.transposed_tile_lists(tile_lists(codes), 3)
    of_lists |= {"tile_lists": lists, "tile_ranks": ranks}
    for deterministic in (False, True):
        backward = BwdCall(
            out, q, k, v, out, softmax_lse, deterministic=deterministic, **of_lists, **options
        )
        if kernel.op == "bwd" or kernels.supports(backward):  # 256 dims with rules have none
            ops.bwd(*backward)


def trained(kernel: Kernel) -> None:
    """Forward and backward, one of them by the kernel."""
    options = {"allow_tf32": kernel.precision == "tf32"}
    if kernel.tier == "rich":
        options |= rules(kernel.has_dropout)
    if kernel.walks_lists:
        sparse(kernel, options)
        return
    dense(kernel.dtype, kernel.dim, kernel.dim_v, options)
    # Columns that do not exist, and rows that are not aligned where that may be.
    missing = max(kernel.vector, 5)
    varlen(kernel.dtype, kernel.dim - missing, kernel.dim_v - 2 * missing, options)
    paged(kernel.dtype, kernel.dim, kernel.dim_v, options)


def laboratory(name: str) -> None:
    """Two blocks, at least, of queries and of keys."""
    (config,) = (c for c in get_kernels_to_build() if c.kernel_name() == name)
    seq_len = 2 * math.lcm(config.B_r, config.B_c)
    lab.forward(config, *generate_qkv(2, seq_len, HEADS, config.d_head, config.dtype, "cuda"))


def main(*parts: str) -> None:
    known = (*library.kernels(), *library.lab_kernels())
    whole = bool(parts) and set(parts) <= set(known)
    names = parts if whole else [id for id in known if any(x in id for x in parts or ("",))]
    helpers = known if whole else names
    for name in names:
        if name.startswith("lab_"):
            laboratory(name)
        elif (kernel := parse(name)).cache is not None:
            for missing in (0, 16):
                cached_in_8_bits(kernel, missing)
        elif kernel.precision == "e4m3":
            with library.only(name):
                for missing in (0, 16, 21):
                    of_e4m3(kernel, missing)
        elif kernel.op == "decode":
            cached(name, kernel.dtype, kernel.dim, kernel.dim_v)
            cached(name, kernel.dtype, kernel.dim - 8, kernel.dim_v - 16)
        else:
            others = [id for id in helpers if id.startswith(f"{kernel.other_op}_")]
            with library.only(name, *others):
                trained(kernel)
        torch.cuda.synchronize()
        print(f"ran {name}", flush=True)
    print(f"{len(names)} kernels ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
