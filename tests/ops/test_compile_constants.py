"""Constants of compiled calls: ours are no inputs of graphs, and layers may each have their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_arguments import good_arguments
from torch import nn
from torch._dynamo.utils import counters

import flash_cute
from flash_cute import precision
from flash_cute.precision.fp8_linear import FP8LinearLayer
from flash_cute.precision.inputs import InputRounding

LAYERS = 12


class Inputs:
    """A backend that notes where inputs of graphs come from."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.names += [x.name for x in graph.graph.nodes if x.op == "placeholder"]
        return graph


def of_package(function: Any, *args: Any, **named: Any) -> list[str]:
    """Those that are no arguments, nor sizes of them."""
    torch._dynamo.reset()
    inputs = Inputs()
    torch.compile(function, backend=inputs, dynamic=True)(*args, **named)
    assert inputs.names
    return [x for x in inputs.names if x.startswith("g_")]


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(
    "function", ["func", "kvpacked_func", "varlen_func", "varlen_qkvpacked_func"]
)
def test_functions(device, function, softcap):
    arguments = good_arguments(function, device)
    call = getattr(flash_cute, f"flash_attn_{function}")
    assert of_package(call, **arguments, softmax_scale=0.3, softcap=softcap, dropout_p=0.1) == []


def test_a_cache(device):
    q, k, v = good_arguments("func", device).values()
    lengths = torch.tensor([3, 8], dtype=torch.int32, device=device)

    def attend(q, k, v, lengths):
        return flash_cute.flash_attn_with_kvcache(
            q[:, :1].contiguous(), k, v, cache_seqlens=lengths, softmax_scale=0.3
        )

    assert of_package(attend, q, k, v, lengths) == []


def test_layers_of_precision():
    config = precision.PrecisionConfig(base_precision=precision.PrecisionFormat.FP8_E4M3)
    rounding = InputRounding(config, False, torch.device("cpu"))
    for layer in (FP8LinearLayer(32, 48), rounding):
        assert of_package(layer, torch.randn(5, 32)) == []


class Layer(nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.scale, self.window, self.softcap = 0.1 + 0.02 * i, (1 + i, 0), 2.0 + i

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + flash_cute.flash_attn_func(
            x, x, x, softmax_scale=self.scale, causal=True, window_size=self.window,
            softcap=self.softcap,
        )  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_unlike_layers_of_a_model_are_one_graph(dynamic):
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(*map(Layer, range(LAYERS))).double()
    x = torch.randn(1, LAYERS + 4, 2, 16, dtype=torch.float64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        assert torch.equal(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_unlike_layers_one_by_one_are_a_graph_each_within_the_limit():
    torch._dynamo.reset()
    counters.clear()
    layers = [Layer(i) for i in range(LAYERS)]
    x = torch.randn(1, LAYERS + 4, 2, 16, dtype=torch.float64)
    expected = [layer(x) for layer in layers]
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=LAYERS):
        for _ in range(2):
            for layer, out in zip(layers, expected, strict=True):
                assert torch.equal(layer(x), out)
    assert counters["stats"]["unique_graphs"] == LAYERS
