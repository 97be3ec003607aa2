"""The attention functions that models call, under the names that flash-attn gave them.

Arguments are a superset of flash-attn 2.8's, in its order and with its layout: (batch, seqlen,
heads, dim), or (total, heads, dim) for sequences of different lengths laid end to end. Each call
validates once and runs one op of ``torch.ops.flash_cute``.
"""

from flash_cute.functional.cache_status import kvcache_status
from flash_cute.functional.combine import flash_attn_combine
from flash_cute.functional.dense_varlen import (
    flash_attn_func,
    flash_attn_varlen_func,
)
from flash_cute.functional.descale_status import descale_status
from flash_cute.functional.kvcache import flash_attn_with_kvcache
from flash_cute.functional.packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_cute.functional.quantize import Fp8Inputs, quantize_fp8

__all__ = [
    "Fp8Inputs",
    "descale_status",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "kvcache_status",
    "quantize_fp8",
]
