""":mod:`flash_cute.call.fp8`, the dtypes of fp8 inputs and of their results, by a short path."""

from flash_cute.call.fp8 import DTYPES, OUT_DTYPES, WIDE_DTYPES

__all__ = ["DTYPES", "OUT_DTYPES", "WIDE_DTYPES"]
