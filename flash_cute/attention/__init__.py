"""Attention modules, made from a config or directly, and fused transformer blocks.

``create_attention(AttentionConfig(d_model=512, num_heads=8))`` makes the module of a pattern;
docs/layers.md says what each supports.
"""

from flash_cute.attention.config import (
    AttentionConfig,
    AttentionPatterns,
    FP8AttentionConfig,
    SparseAttentionConfig,
)
from flash_cute.attention.context_parallel import (
    ContextParallelAttention,
    create_context_parallel_attention,
)
from flash_cute.attention.create import create_attention
from flash_cute.attention.fp8 import FP8Attention
from flash_cute.attention.fusion import create_unified_attention_fusion
from flash_cute.attention.layers import FlashAttention3
from flash_cute.attention.ring import RingAttentionLayer, create_ring_attention
from flash_cute.attention.sparse import DynamicSparseAttention, create_sparse_attention
from flash_cute.sparse.patterns import SparsePattern

__all__ = [
    "AttentionConfig",
    "AttentionPatterns",
    "ContextParallelAttention",
    "DynamicSparseAttention",
    "FP8Attention",
    "FP8AttentionConfig",
    "FlashAttention3",
    "RingAttentionLayer",
    "SparseAttentionConfig",
    "SparsePattern",
    "create_attention",
    "create_context_parallel_attention",
    "create_ring_attention",
    "create_sparse_attention",
    "create_unified_attention_fusion",
]
