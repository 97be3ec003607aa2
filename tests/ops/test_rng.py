"""The random state of dropout: drawn, given, returned, replayed, and refused if it is invalid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_arguments import good_arguments
from checks import leaf

import flash_cute
from flash_cute.testing import bounds

FUNCTIONS = (
    "func", "qkvpacked_func", "kvpacked_func", "varlen_func", "varlen_qkvpacked_func",
    "varlen_kvpacked_func",
)  # fmt: skip
P = {"dropout_p": 0.3}


def call_of(function: str) -> Callable[..., Any]:
    return getattr(flash_cute, f"flash_attn_{function}")


def generator(device: str, seed: int = 7) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def leaves_of(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {x: leaf(y) for x, y in arguments.items() if x in ("q", "k", "v", "kv", "qkv")}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_state_replays_a_call(device, function):
    """Results and gradients, of a state that was returned, and of one that was drawn."""
    call, arguments = call_of(function), good_arguments(function, device)
    same: dict[str, Any] = {**P, "deterministic": True}
    leaves = leaves_of(arguments)
    out, rng = call(**(arguments | leaves), **same, return_rng=True)
    assert rng.dtype == torch.int64 and rng.shape == (2,) and rng.device == out.device
    grads = torch.autograd.grad(out.float().square().sum(), list(leaves.values()))
    again, state = call(**(arguments | leaves), **same, rng=rng, return_rng=True)
    bounds.check_same_bits("out", again, out)
    assert torch.equal(state, rng)
    expected = torch.autograd.grad(again.float().square().sum(), list(leaves.values()))
    for got, grad in zip(grads, expected, strict=True):
        bounds.check_same_bits("gradient", got, grad)
    drawn = flash_cute.rng_state(device)
    assert not torch.equal(call(**arguments, **same, rng=drawn), out)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_in_order(device, function):
    call, arguments = call_of(function), good_arguments(function, device)
    rng = flash_cute.rng_state(device)
    out, lse, probs = call(**arguments, **P, rng=rng, return_attn_probs=True)
    results = {
        ("return_rng",): (out, rng),
        ("return_lse", "return_rng"): (out, lse, rng),
        ("return_attn_probs", "return_rng"): (out, lse, probs, rng),
        ("return_lse", "return_attn_probs", "return_rng"): (out, lse, probs, rng),
    }
    for asked, expected in results.items():
        got = call(**arguments, **P, rng=rng, **dict.fromkeys(asked, True))
        assert isinstance(got, tuple) and len(got) == len(expected)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    out, none = call(**arguments, return_rng=True)
    assert none is None and torch.equal(out, call(**arguments))
    assert call(**arguments, rng=rng, return_rng=True)[1] is None


def test_the_default_generator_draws_without_rng_or_generator(device):
    arguments = good_arguments("func", device)
    torch.manual_seed(3)
    out = flash_cute.flash_attn_func(**arguments, **P)
    torch.manual_seed(3)
    state = flash_cute.rng_state(device)
    bounds.check_same_bits("out", flash_cute.flash_attn_func(**arguments, **P, rng=state), out)
    by_generator = flash_cute.flash_attn_func(**arguments, **P, generator=generator(device))
    state = flash_cute.rng_state(generator=generator(device))
    got = flash_cute.flash_attn_func(**arguments, **P, rng=state)
    bounds.check_same_bits("out", got, by_generator)


def test_where_a_state_is(device):
    where = torch.device(device).type
    assert flash_cute.rng_state().device.type == torch.get_default_device().type
    for state in (
        flash_cute.rng_state(device),
        flash_cute.rng_state(torch.device(device)),
        flash_cute.rng_state(generator=generator(device)),
        flash_cute.rng_state(device, generator(device)),
    ):
        assert state.device.type == where and state.dtype == torch.int64
    with torch.device(device):
        assert flash_cute.rng_state().device.type == where
    with pytest.raises(ValueError, match="generator is on"):
        flash_cute.rng_state("meta", generator(device))
    with pytest.raises(TypeError, match="generator is int"):
        flash_cute.rng_state(device, 7)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_replay_a_state(device, backend):
    arguments = leaves_of(good_arguments("func", device))

    def call(rng: torch.Tensor | None) -> Any:
        return flash_cute.flash_attn_func(**arguments, **P, rng=rng, return_rng=True)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    given = flash_cute.rng_state(device)
    out, state = compiled(given)
    assert torch.equal(state, given)
    bounds.check_same_bits("out", out, call(given)[0])
    (dq,) = torch.autograd.grad(out.float().sum(), arguments["q"])
    assert torch.isfinite(dq).all()
    out, drawn = compiled(None)
    bounds.check_same_bits("out", call(drawn)[0], out)
    assert not torch.equal(compiled(None)[1], drawn)


def test_a_generator_cannot_be_compiled_and_the_message_says_what_can(device):
    arguments = good_arguments("func", device)
    source = generator(device)

    def call() -> torch.Tensor:
        return flash_cute.flash_attn_func(**arguments, **P, generator=source)

    way_out = r"rng=flash_cute\.rng_state\(generator=generator\)"
    with pytest.raises(Exception, match=way_out):
        torch.compile(call, fullgraph=True, backend="eager")()
    with pytest.raises(Exception, match=way_out):
        torch.compile(flash_cute.rng_state, fullgraph=True, backend="eager")(None, source)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_states_are_refused(device, function):
    call, arguments = call_of(function), good_arguments(function, device)
    good = flash_cute.rng_state(device)
    bad: list[tuple[Any, type[Exception], str]] = [
        ([1, 2], TypeError, "rng is list"),
        (good.int(), TypeError, "rng has dtype torch.int32"),
        (good.double(), TypeError, "rng has dtype torch.float64"),
        (good[:1], ValueError, r"rng has shape \(1,\).*rng_state"),
        (good[None], ValueError, r"rng has shape \(1, 2\)"),
        (good.repeat_interleave(2)[::2], ValueError, r"rng has shape \(2,\), strides \(2,\)"),
        (good.to("meta"), ValueError, "rng is on meta"),
        (good.to_sparse(), NotImplementedError, "rng has layout"),
    ]
    for rng, error, said in bad:
        for p in (0.0, 0.3):
            with pytest.raises(error, match=said):
                call(**arguments, dropout_p=p, rng=rng)
    with pytest.raises(ValueError, match="rng and generator are given"):
        call(**arguments, **P, rng=good, generator=generator(device))
    with pytest.raises(TypeError, match="return_rng is str"):
        call(**arguments, return_rng="yes")


def test_ops_are_pure_and_say_where_a_state_comes_from(device):
    arguments = good_arguments("func", device)
    with pytest.raises((RuntimeError, ValueError), match=r"rng is None.*flash_cute\.rng_state\(\)"):
        torch.ops.flash_cute.fwd(**arguments, **P)
    wide = flash_cute.rng_state(device).repeat_interleave(2)[::2]
    with pytest.raises((RuntimeError, ValueError), match="rng"):
        torch.ops.flash_cute.fwd(**arguments, **P, rng=wide)


@pytest.mark.parametrize(
    "device", [torch.Generator(), torch.ones(1), 1.5], ids=["generator", "tensor", "float"]
)
def test_a_state_for_no_device(device):
    with pytest.raises(TypeError, match=r"device is .*generator="):
        flash_cute.rng_state(device)
