"""Weights and layers that a model has under several names, or holds outside of its registries."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from precision_models import error, reachable_bytes
from torch import Tensor, nn

from flash_cute.precision import PrecisionConfig, PrecisionFormat, create_ultra_precision_module
from flash_cute.precision.packed import PackedEmbedding


def packed(model: nn.Module, target: float = 0.4) -> nn.Module:
    return create_ultra_precision_module(
        model, PrecisionConfig(PrecisionFormat.FP32, target_memory_reduction=target)
    )


class Attributes(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.first, self.second, self.third = weight, weight, weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first @ self.second @ self.third


class Collected(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.several = nn.ParameterList([weight, weight])
        self.named = nn.ParameterDict({"a": weight, "b": weight})

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.several[0] @ self.several[1] @ self.named["a"] @ self.named["b"]


class Embedded(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.embed = nn.Embedding(*weight.shape)
        self.embed.weight = self.embed.head = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.argmax(-1)) @ self.embed.head


@pytest.mark.parametrize("kind", [Attributes, Collected, Embedded])
def test_a_weight_of_several_names_of_one_module_is_packed_under_each(kind):
    model = kind(nn.Parameter(torch.randn(64, 64) / 8))
    x = torch.randn(7, 64, requires_grad=True)
    small = packed(model)
    assert len(small.get_precision_stats().layers) == 1
    assert not list(small.parameters()) and reachable_bytes(small) <= 0.6 * 64 * 64 * 4
    assert 0 < error(small(x), model(x)) < 0.01
    other = packed(kind(nn.Parameter(torch.randn(64, 64))))
    other.load_state_dict(small.state_dict())
    assert torch.equal(other(x), small(x))


class Sums(nn.Module):
    """Looks up in embeddings by way of what is no registry of modules."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(100, 64), nn.Embedding(50, 64)
        both = [self.first, self.second]
        self.lookups = {
            "list": both, "tuple in a dict": {"all": tuple(both)}["all"],
            "methods": [x.forward for x in both], "calls": [partial(x.__call__) for x in both],
            "an object": SimpleNamespace(both=both),
        }[how]  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        lookups = getattr(self.lookups, "both", self.lookups)
        return sum(number * lookup(ids) for number, lookup in enumerate(lookups, 1))


@pytest.mark.parametrize("how", ["list", "tuple in a dict", "methods", "calls", "an object"])
def test_other_references_to_an_embedding_see_the_packed_one(how: str):
    model, ids = Sums(how), torch.randint(50, (3, 5))
    small = packed(model)
    assert 0 < error(small(ids), model(ids)) < 0.01
    assert reachable_bytes(small) <= 0.6 * 150 * 64 * 4
    assert isinstance(small.model.first, PackedEmbedding)
    assert type(model.first) is nn.Embedding and model.first.weight.shape == (100, 64)
    again = copy.deepcopy(small)
    assert torch.equal(again(ids), small(ids))
