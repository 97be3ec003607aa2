"""Fusion of whole transformer blocks: fewer kernels per block, or one launch per call."""

from flash_cute.attention.fusion.benchmark import (
    FusionPerformanceStats,
    benchmark_fusion_performance,
)
from flash_cute.attention.fusion.config import FusionConfig, FusionStrategy, OptimizationLevel
from flash_cute.attention.fusion.module import (
    ADAPTERS,
    BlockAdapter,
    UnifiedAttentionFusion,
    create_unified_attention_fusion,
)

__all__ = [
    "ADAPTERS",
    "BlockAdapter",
    "FusionConfig",
    "FusionPerformanceStats",
    "FusionStrategy",
    "OptimizationLevel",
    "UnifiedAttentionFusion",
    "benchmark_fusion_performance",
    "create_unified_attention_fusion",
]
