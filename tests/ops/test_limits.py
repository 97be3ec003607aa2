"""Limits of arguments: the last value that is taken, and the first that is refused by name."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from bad_arguments import BF16, INT32, Arguments, elsewhere, good_arguments, pages
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute.call import validate
from flash_cute.call.validate import kvcache as validate_kvcache
from flash_cute.call.validate.options import OF_FUNCTIONS
from flash_cute.ops.typed import FwdKvcacheCall

FP32 = torch.finfo(torch.float32)
MOST = 2.0**127
INT64 = 2**63 - 1
OPS = torch.ops.flash_cute


def after(x: float) -> float:
    """The next number of fp64, away from 0."""
    return math.nextafter(x, math.copysign(math.inf, x))


NUMBERS: list[tuple[str, list[Any], list[Any]]] = [
    ("dropout_p", [0, 0.0, 1, 1.0], [-5e-324, after(1.0)]),
    ("softmax_scale", [0, MOST, -MOST], [after(MOST), after(-MOST)]),
    ("softcap", [0, FP32.tiny, MOST], [math.nextafter(FP32.tiny, 0), after(MOST), -5e-324]),
]


@pytest.mark.parametrize(("name", "taken", "refused"), NUMBERS, ids=lambda x: str(x)[:13])
def test_numbers(device, name, taken, refused):
    arguments = {x: y.zero_() for x, y in good_arguments("func", device).items()}
    for value in taken:
        assert not flash_cute.flash_attn_func(**arguments, **{name: value}).any()
    for value in refused:
        with pytest.raises(ValueError, match=f"^{name} is {re.escape(str(value))}; expected"):
            flash_cute.flash_attn_func(**arguments, **{name: value})


def test_a_softcap_far_below_the_scale(device):
    """Their ratio is a number of fp32."""
    arguments = {x: y.zero_() for x, y in good_arguments("func", device).items()}
    scale = 2.0**100
    least = scale / FP32.max
    for sign in (1, -1):
        options = {"softmax_scale": sign * scale, "softcap": math.nextafter(least, 1)}
        assert not flash_cute.flash_attn_func(**arguments, **options).any()
        for call in (flash_cute.flash_attn_func, OPS.fwd):
            with pytest.raises((ValueError, RuntimeError), match=r"softmax_scale / softcap"):
                for softcap in (least * (1 - 2.0**-30), least / 2):
                    call(**arguments, softmax_scale=sign * scale, softcap=softcap)


@pytest.mark.parametrize("side", [0, 1])
def test_windows(device, side):
    arguments = good_arguments("func", device)
    name = ("window_size_left", "window_size_right")[side]
    unbounded = flash_cute.flash_attn_func(**arguments)
    for value in (-1, INT64):
        window = [-1, -1]
        window[side] = value
        assert torch.equal(flash_cute.flash_attn_func(**arguments, window_size=window), unbounded)
        OPS.fwd(**arguments, **{name: value})
    for value in (-2, INT64 + 1):
        window = [3, 3]
        window[side] = value
        shown = rf"\({window[0]}, {window[1]}\)"
        with pytest.raises(ValueError, match=rf"^window_size is {shown}; -1 means unbounded"):
            flash_cute.flash_attn_func(**arguments, window_size=window)
    with pytest.raises(ValueError, match=rf"^{name} is -2; -1 means unbounded"):
        OPS.fwd(**{x: y.cpu() for x, y in arguments.items()}, **{name: -2})


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_longest_lengths(device, name):
    arguments = good_arguments("varlen_func", device)
    expected = flash_cute.flash_attn_varlen_func(**arguments)
    longest = flash_cute.flash_attn_varlen_func(**(arguments | {name: 2**28}))
    assert torch.equal(longest, expected)
    assert not flash_cute.flash_attn_varlen_func(**(arguments | {name: 0})).any()
    validate.length(name, INT64)
    for value in (-1, INT64 + 1):
        with pytest.raises(ValueError, match=f"^{name} is {value}; expected the longest"):
            flash_cute.flash_attn_varlen_func(**(arguments | {name: value}))


def test_one_of_each_is_enough(device):
    """Batch, tokens, heads, head dims and pages of 1."""
    x = torch.ones(1, 1, 1, 1, dtype=BF16, device=device)
    assert flash_cute.flash_attn_func(x, x, x).item() == 1
    offsets, table = torch.tensor([0, 1], dtype=INT32), torch.zeros(1, 1, dtype=INT32)
    sequences = (offsets.to(device), offsets.to(device), 1, 1)
    assert flash_cute.flash_attn_varlen_func(x[0], x[0], x[0], *sequences).item() == 1
    paged = flash_cute.flash_attn_varlen_func(x[0], x, x, *sequences, block_table=table.to(device))
    assert paged.item() == 1
    none = offsets[:1].to(device)
    empty = flash_cute.flash_attn_varlen_func(x[0, :0], x[0, :0], x[0, :0], none, none, 0, 0)
    assert empty.shape == (0, 1, 1)


def cache(device: str, **changes: Any) -> Arguments:
    """3 caches of 8 rows for 2 sequences, to which 2 rows of k and v come."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(BF16)

    caches = {"k_cache": random(3, 8, 2, 16), "v_cache": random(3, 8, 2, 16)}
    new = {"k": random(2, 2, 2, 16), "v": random(2, 2, 2, 16), "cache_seqlens": 3}
    return {"q": random(2, 1, 4, 16), **caches, **new} | changes


def test_append_fills_the_cache(device):
    arguments = cache(device, cache_seqlens=6)
    flash_cute.flash_attn_with_kvcache(**arguments)
    assert torch.equal(arguments["k_cache"][:2, 6:], arguments["k"])
    with pytest.raises(ValueError, match=r"^cache_seqlens is 7; with 2 new rows a cache of 8 rows"):
        flash_cute.flash_attn_with_kvcache(**(arguments | {"cache_seqlens": 7}))
    reads = arguments | {"k": None, "v": None}
    flash_cute.flash_attn_with_kvcache(**(reads | {"cache_seqlens": 8}))
    with pytest.raises(ValueError, match=r"^cache_seqlens is 9; with 0 new rows a cache of 8 rows"):
        flash_cute.flash_attn_with_kvcache(**(reads | {"cache_seqlens": 9}))
    for length, word in ((2**31 - 1, "with 0 new rows"), (2**31, "a length that fits int32")):
        with pytest.raises(ValueError, match=f"^cache_seqlens is {length}; .*{word}"):
            flash_cute.flash_attn_with_kvcache(**(reads | {"cache_seqlens": length}))


def test_pages_make_a_cache_of_so_many_rows(device):
    table = torch.tensor([[2, 0], [1, 2]], dtype=INT32, device=device)
    arguments = cache(device, cache_seqlens=16, block_table=table, k=None, v=None)
    flash_cute.flash_attn_with_kvcache(**arguments)
    with pytest.raises(ValueError, match="a cache of 16 rows a sequence is too small"):
        flash_cute.flash_attn_with_kvcache(**(arguments | {"cache_seqlens": 17}))


@pytest.mark.parametrize("name", ["num_splits", "split_size"])
def test_splits(device, name):
    arguments = cache(device, k=None, v=None)
    expected = flash_cute.flash_attn_with_kvcache(**arguments)
    for value in (0, 1):
        got = flash_cute.flash_attn_with_kvcache(**arguments, **{name: value})
        torch.testing.assert_close(got, expected)
    splits = {"num_splits": 0, "split_size": 0} | {name: INT64}
    call = FwdKvcacheCall(*(arguments[x] for x in ("q", "k_cache", "v_cache")), **splits)
    assert validate_kvcache.check(call, OF_FUNCTIONS) == 2
    for value in (-1, INT64 + 1):
        with pytest.raises(ValueError, match=f"^{name} is {value}; expected a count"):
            flash_cute.flash_attn_with_kvcache(**arguments, **{name: value})
    with pytest.raises(TypeError, match=f"^{name} is bool; expected an int"):
        flash_cute.flash_attn_with_kvcache(**arguments, **{name: True})


@pytest.mark.parametrize("name", ["q", "v"])
def test_head_dims_on_cuda(monkeypatch, name):
    """256 are the last; of a cache too. No element is looked at."""
    monkeypatch.setattr(validate, "has_cuda_kernels", lambda: True)
    x, wide = (torch.ones(1, 1, 1, dim, dtype=BF16) for dim in (256, 257))
    validate.cuda(x, x)
    validate_kvcache.cuda(x, x, None)
    given = {"q": x, "v": x} | {name: wide}
    with pytest.raises(NotImplementedError, match=f"^{name}'s head dim 257 .* the largest is 256"):
        validate.cuda(**given)
    of_cache = {"q": "q", "v": "v_cache"}[name]
    with pytest.raises(NotImplementedError, match=f"^{of_cache}'s head dim 257 .* largest is 256"):
        validate_kvcache.cuda(given["q"], given["v"], None)


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32, torch.float64])
def test_dtypes_on_cuda(monkeypatch, dtype):
    monkeypatch.setattr(validate, "has_cuda_kernels", lambda: True)
    x, half = torch.ones(1, 1, 1, 8, dtype=dtype), torch.ones(1, 1, 1, 8, dtype=BF16)
    sink = torch.ones(1, dtype=dtype)
    if dtype == torch.float64:
        with pytest.raises(NotImplementedError, match=r"^dtype torch.float64 .*float32; cast q"):
            validate.cuda(x, x)
        for call in (validate.cuda, validate_kvcache.cuda):
            with pytest.raises(NotImplementedError, match=r"^sink has dtype torch.float64"):
                call(half, half, sink)
        return
    validate.cuda(x, x, sink)
    validate_kvcache.cuda(half, half, sink)
    if dtype == torch.float32:
        with pytest.raises(NotImplementedError, match=r"dtype torch.float32 .* key/value cache"):
            validate_kvcache.cuda(x, x, None)
    else:
        validate_kvcache.cuda(x, x, None)


LATER: list[tuple[str, str, str]] = [
    ("func", "v", "devices differ: q is on {q}, k on {q}, v on {other}"),
    ("varlen_func", "cu_seqlens_k", "cu_seqlens_k is on {other}, q on {q}; they must agree"),
    ("varlen_func", "seqused_q", "seqused_q is on {other}, q on {q}; they must agree"),
    ("varlen_func", "seqused_k", "seqused_k is on {other}, q on {q}; they must agree"),
]


@pytest.mark.parametrize(("function", "name", "message"), LATER, ids=lambda x: x[:12])
def test_every_tensor_on_another_device_is_refused(device, function, name, message):
    """The later ones too, and the message says where each is."""
    arguments = good_arguments(function, device)
    x = arguments.get(name, torch.ones(2, dtype=INT32, device=device))
    places = {"q": arguments["q"].device, "other": elsewhere(x).device}
    with pytest.raises(ValueError, match=message.format(**places)):
        getattr(flash_cute, f"flash_attn_{function}")(**(arguments | {name: elsewhere(x)}))


@pytest.mark.parametrize(
    "name", ["cache_seqlens", "cache_leftpad", "cache_batch_idx", "rotary_seqlens"]
)
def test_every_vector_of_a_cache_on_another_device_is_refused(device, name):
    tables = torch.ones(8, 4, dtype=BF16, device=device)
    lengths = torch.ones(2, dtype=INT32, device=device)
    arguments = cache(device, cache_seqlens=lengths, rotary_cos=tables, rotary_sin=tables)
    flash_cute.flash_attn_with_kvcache(**(arguments | {name: lengths * 0 + 1}))
    bad = {
        rf"{name} has 3 entries; expected 2, one a sequence": lengths.new_ones(3),
        rf"{name} has dtype torch.int64; expected torch.int32": lengths.long(),
        rf"{name} is on .*, q on .*; they must agree": elsewhere(lengths),
        rf"{name} has shape \(2, 1\); expected a contiguous vector": lengths[:, None],
    }
    for message, x in bad.items():
        with pytest.raises((TypeError, ValueError), match=message):
            flash_cute.flash_attn_with_kvcache(**(arguments | {name: x}))


def test_rotary_tables_of_any_width_up_to_the_head_dim(device):
    arguments = cache(device)
    for positions, width in ((8, 8), (8, 1), (1, 8)):
        table = torch.ones(positions, width, dtype=BF16, device=device)
        flash_cute.flash_attn_with_kvcache(**arguments, rotary_cos=table, rotary_sin=table)
    for positions, width in ((8, 9), (8, 0), (0, 8)):
        table = torch.ones(positions, width, dtype=BF16, device=device)
        message = rf"rotary_cos has shape \({positions}, {width}\); twice its width .* \[2, 16\]"
        with pytest.raises(ValueError, match=message):
            flash_cute.flash_attn_with_kvcache(**arguments, rotary_cos=table, rotary_sin=table)


def test_a_build_without_kernels_refuses_caches_on_cuda(monkeypatch):
    monkeypatch.setattr(validate, "has_cuda_kernels", lambda: False)
    x = torch.ones(1, 1, 1, 8, dtype=BF16)
    with pytest.raises(NotImplementedError, match="this build of flash_cute holds no CUDA kernels"):
        validate_kvcache.cuda(x, x, None)
    with FakeTensorMode():
        validate_kvcache.cuda(torch.ones(1, 1, 1, 8, dtype=BF16), x, None)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
def test_parts_of_any_rank_are_combined(device, lead):
    """A single vector too; the weight of each part is its share of exp(lse)."""
    parts, lses = torch.randn(3, *lead, 4, device=device), torch.randn(3, *lead, device=device)
    out, lse = flash_cute.flash_attn_combine(parts, lses)
    weights = lses.double().softmax(0)[..., None]
    torch.testing.assert_close(out.double(), (weights * parts).sum(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), lses.double().logsumexp(0), rtol=2e-6, atol=1e-6)
    for bad in (parts[0], parts[..., 0]):
        with pytest.raises(ValueError, match=r"expected \(parts, .., dim\) and \(parts, ..\)"):
            flash_cute.flash_attn_combine(bad, lses)


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("sink",), ("q", "v"), ("k", "sink")])
def test_gradients_over_pages_are_refused_by_all_of_their_names(device, names):
    arguments = good_arguments("varlen_func", device)
    arguments |= pages(arguments) | {"sink": torch.ones(4, device=device)}
    arguments |= {name: arguments[name].clone().requires_grad_() for name in names}
    listed = f"{' and '.join(names)} require{'s' if len(names) == 1 else ''} grad; "
    for call in (flash_cute.flash_attn_varlen_func, OPS.varlen_fwd):
        with pytest.raises(NotImplementedError, match=f"block_table is given and {listed}"):
            call(**arguments)
        with torch.no_grad():
            call(**arguments)


def test_slopes_that_want_a_gradient_are_named(device):
    slopes = torch.ones(4, device=device).requires_grad_()
    for call in (flash_cute.flash_attn_func, OPS.fwd):
        with pytest.raises(NotImplementedError, match="alibi_slopes requires grad, and has no"):
            call(**good_arguments("func", device), alibi_slopes=slopes)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_of_another_rank_is_named(device, name):
    dense, packed = (good_arguments(x, device) for x in ("func", "varlen_func"))
    for bad, dims in ((dense[name][0], 3), (dense[name][None], 5)):
        with pytest.raises(ValueError, match=f"^{name} has {dims} dimensions, shape .*; expected"):
            flash_cute.flash_attn_func(**(dense | {name: bad}))
    for bad in (packed[name][0], packed[name][None]):
        with pytest.raises(ValueError, match=rf"^{name} has shape .*; expected \(total_"):
            flash_cute.flash_attn_varlen_func(**(packed | {name: bad}))
    paged = packed | pages(packed)
    if name != "q":
        with pytest.raises(ValueError, match=rf"^{name} has shape .*; expected \(num_blocks, page"):
            flash_cute.flash_attn_varlen_func(**(paged | {name: packed[name]}))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_last_dimension_with_gaps_is_named_by_the_op(device, name):
    """The functions copy it. Of one column, or of none at all, there are no gaps."""
    arguments = good_arguments("func", device)
    gaps = arguments[name].mT.contiguous().mT
    words = f"{name}'s last dimension (has|must be contiguous; its) stride (is )?[42]"
    with pytest.raises((ValueError, RuntimeError), match=words):
        OPS.fwd(**(arguments | {name: gaps}))
    column = torch.ones(1, 8, 2, 4, device=device)[..., ::4]
    assert column.stride(-1) == 4 and (OPS.fwd(column, column, column)[0] == 1).all()


def test_head_dims_of_caches(device):
    """v may have one column; none of them is too few."""
    arguments = cache(device, k=None, v=None)
    narrow = arguments | {"v_cache": arguments["v_cache"][..., :1]}
    out = flash_cute.flash_attn_with_kvcache(**narrow)
    torch.testing.assert_close(out, flash_cute.flash_attn_with_kvcache(**arguments)[..., :1])
    message = "head dims are 16 of q, 16 of k_cache, 0 of v_cache; .* none may be 0"
    with pytest.raises(ValueError, match=message):
        flash_cute.flash_attn_with_kvcache(**(arguments | {"v_cache": narrow["v_cache"][..., :0]}))
    none = {x: arguments[x][..., :0] for x in ("q", "k_cache")}
    with pytest.raises(ValueError, match="head dims are 0 of q, 0 of k_cache, 16 of v_cache"):
        flash_cute.flash_attn_with_kvcache(**(arguments | none))
