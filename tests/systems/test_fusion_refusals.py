"""What fusion may not leave out, and changes that it must notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fusion_models import HEADS, WIDTH, encoder_layer, llama_block, tokens
from torch import nn

from benchmarks.llama_block import rotary
from flash_cute.attention.fusion import create_unified_attention_fusion

BLOCKS = {
    "layer": lambda: encoder_layer(batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(encoder_layer(batch_first=True), 2),
    "llama": llama_block,
}
PARTS = {"layer": ("", "linear1", "self_attn"), "encoder": ("", "layers.1"), "llama": ("", "mlp")}
EACH = [(kind, part) for kind, parts in PARTS.items() for part in parts]


def assert_kept(model, kind):
    """The part is refused by name; what an encoder's other layers are fused of gives the same."""
    x = torch.randn(2, 9, WIDTH)
    if kind != "encoder":
        with pytest.raises(NotImplementedError, match=r"hooks of .* would not|forward that is not"):
            create_unified_attention_fusion(model)
        return
    fused = create_unified_attention_fusion(model)
    left = [text for text in fused.report.values() if text.startswith("left")]
    assert any("would not be called" in text or "not its class's" in text for text in left)
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize(("kind", "part"), EACH)
def test_hooks(kind, part):
    model = nn.Sequential(BLOCKS[kind]())
    model[0].get_submodule(part).register_forward_hook(lambda module, args, out: out)
    assert_kept(model, kind)


@pytest.mark.parametrize(("kind", "part"), EACH)
def test_hooks_of_backward(kind, part):
    model = nn.Sequential(BLOCKS[kind]())
    model[0].get_submodule(part).register_full_backward_hook(lambda *_: None)
    assert_kept(model, kind)


@pytest.mark.parametrize(("kind", "part"), EACH)
def test_a_forward_of_one_module(kind, part):
    """As libraries replace it that move weights between devices."""
    model = nn.Sequential(BLOCKS[kind]())
    module = model[0].get_submodule(part)
    own = module.forward
    module.forward = lambda *args, **named: own(*args, **named)
    assert_kept(model, kind)


def test_a_block_that_scales_its_residual():
    class Scaled(type(llama_block())):
        def forward(self, hidden_states, *args, **kwargs):
            return hidden_states + 0.5 * (
                super().forward(hidden_states, *args, **kwargs) - hidden_states
            )

    block = llama_block()
    block.__class__ = Scaled
    with pytest.raises(NotImplementedError, match="computes something else"):
        create_unified_attention_fusion(block)


def test_a_block_without_values():
    with pytest.raises(NotImplementedError, match="parameters have no values"):
        create_unified_attention_fusion(llama_block("meta"))


def test_arguments_and_masks_that_a_block_does_not_take():
    fused, x = create_unified_attention_fusion(llama_block()), torch.randn(2, 9, WIDTH)
    for name in ("cache", "past_key_value", "past_key_values"):
        with pytest.raises(NotImplementedError, match=f"{name}: a fused block has no key/value"):
            fused(x, **{name: object()})
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q is Tensor"):
        fused(x, cu_seq_lens_q=torch.arange(3))
    for shape in ((2, 9), (9, 9), (2, 9, 9)):
        with pytest.raises(NotImplementedError, match="attention_mask has shape"):
            fused(x, torch.zeros(shape))


def test_writes_that_torch_does_not_count():
    layer = encoder_layer(batch_first=True)
    fused, x = create_unified_attention_fusion(layer), tokens(layer)
    numbers = np.triu(np.ones((x.shape[1],) * 2, bool), 1)
    mask = torch.from_numpy(numbers)
    torch.testing.assert_close(fused(x, mask), layer(x, mask))
    numbers[...] = False
    torch.testing.assert_close(fused(x, mask), layer(x, mask))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_weights_written_before_backward(name):
    block = llama_block()
    out = create_unified_attention_fusion(block)(
        torch.randn(1, 5, WIDTH, requires_grad=True), position_embeddings=rotary(5, WIDTH // HEADS)
    )
    with torch.no_grad():
        getattr(block.self_attn, name).weight.mul_(3)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        out.sum().backward()


def test_dropout_of_an_int():
    layer = encoder_layer(batch_first=True)
    layer.dropout1.p = 1
    fused, x = create_unified_attention_fusion(layer), tokens(layer)
    assert fused.training
    torch.testing.assert_close(fused(x), layer(x))
