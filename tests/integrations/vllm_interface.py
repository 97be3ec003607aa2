"""The part of vLLM's interface that its attention backends meet: names, signatures and attributes
as in vllm/v1/attention of vLLM 0.33. The whole of vLLM is met in tests/vllm_engine."""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    supported_dtypes = (torch.float16, torch.bfloat16)
    forward_includes_kv_cache_update = True


class AttentionMetadataBuilder(Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = None
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


class AttentionImpl(Generic[T]):
    can_return_lse_for_decode = False
    lse_base_on_e = True
    supports_pcp = supports_dcp = supports_quant_query_input = False

    def __new__(cls, *args: Any, **named: Any) -> AttentionImpl:
        made = super().__new__(cls)
        made.dcp_world_size, made.pcp_world_size = 1, 1
        return made


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


class AttentionBackendEnum:
    """Its members have a path each; new ones are registered by name."""

    __members__: ClassVar[dict[str, str]] = {}


def register_backend(backend: str, class_path: str) -> None:
    if backend in AttentionBackendEnum.__members__:
        raise ValueError(f"Backend {backend} already exists")
    AttentionBackendEnum.__members__[backend] = class_path


def installed(version: str = "0.33.0") -> dict[str, str]:
    """Puts the interface into sys.modules; returns what backends are registered in it."""
    AttentionBackendEnum.__members__ = {"FLASH_ATTN": "", "CUSTOM": ""}
    classes = (
        AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder,
        AttentionType, MultipleOf,
    )  # fmt: skip
    modules = {
        "vllm": {"__version__": version},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {x.__name__: x for x in classes},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "register_backend": register_backend,
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
    return AttentionBackendEnum.__members__
