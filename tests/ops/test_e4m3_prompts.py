"""Prompts, and chunks of them, of e4m3 queries over e4m3 caches: the op of e4m3 inputs reads them,
and what it does not take is attended to in 16 bits."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from e4m3_prompts import DIM, HEADS, HEADS_K, LAYOUTS, QUERIES, Prompts, of_mask, run
from fp8_calls import MASKS, scales
from fp8_oracle import E4M3, error, exact, rounded
from torch import Tensor

import flash_cute
from flash_cute import Sparse
from flash_cute.functional import quantized_kvcache
from flash_cute.kernels import plan_log

BF16 = torch.bfloat16
pytestmark = [
    pytest.mark.usefixtures("served"),
    pytest.mark.filterwarnings("ignore:flash_cute. no kernel reads a cache"),
]
KINDS = [
    ("none", "none", "none"), ("number", "number", "number"), ("one", "scalar", "one"),
    ("heads", "heads", "heads"), ("batch", "batch", "batch"), ("rows", "batch", "heads"),
    ("one", "tokens", "number"), ("batch", "tokens", "batch"), ("rows", "tokens", "none"),
    ("number", "tokens", "batch"), ("scalar", "number", "batch"), ("none", "batch", "one"),
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
def test_out_and_lse(device, mask, layout, packed):
    kinds = KINDS[(sorted(MASKS).index(mask) + 5 * LAYOUTS.index(layout)) % len(KINDS)]
    prompts = Prompts(layout, kinds, packed)
    out, lse, by_op = run(prompts.on(device, **of_mask(MASKS[mask])))
    assert by_op and lse.is_contiguous()
    prompts.check(out, lse, MASKS[mask])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_kinds_of_descales(device, kinds, packed):
    prompts = Prompts("pages of 16", kinds, packed)
    out, lse, by_op = run(prompts.on(device, causal=True))
    assert by_op
    prompts.check(out, lse, {"causal": True})


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_descales_of_few_queries(device, kinds):
    """Weights are not rounded to e4m3: the bound holds for them, too."""
    prompts = Prompts("pages of 16", kinds, True)
    few = {"q": prompts.q[:8], "cu_seqlens_q": torch.tensor([0, 8, 8, 8, 8]).int()}
    if kinds[0] == "rows":
        few["q_descale"] = prompts.descales[0][:8]
    out, lse, by_op = run(prompts.on(device, causal=True, max_seqlen_q=8, **few))
    assert not by_op and out.dtype == BF16
    q, k, v = prompts.of_sequence(0)
    expected = exact(q[:, :8], k, v, causal=True)
    torch.testing.assert_close(lse[None].cpu().double(), expected.lse, rtol=2e-2, atol=3e-2)
    assert error(out[None], expected.out) < 2e-2


def test_weights_are_rounded(device):
    """out is not that of 16-bit queries, whose weights are exact but for 16 bits."""
    prompts = Prompts(lengths=(300,))
    narrow, lse, by_op = run(prompts.on(device))
    wide, wide_lse, by_op_too = run(prompts.on(device, q=prompts.arguments["q"].to(BF16)))
    assert by_op and not by_op_too
    expected = exact(*prompts.of_sequence(0))
    assert error(wide, expected.out) < 5e-3 < error(narrow, expected.out) < 5e-2
    assert error(narrow, rounded(expected)) < 5e-3 or device == "cuda"
    torch.testing.assert_close(lse, wide_lse, rtol=1e-3, atol=1e-3)


def test_sinks_and_scales(device):
    prompts = Prompts("pages of 16", ("batch", "tokens", "batch"))
    sink = torch.randn(HEADS)
    out, lse, by_op = run(prompts.on(device, sink=sink.to(BF16), softmax_scale=-0.2, causal=True))
    assert by_op
    prompts.check(out, lse, {"causal": True}, sink=sink.to(BF16), scale=-0.2)


REASONS: dict[str, dict[str, Any]] = {
    "16 bits": {"q": lambda x: x["q"].to(BF16)},
    "int8": {
        **{n: torch.randint(-99, 99, (7, 310, HEADS_K, DIM)).to(torch.int8)
           for n in ("k_cache", "v_cache")},
        "k_descale": 0.05, "v_descale": 0.05,
    },
    "few queries": {"q": lambda x: x["q"][:, :32]},
    "softcap": {"softcap": 4.0},
    "alibi_slopes": {"alibi_slopes": torch.rand(HEADS)},
    "cache_leftpad": {"cache_leftpad": torch.tensor([3, 0, 2, 0]).int()},
    "num_splits": {"num_splits": 3},
    "split_size": {"split_size": 64},
    "descales of tokens of v": {"v_descale": lambda x: scales(*x["v_cache"].shape[:3])},
    "room": {name: torch.zeros(9, 16, HEADS_K, DIM).to(E4M3) for name in ("k_cache", "v_cache")},
}  # fmt: skip


def changed(prompts: Prompts, changes: dict[str, Any]) -> dict[str, Any]:
    given = prompts.arguments
    return {n: x(given) if callable(x) else x for n, x in changes.items()}


@pytest.mark.parametrize("name", REASONS)
def test_other_calls_are_those_of_16_bits(device, name):
    """To the bit."""
    prompts = Prompts("pages of 16" if name == "room" else "dense", ("one", "none", "none"))
    given = prompts.on(device, **changed(prompts, REASONS[name]))
    out, lse, by_op = run(given)
    expected, expected_lse, _ = run(given | {"q": given["q"].to(BF16)})
    assert not by_op and out.dtype == BF16
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_sparse_calls_are_those_of_16_bits(device):
    prompts = Prompts("dense", lengths=(256, 130))
    blocks = torch.tensor([0, 1]).int().expand(2, QUERIES, HEADS_K, 2).contiguous()
    sparse = Sparse.topk(blocks.to(device), 128, seqlen_k=310)
    given = prompts.on(device, sparse=sparse)
    out, _, by_op = run(given)
    expected, _, _ = run(given | {"q": given["q"].to(BF16)})
    assert not by_op and torch.equal(out, expected)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 1}])
def test_one_split_is_what_the_op_has(device, splits):
    prompts = Prompts()
    assert run(prompts.on(device, **splits))[2]


def new_rows(prompts: Prompts) -> dict[str, Tensor]:
    batch, caches = len(prompts.lengths), prompts.caches
    return {n: torch.randn(batch, 5, HEADS_K, x.shape[-1]).to(BF16)
            for n, x in zip("kv", caches, strict=True)}  # fmt: skip


@pytest.mark.parametrize("kind", ["batch", "tokens"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_keys_join_first(device, layout, kind):
    """As they do for 16-bit queries, in the caches and in their descales."""
    prompts = Prompts(layout, ("batch", kind, "batch"))
    new = new_rows(prompts)
    calls = [prompts.on(device, causal=True, **new) for _ in range(2)]
    calls[1] = {n: x.clone() if isinstance(x, Tensor) else x for n, x in calls[1].items()}
    calls[1]["q"] = calls[1]["q"].to(BF16)
    out, lse, by_op = run(calls[0])
    assert by_op and not run(calls[1])[2]
    for name in ("k_cache", "v_cache"):
        assert torch.equal(*(x[name].view(torch.int8) for x in calls))
    torch.testing.assert_close(*(x["k_descale"] for x in calls), rtol=0, atol=0, equal_nan=True)
    again = {n: x for n, x in calls[0].items() if n not in ("k", "v")}
    again["cache_seqlens"] = again["cache_seqlens"] + 5
    expected, expected_lse, _ = run(again)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_new_keys_that_are_not_finite(device, wrong):
    """A NaN for the rows that see it, whatever its token's descale."""
    prompts = Prompts("pages of 16", ("none", "tokens", "none"), lengths=(70, 20))
    new = new_rows(prompts)
    new["k"][0, 4, 1, 3] = wrong
    out, _, by_op = run(prompts.on(device, causal=True, **new))
    assert by_op and out[0, -1, 2:].isnan().all()
    assert out[0, :-1].isfinite().all() and out[1].isfinite().all()


def test_rotary_embedding_widens_queries(device):
    """A rotated query is no number of e4m3."""
    prompts = Prompts()
    angles = 6.3 * torch.rand(400, 8)
    rotary = {"rotary_cos": angles.cos().to(BF16), "rotary_sin": angles.sin().to(BF16)}
    given = prompts.on(device, causal=True, **new_rows(prompts), **rotary)
    other = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
    out, _, by_op = run(given)
    expected, _, _ = run(other | {"q": other["q"].to(BF16)})
    assert not by_op and torch.equal(out, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["dense", "pages of 16"])
@pytest.mark.parametrize("kinds", [("number",) * 3, ("batch", "tokens", "heads")], ids=str)
def test_compiled(device, kinds, layout, dynamic):
    prompts = Prompts(layout, kinds)
    given = prompts.on(device, causal=True, **new_rows(prompts))
    traced = {n: x.clone() if isinstance(x, Tensor) else x for n, x in given.items()}
    expected, expected_lse, _ = run(given)
    call = torch.compile(
        flash_cute.flash_attn_with_kvcache, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    out, lse = call(**traced)
    torch.compiler.reset()  # the function's other graphs are not this test's
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert torch.equal(*(x["k_cache"].view(torch.int8) for x in (given, traced)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_read_by_the_host(layout, packed):
    """The tensors have no values."""
    given = Prompts(layout, ("batch", "tokens", "heads"), packed).on("meta", causal=True)
    out, lse, by_op = run(given)
    assert by_op and out.dtype == BF16 and out.shape[:-1] == given["q"].shape[:-1]
    assert lse.device.type == "meta"


def test_graphs_replay_other_lengths(cuda):
    prompts = Prompts("pages of 16", ("batch", "tokens", "batch"))
    given = prompts.on(cuda, causal=True)
    run(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_cute.flash_attn_with_kvcache(**given)
    for lengths in ((40, 120, 40, 0), (300, 7, 1, 0)):
        given["cache_seqlens"].copy_(torch.tensor(lengths))
        graph.replay()
        expected, expected_lse, _ = run(given)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_vmap(device):
    prompts = Prompts(lengths=(300, 131))
    given = prompts.on(device)
    q, k, v = (torch.stack([given[n]] * 3) for n in ("q", "k_cache", "v_cache"))
    lengths = given["cache_seqlens"]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_cute.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)

    out, expected = torch.vmap(call)(q, k, v), run(given)[0]
    assert all(torch.equal(x, expected) for x in out)


def test_autocast_leaves_e4m3(device):
    prompts = Prompts()
    expected, _, _ = run(prompts.on(device, causal=True, **(new := new_rows(prompts))))
    wide = {n: x.float() for n, x in new.items()}
    with torch.autocast(device, torch.float16):
        out, _, by_op = run(prompts.on(device, causal=True, **wide))
    assert by_op and torch.equal(out, expected)


@pytest.mark.parametrize("sizes", [(0, 40, 310), (3, 40, 0), (0, 0, 310)])
def test_no_sequences_and_no_keys(device, sizes):
    batch, queries, rows = sizes
    q = torch.zeros(batch, queries, HEADS, DIM).to(device, E4M3)
    cache = torch.zeros(max(batch, 1), rows, HEADS_K, DIM).to(device, E4M3)
    out, lse, _ = run({"q": q, "k_cache": cache, "v_cache": cache, "return_softmax_lse": True})
    assert out.shape == q.shape and not out.any() and lse.isneginf().all()


def test_pages_that_do_not_exist_are_zeros(device):
    """As for 16-bit queries."""
    prompts = Prompts("pages of 16", lengths=(300, 131))
    table = prompts.table.clone()
    table[0, 2], table[1, 0] = -1, 10**6
    narrow, lse, by_op = run(prompts.on(device, block_table=table))
    wide, wide_lse, _ = run(prompts.on(device, block_table=table, q=prompts.q.to(BF16).view(
        2, QUERIES, HEADS, DIM)))  # fmt: skip
    assert by_op and error(narrow, wide.cpu().double()) < 5e-2
    torch.testing.assert_close(lse, wide_lse, rtol=1e-3, atol=1e-3)


def test_flops_and_the_log(device, caplog):
    from torch.utils.flop_counter import FlopCounterMode

    prompts = Prompts(lengths=(300, 131))
    counter = FlopCounterMode(display=False)
    with counter, plan_log.switched(), caplog.at_level(logging.INFO, "flash_cute"):
        flash_cute.flash_attn_with_kvcache(**prompts.on(device))
    dims = sum(x.shape[-1] for x in prompts.caches)
    assert counter.get_total_flops() == 2 * HEADS * QUERIES * (300 + 131) * dims
    if device == "cpu":
        assert caplog.text.count("fp8_fwd") == 1 and "decode" not in caplog.text


def test_a_copy_tells_its_reason(cuda, recwarn):
    for name, words in (
        ("softcap", "where softcap is given"),
        ("descales of tokens of v", "where v_descale is of tokens"),
        ("16 bits", "where q is torch.bfloat16"),
    ):
        quantized_kvcache._say.cache_clear()
        recwarn.clear()
        prompts = Prompts()
        run(prompts.on(cuda, **changed(prompts, REASONS[name])))
        assert any(words in str(x.message) for x in recwarn)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, torch.inf, torch.nan])
def test_bad_descales_are_refused_before_anything_is_written(name, wrong):
    prompts = Prompts(kinds=("batch", "batch", "batch"))
    given = prompts.on("cpu", **new_rows(prompts))
    given[name] = given[name].clone()
    given[name][1, 1] = wrong
    before = given["k_cache"].view(torch.int8).clone()
    with pytest.raises(ValueError, match=f"{name}.* positive and finite"):
        flash_cute.flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"].view(torch.int8), before)
