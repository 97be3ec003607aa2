"""nn.TransformerEncoderLayer and nn.TransformerEncoder, fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion import masks, steps
from flash_cute.attention.fusion.attention import attend_packed
from flash_cute.attention.fusion.config import STEPS, FusionConfig
from flash_cute.attention.fusion.graphs import drops

SEEDS = 5  # of a layer
_LINEARS = ("linear1", "linear2")
_NORMS = ("norm1", "norm2")
_DROPOUTS = ("dropout", "dropout1", "dropout2")


class FusedEncoderLayer(nn.Module):
    """What nn.TransformerEncoderLayer computes, with its submodules' names and parameters."""

    self_attn: Any
    linear1: Any
    linear2: Any
    norm1: Any
    norm2: Any
    dropout: Any
    dropout1: Any
    dropout2: Any
    activation: Any

    def __init__(self, layer: nn.TransformerEncoderLayer, config: FusionConfig) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)
        if not isinstance(layer.activation, nn.Module):
            self.activation = layer.activation
        self.norm_first, self.config = layer.norm_first, config
        self.means = steps.Means(config.own_kernels, config.enable_memory_optimization)
        self.fused_steps = STEPS[config.strategy]
        self.training = layer.training

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
        visible = read_masks(self, src, src_mask, src_key_padding_mask, is_causal)
        (seeds,) = draw_seeds([self], src)
        return self.run(src, visible, seeds)

    def run(self, src: Tensor, visible: masks.Visible, seeds: Any) -> Tensor:
        """The same, of what :func:`read_masks` made of the masks. ``seeds``, int64 (SEEDS,) or as
        many None: of attention (2), of the dropouts behind it, in the middle, and at the end."""
        x = src if src.dim() == 3 else src.unsqueeze(self.batch_dim)
        norms = [steps.Norm.of(norm, rms=False) for norm in (self.norm1, self.norm2)]
        if self.norm_first:
            x, normal = self._attend(x, norms[0](x), visible, norms[1], seeds, True)
            out = self._add(x, self._feed_forward(normal, seeds[3]), seeds[4])
        else:
            _, x = self._attend(x, x, visible, norms[0], seeds, False)
            y = self._feed_forward(x, seeds[3])
            _, out = self._add_norm(x, y, 2, norms[1], seeds[4], False)
        return out if src.dim() == 3 else out.squeeze(self.batch_dim)

    def simplified(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> dict[str, Any]:
        """A call's arguments by name, without a mask that is the causal one."""
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

    @property
    def batch_dim(self) -> int:
        return 0 if self.self_attn.batch_first else 1

    def _p(self, name: str) -> float:
        dropout = getattr(self, name)
        return dropout.p if dropout.training else 0.0

    def _attend(
        self,
        residual: Tensor,
        x: Tensor,
        visible: masks.Visible,
        norm: steps.Norm,
        seeds: Any,
        keep_sum: bool,
    ) -> tuple[Tensor, Tensor]:
        """Attention of x, its sum with the residual, and the norm that follows."""
        attn, rng = self.self_attn, seeds[:2]
        if not self.config.fuses("attention"):
            y = self._attend_by_module(x, visible)
            return self._add_norm(residual, y, 1, norm, seeds[2], keep_sum)
        qkv = F.linear(x, attn.in_proj_weight, attn.in_proj_bias)
        qkv = qkv.view(*x.shape[:2], 3, attn.num_heads, attn.head_dim)
        qkv = qkv if attn.batch_first else qkv.transpose(0, 1)
        p = attn.dropout if attn.training else 0.0
        out = attend_packed(qkv, visible, p, rng if p and torch.is_tensor(rng) else None)
        out = out.flatten(2) if attn.batch_first else out.flatten(2).transpose(0, 1)
        if self.config.fuses("norm"):
            p = self._p("dropout1")
            return steps.linear_add_norm(
                residual, out, attn.out_proj, norm, p, seeds[2], self.means, keep_sum
            )
        return self._add_norm(residual, attn.out_proj(out), 1, norm, seeds[2], keep_sum)

    def _attend_by_module(self, x: Tensor, visible: masks.Visible) -> Tensor:
        mask, batch_first = visible.mask, self.self_attn.batch_first
        if visible.causal and mask is None:
            mask = masks.later_keys(x, x.shape[1 if batch_first else 0])
        out, _ = self.self_attn(
            x, x, x, attn_mask=mask, key_padding_mask=visible.padding, need_weights=False,
            is_causal=visible.causal,
        )  # fmt: skip
        return out

    def _add_norm(
        self, x: Tensor, y: Tensor, place: int, norm: steps.Norm, seed: Any, keep_sum: bool
    ) -> tuple[Tensor, Tensor]:
        """Dropout ``place`` of y, the sum, and the norm that follows."""
        if self.config.fuses("norm"):
            p = self._p(f"dropout{place}")
            return steps.add_norm(x, y, norm, p, seed, self.means, keep_sum)
        total = x + getattr(self, f"dropout{place}")(y)
        module = self.norm2 if self.norm_first or place == 2 else self.norm1
        return total, module(total)

    def _add(self, x: Tensor, y: Tensor, seed: Any) -> Tensor:
        if self.config.fuses("norm"):
            return steps.add(x, y, self._p("dropout2"), seed, self.means)
        return x + self.dropout2(y)

    def _feed_forward(self, x: Tensor, seed: Any) -> Tensor:
        if not self.config.fuses("ffn"):
            return self.linear2(self.dropout(self.activation(self.linear1(x))))
        first, second = self.linear1, self.linear2
        hidden = steps.Hidden(first.weight, first.bias, second.weight, second.bias, self.activation)
        return steps.feed_forward(x, hidden, self._p("dropout"), seed, self.means)


class FusedEncoder(nn.Module):
    """What nn.TransformerEncoder computes, of fused layers; masks are read once for all of them.

    Padded positions get what the layers give them, also where nn.TransformerEncoder's fast path
    writes zeros.
    """

    def __init__(self, encoder: nn.TransformerEncoder, layers: list[FusedEncoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = encoder.norm
        self.num_layers = encoder.num_layers
        self.fused_steps = layers[0].fused_steps
        self.training = self.layers.training = encoder.training

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As nn.TransformerEncoder; see :meth:`FusedEncoderLayer.forward`."""
        first: Any = self.layers[0]
        visible = read_masks(first, src, mask, src_key_padding_mask, bool(is_causal))
        layers: list[Any] = list(self.layers)
        for layer, seeds in zip(layers, draw_seeds(layers, src), strict=True):
            src = layer.run(src, visible, seeds)
        return src if self.norm is None else self.norm(src)

    def simplified(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> dict[str, Any]:
        """As the layers'."""
        first: Any = self.layers[0]
        call = first.simplified(src, mask, src_key_padding_mask, bool(is_causal))
        call["mask"] = call.pop("src_mask")
        return call

    def seqlen_of(self, call: dict[str, Any]) -> int:
        """Tokens a sequence of such a call."""
        first: Any = self.layers[0]
        return first.seqlen_of(call)


def draw_seeds(layers: Sequence[FusedEncoderLayer], x: Tensor) -> Sequence[Any]:
    """The seeds of each layer's dropouts, drawn by one kernel; None where nothing is dropped."""
    if not any(drops(module) for layer in layers for module in layer.children()):
        return [(None,) * SEEDS] * len(layers)
    return steps.draw_seeds(x, len(layers) * SEEDS).view(len(layers), SEEDS).unbind()


def read_masks(
    layer: FusedEncoderLayer, src: Tensor, mask: Any, padding: Any, is_causal: bool
) -> masks.Visible:
    """What the queries of src see. ValueError for another width or number of dimensions."""
    width = layer.self_attn.embed_dim
    if src.is_nested:
        raise NotImplementedError("src is a nested tensor; give it padded, with a mask")
    if src.dim() not in (2, 3) or src.shape[-1] != width:
        raise ValueError(
            f"src has shape {tuple(src.shape)}; expected 2 or 3 dimensions, the last of {width}"
        )
    if src.dim() == 2:
        padding = padding if padding is None or padding.dim() == 2 else padding[None]
        batch, seqlen = 1, src.shape[0]
    else:
        batch, seqlen = src.shape[layer.batch_dim], src.shape[1 - layer.batch_dim]
    return masks.read(
        mask, padding, is_causal, (batch, seqlen, layer.self_attn.num_heads), src.dtype
    )


def _is_torchs(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of a kind, or of a subclass in torch.nn; parametrized ones are not."""
    return isinstance(module, kind) and type(module).__module__.startswith("torch.nn.modules.")


class EncoderLayerAdapter:
    """Recognises nn.TransformerEncoderLayer."""

    name = "torch.nn.TransformerEncoderLayer"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.TransformerEncoderLayer)

    def refusal(self, module: Any) -> str | None:
        base = nn.TransformerEncoderLayer
        for name in ("forward", "_sa_block", "_ff_block"):
            if getattr(type(module), name) is not getattr(base, name):
                return f"{type(module).__name__} has a {name} of its own"
        kinds = {"self_attn": nn.MultiheadAttention, "self_attn.out_proj": nn.Linear}
        kinds.update(dict.fromkeys(_LINEARS, nn.Linear))
        kinds.update(dict.fromkeys(_NORMS, nn.LayerNorm))
        kinds.update(dict.fromkeys(_DROPOUTS, nn.Dropout))
        for name, kind in kinds.items():
            part = module.get_submodule(name)
            if not _is_torchs(part, kind):
                return f"{name} is {type(part).__name__}, not torch's {kind.__name__}"
        attn = module.self_attn
        if attn.in_proj_weight is None or attn.bias_k is not None or attn.add_zero_attn:
            return "self_attn has kdim, vdim, bias_k or add_zero_attn"
        if module.norm1.weight is None or module.norm2.weight is None:
            return "a norm has no weight"
        return internals.skipped_if_fused(module)

    def fuse(self, module: Any, config: FusionConfig) -> nn.Module:
        return FusedEncoderLayer(module, config)


class EncoderAdapter:
    """Recognises nn.TransformerEncoder, all of whose layers are recognised."""

    name = "torch.nn.TransformerEncoder"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, nn.TransformerEncoder)

    def refusal(self, module: Any) -> str | None:
        if type(module).forward is not nn.TransformerEncoder.forward:
            return f"{type(module).__name__} has a forward of its own"
        one = EncoderLayerAdapter()
        for number, layer in enumerate(module.layers):
            if not one.matches(layer):
                return f"layers.{number} is {type(layer).__name__}"
            if (reason := one.refusal(layer)) is not None:
                return f"layers.{number}: {reason}"
        return internals.skipped_if_fused(module) if len(module.layers) else "it has no layers"

    def fuse(self, module: Any, config: FusionConfig) -> nn.Module:
        return FusedEncoder(module, [FusedEncoderLayer(layer, config) for layer in module.layers])
