"""Models to fuse, and how two are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.llama_block import LlamaBlock

WIDTH, HEADS, HIDDEN, BATCH, SEQLEN = 32, 4, 48, 3, 7

LAYERS: dict[str, dict[str, Any]] = {
    "as_documented": {},
    "batch_first": {"batch_first": True, "activation": "gelu"},
    "norm_first": {"norm_first": True, "activation": nn.GELU("tanh")},
    "norm_first_batch_first": {"norm_first": True, "batch_first": True},
    "without_bias": {"bias": False, "norm_first": True, "activation": "gelu"},
    "own_activation": {"activation": torch.tanh, "batch_first": True, "layer_norm_eps": 1e-3},
}


def encoder_layer(device: str = "cpu", dropout: float = 0.0, **options: Any) -> Any:
    """A small layer whose every parameter matters."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=dropout, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.to(device)


def tokens(layer: Any, device: str = "cpu") -> Tensor:
    """An input for it."""
    torch.manual_seed(2)
    batch_first = layer.self_attn.batch_first
    shape = (BATCH, SEQLEN, WIDTH) if batch_first else (SEQLEN, BATCH, WIDTH)
    return torch.randn(shape, device=device)


def llama_block(device: str = "cpu", **options: Any) -> LlamaBlock:
    """A small block whose every parameter matters."""
    torch.manual_seed(1)
    sizes = {"width": WIDTH, "heads": HEADS, "heads_k": 2, "hidden": HIDDEN}
    block = LlamaBlock(**{**sizes, **options})
    for parameter in block.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return block.to(device)


def assert_same(model: Any, fused: Any, x: Tensor, *args: Any, **kwargs: Any) -> None:
    """Equal outputs and gradients, of x and of every parameter, and outputs without gradients."""
    results = []
    for one in (model, fused):
        leaf = x.clone().requires_grad_()
        out = one(leaf, *args, **kwargs)
        torch.manual_seed(3)
        grads = torch.autograd.grad(out, [leaf, *model.parameters()], torch.randn_like(out))
        results.append((out, *grads))
    for wanted, got in zip(*results, strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype
        scale = float(wanted.detach().abs().max()) + 0.1
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=5e-5 * scale)
    with torch.no_grad():
        torch.testing.assert_close(fused(x, *args, **kwargs), results[0][0], rtol=1e-4, atol=1e-4)


def saved_bytes(call: Callable[[], Any], *models: nn.Module) -> int:
    """Bytes that a call keeps for backward, parameters aside; storages count once."""
    storages: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for m in models for p in m.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    del out
    return sum(storages.values())
