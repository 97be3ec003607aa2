"""Makes a batch for a model, from a sample or from the model's first layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

SEQLEN = 512
"""Tokens of a generated sample, if a model takes sequences."""

_NORMS = (nn.LayerNorm, nn.RMSNorm)  # their outputs have their inputs' shape
_HINT = "pass sample_input, a tensor (batch, ...) or a tuple of them, one for each argument"


@dataclass(frozen=True)
class Sample:
    """Arguments of a model's forward; ``batch_dim`` is the dimension of samples."""

    tensors: tuple[Tensor, ...]
    batch_dim: int = 0

    def of_batch(self, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        """The first sample, ``batch`` times, as new tensors on ``device``."""
        made = []
        for x in self.tensors:
            dim = self.batch_dim if x.dim() > 1 else 0
            sizes = [batch if i == dim else -1 for i in range(x.dim())]
            made.append(x.detach().narrow(dim, 0, 1).to(device).expand(sizes).clone())
        return tuple(made)


def sample_of(model: nn.Module, given: Tensor | tuple[Tensor, ...] | None) -> Sample:
    """A sample for a forward of ``model``.

    Its batch is in dimension 0, or in dimension 1 if the model's first layer of sequences has
    ``batch_first=False``.

    Raises:
        TypeError: ``given`` is neither a tensor nor a tuple of tensors.
        ValueError: ``given`` is empty, or it is None and the first layer does not determine the
            input.
    """
    firsts = [m.batch_first for m in model.modules() if hasattr(m, "batch_first")]
    batch_dim = 1 if firsts and not firsts[0] else 0
    if given is None:
        return _sample_of_first_layer(model, batch_dim)
    tensors = (given,) if isinstance(given, Tensor) else given
    if not isinstance(tensors, tuple) or not all(isinstance(x, Tensor) for x in tensors):
        raise TypeError(f"sample_input is {type(given).__name__}; {_HINT}")
    if not tensors or any(x.dim() == 0 or x.numel() == 0 for x in tensors):
        raise ValueError(f"sample_input holds no sample; {_HINT}")
    return Sample(tensors, batch_dim)


def _sample_of_first_layer(model: nn.Module, batch_dim: int) -> Sample:
    sequences = any(_width_of_attention(m) is not None for m in model.modules())
    for layer in model.modules():
        dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
        width = _width_of_attention(layer)
        if isinstance(layer, nn.Embedding):
            return Sample((torch.zeros(1, SEQLEN, dtype=torch.int64),))
        features = getattr(layer, "in_features", None)  # nn.Linear's, and its fp8 form's
        if width is None and isinstance(features, int):
            if not sequences:
                return Sample((torch.zeros(1, features, dtype=dtype),))
            width = features
        if width is not None:
            shape = (1, SEQLEN, width) if batch_dim == 0 else (SEQLEN, 1, width)
            x = torch.zeros(shape, dtype=dtype)
            return Sample((x, x, x) if layer is model and _takes_qkv(layer) else (x,), batch_dim)
        if any(True for _ in layer.parameters(recurse=False)) and not isinstance(layer, _NORMS):
            break  # the input of another layer is not known
    raise ValueError(f"the layers of {type(model).__name__} do not determine its input; {_HINT}")


def _takes_qkv(layer: nn.Module) -> bool:
    return isinstance(layer, nn.MultiheadAttention)


def _width_of_attention(layer: nn.Module) -> int | None:
    """The width of a layer that attends over sequences; None for any other."""
    if isinstance(layer, nn.TransformerEncoderLayer):
        return layer.linear1.in_features
    if isinstance(getattr(layer, "num_heads", None), int):
        widths = (getattr(layer, name, None) for name in ("d_model", "embed_dim"))
        return next((width for width in widths if isinstance(width, int)), None)
    return None
