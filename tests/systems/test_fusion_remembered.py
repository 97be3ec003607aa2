"""Equal blocks are tried once in a construction; blocks that may differ are each tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_models import WIDTH, llama_block
from torch import Tensor, nn

from benchmarks.llama_block import Attention, LlamaBlock, rotary
from flash_cute.attention.fusion import create_unified_attention_fusion, trial


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The blocks that were tried, in order."""
    found: list[nn.Module] = []
    difference = trial.difference

    def recorded(block: nn.Module, fuse: Callable[[nn.Module], nn.Module]) -> str | None:
        found.append(block)
        return difference(block, fuse)

    monkeypatch.setattr(trial, "difference", recorded)
    return found


def numbered(*numbers: int, kind: type[Attention] = Attention) -> nn.Sequential:
    """Blocks that know which layer they are."""
    blocks = [llama_block() for _ in numbers]
    for block, number in zip(blocks, numbers, strict=True):
        block.self_attn.__class__ = kind
        block.self_attn.layer_idx = number
    return nn.Sequential(*blocks)


class Cached(Attention):
    """Reads its number only if there is a cache, as models of Hugging Face do."""

    def forward(self, hidden_states: Tensor, *args: Any, past: Any = None, **kwargs: Any) -> Any:
        if past is not None:
            hidden_states = hidden_states + past[self.layer_idx]
        return super().forward(hidden_states, *args, **kwargs)


class Alternating(Attention):
    """Every second layer is another one."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states * (1 + self.layer_idx % 2), *args, **kwargs)


def fates(model: nn.Module) -> list[str]:
    report = create_unified_attention_fusion(model).report
    return [report[name].split(":")[0] for name, _ in model.named_children()]


@pytest.mark.parametrize("kind", [Attention, Cached])
def test_equal_layers_are_tried_once_and_each_fused(tried, kind):
    model = numbered(*range(5), kind=kind)
    for i, block in enumerate(model):
        torch.manual_seed(i)
        for parameter in block.parameters():
            nn.init.normal_(parameter, mean=0.1, std=0.3)
    fused = create_unified_attention_fusion(model)
    assert len(tried) == 1 and all(x.startswith("fused") for x in fused.report.values())
    x, position = torch.randn(2, 7, WIDTH), rotary(7, WIDTH // 4)
    for block, other in zip(model, fused.model, strict=True):
        call = {"attention_mask": None, "position_embeddings": position}
        torch.testing.assert_close(other(x, **call), block(x, **call), atol=1e-4, rtol=1e-4)


def test_a_number_that_is_read_has_each_layer_tried(tried):
    assert fates(numbered(0, 1, 2, kind=Alternating)) == ["fused", "left", "fused"]
    assert len(tried) == 3


def hooked(block: LlamaBlock) -> None:
    block.mlp.register_forward_hook(lambda module, args, out: 2 * out)


def other_number(block: LlamaBlock) -> None:
    block.self_attn.scale_by = 2.0


def other_forward(block: LlamaBlock) -> None:
    block.self_attn.__class__ = Alternating
    block.self_attn.layer_idx = 1


def other_object(block: LlamaBlock) -> None:
    block.self_attn.settings = object()


def in_double(block: LlamaBlock) -> None:
    block.double()


@pytest.mark.parametrize("change", [hooked, other_number, other_forward, other_object, in_double])
def test_a_layer_that_may_differ_is_tried_itself(tried, change):
    blocks = [llama_block() for _ in range(3)]
    change(blocks[1])
    alone = create_unified_attention_fusion(nn.Sequential(llama_block(), blocks[1])).report["1"]
    tried.clear()
    report = create_unified_attention_fusion(nn.Sequential(*blocks)).report
    assert report["1"] == alone and report["0"] == report["2"]
    assert [x is blocks[0] for x in tried].count(True) <= 1 and len(tried) <= 2
    assert change is hooked or len(tried) == 2


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_is_no_property_of_a_block(kind, monkeypatch):
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise kind(text)

    model = nn.Sequential(llama_block())
    monkeypatch.setattr(LlamaBlock, "forward", forward)
    with pytest.raises(kind, match="can't allocate"):
        create_unified_attention_fusion(model)
