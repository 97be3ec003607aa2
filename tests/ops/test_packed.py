"""Gradients of packed tensors that are not plain: subclasses, fakes, and modes that look at ops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from checks import leaf
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import flash_cute
from flash_cute.functional import packed_autograd as packed
from flash_cute.testing import bounds

Call = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]  # a function, and its leaves
NAMES = ("qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked")


def packed_call(name: str, device: str, seed: int = 0) -> Call:
    torch.manual_seed(seed)
    lead, is_varlen = ((10,), True) if name.startswith("varlen") else ((2, 5), False)
    parts = 2 if name.endswith("_kvpacked") or name == "kvpacked" else 3
    together = torch.randn(*lead, parts, 4, 16, device=device)
    function = getattr(flash_cute, f"flash_attn_{name}_func")
    if is_varlen:
        offsets = torch.tensor([0, 3, 10], dtype=torch.int32, device=device)
        both = ("cu_seqlens_q", "cu_seqlens_k") if parts == 2 else ("cu_seqlens",)
        longest = ("max_seqlen_q", "max_seqlen_k") if parts == 2 else ("max_seqlen",)
        function = partial(function, **dict.fromkeys(both, offsets), **dict.fromkeys(longest, 7))
    leaves = [together] if parts == 3 else [torch.randn(*lead, 4, 16, device=device), together]
    return partial(function, deterministic=True), [leaf(x) for x in leaves]


def gradients(function: Callable[..., torch.Tensor], leaves: list[torch.Tensor]):
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_subclass_have_its_type(device, name):
    """A tensor that holds two: each has the gradient that it has alone."""
    function, first = packed_call(name, device)
    _, second = packed_call(name, device, seed=1)
    both = [leaf(TwoTensor(a.detach(), b.detach())) for a, b in zip(first, second, strict=True)]
    got = gradients(function, both)
    for grad, a, b in zip(
        got, gradients(function, first), gradients(function, second), strict=True
    ):
        assert type(grad) is TwoTensor
        bounds.check_same_bits("first", grad.a, a)
        bounds.check_same_bits("second", grad.b, b)


@pytest.mark.parametrize("name", NAMES)
def test_backward_of_fakes_after_their_mode(name):
    function, leaves = packed_call(name, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [leaf(mode.from_tensor(x.detach())) for x in leaves]
        out = function(*fakes)
    for grad, x in zip(torch.autograd.grad(out.sum(), fakes), leaves, strict=True):
        assert isinstance(grad, FakeTensor)
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_saved_tensors_that_are_mutated(device, name):
    """Where torch keeps copies of them for backward."""
    function, leaves = packed_call(name, device)
    expected = gradients(function, leaves)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        copies = [x * 1 for x in leaves]
        loss = function(*copies).square().sum()
        for x in copies:
            x.detach().zero_()
        got = torch.autograd.grad(loss, leaves)
    for grad, x in zip(got, expected, strict=True):
        bounds.check_same_bits("gradient", grad, x)


@pytest.mark.parametrize("name", NAMES)
def test_plain_gradients_are_not_stacked(device, name, monkeypatch):
    def refuse(*_):
        raise AssertionError("stacked")

    monkeypatch.setattr(packed, "_stacked", refuse)
    function, leaves = packed_call(name, device)
    leaves[-1] = torch.nn.Parameter(leaves[-1])
    assert all(grad.any() for grad in gradients(function, leaves))
