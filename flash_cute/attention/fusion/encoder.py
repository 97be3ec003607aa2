"""nn.TransformerEncoderLayer and nn.TransformerEncoder, fused."""

from __future__ import annotations

from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion import masks, steps
from flash_cute.attention.fusion.attention import attend_packed
from flash_cute.attention.fusion.config import FusionConfig
from flash_cute.attention.fusion.graphs import drops
from flash_cute.attention.fusion.parts import (
    LINEARS,
    FusedBlock,
    are_plain,
    difference,
    fused_copy,
    is_plain,
    own_method,
)

SEEDS = 5  # of a layer
_NORMS = ("norm1", "norm2")
_DROPOUTS = ("dropout", "dropout1", "dropout2")
_KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "self_attn": (nn.MultiheadAttention,),
    **dict.fromkeys(("self_attn.out_proj", "linear1", "linear2"), LINEARS),
    **dict.fromkeys(_NORMS, (nn.LayerNorm,)),
    **dict.fromkeys(_DROPOUTS, (nn.Dropout,)),
}
_PARTS = [(attrgetter(name), kinds) for name, kinds in _KINDS.items()]


class FusedEncoderLayer(FusedBlock):
    """nn.TransformerEncoderLayer with fused steps. A submodule that is no longer plain is called
    instead of fused."""

    self_attn: Any
    linear1: Any
    linear2: Any
    norm1: Any
    norm2: Any
    dropout: Any
    dropout1: Any
    dropout2: Any
    activation: Any
    norm_first: bool
    sizes: dict[str, Any]

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As nn.TransformerEncoderLayer: src (seqlen, batch, d_model), with ``batch_first``
        (batch, seqlen, d_model), or (seqlen, d_model). ``is_causal`` needs no
        ``src_mask``."""
        if src.is_nested or internals.has_global_hooks():
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)  # type: ignore
        visible = read_masks(self, src, src_mask, src_key_padding_mask, is_causal)
        x = src if src.dim() == 3 else src.unsqueeze(self.batch_dim)
        seeds = self._seeds(x)
        if self.norm_first:
            x, normal = self._attend(x, self.norm1(x), visible, self.norm2, seeds, True)
            out = self._add(x, self._feed_forward(normal, seeds[3]), seeds[4])
        else:
            _, x = self._attend(x, x, visible, self.norm1, seeds, False)
            y = self._feed_forward(x, seeds[3])
            _, out = self._add_norm(x, y, self.dropout2, self.norm2, seeds[4], False)
        return out if src.dim() == 3 else out.squeeze(self.batch_dim)

    def simplified(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> dict[str, Any]:
        """A call's arguments by name; a causal mask is replaced by ``is_causal``."""
        causal = bool(is_causal) or (src_mask is not None and masks.is_causal_mask(src_mask))
        return {
            "src": src,
            "src_mask": None if causal else src_mask,
            "src_key_padding_mask": src_key_padding_mask,
            "is_causal": causal,
        }

    def seqlen_of(self, call: dict[str, Any]) -> int:
        """Tokens a sequence of such a call."""
        src = call["src"]
        return src.shape[0 if src.dim() == 2 else 1 - self.batch_dim]

    def frozen(self) -> Any:
        """The numbers that a CUDA graph would freeze; None if a submodule must be called."""
        activation = self.activation
        plain = all([is_plain(part(self), *kinds) for part, kinds in _PARTS])
        if isinstance(activation, nn.Module):
            plain = plain and is_plain(activation, type(activation))
        if not plain or internals.has_global_hooks() or not _projects_packed(self.self_attn):
            return None
        heads = self.self_attn.num_heads
        return (heads, self.norm_first, activation, self.norm1.eps, self.norm2.eps)

    def size(self, name: str) -> Any:
        """An attribute of self_attn, or its value at fusion if self_attn was replaced."""
        return getattr(self.self_attn, name, self.sizes[name])

    @property
    def batch_dim(self) -> int:
        return 0 if self.size("batch_first") else 1

    def _seeds(self, x: Tensor) -> Any:
        """Seeds for attention (2) and for the dropouts after attention, in the feed-forward step
        and at the end, drawn by one kernel: int64 (SEEDS,), or SEEDS times None without dropout."""
        parts = (self.self_attn, self.dropout, self.dropout1, self.dropout2)
        return steps.draw_seeds(x, SEEDS) if any(map(drops, parts)) else (None,) * SEEDS

    def _attend(
        self,
        residual: Tensor,
        x: Tensor,
        visible: masks.Visible,
        norm: Any,
        seeds: Any,
        keep_sum: bool,
    ) -> tuple[Tensor, Tensor]:
        """Attention of x, its sum with the residual, and the norm that follows."""
        attn = self.self_attn
        last = (self.dropout1, norm, seeds[2], keep_sum)
        if not self.fusion.fuses("attention") or not _projects_packed(attn):
            return self._add_norm(residual, self._attend_by_module(x, visible), *last)
        qkv = F.linear(x, attn.in_proj_weight, attn.in_proj_bias)
        qkv = qkv.view(*x.shape[:2], 3, attn.num_heads, attn.head_dim)
        qkv = qkv if attn.batch_first else qkv.transpose(0, 1)
        p = attn.dropout if attn.training else 0.0
        out = attend_packed(qkv, visible, p, seeds[:2] if p and torch.is_tensor(seeds) else None)
        out = out.flatten(2) if attn.batch_first else out.flatten(2).transpose(0, 1)
        if self._fuses_norm(self.dropout1, norm) and is_plain(attn.out_proj, *LINEARS):
            return steps.linear_add_norm(
                residual, out, attn.out_proj, steps.Norm.of(norm, rms=False), _p(self.dropout1),
                seeds[2], self.step_options, keep_sum,
            )  # fmt: skip
        return self._add_norm(residual, attn.out_proj(out), *last)

    def _attend_by_module(self, x: Tensor, visible: masks.Visible) -> Tensor:
        mask = visible.mask
        if visible.causal and mask is None:
            mask = masks.later_keys(x, x.shape[1 - self.batch_dim])
        out, _ = self.self_attn(
            x, x, x, attn_mask=mask, key_padding_mask=visible.padding, need_weights=False,
            is_causal=visible.causal,
        )  # fmt: skip
        return out

    def _fuses_norm(self, dropout: Any, norm: Any) -> bool:
        plain = is_plain(dropout, nn.Dropout) and is_plain(norm, nn.LayerNorm)
        return self.fusion.fuses("norm") and plain and norm.weight is not None

    def _add_norm(
        self, x: Tensor, y: Tensor, dropout: Any, norm: Any, seed: Any, keep_sum: bool
    ) -> tuple[Tensor, Tensor]:
        """Dropout of y, the sum, and the norm that follows."""
        if self._fuses_norm(dropout, norm):
            of = steps.Norm.of(norm, rms=False)
            return steps.add_norm(x, y, of, _p(dropout), seed, self.step_options, keep_sum)
        total = x + dropout(y)
        return total, norm(total)

    def _add(self, x: Tensor, y: Tensor, seed: Any) -> Tensor:
        if self.fusion.fuses("norm") and is_plain(self.dropout2, nn.Dropout):
            return steps.add(x, y, _p(self.dropout2), seed, self.step_options)
        return x + self.dropout2(y)

    def _feed_forward(self, x: Tensor, seed: Any) -> Tensor:
        first, second, activation = self.linear1, self.linear2, self.activation
        plain = are_plain((first, second), *LINEARS) and is_plain(self.dropout, nn.Dropout)
        if isinstance(activation, nn.Module):
            plain = plain and is_plain(activation, type(activation))
        if not self.fusion.fuses("ffn") or not plain:
            return second(self.dropout(activation(first(x))))
        hidden = steps.FeedForwardWeights(
            first.weight, first.bias, second.weight, second.bias, activation
        )
        return steps.feed_forward(x, hidden, _p(self.dropout), seed, self.step_options)


def _p(dropout: Any) -> float:
    return dropout.p if dropout.training else 0.0


def _projects_packed(attn: Any) -> bool:
    """Whether attention is plain, and projects q, k and v by one product of one input."""
    plain = is_plain(attn, nn.MultiheadAttention) and attn.in_proj_weight is not None
    return plain and attn.bias_k is None and not attn.add_zero_attn


class FusedEncoder(FusedBlock):
    """nn.TransformerEncoder with fused layers, which read each mask once.

    Padded positions hold the layers' outputs, even if nn.TransformerEncoder's fast path would write
    zeros.
    """

    layers: Any
    norm: Any

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As nn.TransformerEncoder; see :meth:`FusedEncoderLayer.forward`."""
        with nullcontext() if torch.compiler.is_compiling() else masks.read_once():
            for layer in self.layers:
                src = layer(
                    src, src_mask=mask, src_key_padding_mask=src_key_padding_mask,
                    is_causal=bool(is_causal),
                )  # fmt: skip
        return src if self.norm is None else self.norm(src)

    def simplified(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> dict[str, Any]:
        """See :meth:`FusedEncoderLayer.simplified`."""
        causal = bool(is_causal) or (mask is not None and masks.is_causal_mask(mask))
        return {
            "src": src,
            "mask": None if causal else mask,
            "src_key_padding_mask": src_key_padding_mask,
            "is_causal": causal,
        }

    def frozen(self) -> Any:
        """See :meth:`FusedEncoderLayer.frozen`."""
        layers = list(self.layers)
        parts = [*layers, *(() if self.norm is None else (self.norm,))]
        if any(internals.has_hooks(x) or "forward" in vars(x) for x in parts):
            return None
        found = [x.frozen() if isinstance(x, FusedEncoderLayer) else None for x in layers]
        return None if None in found else (*found, getattr(self.norm, "eps", None))

    def seqlen_of(self, call: dict[str, Any]) -> int:
        """Tokens a sequence of such a call."""
        first: Any = self.layers[0]
        return first.seqlen_of(call)


def read_masks(
    layer: FusedEncoderLayer, src: Tensor, mask: Any, padding: Any, is_causal: bool
) -> masks.Visible:
    """The masks of src as one value. ValueError for another width or number of dimensions."""
    width = layer.size("embed_dim")
    if src.dim() not in (2, 3) or src.shape[-1] != width:
        raise ValueError(
            f"src has shape {tuple(src.shape)}; expected 2 or 3 dimensions, the last of {width}"
        )
    if src.dim() == 2:
        padding = padding if padding is None or padding.dim() == 2 else padding[None]
        batch, seqlen = 1, src.shape[0]
    else:
        batch, seqlen = src.shape[layer.batch_dim], src.shape[1 - layer.batch_dim]
    return masks.read(mask, padding, is_causal, (batch, seqlen, layer.size("num_heads")), src.dtype)


class EncoderLayerAdapter:
    """Recognises nn.TransformerEncoderLayer."""

    name = "torch.nn.TransformerEncoderLayer"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.TransformerEncoderLayer)

    def refusal(self, module: Any) -> str | None:
        if (reason := _own_methods(module, ("forward", "_sa_block", "_ff_block"))) is not None:
            return reason
        if (reason := internals.skipped_if_fused(module)) is not None:
            return reason
        for name, kinds in _KINDS.items():
            if (reason := difference(module.get_submodule(name), *kinds)) is not None:
                return f"{name} {reason}"
        if not _projects_packed(module.self_attn):
            return "self_attn has kdim, vdim, bias_k or add_zero_attn"
        if module.norm1.weight is None or module.norm2.weight is None:
            return "a norm has no weight"
        return None

    def fuse(self, module: Any, config: FusionConfig) -> nn.Module:
        layer = fused_copy(module, FusedEncoderLayer, config)
        names = ("embed_dim", "num_heads", "batch_first")
        layer.sizes = {name: getattr(module.self_attn, name) for name in names}
        return layer


def _own_methods(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Why a module that overrides one of these methods is left; None if it overrides none."""
    for base in (nn.TransformerEncoderLayer, nn.TransformerEncoder):
        for name in names if isinstance(module, base) else ():
            if getattr(type(module), name) is not getattr(base, name):
                return f"{type(module).__name__} has a {name} of its own"
    own = own_method(module)
    return None if own is None else f"it has a {own} that is not its class's"


class EncoderAdapter:
    """Recognises nn.TransformerEncoder, all of whose layers are recognised."""

    name = "torch.nn.TransformerEncoder"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.TransformerEncoder)

    def refusal(self, module: Any) -> str | None:
        if (reason := _own_methods(module, ("forward",))) is not None:
            return reason
        one = EncoderLayerAdapter()
        for number, layer in enumerate(module.layers):
            if not one.matches(layer):
                return f"layers.{number} is {type(layer).__name__}"
            if (reason := one.refusal(layer)) is not None:
                return f"layers.{number}: {reason}"
        return internals.skipped_if_fused(module) if len(module.layers) else "it has no layers"

    def fuse(self, module: Any, config: FusionConfig) -> nn.Module:
        encoder = fused_copy(module, FusedEncoder, config)
        encoder.layers = internals.copy_of(module.layers)
        one = EncoderLayerAdapter()
        fused = {id(layer): one.fuse(layer, config) for layer in module.layers}
        for number, layer in enumerate(module.layers):
            encoder.layers[number] = fused[id(layer)]
        return encoder
