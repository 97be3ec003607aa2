"""An argument that a rule of the ops does not know is never taken for one that it knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import flash_cute
from flash_cute.ops import sharding, vmap
from flash_cute.ops.schema import fwd
from flash_cute.ops.typed import FwdCall


def test_vmap_calls_the_op_for_each_sample(monkeypatch):
    q = torch.randn(3, 2, 10, 4, 8)
    slopes = torch.rand(3, 4)

    def attend(q, slopes):
        return flash_cute.flash_attn_func(q, q, q, alibi_slopes=slopes)

    expected = torch.stack([attend(*x) for x in zip(q, slopes, strict=True)])
    monkeypatch.setattr(vmap, "_KNOWN", vmap._KNOWN - {"alibi_slopes"})
    monkeypatch.setattr(vmap, "_into_batch", None)
    assert torch.equal(torch.vmap(attend)(q, slopes), expected)


def test_dtensors_are_refused():
    tensors = {name: SimpleNamespace(placements=()) for name in ("q", "k", "v", "bias")}
    q = torch.empty(1, 1, 1, 8)
    with pytest.raises(NotImplementedError, match="bias is given, and q, k and v are DTensors"):
        sharding._refuse(fwd, FwdCall(q, q, q), tensors)


def test_results_are_those_requested():
    q = torch.empty(1, 1, 1, 8)
    call = FwdCall(q, q, q, return_softmax=True)
    names = ("out", "softmax_lse", "row_max", "softmax", "dq", "dsink", "softmax_d")
    there = [sharding._is_there(call, name) for name in names]
    assert there == [True, True, False, True, True, False, True]
    assert sharding._is_there(call._replace(sink=q[0, 0, 0]), "dsink")
