"""Makes the attention module of a config."""

from __future__ import annotations

import dataclasses

from torch import nn

from flash_cute.attention.config import (
    AttentionConfig,
    AttentionPatterns,
    FP8AttentionConfig,
    SparseAttentionConfig,
)
from flash_cute.attention.context_parallel import ContextParallelAttention
from flash_cute.attention.fp8 import FP8Attention
from flash_cute.attention.layers import FlashAttention3
from flash_cute.attention.ring import RingAttentionLayer
from flash_cute.attention.sparse import DynamicSparseAttention


def create_attention(config: AttentionConfig) -> nn.Module:
    """The module that a config describes.

    Args:
        config: an :class:`AttentionConfig`, an :class:`FP8AttentionConfig` or a
            :class:`SparseAttentionConfig`.

    Returns:
        :class:`FlashAttention3`; for an :class:`FP8AttentionConfig` an
        :class:`flash_cute.attention.FP8Attention`, of pattern RING a
        :class:`flash_cute.attention.RingAttentionLayer`, of CONTEXT_PARALLEL a
        :class:`flash_cute.attention.ContextParallelAttention`, of SPARSE a
        :class:`flash_cute.attention.DynamicSparseAttention`. Their :meth:`forward` takes
        hidden_states (batch, seqlen, d_model) and an attention_mask (batch, seqlen), in which 1
        takes part, and returns (batch, seqlen, d_model).

    Raises:
        NotImplementedError: names a pattern that has no module yet.
        TypeError: config is not an AttentionConfig.

    Example::

        import torch
        from flash_cute.attention import AttentionConfig, create_attention

        attention = create_attention(AttentionConfig(d_model=512, num_heads=8, pattern="causal"))
        out = attention(torch.randn(2, 100, 512))
    """
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"config is {type(config).__name__}; expected an AttentionConfig")
    if isinstance(config, FP8AttentionConfig):
        return FP8Attention(config)
    if config.pattern is AttentionPatterns.RING:
        return RingAttentionLayer(config)
    if config.pattern is AttentionPatterns.CONTEXT_PARALLEL:
        return ContextParallelAttention(config)
    if config.pattern is AttentionPatterns.SPARSE:
        return DynamicSparseAttention(_sparse(config))
    return FlashAttention3(config)


def _sparse(config: AttentionConfig) -> SparseAttentionConfig:
    """The config as a SparseAttentionConfig, with defaults for the fields that it lacks."""
    if isinstance(config, SparseAttentionConfig):
        return config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return SparseAttentionConfig(**fields)
