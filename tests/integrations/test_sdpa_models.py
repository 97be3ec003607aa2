"""Unchanged models that call torch's attention, with flash_cute activated."""

from __future__ import annotations

import pytest
import torch
from test_sdpa import ops_of

from flash_cute.integrations import sdpa


def check(model: torch.nn.Module, *args: torch.Tensor, **named: torch.Tensor) -> None:
    """Outputs and gradients are those without flash_cute, which computes them."""
    found = []

    def run():
        model.zero_grad()
        out = model(*args, **named)
        out = out.logits if hasattr(out, "logits") else out
        out.square().mean().backward()
        found.append([out.detach()] + [x.grad.clone() for x in model.parameters()])

    assert ops_of(run) == set()
    with sdpa.activated():
        assert ops_of(run) == {"flash_cute::fwd", "flash_cute::bwd"}
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6 + 1e-5 * y.abs().max().item())


def test_timm():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=7, img_size=64)
    check(model.train(), torch.randn(2, 3, 64, 64))


def test_torchvision():
    try:
        from torchvision.models import VisionTransformer
    except (ImportError, RuntimeError) as error:  # built for another torch
        pytest.skip(f"torchvision: {error}")
    torch.manual_seed(0)
    model = VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=7)
    torch.nn.init.normal_(model.heads.head.weight)
    check(model.train(), torch.randn(2, 3, 32, 32))


def test_torch_s_encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    check(torch.nn.TransformerEncoder(layer, 2).train(), torch.randn(2, 9, 32))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_transformers(name):
    pytest.importorskip("transformers")
    import hf_models

    made = hf_models.model(name, "sdpa")
    ids = hf_models.tokens(2, 9)
    if name == "bert":
        model = torch.nn.Sequential()
        model.forward = lambda ids: made(ids).last_hidden_state  # type: ignore[method-assign]
        model.bert = made
        made.pooler = None
        check(model, ids)
    else:
        check(made, input_ids=ids)
