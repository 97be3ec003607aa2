""":mod:`flash_cute.functional.kvcache`, the functions over a key/value cache, by a short path."""

from flash_cute.functional.kvcache import (
    flash_attn_combine,
    flash_attn_with_kvcache,
    kvcache_status,
)

__all__ = ["flash_attn_combine", "flash_attn_with_kvcache", "kvcache_status"]
