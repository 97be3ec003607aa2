"""Attention layers and what is built of them."""

from flash_cute.attention.fusion import create_unified_attention_fusion

__all__ = ["create_unified_attention_fusion"]
