"""Estimates of memory against what the allocator allocates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hardware_models import (
    Attention,
    Make,
    allocator_peak,
    encoder,
    mlp,
    training_step,
    weight_bytes,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_cute.hardware import HardwareAbstractionLayer

STEPS = [
    pytest.param(mlp, (2048, 256), id="activations outweigh weights"),
    pytest.param(lambda: nn.Linear(512, 512), (4, 512), id="weights outweigh activations"),
    pytest.param(encoder, (16, 128, 64), id="encoder"),
    pytest.param(lambda: mlp().bfloat16(), (2048, 256), id="bf16"),
]


@pytest.mark.parametrize(("make", "shape"), STEPS)
def test_estimate_is_the_allocator_s_peak(make: Make, shape: tuple[int, ...]):
    model = make()
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    step, weights = training_step(model, x), weight_bytes(model)
    held = 3 * weights  # weights and AdamW's state
    peak = held + allocator_peak(step)
    estimate = HardwareAbstractionLayer([]).estimate_memory_usage(model, len(x), x)
    assert estimate == pytest.approx(peak, rel=0.1)

    for fast in (False, True):  # one op for a whole encoder layer
        torch.backends.mha.set_fastpath_enabled(fast)
        with torch.no_grad():
            peak = weights + allocator_peak(lambda: model.eval()(x.clone()))
        hal = HardwareAbstractionLayer([])
        estimate = hal.estimate_memory_usage(model, len(x), x, training=False)
        assert estimate == pytest.approx(peak, rel=0.15)


def test_estimate_of_attention_covers_what_backward_needs():
    """The op's outputs that backward reads, q, k and v, are seen through the fakes."""
    model, tokens = Attention(), 256
    x = torch.zeros(1, tokens, 64)
    hal = HardwareAbstractionLayer([])
    one, two = (hal.estimate_memory_usage(model, n, x) for n in (1, 2))
    saved = (1 + 3 + 1) * x.nbytes + 4 * tokens * 4  # input, qkv, out, lse of 4 heads
    assert saved < two - one < 3 * saved


@pytest.mark.parametrize("make", [mlp, encoder, Attention])
def test_estimate_is_linear_in_the_batch_and_covers_the_weights(make: Make):
    hal, model = HardwareAbstractionLayer([]), make()
    for training, copies in ((True, 4), (False, 1)):
        values = [hal.estimate_memory_usage(model, n, None, training) for n in (1, 2, 4, 1000)]
        assert all(isinstance(value, float) for value in values)
        slope = values[1] - values[0]
        assert slope > 0
        assert values[2] - values[1] == pytest.approx(2 * slope)
        assert values[3] - values[2] == pytest.approx(996 * slope)
        assert values[0] >= copies * weight_bytes(model) + slope - 1


def test_frozen_weights_need_neither_gradients_nor_state():
    hal, model = HardwareAbstractionLayer([]), mlp()
    full = hal.estimate_memory_usage(model, 1)
    model[0].requires_grad_(False)
    frozen = sum(p.nbytes for p in model[0].parameters())
    assert full - hal.estimate_memory_usage(model, 1) == pytest.approx(3 * frozen, rel=0.01)


class Checkpointed(nn.Module):
    """Layers that run forward again in backward, if asked to."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp(64) for _ in range(6)])
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for part in self.layers:
            x = checkpoint(part, x, use_reentrant=False) if self.again else part(x)
        return x


def test_estimate_follows_checkpoints_and_autocast():
    hal, x = HardwareAbstractionLayer([]), torch.zeros(1, 64)
    kept, again = (hal.estimate_memory_usage(Checkpointed(a), 4096, x) for a in (False, True))
    assert again < 0.6 * kept
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert hal.estimate_memory_usage(Checkpointed(False), 4096, x) < 0.8 * kept


class Tied(nn.Module):
    """Tokens in and logits out by one weight; the result is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.logits = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.logits.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor | None]:
        return {"loss": None, "logits": self.logits(self.tokens(ids))}


def test_weights_that_are_tied_count_once():
    ids = torch.zeros(1, 1, dtype=torch.int64)
    hal, weights = HardwareAbstractionLayer([]), 1000 * 64 * 4
    assert 4 * weights < hal.estimate_memory_usage(Tied(), 1, ids) < 4.2 * weights
    assert weights < hal.estimate_memory_usage(Tied(), 1, ids, training=False) < 1.2 * weights


def test_estimate_is_the_same_without_gradients_and_of_a_compiled_model():
    hal, model = HardwareAbstractionLayer([]), mlp(64)
    expected = hal.estimate_memory_usage(model, 100)
    with torch.no_grad():
        assert hal.estimate_memory_usage(model, 100) == expected
    with torch.inference_mode():
        assert hal.estimate_memory_usage(model, 100) == expected
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    compiled, sample = torch.compile(model, backend=backend), torch.zeros(1, 64)
    assert hal.estimate_memory_usage(compiled, 100, sample) == expected
    assert not graphs
    compiled(sample)
    assert len(graphs) == 1


def test_estimate_names_its_unit():
    assert "in bytes" in HardwareAbstractionLayer.estimate_memory_usage.__doc__


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize(("make", "shape"), [(mlp, (65536, 256)), (encoder, (256, 256, 64))])
def test_estimate_is_within_a_tenth_of_cuda_s_peak(cuda, make: Make, shape: tuple[int, ...]):
    model = make().to(cuda)
    estimate = HardwareAbstractionLayer().estimate_memory_usage(
        model, shape[0], torch.zeros(1, *shape[1:], device=cuda)
    )
    x = torch.randn(shape, device=cuda)
    step = training_step(model, x)
    others = torch.cuda.memory_allocated() - 3 * weight_bytes(model)
    torch.cuda.reset_peak_memory_stats()
    step()
    assert estimate == pytest.approx(torch.cuda.max_memory_allocated() - others, rel=0.1)
