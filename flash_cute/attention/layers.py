"""``FlashAttention3``: attention of the whole sequence on one device."""

from __future__ import annotations

from typing import Any

import torch

from flash_cute.attention.config import AttentionConfig, AttentionPatterns
from flash_cute.core.multihead import MultiHeadAttention
from flash_cute.kernels.support import supports
from flash_cute.native.library import has_cuda_kernels


class FlashAttention3(MultiHeadAttention):
    """Multi-head attention over this library's kernels; on Hopper over Hopper's own.

    The name is the paper's (FlashAttention-3, arXiv 2407.08608), whose design for Hopper (TMA,
    wgmma, warps that load while others multiply) is that of the kernels for compute capability
    9.0 in fp16 and bf16. Everywhere else the same module, with the same results up to rounding,
    runs other kernels: :meth:`kernels` names them. fp8, the paper's third part, is not in them:
    see :class:`flash_cute.attention.FP8AttentionConfig`. :meth:`forward` is that of
    :class:`flash_cute.core.AttentionLayer`.

    Args:
        config: an :class:`AttentionConfig`, or d_model and the config's other fields by name.
        num_heads: heads of queries, without a config.

    Raises:
        TypeError, ValueError: names the field, what was given and what is supported.

    Example::

        import torch
        from flash_cute.attention import FlashAttention3

        attention = FlashAttention3(512, 8, pattern="causal", dtype=torch.bfloat16)
        out = attention(torch.randn(2, 100, 512, dtype=torch.bfloat16))  # (2, 100, 512)
    """

    def __init__(
        self,
        config: AttentionConfig | int | None = None,
        num_heads: int | None = None,
        **fields: Any,
    ) -> None:
        if isinstance(config, AttentionConfig):
            if num_heads is not None or fields:
                raise TypeError("a config holds all fields; change it by dataclasses.replace")
        else:
            given = {"d_model": config, "num_heads": num_heads}
            fields |= {name: x for name, x in given.items() if x is not None}
            config = AttentionConfig(**fields)
        _refuse_pattern_of_systems(config.pattern)
        super().__init__(
            config.d_model, config.num_heads, config.num_kv_heads, config.dropout, config.bias,
            config.score(), config.device, config.dtype,
        )  # fmt: skip
        self.config = config

    def kernels(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> str:
        """The kernels that calls prefer, in words.

        Args:
            device: None is the parameters' device.
            dtype: of q, k and v; None is the parameters' own.

        Example::

            from flash_cute.attention import FlashAttention3

            FlashAttention3(512, 8).kernels()  # "ATen's on the CPU"
        """
        device = self.in_proj_weight.device if device is None else torch.device(device)
        dtype = self.in_proj_weight.dtype if dtype is None else dtype
        if device.type == "cpu":
            return "ATen's on the CPU"
        if device.type != "cuda":
            return f"none on {device.type}"
        if not has_cuda_kernels():
            return "none on CUDA: this build holds no CUDA kernels"
        found = supports({"dtype": dtype, "head_dim": self.head_dim}, device.index).plan
        if found is None:
            return f"none on CUDA for {dtype}, head dim {self.head_dim}"
        if found.kernel.arch == 90:
            return "Hopper's own (sm90); Ampere's (sm80) for calls that these refuse"
        return "Ampere's (sm80)"

    def extra_repr(self) -> str:
        score = {"pattern": self.config.pattern.value} | self.config.score()
        del score["causal"]
        options = ", ".join(f"{name}={x}" for name, x in score.items())
        return f"{super().extra_repr()}, {options}, kernels={self.kernels()!r}"


def _refuse_pattern_of_systems(pattern: AttentionPatterns) -> None:
    if pattern not in (AttentionPatterns.FULL, AttentionPatterns.CAUSAL):
        raise NotImplementedError(
            f"pattern is {pattern}, which this layer does not have; supported: "
            f"{AttentionPatterns.FULL}, {AttentionPatterns.CAUSAL}, and by create_attention "
            f"{AttentionPatterns.RING}, {AttentionPatterns.CONTEXT_PARALLEL}, "
            f"{AttentionPatterns.SPARSE}"
        )
