"""The part of vLLM's interface that its attention backends meet, without its kernels: names,
signatures and attributes as in vllm/v1/attention of vLLM 0.15."""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    NEVER = 0


class FlashAttentionBackend:
    supported_dtypes = (torch.float16, torch.bfloat16)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class FlashAttentionMetadataBuilder:
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any):
        self.aot_schedule = True

    def use_cascade_attention(self, *args: Any, **named: Any) -> bool:
        return True


class FlashAttentionImpl:
    dcp_world_size = 1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: AttentionType = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        assert sinks is None, "Sinks are only supported in FlashAttention 3"
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        slopes = alibi_slopes
        self.alibi_slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)
        if sliding_window is None:
            self.sliding_window = (-1, -1)
        elif attn_type == AttentionType.ENCODER_ONLY:
            self.sliding_window = (sliding_window - 1, sliding_window - 1)
        else:
            self.sliding_window = (sliding_window - 1, 0)
        self.logits_soft_cap = 0 if logits_soft_cap is None else logits_soft_cap
        self.attn_type, self.batch_invariant_enabled = attn_type, False


@dataclass
class FlashAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None = None
    use_cascade: bool = False
    causal: bool = True


def installed() -> dict[str, str]:
    """Puts the interface into sys.modules; returns what backends are registered in it."""
    registered: dict[str, str] = {}
    modules = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionCGSupport": AttentionCGSupport,
            "AttentionType": AttentionType,
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.flash_attn": {
            x.__name__: x
            for x in (FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder)
        },
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": SimpleNamespace(CUSTOM="CUSTOM"),
            "register_backend": registered.__setitem__,
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # a package
        vars(module).update(contents)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    importlib.invalidate_caches()
    return registered
