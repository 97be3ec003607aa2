"""What types the public functions return: read by mypy in ``make lint``, where a wrong type, and an
error that no longer comes, are errors."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

from flash_cute import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    quantize_fp8,
)


def results_follow_the_flags(q: Tensor, cu: Tensor, flag: bool) -> None:
    assert_type(flash_attn_func(q, q, q, causal=True), Tensor)
    assert_type(flash_attn_func(q, q, q, 0.1, None, True, (-1, 0), num_splits=2), Tensor)
    assert_type(flash_attn_func(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_func(q, q, q, return_softmax_lse=True), tuple[Tensor, Tensor])
    assert_type(flash_attn_func(q, q, q, return_attn_probs=True), tuple[Tensor, Tensor, Tensor])
    assert_type(flash_attn_func(q, q, q, return_lse=flag), Tensor | tuple[Tensor | None, ...])
    assert_type(flash_attn_func(q, q, q, return_rng=True), Tensor | tuple[Tensor | None, ...])
    assert_type(flash_attn_varlen_func(q, q, q, cu, cu, 3, 3), Tensor)
    assert_type(
        flash_attn_varlen_func(q, q, q, cu, cu, 3, 3, return_lse=True), tuple[Tensor, Tensor]
    )
    assert_type(flash_attn_qkvpacked_func(q), Tensor)
    x = quantize_fp8(q, q, q)
    assert_type(flash_attn_func(x.q, x.k, x.v, **x.descales()), Tensor)
    assert_type(flash_attn_with_kvcache(q, q, q, cache_seqlens=3), Tensor)
    both = flash_attn_with_kvcache(q, q, q, return_softmax_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    assert_type(flash_attn_combine(q, q), tuple[Tensor, Tensor])
    assert_type(flash_attn_combine(q, q, None, torch.float16, return_lse=False), Tensor)


def misspelt_arguments_are_errors(q: Tensor, cu: Tensor) -> None:
    flash_attn_func(q, q, q, causual=True)  # type: ignore[call-overload]
    flash_attn_func(q, q, q, is_causal=True)  # type: ignore[call-overload]
    flash_attn_func(q, q, q, attention_chunk=4)  # type: ignore[call-overload]
    flash_attn_varlen_func(q, q, q, cu, cu, 3, 3, window=(1, 0))  # type: ignore[call-overload]
    flash_attn_with_kvcache(q, q, q, cache_seqlen=3)  # type: ignore[call-overload]
