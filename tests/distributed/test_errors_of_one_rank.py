"""What goes wrong on one rank alone, before it communicates, is the same error on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flash_cute.attention import create_context_parallel_attention, create_ring_attention
from flash_cute.distributed import (
    ContextParallel,
    Links,
    cp_attention,
    cp_decode,
    measure_links,
)
from flash_cute.testing import distributed as cases
from flash_cute.testing.ranks import Raised, Ranks


@pytest.fixture(scope="module")
def pair():
    """Two ranks that give up soon, should one wait for the other."""
    with Ranks(2, seconds=10.0, method="forkserver") as ranks:
        yield ranks


def is_wrong() -> bool:
    return dist.get_rank() == 1


def layer_with(kind: str, what: str) -> None:
    """The second rank's tokens, or their mask, have another dtype or device."""
    torch.manual_seed(0)
    if kind == "ring":
        layer: Any = create_ring_attention(16, 2)
    else:
        layer = create_context_parallel_attention(16, 2, 2)
    x, mask = torch.randn(2, 5, 16), None
    if what.startswith("mask"):
        mask = torch.ones(2, 5, dtype=torch.bool)
    if is_wrong():
        if what == "dtype":
            x = x.double()
        elif what == "integers":
            x = x.long()
        elif what == "device":
            x = x.to("meta")
        elif what == "no tensor":
            x = x.tolist()
        elif what == "mask's device":
            mask = torch.ones(2, 5, dtype=torch.bool, device="meta")
    layer(x, mask)


@pytest.mark.parametrize(
    ("what", "kind_of_error", "words"),
    [
        ("dtype", "TypeError", "hidden_states has dtype torch.float64"),
        ("integers", "TypeError", "hidden_states has dtype torch.int64"),
        ("device", "ValueError", "hidden_states is on meta"),
        ("no tensor", "TypeError", "hidden_states is list"),
        ("mask's device", "ValueError", "attention_mask is on meta"),
    ],
)
@pytest.mark.parametrize("kind", ["ring", "context_parallel"])
def test_tokens_of_a_layer(pair, kind, what, kind_of_error, words):
    check_same(pair, layer_with, (kind, what), kind_of_error, f"rank 1: {words}")


def planned(what: str) -> None:
    cp = cases.context("all_gather", "contiguous", 1, "cpu")
    offsets = torch.tensor([0, 3, 8])
    if what == "meta":
        cp.plan(cu_seqlens=offsets.to("meta") if is_wrong() else offsets)
    elif what == "no list":
        cp.plan(cu_seqlens=8 if is_wrong() else offsets)
    elif what == "sizes":
        cp.plan(8, sizes=object() if is_wrong() else [4, 4])
    else:
        cp.plan(object() if is_wrong() else 8)


def measured(what: str) -> None:
    wrong = {"megabytes": {"megabytes": -1}, "rounds": {"rounds": 0}, "text": {"rounds": "3"}}[what]
    measure_links(**({"megabytes": 1, "rounds": 1} | (wrong if is_wrong() else {})))


def made(what: str) -> None:
    """The second rank has no ContextParallel; the first one's plan hears of it."""
    wrong: dict[str, Any] = {
        "strategy": "rings", "layout": "striped", "head_groups": 0, "links": (1, 2, 3),
    }  # fmt: skip
    ContextParallel(**({what: wrong[what]} if is_wrong() else {"links": Links()})).plan(8)


def unsharded(what: str) -> None:
    cp = cases.context("all_gather", "contiguous", 1, "cpu")
    plan = cp.plan(8)
    x = torch.zeros(1, 4, 3)
    if is_wrong():
        x = {"device": x.to("meta"), "dtype": x.double(), "sparse": x.to_sparse()}[what]
    cp.unshard(x, plan)


def attended(what: str) -> None:
    cp = cases.context("ring", "contiguous", 1, "cpu")
    plan = cp.plan(8)
    q = torch.zeros(1, 4, 2, 8)
    slopes = torch.zeros(2)
    if is_wrong() and what == "device":
        q, slopes = q.to("meta"), slopes.to("meta")
    elif is_wrong() and what == "slopes":
        slopes = slopes.to("meta")
    elif is_wrong():
        q = q.to_sparse()
    cp_attention(q, q, q, plan, alibi_slopes=slopes)


def decoded(what: str) -> None:
    cp = cases.context("ring", "contiguous", 1, "cpu")
    q, caches = torch.zeros(1, 1, 2, 8), torch.zeros(2, 1, 16, 2, 8)
    length: Any = 1
    if is_wrong():
        q = q.to("meta") if what == "device" else q.double() if what == "dtype" else q
        length = object() if what == "length" else 1
    cp_decode(q, *caches, cp, cache_seqlens=length)


@pytest.mark.parametrize(
    ("function", "what", "kind", "words"),
    [
        (planned, "meta", "ValueError", "rank 1: cu_seqlens is on meta"),
        (planned, "no list", "TypeError", "rank 1: cu_seqlens is int"),
        (planned, "sizes", "TypeError", "rank 1: sizes is object"),
        (planned, "seqlen", "TypeError", "rank 1: seqlen is object"),
        (measured, "megabytes", "ValueError", "rank 1: megabytes is -1"),
        (measured, "rounds", "ValueError", "rounds 0"),
        (measured, "text", "TypeError", "rank 1: rounds is str"),
        (made, "strategy", "ValueError", "rank 1: strategy is 'rings'"),
        (made, "layout", "ValueError", "rank 1: layout is 'striped'"),
        (made, "head_groups", "ValueError", "rank 1: head_groups is 0"),
        (made, "links", "TypeError", "rank 1: links is tuple"),
        (unsharded, "device", "ValueError", "torch.float32 meta"),
        (unsharded, "dtype", "ValueError", "torch.float64 cpu"),
        (unsharded, "sparse", "", "rank 1: "),
        (attended, "device", "ValueError", "meta"),
        (attended, "slopes", "ValueError", "rank 1: alibi_slopes"),
        (attended, "sparse", "", "rank 1: "),
        (decoded, "device", "ValueError", "rank 1: "),
        (decoded, "dtype", "TypeError", "rank 1: "),
        (decoded, "length", "TypeError", "rank 1: cache_seqlens"),
    ],
)
def test_calls(pair, function, what, kind, words):
    check_same(pair, function, (what,), kind, words)


def compiled_layer(kind: str, what: str) -> None:
    """As :func:`layer_with`, and with what a graph does not take, after a call that is right."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    longest = 12 if is_wrong() and what == "length" else 20
    if kind == "ring":
        layer: Any = create_ring_attention(16, 2, longest)
    else:
        layer = create_context_parallel_attention(16, 2, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(2, 5, 16))
    x, options = torch.randn(2, 7, 16), dict[str, Any]()
    if is_wrong() and what == "dtype":
        x = x.double()
    elif is_wrong() and what == "rank":
        x = x[0]
    elif is_wrong() and what in ("mask", "key"):
        options = {"attention_mask": torch.ones(2, 7)} if what == "mask" else {"key": x}
    out = compiled(x.requires_grad_(), **options)
    out.sum().backward()


@pytest.mark.parametrize(
    ("what", "kind_of_error", "words"),
    [
        ("dtype", "TypeError", "hidden_states has dtype torch.float64"),
        ("rank", "ValueError", "hidden_states has shape (7, 16)"),
        ("mask", "NotImplementedError", "attention_mask is not supported in torch.compile"),
        ("key", "NotImplementedError", "key or value is given"),
        ("length", "ValueError", "hidden_states have 14 tokens"),
    ],
)
@pytest.mark.parametrize("kind", ["ring", "context_parallel"])
def test_tokens_of_a_compiled_layer(pair, kind, what, kind_of_error, words):
    if (kind, what) != ("context_parallel", "length"):  # which has no longest one
        check_same(pair, compiled_layer, (kind, what), kind_of_error, f"rank 1: {words}")


def compiled_call(strategy: str, what: str, is_later: bool) -> None:
    """The second rank's call is refused while its graph is made: the first one, or a later one."""
    torch._dynamo.reset()
    cp = cases.context(strategy, "contiguous", 1, "cpu")
    plan = cp.plan(8)

    def call(q: Any, k: Any, slopes: Any, options: dict[str, Any]) -> Any:
        out = cp_attention(q * 2, k, k, plan, alibi_slopes=slopes, **options)
        return out[0].sum() + out[1].sum() if isinstance(out, tuple) else out.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    q, k, slopes = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8), torch.zeros(2)
    if is_later:
        compiled(q, k, slopes, {})
        q, k = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8)
    options: dict[str, Any] = {"return_lse": what == "heads"}
    if is_wrong():
        q = torch.randn(len(q), 4, 3, 8) if what == "heads" else q
        q = torch.randn(len(q), 3, 2, 8) if what == "rows" else q
        k = k.double() if what == "dtype" else k
        slopes = torch.zeros(3) if what == "slopes" else slopes
        options |= {"softcap": -1.0} if what == "softcap" else {}
        options |= {"window_size": "none"} if what == "window" else {}
        options |= {"dropout_p": 0.1} if what == "dropout" else {}
    compiled(q.requires_grad_(), k, slopes, options).backward()


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_a_compiled_call(pair, strategy, is_later):
    for what, kind, words in (
        ("rows", "ValueError", "q has shape"),
        ("heads", "ValueError", "heads"),
        ("dtype", "TypeError", "float64"),
        ("slopes", "ValueError", "alibi_slopes"),
        ("softcap", "ValueError", "softcap"),
        ("window", "", "window_size"),
        ("dropout", "NotImplementedError", "dropout_p is"),
    ):
        check_same(pair, compiled_call, (strategy, what, is_later), kind, words)


def check_same(
    pair: Ranks, function: Callable[..., Any], args: tuple[Any, ...], kind: str, words: str
) -> None:
    """All ranks raise the same, of this kind if one is given, and go on afterwards."""
    first, second = pair.outcomes(function, *args)
    assert isinstance(first, Raised) and isinstance(second, Raised), (first, second)
    assert first.message == second.message and first.kind == second.kind, (first, second)
    assert words in first.message and kind in ("", first.kind), first
    assert pair.run(fine) == [0, 1]


def fine() -> int:
    cp = cases.context("ring", "contiguous", 1, "cpu")
    q = torch.zeros(1, 4, 2, 8)
    cp_attention(q, q, q, cp.plan(8))
    return dist.get_rank()


def wrong_alone() -> float:
    """Seconds until the second rank raises its error, if the first rank does not wait for it."""
    ContextParallel()
    start = time.perf_counter()
    if is_wrong():
        with pytest.raises(ValueError, match="strategy is 'rings'"):
            ContextParallel(strategy="rings")
    return time.perf_counter() - start


def test_an_error_is_raised_without_checks():
    with Ranks(2, seconds=3.0, method="forkserver") as ranks:
        first, second = ranks.run(wrong_alone)
    assert first < 1 and second < 12


def test_without_checks_no_rank_waits(pair):
    assert pair.run(unchecked) == [0, 1]


def unchecked() -> int:
    if is_wrong():
        with pytest.raises(ValueError, match="layout is 'striped'"):
            ContextParallel(layout="striped", check=False)
    else:
        ContextParallel(check=False)
    return dist.get_rank()
