"""Precision: models in fewer bytes. docs/adaptive_precision.md says when it pays."""

from flash_cute.precision.adaptive import (
    LayerPrecision,
    PrecisionStats,
    UltraPrecisionModule,
    create_ultra_precision_module,
)
from flash_cute.precision.analysis import analyze_precision_opportunities
from flash_cute.precision.settings import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
)

__all__ = [
    "AllocationStrategy",
    "LayerPrecision",
    "PrecisionConfig",
    "PrecisionFormat",
    "PrecisionStats",
    "QuantizationMode",
    "UltraPrecisionModule",
    "analyze_precision_opportunities",
    "create_ultra_precision_module",
]
