"""The dtypes of fp8 inputs and of their results (:mod:`flash_cute.call.fp8`), and what rounds to
fp8, by a short path."""

from flash_cute.call.fp8 import DTYPES, OUT_DTYPES, WIDE_DTYPES
from flash_cute.functional.quantize import Fp8Inputs, quantize_fp8

__all__ = ["DTYPES", "OUT_DTYPES", "WIDE_DTYPES", "Fp8Inputs", "quantize_fp8"]
