"""The one way from a config to its module."""

from __future__ import annotations

from torch import nn

from flash_cute.attention.config import AttentionConfig, AttentionPatterns, FP8AttentionConfig
from flash_cute.attention.context_parallel import ContextParallelAttention
from flash_cute.attention.fp8 import FP8Attention
from flash_cute.attention.layers import FlashAttention3
from flash_cute.attention.ring import RingAttentionLayer


def create_attention(config: AttentionConfig) -> nn.Module:
    """The module that a config describes.

    Args:
        config: an :class:`AttentionConfig`, or an :class:`FP8AttentionConfig`.

    Returns:
        :class:`FlashAttention3`; for an :class:`FP8AttentionConfig` an
        :class:`flash_cute.attention.FP8Attention`, of pattern RING a
        :class:`flash_cute.attention.RingAttentionLayer`, of CONTEXT_PARALLEL a
        :class:`flash_cute.attention.ContextParallelAttention`. Their :meth:`forward` takes
        hidden_states (batch, seqlen, d_model) and an attention_mask (batch, seqlen), in which 1
        takes part, and returns (batch, seqlen, d_model).

    Raises:
        NotImplementedError: the pattern's system does not exist yet, by name.
        TypeError: config is none.

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
    return FlashAttention3(config)
