"""Blocks of Llama's shape, fused: RMSNorm, grouped-query attention with rotary, SwiGLU."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion import masks, steps
from flash_cute.attention.fusion.attention import attend
from flash_cute.attention.fusion.config import STEPS, FusionConfig
from flash_cute.attention.fusion.functions import Rotate, kernels_for
from flash_cute.attention.fusion.kernels_torch import rotate

_BLOCK = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ARGUMENTS = (
    "attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings",
)  # fmt: skip
_IGNORED = ("cache_position", "use_cache")  # without a cache
_IMPLEMENTATIONS = (None, "eager", "sdpa")  # of attention, whose masks are 4-dimensional
_TOKENS, _SAME = 5, 5e-3  # of the comparison of a block with its fused form; TF32 is off by 1e-3
_QKV = ("q_proj", "k_proj", "v_proj")
_LINEARS = (
    *(f"self_attn.{name}" for name in (*_QKV, "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)


class FusedLlamaBlock(nn.Module):
    """What the block computes, with its submodules' names and parameters.

    The weights of q_proj, k_proj and v_proj come to lie one after the other in memory, those of
    gate_proj and up_proj too: one product each.
    """

    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init__(self, block: Any, config: FusionConfig) -> None:
        super().__init__()
        for name, child in block.named_children():
            self.add_module(name, child)
        self.config, self.fused_steps = config, STEPS[config.strategy]
        self.means = steps.Means(config.own_kernels, config.enable_memory_optimization)
        attn = block.self_attn
        self.head_dim = attn.head_dim
        self.scale = getattr(attn, "scaling", None)
        self.training = block.training
        if config.fuses("attention"):
            steps.pack(self._qkv())
        if config.fuses("ffn"):
            steps.pack(self._gate_up())

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """hidden_states (batch, seqlen, width); position_embeddings (cos, sin), each (batch or 1,
        seqlen, head_dim), None rotates nothing; attention_mask None is ``self_attn.is_causal``'s,
        else (batch or 1, heads or 1, seqlen, seqlen), bool with True where a query sees a key, or
        added. Returns hidden_states.

        Where attention is fused, NotImplementedError for a key/value cache, for what is not known,
        and for masks of another attn_implementation of Hugging Face than "eager" and "sdpa".
        """
        x = hidden_states
        first = steps.Norm.of(self.input_layernorm, rms=True)
        if past_key_values is not None:
            others["past_key_values"] = past_key_values
        if self.config.fuses("attention"):
            _refuse_others(others)
            if (masks_of := _implementation(self.self_attn)) not in _IMPLEMENTATIONS:
                raise NotImplementedError(_other_masks(masks_of))
            visible = _visible(attention_mask, self.self_attn.is_causal, x.dtype)
            y = self._attend(first(x), visible, position_embeddings)
        else:
            y = self.self_attn(
                hidden_states=self.input_layernorm(x), attention_mask=attention_mask,
                position_ids=position_ids, position_embeddings=position_embeddings, **others,
            )  # fmt: skip
            y = y[0] if isinstance(y, tuple) else y
        if self.config.fuses("norm"):
            norm = steps.Norm.of(self.post_attention_layernorm, rms=True)
            x, normal = steps.add_norm(x, y, norm, 0.0, None, self.means, keep_sum=True)
        else:
            x = x + y
            normal = self.post_attention_layernorm(x)
        return x + self._feed_forward(normal)

    def simplified(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A call's arguments by name."""
        named = dict(zip(_ARGUMENTS, args, strict=False))
        return {"hidden_states": hidden_states, **named, **kwargs}

    def seqlen_of(self, call: dict[str, Any]) -> int:
        """Tokens a sequence of such a call."""
        return call["hidden_states"].shape[1]

    def _qkv(self) -> list[Any]:
        return [getattr(self.self_attn, name) for name in _QKV]

    def _gate_up(self) -> list[Any]:
        return [self.mlp.gate_proj, self.mlp.up_proj]

    def _attend(self, x: Tensor, visible: masks.Visible, position: Any) -> Tensor:
        attn, dim = self.self_attn, self.head_dim
        heads, heads_k = (p.out_features // dim for p in (attn.q_proj, attn.k_proj))
        qkv = F.linear(x, *steps.packed(self._qkv())).unflatten(-1, (heads + 2 * heads_k, dim))
        if position is None:
            q, k, v = qkv.split((heads, heads_k, heads_k), dim=2)
        elif self.means.own and kernels_for(qkv) is not None:
            q, k, v = Rotate.apply(qkv, *position, heads, heads_k)
        else:
            qk, v = qkv.split((heads + heads_k, heads_k), dim=2)
            cos, sin = position
            q, k = rotate(qk, cos, sin, heads + heads_k).split((heads, heads_k), dim=2)
        p = getattr(attn, "attention_dropout", 0.0) if attn.training else 0.0
        rng = steps.draw_seeds(x, 2) if p else None
        out = attend(q, k, v, visible, p, rng, self.scale)
        return F.linear(out.flatten(2), attn.o_proj.weight, attn.o_proj.bias)

    def _feed_forward(self, x: Tensor) -> Tensor:
        if not self.config.fuses("ffn"):
            return self.mlp(x)
        w1, b1 = steps.packed(self._gate_up())
        down = self.mlp.down_proj
        hidden = steps.Hidden(w1, b1, down.weight, down.bias, F.silu, gated=True)
        return steps.feed_forward(x, hidden, 0.0, None, self.means)


def _refuse_others(given: dict[str, Any]) -> None:
    """What a block is given besides, and may not leave out."""
    for name, value in given.items():
        if value is None or value is False or name in _IGNORED:
            continue
        if "cache" in name or name.startswith("past_key_value"):
            raise NotImplementedError(
                f"{name}: a fused block has no key/value cache; call with use_cache=False"
            )
        raise NotImplementedError(f"{name} is {type(value).__name__}: a fused block takes no such")


def _implementation(attn: Any) -> str | None:
    """Which masks a model of Hugging Face makes for its attention; None if it is none of these."""
    return getattr(getattr(attn, "config", None), "_attn_implementation", None)


def _other_masks(implementation: str | None) -> str:
    return (
        f"attn_implementation is {implementation!r}, whose masks a fused block does not take; "
        "set_attn_implementation('sdpa') first"
    )


def _visible(mask: Tensor | None, is_causal: bool, dtype: torch.dtype) -> masks.Visible:
    if mask is None:
        return masks.Visible(causal=is_causal)
    if mask.dim() != 4:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(mask.shape)}; a fused block takes (batch or 1, heads "
            "or 1, seqlen, seqlen)"
        )
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
    return masks.Visible(bias=mask)


class LlamaAdapter:
    """Recognises a block by its parts, named as Hugging Face's LlamaDecoderLayer names them."""

    name = (
        "a block of Llama's shape (input_layernorm, self_attn with q_proj, k_proj, v_proj, o_proj, "
        "post_attention_layernorm, mlp with gate_proj, up_proj, down_proj)"
    )

    def matches(self, module: nn.Module) -> bool:
        children = dict(module.named_children())
        parts = {name for name, _ in module.named_modules()}
        return children.keys() >= _BLOCK and parts >= set(_LINEARS)

    def refusal(self, module: Any) -> str | None:
        attn, mlp = module.self_attn, module.mlp
        for part, names in ((module, _BLOCK), (attn, {*_QKV, "o_proj"})):
            more = {name for name, _ in part.named_children()} - set(names)
            if more:
                return f"it has also {sorted(more)}"
        for name in _LINEARS:
            if type(module.get_submodule(name)) is not nn.Linear:
                return f"{name} is no plain nn.Linear"
        if not isinstance(getattr(attn, "head_dim", None), int):
            return "self_attn.head_dim is no int"
        if not isinstance(getattr(attn, "is_causal", None), bool):
            return "self_attn.is_causal is no bool"
        if getattr(attn, "sliding_window", None) is not None:
            return "self_attn has a sliding window"
        act = getattr(mlp, "act_fn", None)
        if not (act is F.silu or type(act).__name__ in ("SiLU", "SiLUActivation")):
            return "mlp.act_fn is no SiLU"
        if any(p.is_meta or internals.is_fake(p) for p in module.parameters()):
            return "its parameters have no values, so that nothing says what it computes"
        for name in ("input_layernorm", "post_attention_layernorm"):
            if not _is_rms_norm(getattr(module, name)):
                return f"{name} does not compute weight * x / rms(x)"
        if (implementation := _implementation(attn)) not in _IMPLEMENTATIONS:
            return _other_masks(implementation)
        return internals.skipped_if_fused(module) or _difference(module)

    def fuse(self, module: Any, config: FusionConfig) -> nn.Module:
        return FusedLlamaBlock(module, config)


def _difference(block: Any) -> str | None:
    """Why a block's numbers are not those of its fused form, on a few random tokens in fp32; None
    if they are. Blocks of one shape may scale residuals, rotate otherwise, or in some layers not.
    """
    weight = block.self_attn.q_proj.weight
    exact = torch.promote_types(weight.dtype, torch.float32)
    block = copy.deepcopy(block).to(exact).eval()
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(weight.device, exact)

    x = random(2, _TOKENS, weight.shape[1])
    hidden = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool, device=x.device).triu(1)
    call = {
        "hidden_states": x,
        "attention_mask": x.new_zeros(_TOKENS, _TOKENS).masked_fill(hidden, -torch.inf)[None, None],
        "position_embeddings": tuple(random(1, _TOKENS, block.self_attn.head_dim) for _ in "cs"),
    }
    with torch.no_grad():
        try:
            out = block(**call)
        except Exception as error:  # whatever another kind of block raises
            return f"a call as of a Llama block fails: {type(error).__name__}: {error}"
        out = out[0] if isinstance(out, tuple) else out
        fused = FusedLlamaBlock(block, FusionConfig())(**call)
    if out.shape != x.shape or not (out - fused).abs().max() <= _SAME * (out - x).abs().max():
        return "it computes something else than a Llama block of these parts"
    return None


def _is_rms_norm(module: Any) -> bool:
    """Whether a norm is torch's RMSNorm by what it computes; nn.RMSNorm by its type."""
    if type(module) is nn.RMSNorm:
        return module.weight is not None
    weight = getattr(module, "weight", None)
    has_eps = any(hasattr(module, name) for name in ("variance_epsilon", "eps"))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not has_eps:
        return False
    with torch.no_grad():
        x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
        expected = steps.Norm.of(module, rms=True)(x)
        return torch.allclose(module(x), expected, rtol=0.02, atol=1e-3)
