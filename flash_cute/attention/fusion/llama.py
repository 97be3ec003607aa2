"""Blocks of Llama's shape, fused: RMSNorm, grouped-query attention with rotary, SwiGLU."""

from __future__ import annotations

import inspect
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion import masks, steps, trial
from flash_cute.attention.fusion.attention import attend
from flash_cute.attention.fusion.config import FusionConfig, FusionStrategy
from flash_cute.attention.fusion.functions import Rotate, kernels_for
from flash_cute.attention.fusion.kernels_torch import rotate
from flash_cute.attention.fusion.parts import (
    FusedBlock,
    Recognised,
    are_plain,
    fused_copy,
    is_plain,
    own_method,
)
from flash_cute.attention.fusion.remembered import once

_BLOCK = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_IMPLEMENTATIONS = (None, "eager", "sdpa")  # of attention, whose masks are 4-dimensional
_QKV = ("q_proj", "k_proj", "v_proj")
_LINEARS = (
    *(f"self_attn.{name}" for name in (*_QKV, "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)
_PARTS = [attrgetter(name) for name in _LINEARS]
_NORMS = ("input_layernorm", "post_attention_layernorm")


class FusedLlamaBlock(FusedBlock):
    """A Llama block with fused steps. A submodule that was changed since is called instead:
    self_attn with keyword arguments, or by the block's own forward if it does not accept them."""

    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any
    recognised: dict[str, Recognised]
    argument_names: list[str]
    defaults: dict[str, Any]
    names_arguments: bool

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The block's own arguments: hidden_states (batch, seqlen, width); position_embeddings
        (cos, sin), each (batch or 1, seqlen, head_dim), or None for no rotation; attention_mask
        (batch or 1, heads or 1, seqlen, seqlen), bool with True if a query sees a key, or a float
        that is added; None means ``self_attn.is_causal``. Returns hidden_states.

        With fused attention: NotImplementedError for a key/value cache, for unknown arguments, and
        for masks of Hugging Face's attn_implementations other than "eager" and "sdpa".
        """
        x, given = hidden_states, self._by_name(args, kwargs)
        fuses = self.fusion.fuses("attention")
        if fuses:
            _refuse(given, self.self_attn, self.defaults)
        if internals.has_global_hooks():
            return super().forward(x, **given)  # type: ignore[misc]
        if fuses and not self._takes(x, given):
            if not self.names_arguments:
                return super().forward(x, **given)  # type: ignore[misc]
            fuses = False
        if fuses:
            visible = _visible(given, self.self_attn, x)
            y = self._attend(self._norm("input_layernorm", x), visible, given)
        else:
            y = self.self_attn(hidden_states=self.input_layernorm(x), **given)
            y = y[0] if isinstance(y, tuple) else y
        if self.fusion.fuses("norm") and self._is_unchanged("post_attention_layernorm"):
            norm = steps.Norm.of(self.post_attention_layernorm, rms=True)
            x, normal = steps.add_norm(x, y, norm, 0.0, None, self.step_options, keep_sum=True)
        else:
            x = x + y
            normal = self.post_attention_layernorm(x)
        return x + self._feed_forward(normal)

    def simplified(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A call's arguments by name."""
        return {"hidden_states": hidden_states, **self._by_name(args, kwargs)}

    def frozen(self) -> Any:
        """The numbers that a CUDA graph would freeze; None if a submodule must be called."""
        linears = [part(self) for part in _PARTS]
        unchanged = all(map(self._is_unchanged, self.recognised)) and _is_silu(self.mlp.act_fn)
        if not unchanged or not are_plain(linears, nn.Linear) or internals.has_global_hooks():
            return None
        return ()  # unchanged submodules have the same numbers

    def seqlen_of(self, call: dict[str, Any]) -> int:
        """Tokens a sequence of such a call."""
        return call["hidden_states"].shape[1]

    def _by_name(self, args: Any, kwargs: Any) -> dict[str, Any]:
        if len(args) > len(self.argument_names):
            raise TypeError(
                f"{len(args) + 1} positional arguments; expected hidden_states and at most "
                f"{', '.join(self.argument_names)}"
            )
        return {**dict(zip(self.argument_names, args, strict=False)), **kwargs}

    def _is_unchanged(self, name: str) -> bool:
        return self.recognised[name].is_unchanged(getattr(self, name))

    def _takes(self, x: Tensor, given: dict[str, Any]) -> bool:
        """Whether the fused form supports a call: attention is unchanged, and position embeddings
        cover whole heads."""
        if not self._is_unchanged("self_attn"):
            return False
        position = given.get("position_embeddings")
        if position is None:
            return True
        shapes = [(batch, x.shape[1], self.self_attn.head_dim) for batch in (1, len(x))]
        return len(position) == 2 and all(tuple(a.shape) in shapes for a in position)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        norm = getattr(self, name)
        return steps.Norm.of(norm, rms=True)(x) if self._is_unchanged(name) else norm(x)

    def _attend(self, x: Tensor, visible: masks.Visible, given: dict[str, Any]) -> Tensor:
        attn = self.self_attn
        dim, position = attn.head_dim, given.get("position_embeddings")
        qkv, widths = steps.products(x, [getattr(attn, name) for name in _QKV])
        heads, heads_k, _ = (width // dim for width in widths)
        qkv = qkv.unflatten(-1, (heads + 2 * heads_k, dim))
        if position is None:
            q, k, v = qkv.split((heads, heads_k, heads_k), dim=2)
        elif self.step_options.own_kernels and kernels_for(qkv) is not None:
            q, k, v = Rotate.apply(qkv, *position, heads, heads_k)
        else:
            qk, v = qkv.split((heads + heads_k, heads_k), dim=2)
            cos, sin = position
            q, k = rotate(qk, cos, sin, heads + heads_k).split((heads, heads_k), dim=2)
        p = _dropout_of(attn) if attn.training else 0.0
        rng = steps.draw_seeds(x, 2) if p else None
        out = attend(q, k, v, visible, p, rng, getattr(attn, "scaling", None))
        return attn.o_proj(out.flatten(2))

    def _feed_forward(self, x: Tensor) -> Tensor:
        mlp = self.mlp
        if (
            not self.fusion.fuses("ffn")
            or not self._is_unchanged("mlp")
            or not _is_silu(mlp.act_fn)
        ):
            return mlp(x)
        return steps.gated(
            x, [mlp.gate_proj, mlp.up_proj], mlp.down_proj, F.silu, self.step_options
        )


def _refuse(given: dict[str, Any], attn: Any, defaults: dict[str, Any]) -> None:
    """Refuses arguments that a fused block would ignore, unless they have their defaults or are
    switched off."""
    implementation = _implementation(attn)
    if implementation not in _IMPLEMENTATIONS:
        raise NotImplementedError(_other_masks(implementation))
    known = (*_ARGUMENTS, *(("is_causal",) if implementation is not None else ()))
    for name, value in given.items():
        default = defaults.get(name, attn.is_causal if name == "is_causal" else None)
        nothing = (None, False) if default in (None, False) else (default,)
        if name in known or any(value is x for x in nothing):
            continue
        if "cache" in name or name.startswith("past_key_value"):
            raise NotImplementedError(
                f"{name}: a fused block has no key/value cache; call with use_cache=False"
            )
        kind = type(value).__name__
        raise NotImplementedError(f"{name} is {kind}, which a fused block does not support")


# Ignored arguments: position_ids are for attentions that are refused, the last two for caches.
_ARGUMENTS = (
    "attention_mask", "position_ids", "position_embeddings", "cache_position", "use_cache",
)  # fmt: skip


def _dropout_of(attn: Any) -> float:
    return float(getattr(attn, "attention_dropout", 0.0))


def _is_silu(activation: Any) -> bool:
    if isinstance(activation, nn.Module) and not is_plain(activation, type(activation)):
        return False
    return activation is F.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")


def _implementation(attn: Any) -> str | None:
    """The attn_implementation of a Hugging Face model, which decides its masks; else None."""
    return getattr(getattr(attn, "config", None), "_attn_implementation", None)


def _other_masks(implementation: str | None) -> str:
    return (
        f"attn_implementation is {implementation!r}, whose masks a fused block does not "
        "support; set_attn_implementation('sdpa') first"
    )


def _visible(given: dict[str, Any], attn: Any, x: Tensor) -> masks.Visible:
    mask = given.get("attention_mask")
    if mask is None:
        is_causal = given.get("is_causal")
        is_causal = attn.is_causal if is_causal is None else is_causal
        # Hugging Face's "eager" ignores is_causal: without a mask it hides nothing.
        return masks.Visible(causal=bool(is_causal) and _implementation(attn) != "eager")
    if mask.dim() != 4:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(mask.shape)}; a fused block takes (batch or 1, heads "
            "or 1, seqlen, seqlen)"
        )
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, float("-inf"))
    return masks.Visible(bias=mask)


class LlamaAdapter:
    """Recognises a block by its submodules, named as in Hugging Face's LlamaDecoderLayer, and by
    what its forward computes."""

    name = (
        "a block of Llama's shape (input_layernorm, self_attn with q_proj, k_proj, v_proj, o_proj, "
        "post_attention_layernorm, mlp with gate_proj, up_proj, down_proj)"
    )

    def matches(self, module: nn.Module) -> bool:
        children = dict(module.named_children())
        parts = {name for name, _ in module.named_modules()}
        return children.keys() >= _BLOCK and parts >= set(_LINEARS)

    def refusal(self, module: Any) -> str | None:
        return (
            _other_parts(module)
            or internals.skipped_if_fused(module)
            or _other_attributes(module)
            or _other_state(module)
            or _own_method(module)
        )

    def fuse(self, module: Any, config: FusionConfig) -> nn.Module:
        block = _fused(module, config)
        reason = once(
            "difference", module, lambda: trial.difference(module, lambda x: _fused(x, config))
        )
        if reason is not None:
            raise NotImplementedError(reason)
        by_module = replace(config, strategy=FusionStrategy.FFN_ONLY)
        block.names_arguments = once(
            "agrees", module, lambda: trial.agrees(module, lambda x: _fused(x, by_module))
        )
        return block


def _fused(module: Any, config: FusionConfig) -> Any:
    block = fused_copy(module, FusedLlamaBlock, config)
    names = ("self_attn", "mlp", *_NORMS)
    block.recognised = {name: Recognised.of(getattr(module, name)) for name in names}
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    block.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    block.names_arguments = False
    block.argument_names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return block


def _other_parts(module: Any) -> str | None:
    """The first difference of a block's submodules from Llama's; None if there is none."""
    attn, mlp = module.self_attn, module.mlp
    for part, names in (
        (module, _BLOCK),
        (attn, {*_QKV, "o_proj"}),
        (mlp, {"gate_proj", "up_proj", "down_proj", "act_fn"}),
    ):
        if more := {name for name, _ in part.named_children()} - set(names):
            return f"it has also {sorted(more)}"
    for name in _LINEARS:
        if type(module.get_submodule(name)) is not nn.Linear:
            return f"{name} is not a plain nn.Linear"
    if any(p.is_meta or internals.is_fake(p) for p in module.parameters()):
        return "its parameters have no values, so what it computes cannot be checked"
    return None


def _other_attributes(module: Any) -> str | None:
    """The first attribute of a block that differs from Llama's; None if there is none."""
    attn, act = module.self_attn, getattr(module.mlp, "act_fn", None)
    dim = getattr(attn, "head_dim", None)
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        return "self_attn.head_dim is not a positive int"
    widths = [getattr(attn, name).out_features for name in _QKV]
    if any(width % dim for width in widths) or widths[0] % widths[1] or widths[1] != widths[2]:
        return f"the widths {widths} of q, k and v do not make heads of head_dim {dim}"
    if not isinstance(getattr(attn, "is_causal", None), bool):
        return "self_attn.is_causal is not a bool"
    if getattr(attn, "sliding_window", None) is not None:
        return "self_attn has a sliding window"
    if not (act is F.silu or type(act).__name__ in ("SiLU", "SiLUActivation")):
        return "mlp.act_fn is not SiLU"
    for name in _NORMS:
        if not _is_rms_norm(getattr(module, name)):
            return f"{name} does not compute weight * x / rms(x)"
    if (implementation := _implementation(attn)) not in _IMPLEMENTATIONS:
        return _other_masks(implementation)
    return None


def _other_state(module: Any) -> str | None:
    """The first difference of a block's parameters and buffers from Llama's; None if none."""
    known = {f"{name}.{kind}" for name in _LINEARS for kind in ("weight", "bias")}
    known |= {f"{name}.weight" for name in _NORMS}
    state = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if more := state - known:
        return f"it has also {sorted(more)}"
    for name in (*_LINEARS, *_NORMS):
        part = module.get_submodule(name)
        if not is_plain(part, type(part)):
            return f"{name} has weights that are not ordinary tensors"
    return None


def _own_method(module: Any) -> str | None:
    for name, part in module.named_modules():
        if (method := own_method(part)) is not None:
            return f"{name or 'the block itself'} has a {method} that is not its class's"
    return None


def _is_rms_norm(module: Any) -> bool:
    """Whether a norm computes what torch's RMSNorm with its eps does."""
    weight = getattr(module, "weight", None)
    has_eps = any(hasattr(module, name) for name in ("variance_epsilon", "eps"))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not has_eps:
        return False
    generator = torch.Generator().manual_seed(0)
    norm = trial.with_random_weights(module, torch.float32, generator)
    x = torch.linspace(-1, 2, len(weight), device=weight.device)
    x = x * torch.logspace(-4, 2, 7, device=weight.device)[:, None]
    with torch.no_grad():
        return torch.allclose(norm(x), steps.Norm.of(norm, rms=True)(x), rtol=1e-3, atol=1e-5)
