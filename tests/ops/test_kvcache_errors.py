"""Bad calls over a key/value cache: the type of the error, and what its message names."""

from __future__ import annotations

import pytest
import torch
from bad_arguments import BF16, INT32, Arguments, Change, on, to

import flash_cute
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.call.validate import ops as validate_ops


def good(device: str) -> Arguments:
    """A call with everything: pages, new keys, rotary embedding."""

    def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        "q": zeros(2, 3, 4, 16),
        "k_cache": zeros(9, 8, 2, 16),
        "v_cache": zeros(9, 8, 2, 16),
        "k": zeros(2, 3, 2, 16),
        "v": zeros(2, 3, 2, 16),
        "rotary_cos": zeros(64, 4),
        "rotary_sin": zeros(64, 4),
        "cache_seqlens": zeros(2, dtype=INT32),
        "block_table": torch.arange(8, dtype=INT32, device=device).view(2, 4),
    }


def test_heads_between_boundaries_are_refused_on_cuda(cuda):
    arguments = good(cuda)
    del arguments["rotary_cos"], arguments["rotary_sin"]
    for name in ("q", "k_cache", "v_cache"):
        x = arguments[name]
        wide = torch.zeros(*x.shape[:-2], x.shape[-2] * x.shape[-1] + 4, dtype=BF16, device=cuda)
        moved = wide[..., :-4].unflatten(-1, x.shape[-2:])
        with pytest.raises(ValueError, match=f"^{name} has strides"):
            flash_cute.flash_attn_with_kvcache(**(arguments | {name: moved}))


def test_vectors_are_looked_at_by_name(device):
    x = torch.zeros(2, 3, 4, 16, dtype=BF16, device=device)
    odd = torch.zeros(2, 3, 68, dtype=BF16, device=device)[..., :64].unflatten(-1, (4, 16))
    late = torch.zeros(2 * 3 * 4 * 16 + 4, dtype=BF16, device=device)[4:].view(2, 3, 4, 16)
    validate_kvcache.vectors(None, x, x)
    validate_kvcache.vectors(odd[:1, :1], x, x)  # the stride of a single row does not matter
    for name, bad in (("q", odd), ("k_cache", late), ("v_cache", odd)):
        given = {"q": x, "k_cache": x, "v_cache": x, name: bad}
        with pytest.raises(ValueError, match=f"^{name} has strides"):
            validate_kvcache.vectors(**given)


CASES: list[tuple[Change, type[Exception], str]] = [
    (to(q=None), TypeError, "q is NoneType"),
    (on("q", lambda x: x[0]), ValueError, r"q has shape \(3, 4, 16\); expected \(batch, seqlen_q"),
    (on("q", torch.Tensor.float), TypeError, "dtypes differ"),
    (on("k_cache", lambda x: x[..., :8]), ValueError, "16 of q, 8 of k_cache"),
    (on("k_cache", lambda x: x[0]), ValueError, "k_cache has shape .*num_blocks, page_size"),
    (on("v_cache", lambda x: x[:5]), ValueError, "k_cache and v_cache differ"),
    (on("v_cache", lambda x: x[:, :, :1]), ValueError, "k_cache and v_cache differ"),
    (on("k_cache", lambda x: x.mT.contiguous().mT),
     ValueError, "k_cache.s last dimension has stride 2"),
    (to(k=None), ValueError, "k or v is None; give both, or neither"),
    (on("k", lambda x: x[:, :2]), ValueError, r"v has shape \(2, 3, 2, 16\); expected \(2, 2, 2"),
    (on("k", lambda x: x[:, :, :1]), ValueError, r"k has shape \(2, 3, 1, 16\); expected"),
    (to(cache_seqlens=None), ValueError, "cache_seqlens is None; k and v need it"),
    (on("cache_seqlens", torch.Tensor.long), TypeError, "cache_seqlens has dtype torch.int64"),
    (on("cache_seqlens", lambda x: x[:1]), ValueError, "cache_seqlens has 1 entries; expected 2"),
    (to(cache_seqlens=True), TypeError, "cache_seqlens is bool"),
    (to(cache_seqlens=-1), ValueError, "cache_seqlens is -1"),
    (to(cache_seqlens=2**31), ValueError, "cache_seqlens is 2147483648"),
    (to(cache_seqlens=[1, 2]), TypeError, "cache_seqlens is list"),
    (lambda a: {"q": a["q"][0, 0, 0, 0], "cache_seqlens": 3}, ValueError, r"q has shape \(\)"),
    (on("block_table", torch.Tensor.long), TypeError, "block_table is torch.int64"),
    (on("block_table", lambda x: x[0]), ValueError, "block_table has shape"),
    (lambda a: {"cache_batch_idx": a["cache_seqlens"]}, ValueError, "batch_idx and block"),
    (lambda a: {"page_table": a["block_table"]}, ValueError, "names of one"),
    (lambda a: {"block_table": None, "k_cache": a["k_cache"][:1], "v_cache": a["v_cache"][:1]},
     ValueError, "the caches hold 1 sequences, q has 2"),
    (to(rotary_sin=None), ValueError, "rotary_cos or rotary_sin is None; give both, or neither"),
    (on("rotary_cos", torch.Tensor.float), TypeError, "rotary_cos is torch.float32; q is"),
    (on("rotary_sin", lambda x: x[:7]), ValueError, "rotary_sin has shape"),
    (on("rotary_cos", lambda x: x.repeat(1, 2)[:, ::2]), ValueError, "expected contiguous"),
    (on("block_table", lambda x: x.mT.contiguous().mT), ValueError, "rows contiguous"),
    (lambda a: {name: a[name].repeat(1, 3) for name in ("rotary_cos", "rotary_sin")}, ValueError,
     r"twice its width must be in \[2, 16\]"),
    (to(k=None, v=None), ValueError, "rotary_cos is given, but no k and v"),
    (lambda a: {"rotary_cos": None, "rotary_sin": None, "rotary_seqlens": a["cache_seqlens"]},
     ValueError, "rotary_seqlens is given, but no rotary_cos"),
    (lambda a: {"cu_seqlens_k_new": a["cache_seqlens"]}, ValueError, "cu_seqlens_k_new has 2 ent"),
    (lambda a: {"cu_seqlens_q": a["cache_seqlens"]}, ValueError, "max_seqlen_q is None"),
    (to(num_splits=-1), ValueError, "num_splits is -1"),
    (to(num_splits=1.5), TypeError, "num_splits is float"),
    (to(num_splits=2, split_size=64), ValueError, "give one of them"),
    (to(softcap=-1.0), ValueError, "softcap is -1"),
    (to(window_size=(1,)), ValueError, "window_size"),
    (to(alibi_slopes=torch.ones(3)), ValueError, "alibi_slopes"),
]  # fmt: skip

# How messages begin that the op has, too: its checks are in csrc on CUDA.
SAME_WORDS = (
    "16 of q", "k or v is None", "v has shape", "k has shape", "cache_seqlens is None",
    "the caches hold", "rotary_cos or rotary_sin is None", "rotary_cos is given",
    "rotary_seqlens is given", "give one of them", "batch_idx and block",
)  # fmt: skip


def test_the_call_is_good(device):
    flash_cute.flash_attn_with_kvcache(**good(device))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2][:40])
def test_bad_call(device, case):
    change, error, message = case
    arguments = good(device)
    before = arguments["k_cache"].clone()
    with pytest.raises(error, match=message):
        flash_cute.flash_attn_with_kvcache(**(arguments | change(arguments)))
    assert torch.equal(arguments["k_cache"], before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q is 4, but q has 3 rows a sequence"),
        ({"rotary_interleaved": "no"}, TypeError, "rotary_interleaved is str; expected a bool"),
        ({"cache_seqlens": 30}, ValueError, "is 30; with 3 new rows a cache of 32 rows"),
        ({"return_softmax_lse": "no"}, TypeError, "return_softmax_lse is str; expected a bool"),
        ({"check_indices": None}, TypeError, "check_indices is NoneType; expected a bool"),
        ({"max_seqlen_q": "3"}, TypeError, "max_seqlen_q is str"),
        ({"k_cache": None}, TypeError, "k_cache is NoneType"),
        ({"v_cache": [1]}, TypeError, "v_cache is list"),
        ({"k_cache": torch.zeros(9, 8, 2, 16)}, TypeError, "k_cache torch.float32, v_cache"),
        ({"split_size": 2**70}, ValueError, "split_size is"),
    ],
)
def test_bad_argument_of_the_function(device, change, error, message):
    with pytest.raises(error, match=message):
        flash_cute.flash_attn_with_kvcache(**(good(device) | change))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_append_refuses_expanded_caches(device, name):
    """Of sequences in an expanded cache; reading one is allowed."""
    arguments = good(device) | {"block_table": None}
    arguments[name] = arguments[name][:1].expand(2, -1, -1, -1)
    other = "v_cache" if name == "k_cache" else "k_cache"
    arguments[other] = arguments[other][:2].contiguous()
    with pytest.raises(ValueError, match=f"{name} has elements that share memory"):
        flash_cute.flash_attn_with_kvcache(**arguments)
    reads = dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin"))
    flash_cute.flash_attn_with_kvcache(**(arguments | reads))


def test_append_refuses_one_tensor_as_both_caches(device):
    arguments = good(device)
    arguments["v_cache"] = arguments["k_cache"]
    with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
        flash_cute.flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2][:40])
def test_bad_call_of_the_op(device, case):
    """The op refuses it too, partly in its own words."""
    change, _, message = case
    arguments = good(device)
    arguments |= change(arguments)
    if "window_size" in arguments or "page_table" in arguments:
        pytest.skip("an argument of the function alone")
    if "cu_seqlens_q" in arguments:
        arguments["max_seqlen_q"] = 3
    words = message if message.startswith(SAME_WORDS) else None
    with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
        torch.ops.flash_cute.fwd_kvcache(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3, 8), torch.ones(2, 4)), ValueError, "expected .parts, .., dim."),
        ((torch.ones(0, 3, 8), torch.ones(0, 3)), ValueError, "holds no part"),
        ((torch.ones(2, 3, 0), torch.ones(2, 3)), ValueError, "a head dim of 0"),
        ((torch.ones(2, 3, 8).half(), torch.ones(2, 3)), TypeError, "out_partial is torch.float16"),
        ((torch.ones(2, 3, 8), None), TypeError, "lse_partial is NoneType"),
        (
            (torch.ones(2, 3, 8), torch.ones(2, 3), None, torch.int32),
            TypeError,
            "dtype is torch.in",
        ),
        ((torch.ones(2, 3, 8), torch.ones(2, 3), torch.ones(3, 7)), ValueError, "out has shape"),
        ((torch.ones(2, 3, 8), torch.ones(2, 3), [1.0]), TypeError, "out is list"),
        (
            (torch.ones(2, 3, 8), torch.ones(2, 3), torch.ones(3, 8, device="meta")),
            ValueError,
            "out is on meta, the result on cpu",
        ),
    ],
)
def test_bad_combination(arguments, error, message):
    with pytest.raises(error, match=message):
        flash_cute.flash_attn_combine(*arguments)


@pytest.mark.parametrize("view", [lambda x: x[:], torch.Tensor.detach], ids=["slice", "detach"])
def test_caches_in_one_place_are_refused(device, view):
    arguments = good(device)
    arguments["v_cache"] = view(arguments["k_cache"])
    before = arguments["k_cache"].clone()
    with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
        flash_cute.flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"], before)


def append(cache: torch.Tensor, first: int, by_the_op: bool) -> None:
    """Appends one token to each of two sequences of a cache whose k and v are views of
    ``cache``."""
    k_cache, v_cache = cache[:3], cache[first : first + 3]
    q, new = torch.ones(2, 1, 4, 16), torch.ones(2, 1, 2, 16)
    call = flash_cute.flash_attn_with_kvcache
    if by_the_op:
        call = torch.ops.flash_cute.fwd_kvcache
    call(q, k_cache, v_cache, new, new, cache_seqlens=torch.tensor([3, 4], dtype=INT32))


@pytest.mark.parametrize("by_the_op", [False, True], ids=["function", "op"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_caches_that_share_rows_are_refused(first, by_the_op):
    cache = torch.zeros(6, 8, 2, 16)
    with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
        append(cache, first, by_the_op)
    assert not cache.any()
    append(cache, 3, by_the_op)
    assert cache.any()


@pytest.mark.parametrize("seed", range(40))
def test_overlap_is_exact_where_strides_agree(seed):
    """Beside the elements that two views have, whatever lies between them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [int(n) for n in torch.randint(1, 5, (3,), generator=generator)]
    memory = torch.arange(256, dtype=torch.float64).view(4, 4, 4, 4)

    def view() -> torch.Tensor:
        first = [int(torch.randint(0, 5 - n, (), generator=generator)) for n in sizes]
        parts = memory
        for dim, (start, n) in enumerate(zip(first, sizes, strict=True)):
            parts = parts.narrow(dim, start, n)
        width = int(torch.randint(1, 5, (), generator=generator))
        return parts[..., 4 - width :] if seed % 2 else parts[..., :width]

    for _ in range(25):
        x, y = view(), view()
        shared = bool(set(x.flatten().tolist()) & set(y.flatten().tolist()))
        assert validate_ops.overlap(x, y) is shared, (x.shape, y.shape, x.stride())
        assert validate_ops.overlap(y, x) is shared


def test_a_cache_with_the_negative_bit_is_refused(device):
    arguments = good(device)
    before = arguments["v_cache"].clone()
    arguments["k_cache"] = torch._neg_view(arguments["k_cache"])
    with pytest.raises(ValueError, match="k_cache is a view with the negative bit"):
        flash_cute.flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["v_cache"], before)


def test_indices_that_cannot_be_read(device):
    arguments = good(device) | {"check_indices": True}
    fixed = {x: y for x, y in arguments.items() if x != "q"}
    with pytest.raises(NotImplementedError, match="check_indices"):
        torch.vmap(lambda q: flash_cute.flash_attn_with_kvcache(q, **fixed))(arguments["q"][None])


BAD_STATUS = {
    "no_cache": ({"k_cache": None}, TypeError, "k_cache"),
    "a_list": ({"cache_seqlens": [1]}, TypeError, "cache_seqlens"),
    "a_float": ({"cache_seqlens": 3.5}, TypeError, "cache_seqlens"),
    "a_vector": ({"block_table": torch.ones(1, dtype=INT32)}, ValueError, "block_table"),
}


@pytest.mark.parametrize("name", BAD_STATUS)
def test_status_of_bad_arguments(name):
    changes, error, match = BAD_STATUS[name]
    arguments = {"k_cache": torch.ones(1, 2, 3, 4), "cache_seqlens": 1} | changes
    with pytest.raises(error, match=match):
        flash_cute.kvcache_status(**arguments)
