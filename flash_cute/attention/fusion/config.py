"""The options of fusion."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FusionStrategy(Enum):
    """Which steps of a block are fused; the others run as the original's own modules."""

    FULL_BLOCK = "full_block"
    ATTENTION_ONLY = "attention_only"
    FFN_ONLY = "ffn_only"
    NORM_ONLY = "norm_only"


class OptimizationLevel(Enum):
    """How far fusion goes.

    - CONSERVATIVE: attention by flash_cute; all else by torch's own ops.
    - BALANCED: also one kernel for dropout, residual and norm, and one for activation and dropout.
    - AGGRESSIVE: also one CUDA graph launch a call, if no gradient is required.
    """

    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"


STEPS = {
    FusionStrategy.FULL_BLOCK: ("attention", "ffn", "norm"),
    FusionStrategy.ATTENTION_ONLY: ("attention",),
    FusionStrategy.FFN_ONLY: ("ffn",),
    FusionStrategy.NORM_ONLY: ("norm",),
}


@dataclass(frozen=True)
class StepOptions:
    """How the steps of a call run: by this library's kernels or torch's ops; with ``save_memory``
    backward recomputes the activation."""

    own_kernels: bool
    save_memory: bool


@dataclass
class FusionConfig:
    """Options of :class:`flash_cute.attention.fusion.UnifiedAttentionFusion`, which takes a copy.

    Args:
        strategy: which steps are fused.
        optimization_level: how far.
        enable_mixed_precision: follow ``torch.autocast``: under it, products and attention run in
            its dtype, norms and residuals in the parameters'. False: autocast is switched off
            inside, and the input is cast to the parameters' dtype. Nothing is ever rounded to
            fp16 or bf16 outside of autocast.
        enable_memory_optimization: the feed-forward step saves one hidden tensor for backward (two
            if gated), and recomputes the activation. False saves it. Without effect at
            CONSERVATIVE and under torch.compile, which decides by itself.
        target_sequence_length: tokens. AGGRESSIVE keeps the graphs of the last 32 kinds of input of
            this length, and of the last 4 of other lengths.

    Raises:
        TypeError, ValueError: a field is of another type, or the length is below 1.

    Example::

        import torch
        from flash_cute.attention import fusion

        config = fusion.FusionConfig(optimization_level=fusion.OptimizationLevel.AGGRESSIVE)
        layer = torch.nn.TransformerEncoderLayer(64, 4)
        fused = fusion.UnifiedAttentionFusion(layer, config)
    """

    strategy: FusionStrategy = FusionStrategy.FULL_BLOCK
    optimization_level: OptimizationLevel = OptimizationLevel.BALANCED
    enable_mixed_precision: bool = True
    enable_memory_optimization: bool = True
    target_sequence_length: int = 512

    def __post_init__(self) -> None:
        for name, kind in (
            ("strategy", FusionStrategy),
            ("optimization_level", OptimizationLevel),
            ("enable_mixed_precision", bool),
            ("enable_memory_optimization", bool),
            ("target_sequence_length", int),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TypeError(f"{name} is {value!r}; expected {kind.__name__}")
        if self.target_sequence_length < 1:
            tokens = self.target_sequence_length
            raise ValueError(f"target_sequence_length is {tokens}; expected 1 token or more")

    def fuses(self, step: str) -> bool:
        """Whether a step is fused: "attention", "ffn" or "norm"."""
        return step in STEPS[self.strategy]

    @property
    def own_kernels(self) -> bool:
        """Whether steps other than attention run by fused kernels."""
        return self.optimization_level is not OptimizationLevel.CONSERVATIVE
