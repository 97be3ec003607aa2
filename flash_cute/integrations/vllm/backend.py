"""The classes of vLLM's interface: the backend, a batch's metadata, and a layer's attention.

Pages are vLLM's: (pages, heads_k, page size, 2 * dim), keys and values side by side, with vLLM's
strides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

import flash_cute
from flash_cute.functional.quantized_kvcache import quantized
from flash_cute.integrations.vllm import NAME
from flash_cute.kernels import support
from flash_cute.ops import has_fp8_attention

FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of e4m3


class Backend(AttentionBackend):
    """The backend and its features. Caches are of 16 bits or e4m3. Not supported: multimodal
    prefixes, R-SWA, MLA, sparse attention, decode and prefill context parallelism."""

    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Implementation]:
        return Implementation

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return support.reads_caches_in_place(torch.bfloat16, head_size, head_size, "h100")

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, "auto", "float16", "bfloat16", *FP8)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """False: a row's last bits may depend on the batch that it is in."""
        return False


@dataclass(frozen=True)
class Metadata:
    """A batch: requests' queries laid end to end, their lengths including the cache, and pages.

    ``causal`` is a bool for all requests, or int32 (requests,).
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Makes the metadata from vLLM's. Graphs serve any batch: of the lengths on the host a call
    depends only on the longest query's."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        given = common_attn_metadata
        return Metadata(
            given.num_actual_tokens, given.max_query_len, given.query_start_loc, given.max_seq_len,
            given.seq_lens, given.block_table_tensor, given.slot_mapping, given.causal,
        )  # fmt: skip

    def update_block_table(
        self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> Metadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Does nothing: the metadata holds the tensors that vLLM writes in place."""


class Implementation(AttentionImpl[Metadata]):
    """One layer's attention; vLLM writes new keys and values to the cache before it. Over caches of
    e4m3 vLLM rounds queries to e4m3, too, where ``supports_quant_query_input`` says so: where an op
    of e4m3 inputs computes prompts."""

    can_return_lse_for_decode = False
    lse_base_on_e = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if not Backend.supports_kv_cache_dtype(kv_cache_dtype):
            raise NotImplementedError(
                f"kv_cache_dtype is {kv_cache_dtype}; flash_cute has caches of fp16, bf16 and e4m3"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        self.is_fp8 = kv_cache_dtype in FP8
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = logits_soft_cap or 0.0
        self.window_side = -1 if sliding_window is None else sliding_window - 1
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes).float()
        is_plain = self.softcap == 0 and alibi_slopes is None and not self._is_encoder()
        self.supports_quant_query_input = self.is_fp8 and is_plain and _has_fp8_kernels()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the first ``num_actual_tokens`` of query (tokens, heads, dim); output is
        written and returned."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale is given; flash_cute does not quantize outputs")
        if attn_metadata is None:  # vLLM profiles its memory
            return output.fill_(0)
        if self.dcp_world_size > 1:
            raise NotImplementedError(
                "decode context parallelism is not in flash_cute's backend; use FLASH_ATTN"
            )
        tokens = attn_metadata.num_actual_tokens
        q = query[:tokens]
        out = output[:tokens].view_as(q)
        if self._is_encoder():
            offsets, longest = attn_metadata.query_start_loc, attn_metadata.max_query_len
            flash_cute.flash_attn_varlen_func(
                q, key[:tokens], value[:tokens], offsets, offsets, longest, longest, out=out,
                **self._score_options(q.device, False),
            )  # fmt: skip
            return output
        causal = attn_metadata.causal
        if isinstance(causal, Tensor):  # one call for each kind: a request without keys gives 0
            lengths, is_causal = attn_metadata.seq_lens, causal != 0
            over = partial(self._over_pages, layer, q, kv_cache, attn_metadata)
            with_mask, without = over(lengths * is_causal, True), over(lengths * ~is_causal, False)
            torch.add(with_mask, without, out=out)
        else:
            lengths = attn_metadata.seq_lens
            out.copy_(self._over_pages(layer, q, kv_cache, attn_metadata, lengths, causal))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes key and value (tokens, heads_k, dim) to the rows of pages in ``slot_mapping``;
        negative ones are padding."""
        if self._is_encoder():
            return
        if key.is_cuda:
            caches = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            from vllm import _custom_ops  # its kernels are for CUDA

            _custom_ops.reshape_and_cache_flash(
                key, value, *caches, slot_mapping, self.kv_cache_dtype, layer._k_scale,
                layer._v_scale,
            )  # fmt: skip
            return
        tokens = (slot_mapping >= 0).nonzero().flatten()
        slots = slot_mapping[tokens]
        size = kv_cache.shape[2]
        for name, cache, x in zip("kv", self._caches(kv_cache), (key, value), strict=True):
            if self.is_fp8:
                scale = getattr(layer, f"_{name}_scale")
                x, cache = quantized(x, scale, cache.dtype).view(torch.int8), cache.view(torch.int8)
            cache[slots // size, slots % size] = x[tokens].to(cache.dtype)

    def _is_encoder(self) -> bool:
        return self.attn_type in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Views (pages, page size, heads_k, dim) of keys and of values."""
        if self.is_fp8:  # vLLM's are bytes
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def _over_pages(
        self,
        layer: Any,
        q: Tensor,
        kv_cache: Tensor,
        metadata: Metadata,
        lengths: Tensor,
        causal: bool,
    ) -> Tensor:
        """Attention over pages; queries are the last of their request's ``lengths`` tokens."""
        k_cache, v_cache = self._caches(kv_cache)
        table = metadata.block_table
        if self.is_fp8 and metadata.max_query_len > 1:
            # Prompts take memory for as many keys as the table has. Graphs are captured with the
            # largest length; steps of a draft, whose lengths grow on the device, have one query.
            table = table[:, : -(-max(metadata.max_seq_len, 1) // k_cache.shape[1])]
        return flash_cute.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table,
            cu_seqlens_q=metadata.query_start_loc, max_seqlen_q=metadata.max_query_len,
            q_descale=layer._q_scale if q.dtype == torch.float8_e4m3fn else None,
            k_descale=layer._k_scale if self.is_fp8 else None,
            v_descale=layer._v_scale if self.is_fp8 else None,
            **self._score_options(q.device, causal),
        )  # fmt: skip

    def _score_options(self, device: torch.device, causal: bool) -> dict[str, Any]:
        """Arguments that change scores; without a causal mask a window is on both sides."""
        if self.slopes is not None:
            self.slopes = self.slopes.to(device)
        return {
            "softmax_scale": self.scale,
            "causal": causal,
            "window_size": (self.window_side, 0 if causal else self.window_side),
            "softcap": self.softcap,
            "alibi_slopes": self.slopes,
            "sink": self.sinks,
        }


def _has_fp8_kernels() -> bool:
    """Whether this process's GPU has kernels of e4m3 inputs."""
    return torch.cuda.is_available() and has_fp8_attention(torch.device("cuda"))
