"""The fused wrapper as a module: what it goes over, its replicas, and what a call looks at."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
from fusion_models import WIDTH, encoder_layer
from torch import Tensor, nn
from torch.nn.parallel import replicate

from flash_cute.attention.fusion import create_unified_attention_fusion
from flash_cute.attention.fusion.encoder import FusedEncoderLayer
from flash_cute.attention.fusion.graphs import Graphs


class Scaled(nn.Module):
    """A model whose root has a parameter and a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.layer = encoder_layer(batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale) + self.shift


def test_the_root_is_among_the_modules():
    given = encoder_layer(batch_first=True)
    fused = create_unified_attention_fusion(given)
    inside = list(fused.modules())
    assert inside[:2] == [fused, fused.model]
    assert len(inside) == len(set(inside)) == 1 + len(list(given.modules()))
    seen: list[nn.Module] = []
    assert fused.apply(seen.append) is fused
    assert seen[-2:] == [fused.model, fused] and set(seen) == set(inside)
    assert [name for name, _ in fused.named_modules()] == [n for n, _ in given.named_modules()]
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in given.named_parameters()]


def test_replicas_have_the_parameters_of_the_root(monkeypatch):
    """As nn.DataParallel makes them; on the CPU tensors are copied here."""

    def copies(tensors: Any, devices: Any, detach: bool = False) -> Any:
        return [[x.detach() if detach else x * 1 for x in tensors] for _ in devices]

    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    given = Scaled()
    fused, x = create_unified_attention_fusion(given), torch.randn(2, 5, WIDTH)
    wanted = given(x)
    expected = torch.autograd.grad(wanted.sin().sum(), list(given.parameters()))
    for replica in replicate(fused, [0, 1]):
        out = replica(x)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-3)
        got = torch.autograd.grad(out.sin().sum(), list(fused.parameters()))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert isinstance(fused.model.scale, nn.Parameter)


class OnGPU(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_a_call_looks_once_at_the_parts_of_each_layer(monkeypatch):
    looked: list[FusedEncoderLayer] = []
    frozen = FusedEncoderLayer.frozen

    def recorded(layer: FusedEncoderLayer) -> Any:
        looked.append(layer)
        return frozen(layer)

    monkeypatch.setattr(FusedEncoderLayer, "frozen", recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    layers = nn.TransformerEncoder(encoder_layer(batch_first=True), 3).eval()
    fused = create_unified_attention_fusion(layers)
    x = torch.randn(2, 5, WIDTH).as_subclass(OnGPU)

    class Captured:
        def replay(self, tensors: list[Tensor]) -> Tensor:
            return tensors[0]

    monkeypatch.setattr(Graphs, "_capture", lambda graphs, call: Captured())
    fused.graphs = Graphs(fused.model, 5)
    with torch.no_grad():
        for _ in range(2):
            looked.clear()
            assert fused(x) is x and fused.last_call == "one CUDA graph"
            assert looked == list(fused.model.layers)
        fused.model.layers[1].norm1.register_forward_hook(lambda *_: None)
        reason, _ = fused.graphs.check_call(fused.model.simplified(x))
    assert reason == "a part of the model was changed, and is called"
