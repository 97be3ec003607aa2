"""Low precision: training with fp8 matrix products, and models in fewer bytes.

docs/fp8_training.md and docs/adaptive_precision.md say when each pays.
"""

from flash_cute.precision.adaptive import (
    LayerPrecision,
    PrecisionStats,
    UltraPrecisionModule,
    create_ultra_precision_module,
)
from flash_cute.precision.analysis import analyze_precision_opportunities
from flash_cute.precision.formats import FP8Config, FP8Format
from flash_cute.precision.fp8_convert import convert_model_to_fp8
from flash_cute.precision.fp8_linear import FP8LinearLayer
from flash_cute.precision.settings import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
)
from flash_cute.precision.training import FP8TrainingEngine, create_fp8_trainer

__all__ = [
    "AllocationStrategy",
    "FP8Config",
    "FP8Format",
    "FP8LinearLayer",
    "FP8TrainingEngine",
    "LayerPrecision",
    "PrecisionConfig",
    "PrecisionFormat",
    "PrecisionStats",
    "QuantizationMode",
    "UltraPrecisionModule",
    "analyze_precision_opportunities",
    "convert_model_to_fp8",
    "create_fp8_trainer",
    "create_ultra_precision_module",
]
