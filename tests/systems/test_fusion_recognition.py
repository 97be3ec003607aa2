"""A block with Llama's parts is fused only if its forward does what Llama's does, always."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusion_models import WIDTH, assert_same, encoder_layer, llama_block
from torch import Tensor, nn

from benchmarks.llama_block import MLP, Attention, LlamaBlock, RMSNorm, rotary, turned
from flash_cute.attention.fusion import ADAPTERS, create_unified_attention_fusion


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    causal = {"is_causal": mask is None, "enable_gqa": True, **options}
    return F.scaled_dot_product_attention(q, k, v, mask, **causal)


def windowed(q, k, v, mask, size):
    i = torch.arange(q.shape[2], device=q.device)
    hidden = (i[:, None] < i) | (i[:, None] - i >= size)
    own = q.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    return sdpa(q, k, v, own if mask is None else own + mask)


def cut(q, k, v, mask, size):
    if mask is not None or q.shape[2] <= size:
        return sdpa(q, k, v, mask)
    return sdpa(q, k[:, :, :size], v[:, :, :size], None, is_causal=False)


def counted(attn, q, k, v, mask):
    attn.calls = getattr(attn, "calls", 0) + 1
    return sdpa(q, k, v, mask)


ATTENTIONS = {
    "window_8": lambda _, *x: windowed(*x, 8),
    "window_200": lambda _, *x: windowed(*x, 200),
    "window_of_long": lambda _, *x: windowed(*x, 500) if x[0].shape[2] > 500 else sdpa(*x),
    "cut_8": lambda _, *x: cut(*x, 8),
    "cut_5000": lambda _, *x: cut(*x, 5000),
    "dropout": lambda attn, *x: F.dropout(sdpa(*x), 0.5, attn.training),
    "dropped_probabilities": lambda attn, *x: sdpa(*x, dropout_p=0.1 if attn.training else 0.0),
    "scale": lambda _, *x: sdpa(*x, scale=0.4),
    "no_causal_mask": lambda _, *x: sdpa(*x, is_causal=False),
    "no_gradient_of_keys": lambda _, q, k, v, mask: sdpa(q, k.detach(), v, mask),
    "bf16": lambda _, *x: sdpa(*x) * (0.5 if x[0].dtype == torch.bfloat16 else 1),
    "batch": lambda _, *x: sdpa(*x) * (0.5 if len(x[0]) > 50 else 1),
    "noise": lambda attn, *x: sdpa(*x) + (1e-6 * torch.randn_like(x[0]) if attn.training else 0),
    "python_s_random": lambda attn, *x: sdpa(*x) * (random.random() < 2),
    "values": lambda _, *x: sdpa(*x) * (0.5 if bool(x[0].abs().max() > 1e6) else 1),
    "clamp": lambda _, q, k, v, mask: sdpa(q.clamp(-1e6, 1e6), k, v, mask),
    "count": counted,
}


def with_attention(attend) -> LlamaBlock:
    class Own(Attention):
        def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **_):
            q, k, v = (
                proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for proj in (self.q_proj, self.k_proj, self.v_proj)
            )
            if position_embeddings is not None:
                cos, sin = (x[:, None] for x in position_embeddings)
                q, k = (x * cos + turned(x) * sin for x in (q, k))
            out = attend(self, q, k, v, attention_mask)
            return self.o_proj(out.transpose(1, 2).flatten(2)), None

    block = llama_block()
    block.self_attn.__class__ = Own
    return block


def reason(block: nn.Module) -> str:
    """The report of a block next to one that is fused; the state of generators must not change."""
    model = nn.Sequential(block, encoder_layer(batch_first=True))
    states = torch.get_rng_state(), random.getstate()
    fused = create_unified_attention_fusion(model)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert fused.report["1"].startswith("fused")
    return fused.report["0"]


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_attentions_of_their_own_are_left(kind):
    assert reason(with_attention(ATTENTIONS[kind])).startswith("left: ")


def test_the_same_attention_is_fused():
    block = with_attention(lambda _, *x: sdpa(*x))
    fused, x = create_unified_attention_fusion(block), torch.randn(2, 9, WIDTH)
    assert_same(block, fused, x, position_embeddings=rotary(9, 8))


def residual(block, x, *others):
    x = x + 1.001 * block.self_attn(block.input_layernorm(x), *others)[0]
    return x + block.mlp(block.post_attention_layernorm(x))


def norm_behind(block, x, *others):
    x = x + block.input_layernorm(block.self_attn(x, *others)[0])
    return x + block.post_attention_layernorm(block.mlp(x))


FORWARDS = {
    "scaled_residual": residual,
    "norm_behind": norm_behind,
    "layer_drop": lambda block, x, *others: (
        x if block.training and torch.rand(()) < 0 else LlamaBlock.forward(block, x, *others)
    ),
    "tuple": lambda block, *given: (LlamaBlock.forward(block, *given),),
    "length": lambda block, x, *others: (
        LlamaBlock.forward(block, x, *others) if x.shape[1] <= 5 else x
    ),
    "no_grad": lambda block, *given: (
        LlamaBlock.forward(block, *given) * (1 if torch.is_grad_enabled() else 1.1)
    ),
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_forwards_of_their_own_are_left(kind):
    class Own(LlamaBlock):
        def forward(self, hidden_states, attention_mask=None, position_embeddings=None):
            return FORWARDS[kind](self, hidden_states, attention_mask, position_embeddings)

    block = llama_block()
    block.__class__ = Own
    assert reason(block).startswith("left: ")


class OtherEps(RMSNorm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4)


class Gated(MLP):
    def forward(self, x):
        return super().forward(x) + self.alpha * x


def no_effect_yet() -> LlamaBlock:
    block = llama_block()
    block.mlp.alpha = nn.Parameter(torch.zeros(()))
    block.mlp.__class__ = Gated
    return block


def zero_weights() -> LlamaBlock:
    block = with_attention(ATTENTIONS["window_8"])
    nn.init.zeros_(block.self_attn.o_proj.weight)
    return block


def other_eps() -> LlamaBlock:
    block = llama_block()
    block.post_attention_layernorm.__class__ = OtherEps
    return block


@pytest.mark.parametrize("make", [no_effect_yet, zero_weights, other_eps])
def test_weights_that_hide_what_a_block_does(make):
    assert reason(make()).startswith("left: ")


def test_biases_of_some_projections():
    """Also if they are 0 until they are trained."""
    block = llama_block()
    block.self_attn.k_proj.bias = nn.Parameter(torch.zeros(16))
    block.mlp.up_proj.bias = nn.Parameter(torch.randn(48))
    fused, x = create_unified_attention_fusion(block), torch.randn(2, 9, WIDTH)
    nn.init.normal_(block.self_attn.k_proj.bias)
    assert_same(block, fused, x, position_embeddings=rotary(9, 8))


@pytest.mark.parametrize("eps", [None, 1e-5])
def test_norms_of_torch(eps):
    block, position = llama_block(), rotary(9, 8)
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(block, name, nn.RMSNorm(WIDTH, eps=eps))
    fused = create_unified_attention_fusion(block)
    assert_same(block, fused, torch.randn(2, 9, WIDTH), position_embeddings=position)
    x = torch.randn(2, 9, WIDTH).bfloat16() / 64  # where eps matters
    out, wanted = fused.bfloat16()(x).double(), block.bfloat16()(x).double()
    assert (out - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_positional_arguments_are_the_block_s():
    block, position = llama_block(), rotary(9, 8)
    fused, x = create_unified_attention_fusion(block), torch.randn(2, 9, WIDTH)
    torch.testing.assert_close(
        fused(x, None, position), block(x, None, position), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(TypeError, match="4 positional arguments; expected hidden_states and at"):
        fused(x, None, position, 3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("is_causal", [None, False, True])
def test_what_a_call_says_of_causality(implementation, is_causal):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
    )
    config._attn_implementation = implementation
    block, x = llama.LlamaDecoderLayer(config, 0), torch.randn(2, 9, WIDTH)
    call = {"position_embeddings": rotary(9, 8), "is_causal": is_causal}
    fused = create_unified_attention_fusion(block)
    torch.testing.assert_close(fused(x, **call), block(x, **call), rtol=1e-4, atol=1e-4)


BROKEN = {
    "no dropout1": lambda layer: delattr(layer, "dropout1"),
    "norm1 is None": lambda layer: setattr(layer, "norm1", None),
    "own _ff_block": lambda layer: setattr(layer, "_ff_block", lambda x: x),
    "lazy": lambda layer: setattr(layer, "linear1", nn.LazyLinear(48)),
    "no weight": lambda layer: layer.norm1.register_parameter("weight", None),
    "no attention": lambda layer: setattr(layer, "self_attn", nn.Identity()),
}


@pytest.mark.parametrize("how", BROKEN)
def test_layers_that_cannot_be_fused_are_left_and_named(how):
    layer = encoder_layer(batch_first=True)
    BROKEN[how](layer)
    assert reason(layer).startswith("left: ")


def test_an_adapter_that_raises_leaves_the_block(monkeypatch):
    class Raises:
        name = "nn.Tanh"

        def matches(self, module):
            return isinstance(module, nn.Tanh)

        def refusal(self, module):
            raise KeyError("unforeseen")

    monkeypatch.setattr("flash_cute.attention.fusion.module.ADAPTERS", [Raises(), *ADAPTERS])
    assert reason(nn.Tanh()) == "left: KeyError: 'unforeseen'"


def test_what_is_fused_is_not_fused_again():
    fused = create_unified_attention_fusion(llama_block())
    with pytest.raises(NotImplementedError, match="the model is left: it is fused already"):
        create_unified_attention_fusion(fused.model)


class OtherDtype:
    """torch.set_default_dtype for a while."""

    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(torch.float32)


class Rough:
    """Products in fp32 may be computed in bf16 for a while."""

    def __enter__(self) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    def __exit__(self, *_: object) -> None:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"


def settings() -> tuple[Any, ...]:
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    return (
        torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(), *(x.fp32_precision for x in backends),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "around",
    [
        torch.inference_mode, torch.no_grad, OtherDtype, Rough,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["inference_mode", "no_grad", "default_dtype", "precision", "autocast"],
)  # fmt: skip
def test_recognition_does_not_depend_on_the_caller_s_settings(around, dtype):
    model = nn.Sequential(llama_block(), other_eps()).to(dtype)
    wanted = create_unified_attention_fusion(model).report
    assert wanted["0"].startswith("fused") and wanted["1"].startswith("left")
    with around():
        before = settings()
        assert create_unified_attention_fusion(model).report == wanted
        assert settings() == before
