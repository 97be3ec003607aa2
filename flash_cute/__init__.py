"""flash_cute: exact attention from CuTe kernels, as PyTorch ops."""

from flash_cute import check, mha
from flash_cute.functional import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_cute.kvcache import flash_attn_combine, flash_attn_with_kvcache, kvcache_status
from flash_cute.rng import rng_state

__version__ = "0.1.0"

__all__ = [
    "check",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "kvcache_status",
    "mha",
    "rng_state",
]
