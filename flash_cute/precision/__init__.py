"""Low precision: training with fp8 matrix products.

``import flash_cute`` does not load this package.
"""

from flash_cute.precision.formats import FP8Config, FP8Format
from flash_cute.precision.fp8_convert import convert_model_to_fp8
from flash_cute.precision.fp8_linear import FP8LinearLayer
from flash_cute.precision.training import FP8TrainingEngine, create_fp8_trainer

__all__ = [
    "FP8Config",
    "FP8Format",
    "FP8LinearLayer",
    "FP8TrainingEngine",
    "convert_model_to_fp8",
    "create_fp8_trainer",
]
