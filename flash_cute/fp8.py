"""The dtypes of fp8 inputs and of their results (:mod:`flash_cute.call.fp8`), why calls are
widened, what rounds to fp8, and what is wrong with descales, by a short path."""

from flash_cute.call.fp8 import DTYPES, OUT_DTYPES, WIDE_DTYPES
from flash_cute.functional.descale_status import descale_status
from flash_cute.functional.e4m3 import why_widened
from flash_cute.functional.quantize import Fp8Inputs, quantize_fp8

__all__ = [
    "DTYPES",
    "OUT_DTYPES",
    "WIDE_DTYPES",
    "Fp8Inputs",
    "descale_status",
    "quantize_fp8",
    "why_widened",
]
