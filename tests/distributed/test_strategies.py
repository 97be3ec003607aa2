"""A strategy is a class and its place in the list: nothing else knows it by name."""

from __future__ import annotations

from unittest import mock

import torch
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute.distributed import ContextParallel, cp_attention
from flash_cute.distributed.all_gather import AllGather
from flash_cute.distributed.strategies import STRATEGIES


class Another(AllGather):
    name = "another"
    balances = False

    def expected_time(self, *_: object) -> float:
        return 0.0


@mock.patch.dict(STRATEGIES, another=Another())
def of_another() -> tuple[list[float], list[int], str]:
    """A strategy's errors against one process, its FLOPs against all_gather, and its refusals."""
    of_auto = ContextParallel().plan(16, causal=True, heads=4, heads_k=4)
    assert (of_auto.strategy, of_auto.layout) == ("another", "contiguous")
    torch.manual_seed(0)
    whole = torch.randn(1, 16, 4, 8, dtype=torch.float64, requires_grad=True)
    out = flash_cute.flash_attn_func(whole, whole, whole, causal=True)
    (grad,) = torch.autograd.grad(out.sum(), whole)
    errors, flops = [], []
    for name in ("another", "all_gather"):
        cp = ContextParallel(strategy=name, layout="contiguous")
        plan = cp.plan(16, causal=True)
        x = cp.shard(whole.detach(), plan).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            mine = cp_attention(x, x, x, plan)
            mine.sum().backward()
        flops.append(counter.get_total_flops())
        pairs = ((mine, cp.shard(out, plan)), (x.grad, cp.shard(grad, plan)))
        errors += [(a - b).abs().max().item() for a, b in pairs]
    cp = ContextParallel(strategy="another")
    try:
        cp_attention(x, x, x, cp.plan(16, causal=True), dropout_p=0.5)
    except NotImplementedError as error:
        return errors, flops, str(error)
    return errors, flops, ""


def test_a_listed_strategy_is_supported_everywhere(two):
    for errors, flops, refused in two.run(of_another):
        assert max(errors) < 1e-12 and flops[0] == flops[1] > 0
        assert "the plan's strategy another" in refused
