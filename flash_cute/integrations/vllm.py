"""vLLM: an attention backend over flash_cute's functions, for caches in pages.

It is a subclass of vLLM's FLASH_ATTN backend, whose cache layout, metadata and cache update it
keeps. Tested against vLLM's interface alone, without vLLM's kernels (tests/integrations/
test_vllm.py); the interface is that of vLLM 0.15.

Example::

    from flash_cute.integrations import vllm

    vllm.register()  # in a plugin of the group vllm.general_plugins
    # From then on vllm.LLM(model, attention_config={"backend": "CUSTOM"}) takes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import flash_cute
from flash_cute.kernels import support


def register() -> None:
    """Makes the backend vLLM's ``CUSTOM``. Nothing else changes: it is taken where it is named.

    Example::

        from flash_cute.integrations import vllm

        vllm.register()
    """
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")


class MetadataBuilder(flash_attn.FlashAttentionMetadataBuilder):
    """vLLM's own, without plans for FlashAttention-3's kernels. Graphs hold mixed batches, too:
    nothing of a call depends on lengths that the host knows."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.aot_schedule = False

    def use_cascade_attention(self, *args: Any, **named: Any) -> bool:
        return False


class Backend(flash_attn.FlashAttentionBackend):
    """What vLLM asks of a backend."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return support.reads_caches_in_place(torch.bfloat16, head_size, head_size, "h100")

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, "auto", "float16", "bfloat16")

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """False: a row's last bits may depend on the batch that it is in."""
        return False

    @classmethod
    def supports_combination(cls, *args: Any, **named: Any) -> str | None:
        return None


class Implementation(flash_attn.FlashAttentionImpl):
    """One layer's attention. vLLM writes new keys and values into the cache before."""

    can_return_lse_for_decode = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: Any = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        # Sinks are set afterwards: vLLM's class asks its own kernels whether they have them.
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name,
        )  # fmt: skip
        if not Backend.supports_kv_cache_dtype(kv_cache_dtype):
            raise NotImplementedError(
                f"kv_cache_dtype is {kv_cache_dtype}; flash_cute has caches of fp16 and bf16"
            )
        self.sinks = sinks
        self.supports_quant_query_input = False
        self._slopes: Tensor | None = None
        # A probe: of which dimension of the cache keys and values are the two entries.
        shape = Backend.get_kv_cache_shape(101, 16, 3, 8)
        if 2 not in shape:
            raise NotImplementedError(f"vLLM's cache has shape {shape}: keys and values are mixed")
        self._dim_of_pair = shape.index(2)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query (tokens, heads, dim), of which the first ``num_actual_tokens`` count; output is
        written and returned."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale is given; flash_cute does not quantize outputs")
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        if getattr(self, "dcp_world_size", 1) > 1 or getattr(attn_metadata, "use_cascade", False):
            raise NotImplementedError(
                "decode context parallelism and cascade attention are not in flash_cute's backend; "
                "use FLASH_ATTN"
            )
        tokens = attn_metadata.num_actual_tokens
        q, offsets = query[:tokens], attn_metadata.query_start_loc
        longest = attn_metadata.max_query_len
        score: dict[str, Any] = {
            "softmax_scale": self.scale,
            "window_size": self.sliding_window,
            "softcap": self.logits_soft_cap or 0.0,
            "alibi_slopes": self._slopes_on(q.device),
            "sink": self.sinks,
        }
        out = output[:tokens].view_as(q)
        if self.attn_type in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER):
            flash_cute.flash_attn_varlen_func(
                q, key[:tokens], value[:tokens], offsets, offsets, longest, longest, out=out,
                **score,
            )  # fmt: skip
            return output
        k_cache, v_cache = kv_cache.unbind(self._dim_of_pair)
        is_invariant = getattr(self, "batch_invariant_enabled", False)
        result = flash_cute.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=attn_metadata.seq_lens,
            block_table=attn_metadata.block_table, cu_seqlens_q=offsets, max_seqlen_q=longest,
            causal=bool(attn_metadata.causal), num_splits=int(is_invariant), **score,
        )  # fmt: skip
        out.copy_(result)
        return output

    def _slopes_on(self, device: torch.device) -> Tensor | None:
        if self.alibi_slopes is not None and self._slopes is None:
            self._slopes = torch.as_tensor(self.alibi_slopes, dtype=torch.float32, device=device)
        return self._slopes
