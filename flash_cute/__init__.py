"""flash_cute: exact attention from CuTe kernels, as PyTorch ops."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from flash_cute import check, mha
from flash_cute.call.rng import rng_state
from flash_cute.functional.cache_status import kvcache_status
from flash_cute.functional.descale_status import descale_status
from flash_cute.functional.quantize import quantize_fp8
from flash_cute.tiled import FlashAttention, flash_attention_backward, flash_attention_forward
from flash_cute.tiled.sizes import estimate_memory_usage, get_optimal_block_sizes

if TYPE_CHECKING:  # the same functions, with results by the flags of a call
    from flash_cute.signatures import (
        flash_attn_combine,
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from flash_cute.sparse import Sparse
else:
    from flash_cute.functional.combine import flash_attn_combine
    from flash_cute.functional.dense_varlen import flash_attn_func, flash_attn_varlen_func
    from flash_cute.functional.kvcache import flash_attn_with_kvcache
    from flash_cute.functional.packed import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )

__version__ = "0.1.0"

__all__ = [
    "FlashAttention",
    "Sparse",
    "autotune",
    "check",
    "descale_status",
    "estimate_memory_usage",
    "flash_attention_backward",
    "flash_attention_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_optimal_block_sizes",
    "kvcache_status",
    "mha",
    "quantize_fp8",
    "rng_state",
]

if os.environ.get("FLASH_CUTE_CALIBRATION"):
    from flash_cute.kernels import use_calibration

    use_calibration()


_MODULES = (
    "attention", "compat", "core", "distributed", "fp8", "functional_packed", "hardware",
    "integrations", "kvcache", "lab", "library", "plan_log", "precision", "reference", "rng",
    "sparse", "tiled_sizes", "utils",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Attributes that are imported at their first use."""
    if name == "autotune":
        from flash_cute.tuning import autotune

        return autotune
    if name == "Sparse":
        from flash_cute.sparse import Sparse

        return Sparse
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
