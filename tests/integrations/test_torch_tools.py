"""torch's own tools around the public functions: symbolic tracing, selective checkpointing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flash_cute
from flash_cute import flash_attn_func
from flash_cute.call.validate import ops as validate_ops

torch.fx.wrap("flash_attn_func")


class Wrapped(torch.nn.Module):
    def forward(self, x):
        return flash_attn_func(x, x, x, causal=True) + 1


class NotWrapped(torch.nn.Module):
    def forward(self, x):
        return flash_cute.flash_attn_func(x, x, x)


def test_symbolic_tracing():
    traced = torch.fx.symbolic_trace(Wrapped())
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert flash_attn_func in calls
    x = torch.randn(1, 5, 2, 8)
    assert torch.equal(traced(x), Wrapped()(x))
    with pytest.raises(TypeError, match=r"torch\.fx\.wrap"):
        torch.fx.symbolic_trace(NotWrapped())


@pytest.fixture
def forwards(monkeypatch):
    """How often the CPU has computed attention forward."""
    calls = []
    checks = validate_ops.arguments

    def count(call):
        if not hasattr(call, "softmax_lse"):
            calls.append(call.q.shape)
        return checks(call)

    monkeypatch.setattr(validate_ops, "arguments", count)
    return calls


@pytest.mark.parametrize("is_compiled", [False, True])
def test_selective_activation_checkpointing(is_compiled, forwards):
    """Attention's results are kept: backward does not compute it again."""

    def policy(context, op, *args, **named):
        kept = {torch.ops.flash_cute.fwd.default, torch.ops.flash_cute.varlen_fwd.default}
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x):
        return flash_attn_func(x, x, x, causal=True).sin()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    x = torch.randn(2, 9, 4, 16, requires_grad=True)

    def run(context_fn):
        named = {} if context_fn is None else {"context_fn": context_fn}
        return checkpoint(block, x, use_reentrant=False, **named)

    if is_compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = []
    for context_fn, expected in ((None, 2), (contexts, 1)):
        run(context_fn)  # compiles
        forwards.clear()
        out = run(context_fn)
        found.append(torch.autograd.grad(out, x, torch.ones_like(out))[0])
        assert len(forwards) == expected
    assert torch.equal(*found)
