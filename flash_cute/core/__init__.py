"""Layers for models: multi-head attention, a linear layer and GELU.

They are drop-in parts: they load the state dicts of ``nn.MultiheadAttention`` and ``nn.Linear``,
and run on the CPU and on CUDA. docs/layers.md says what each does, and when it pays.
"""

from flash_cute.core.attention_layer import AttentionLayer
from flash_cute.core.gelu import FusedGELU
from flash_cute.core.linear import OptimizedLinear

__all__ = ["AttentionLayer", "FusedGELU", "OptimizedLinear"]
