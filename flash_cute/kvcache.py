"""The functions over a key/value cache, by a short path."""

from flash_cute.functional.cache_status import kvcache_status
from flash_cute.functional.combine import flash_attn_combine
from flash_cute.functional.kvcache import flash_attn_with_kvcache

__all__ = ["flash_attn_combine", "flash_attn_with_kvcache", "kvcache_status"]
