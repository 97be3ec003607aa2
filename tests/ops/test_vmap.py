"""torch.vmap over the ops: the results of one call a sample, from one call where that can be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from vmap_calls import (
    BATCH,
    DIM,
    DIM_V,
    HEADS,
    HEADS_K,
    ROWS_K,
    ROWS_Q,
    SAMPLES,
    check,
    dense,
    randn,
)

import flash_cute

OPS = torch.ops.flash_cute
BF16 = torch.bfloat16

MAPPED: dict[str, tuple[str, dict[str, int]]] = {
    "all": ("q k v", {"q": 0, "k": 0, "v": 0}),
    "elsewhere": ("q k v", {"q": 2, "k": 3, "v": 1}),
    "last": ("q k v", {"q": 4, "k": 4, "v": 4}),
    "q": ("q k v", {"q": 0}),
    "k": ("q k v", {"k": 1}),
    "shared": ("q k v alibi_slopes sink", {"q": 0, "v": 0}),
    "shared_batch": ("q k v alibi_batch", {"q": 0}),
    "slopes": ("q k v alibi_slopes", {"alibi_slopes": 0}),
    "slopes_last": ("q k v alibi_slopes", {"q": 0, "alibi_slopes": 1}),
    "slopes_batch": ("q k v alibi_batch", {"k": 0, "alibi_batch": 1}),
    "sink": ("q k v sink", {"sink": 0}),
    "everything": (
        "q k v alibi_batch sink",
        {"q": 0, "k": 1, "v": 2, "alibi_batch": 2, "sink": 1},
    ),
}
RETURNS = {"is_causal": True, "return_softmax": True, "return_row_max": True}


def renamed(mapped: dict[str, int]) -> dict[str, int]:
    return {"alibi_slopes" if n == "alibi_batch" else n: dim for n, dim in mapped.items()}


@pytest.mark.parametrize("name", MAPPED)
def test_forward(device, name):
    names, mapped = MAPPED[name]
    check(partial(OPS.fwd, **RETURNS), dense(device, mapped, names), renamed(mapped))


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", [*MAPPED, "dout"])
def test_backward(device, name, with_dlse):
    names, mapped = MAPPED.get(name, ("q k v sink", {}))
    arguments = dense(device, mapped, names)
    mapped = renamed(mapped)
    call = partial(OPS.fwd, is_causal=True)
    dims = ({n: mapped.get(n) for n in arguments},)
    if mapped:
        out, lse, _, _ = torch.vmap(lambda x: call(**x), dims, (0, 1, None, None))(arguments)
        mapped = mapped | {"out": 0, "softmax_lse": 1}
    else:
        out, lse, _, _ = call(**arguments)
    arguments |= {"out": out, "softmax_lse": lse, "dout": randn(device, *out.shape)}
    if name == "dout":
        arguments["dout"] = randn(device, *out.shape, samples=1)
    mapped = mapped | {"dout": mapped.get("out", 1)}
    if with_dlse:
        arguments["dlse"] = randn(device, *lse.shape)
        mapped |= {"dlse": 1} if "softmax_lse" in mapped else {}
    options = {"is_causal": True, "deterministic": True}
    check(partial(OPS.bwd, **options), arguments, mapped)


def sequences(device: str) -> dict[str, Any]:
    """Offsets that leave rows out on both sides, and lengths in use."""
    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    return {
        "cu_seqlens_q": int32([1, 4, 4, 8]),
        "cu_seqlens_k": int32([0, 5, 9, 12]),
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
        "seqused_k": int32([5, 2, 3]),
    }


def packed(device: str, mapped: dict[str, int], *options: str) -> dict[str, Any]:
    shapes = {
        "q": (ROWS_Q, HEADS, DIM),
        "k": (ROWS_K, HEADS_K, DIM),
        "v": (ROWS_K, HEADS_K, DIM_V),
        "alibi_slopes": (3, HEADS),
        "sink": (HEADS,),
    }
    names = ("q", "k", "v", *options)
    tensors = {n: randn(device, *shapes[n], samples=mapped.get(n)) for n in names}
    return tensors | sequences(device)


VARLEN: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "all": ((), {"q": 0, "k": 0, "v": 0}),
    "q": ((), {"q": 1}),
    "k_last": ((), {"k": 3}),
    "shared": (("alibi_slopes", "sink"), {"q": 0}),
    "mapped": (("alibi_slopes", "sink"), {"v": 2, "alibi_slopes": 1, "sink": 0}),
}


@pytest.mark.parametrize("name", VARLEN)
def test_varlen(device, name):
    options, mapped = VARLEN[name]
    arguments = packed(device, mapped, *options)
    check(partial(OPS.varlen_fwd, **RETURNS), arguments, mapped)
    dims = ({n: mapped.get(n) for n in arguments},)
    out, lse = torch.vmap(lambda x: OPS.varlen_fwd(**x)[:2], dims)(arguments)
    saved = {"out": out, "softmax_lse": lse, "dout": randn(device, *out.shape)}
    mapped = mapped | {"out": 0, "softmax_lse": 0, "dout": 0}
    check(partial(OPS.varlen_bwd, deterministic=True), arguments | saved, mapped)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_sequences_that_differ_take_a_call_each(device, name):
    arguments = packed(device, {"q": 0})
    earlier = [(arguments[name] - i).clamp(min=0) for i in range(SAMPLES)]
    arguments[name] = torch.stack(earlier, 1)
    mapped = {"q": 0, name: 1}
    check(partial(OPS.varlen_fwd, **RETURNS), arguments, mapped, calls=SAMPLES)


def test_pages_of_varlen_calls():
    int32 = partial(torch.tensor, dtype=torch.int32)
    arguments = packed("cpu", {"q": 0}) | {"seqused_k": int32([5, 2, 7])}
    arguments["k"] = randn("cpu", 6, 4, HEADS_K, DIM)
    arguments["v"] = randn("cpu", 6, 4, HEADS_K, DIM_V, samples=0)
    arguments["block_table"] = int32([[4, 1], [0, 9], [2, 5]])
    check(OPS.varlen_fwd, arguments, {"q": 0, "v": 0})


@pytest.mark.parametrize("mapped", [{"rng": 0}, {"q": 0}, {"q": 0, "k": 0, "v": 0, "rng": 1}])
def test_dropout_drops_what_single_calls_drop(device, mapped):
    """It depends on the place in batch and heads: there is a call a sample."""
    arguments = dense(device, mapped, "q k v")
    seeds = torch.randint(2**62, (2, SAMPLES), device=device)
    arguments["rng"] = seeds.movedim(1, mapped["rng"]) if "rng" in mapped else seeds[:, 0].clone()
    dropping = partial(OPS.fwd, dropout_p=0.4, return_softmax=True)
    check(dropping, arguments, mapped, calls=SAMPLES)
    check(partial(OPS.fwd, dropout_p=0.0), arguments, mapped)


def test_randomness_means_what_it_means_to_torch(device):
    x = randn(device, BATCH, ROWS_K, HEADS_K, DIM)
    same = torch.stack([x] * SAMPLES)
    attend = partial(flash_cute.flash_attn_func, k=x, v=x, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(attend)(same)
    for randomness, is_same in (("same", True), ("different", False)):
        out = torch.vmap(attend, randomness=randomness)(same)
        assert torch.equal(out[0], out[1]) == torch.equal(out[0], out[2]) == is_same


def cache(device: str, mapped: dict[str, int], **options: Any) -> dict[str, Any]:
    """A call over a cache of 5 sequences, or of 5 pages of 6 rows with a table."""
    shapes = {
        "q": (BATCH, 2, HEADS, DIM),
        "k_cache": (5, 6, HEADS_K, DIM),
        "v_cache": (5, 6, HEADS_K, DIM_V),
        "alibi_slopes": (BATCH, HEADS),
        "sink": (HEADS,),
    }
    names = ["q", "k_cache", "v_cache", *(n for n in mapped if n in ("alibi_slopes", "sink"))]
    arguments = {
        n: randn(device, *shapes[n], samples=mapped.get(n))
        if n in ("alibi_slopes", "sink")
        else randn(device, *shapes[n], samples=mapped.get(n), dtype=BF16)
        for n in names
    }
    int32 = partial(torch.tensor, dtype=torch.int32, device=device)
    return arguments | {n: int32(x) if isinstance(x, list) else x for n, x in options.items()}


OVER_CACHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "shared": ({"q": 0}, {}),
    "own": ({"q": 0, "k_cache": 0, "v_cache": 1}, {}),
    "own_rows": ({"k_cache": 0, "v_cache": 0}, {"cache_batch_idx": [4, 2]}),
    "row_outside": ({"k_cache": 0, "v_cache": 0}, {"cache_batch_idx": [5, -1]}),
    "rows": ({"q": 3, "cache_batch_idx": 1}, {"cache_batch_idx": [[4, 2, 0], [1, 4, 4]]}),
    "lengths": ({"cache_seqlens": 0}, {"cache_seqlens": [[6, 0], [3, 2], [1, 9]]}),
    "leftpad": (
        {"q": 0, "k_cache": 0, "v_cache": 0, "cache_leftpad": 1},
        {"cache_seqlens": [5, 6], "cache_leftpad": [[1, 2, 3], [0, 6, 2]]},
    ),
    "pages": ({"q": 0}, {"block_table": [[4, 1], [0, 3]], "cache_seqlens": [12, 7]}),
    "own_pages": (
        {"q": 0, "k_cache": 0, "v_cache": 0},
        {"block_table": [[4, 1], [0, 7]], "cache_seqlens": [12, 9]},
    ),
    "tables": (
        {"k_cache": 0, "v_cache": 0, "block_table": 0, "alibi_slopes": 0},
        {"block_table": [[[4, 1], [0, 2]], [[2, -1], [0, 3]], [[1, 0], [3, 3]]]},
    ),
}


@pytest.mark.parametrize("name", OVER_CACHES)
def test_attention_over_caches(device, name):
    mapped, options = OVER_CACHES[name]
    attend = partial(OPS.attend_kvcache, is_causal=True)
    check(attend, cache(device, mapped, **options), mapped)


def test_caches_of_as_many_sequences_need_no_indices(device):
    mapped = {"q": 0, "k_cache": 0, "v_cache": 0}
    arguments = cache(device, mapped)
    arguments |= {n: arguments[n][:, :BATCH] for n in ("k_cache", "v_cache")}
    check(OPS.attend_kvcache, arguments, mapped)


@pytest.mark.parametrize("name", ["sink", "v_cache", "cu_seqlens_q"])
def test_other_calls_over_caches_take_a_call_each(device, name):
    mapped = {"q": 0} if name == "cu_seqlens_q" else {name: 0}
    arguments = cache(device, mapped)
    if name == "cu_seqlens_q":
        arguments["q"] = arguments["q"].flatten(1, 2)
        arguments[name] = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
        arguments["max_seqlen_q"] = 3
    check(OPS.attend_kvcache, arguments, mapped, calls=SAMPLES)


@pytest.mark.parametrize("mapped", [{"out_partial": 0, "lse_partial": 1}, {"lse_partial": 0}])
@pytest.mark.parametrize("lead", [(7,), (2, 5)])
def test_combine(device, lead, mapped):
    shapes = {"out_partial": (4, *lead, DIM), "lse_partial": (4, *lead)}
    arguments = {n: randn(device, *s, samples=mapped.get(n)) for n, s in shapes.items()}
    check(partial(OPS.combine, dtype=BF16), arguments, mapped)


def test_ops_that_write_are_refused_and_write_nothing(device):
    q = randn(device, SAMPLES, 1, 2, HEADS, DIM, dtype=BF16)
    caches = [randn(device, SAMPLES, 1, 8, HEADS, DIM, dtype=BF16) for _ in "kv"]
    before = [x.clone() for x in caches]

    def append(q, k_cache, v_cache):
        return flash_cute.flash_attn_with_kvcache(q, k_cache, v_cache, q, q, cache_seqlens=2)

    with pytest.raises(NotImplementedError, match=r"fwd_kvcache.*k_cache, v_cache"):
        torch.vmap(append)(q, *caches)
    assert all(torch.equal(*pair) for pair in zip(before, caches, strict=True))
    out = torch.zeros_like(q)
    for overload, name in ((OPS.fwd.out, "out"), (OPS.varlen_fwd.out, "out")):
        options = {} if overload is OPS.fwd.out else sequences(device)
        call = partial(overload, **options)
        x = q if overload is OPS.fwd.out else q[:, 0]
        with pytest.raises(NotImplementedError, match=f"writes into {name}"):
            torch.vmap(lambda x, out, call=call: call(x, x, x, out=out))(x, out)
    assert not out.any()


NO_SAMPLES = {
    "dense": (lambda q, **_: flash_cute.flash_attn_func(q, q, q), "q"),
    "dropout": (lambda q, rng, **_: flash_cute.flash_attn_func(q, q, q, 0.5, rng=rng), "q"),
    "sinks": (lambda q, sink, **_: flash_cute.flash_attn_func(q, q, q, sink=sink), "sink"),
    "varlen": (
        lambda q, cu, **_: flash_cute.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 5, 5), "cu",
    ),
    "cache": (lambda q, sink, **_: flash_cute.flash_attn_with_kvcache(q, q, q, sink=sink), "sink"),
    "combine": (lambda q, lse, **_: flash_cute.flash_attn_combine(q, lse)[0], "q lse"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_SAMPLES)
def test_no_samples_give_no_results(device, name):
    """As many dimensions as one result has, and none of it; gradients too."""
    function, mapped = NO_SAMPLES[name]
    one = {
        "q": torch.randn(2, 5, 4, 8, device=device),
        "sink": torch.zeros(4, device=device),
        "lse": torch.zeros(2, 5, 4, device=device),
        "cu": torch.tensor([0, 5], dtype=torch.int32, device=device),
        "rng": flash_cute.rng_state(device),
    }
    if device == "cuda":
        one["q"] = one["q"] if name == "combine" else one["q"].bfloat16()
    expected = function(**one)
    none = one | {x: one[x].expand(0, *one[x].shape) for x in mapped.split()}
    dims = {x: 0 if x in mapped.split() else None for x in one}
    assert torch.vmap(lambda x: function(**x), (dims,))(none).shape == (0, *expected.shape)
    if name in ("dense", "dropout", "sinks"):
        grad = torch.func.grad(lambda x: function(**(one | x)).float().sum())
        part = {x: none[x] for x in mapped.split()}
        got = torch.vmap(grad)(part)
        assert all(got[x].shape == part[x].shape for x in part)
