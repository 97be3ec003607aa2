"""Which calls with fp8 inputs the ops of e4m3 inputs compute, and what they are given."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_cute
from flash_cute.fp8 import descale_status, why_widened
from flash_cute.kernels import plan_log
from flash_cute.ops import has_fp8_attention
from flash_cute.ops.typed import OPS, FwdCall, VarlenFwdCall

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def inputs(device: str) -> list[Tensor]:
    return [torch.randn(2, n, h, 32).to(device).to(E4M3) for n, h in ((20, 4), (33, 2), (33, 2))]


def packed(device: str) -> tuple[list[Tensor], tuple[Any, ...]]:
    q, k, v = (x.flatten(0, 1) for x in inputs(device))
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (20, 33)]
    return [q, k, v], (*offsets, 20, 33)


def scales(*shape: int, device: str = "cpu") -> Tensor:
    return torch.rand(shape, device=device) + 0.5


def same(got: Any, expected: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("kind", ["none", "numbers", "one", "heads", "rows", "channels"])
def test_descales_of_dense_calls(device, kind):
    q, k, v = inputs(device)
    one, row_q, row_k = scales(1), scales(2, 20, 4, 1), scales(2, 33, 2, 1)
    heads, channels = scales(2, 2), scales(2, 2, 32)
    public, of_op, scale = {
        "none": ({}, (None, None, None), 1.0),
        "numbers": (
            {"q_descale": 0.5, "k_descale": 2, "v_descale": 0.25},
            (None, None, torch.full((2, 2), 0.25)),
            1.0,
        ),
        "one": ({"q_descale": one, "v_descale": one[0]},
                (one.expand(2, 2), None, one.expand(2, 2)), 1.0),
        "heads": ({"q_descale": heads, "k_descale": heads + 1, "v_descale": heads + 2},
                  (heads, heads + 1, heads + 2), 1.0),
        "rows": ({"q_descale": row_q, "k_descale": row_k}, (row_q[..., 0], row_k[..., 0], None),
                 1.0),
        "channels": ({"q_descale": 4.0, "v_descale": channels}, (None, None, channels), 4.0),
    }[kind]  # fmt: skip
    public = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in public.items()}
    of_op = [None if x is None else x.to(device) for x in of_op]
    options: dict[str, Any] = {"causal": True, "return_lse": True, "out_dtype": torch.float16}
    got = flash_cute.flash_attn_func(q, k, v, **options, **public)
    expected = OPS.fp8_fwd(
        q, k, v, *of_op, softmax_scale=scale * 32**-0.5, is_causal=True, dtype=torch.float16
    )
    assert same(got, expected)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("kind", ["none", "heads", "rows", "channels"])
def test_descales_of_packed_calls(device, kind):
    (q, k, v), sequences = packed(device)
    row_q, row_k = scales(40, 4, 1, device=device), scales(66, 2, 1, device=device)
    heads, channels = scales(2, 2, device=device), scales(2, 2, 32, device=device)
    public, of_op = {
        "none": ({}, (None, None, None)),
        "heads": ({"q_descale": heads, "k_descale": heads}, (heads, heads, None)),
        "rows": ({"q_descale": row_q, "k_descale": row_k}, (row_q.mT, row_k.mT, None)),
        "channels": ({"v_descale": channels}, (None, None, channels)),
    }[kind]
    of_op = [x.mT[..., 0][None] if kind == "rows" and x is not None else x for x in of_op]
    used = torch.tensor([20, 7], dtype=torch.int32, device=device)
    sink = torch.randn(4, device=device, dtype=BF16)
    got = flash_cute.flash_attn_varlen_func(
        q, k, v, *sequences, window_size=(9, 2), seqused_k=used, sink=sink, return_lse=True,
        **public,
    )  # fmt: skip
    expected = OPS.fp8_varlen_fwd(
        q, k, v, *sequences, None, used, None, *of_op, window_size_left=9, window_size_right=2,
        sink=sink.float(),
    )  # fmt: skip
    assert same(got, expected)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("with_table", [False, True])
def test_rows_of_pages_and_of_a_padded_batch(device, with_table):
    q = torch.randn(12, 4, 32, device=device).to(E4M3)
    k, v = (torch.randn(3, 16, 2, 32, device=device).to(E4M3) for _ in "kv")
    rows = scales(3, 16, 2, 1, device=device)
    offsets = torch.tensor([0, 5, 9, 12], dtype=torch.int32, device=device)
    used = torch.tensor([16, 3, 9], dtype=torch.int32, device=device)
    table = torch.tensor([[2], [0], [1]], dtype=torch.int32, device=device)
    table = table if with_table else None
    got = flash_cute.flash_attn_varlen_func(
        q, k, v, offsets, None, 5, 16, seqused_k=used, block_table=table, k_descale=rows,
        return_lse=True,
    )  # fmt: skip
    if with_table:
        sums = torch.tensor([0, 16, 19, 28], dtype=torch.int32, device=device)
        of_op = (sums, k, v, rows[..., 0])
    else:
        sums = torch.tensor([0, 16, 32, 48], dtype=torch.int32, device=device)
        of_op = (sums, k.flatten(0, 1), v.flatten(0, 1), rows[..., 0].flatten(0, 1)[None])
    expected = OPS.fp8_varlen_fwd(
        q, *of_op[1:3], offsets, of_op[0], 5, 16, None, used, table, None, of_op[3]
    )
    assert same(got, expected)


@pytest.mark.usefixtures("served")
def test_results_that_are_asked_for(device):
    q, k, v = inputs(device)
    out = flash_cute.flash_attn_func(q, k, v)
    assert isinstance(out, Tensor) and out.dtype == BF16
    state = torch.tensor([1, 2], device=device)
    found = flash_cute.flash_attn_func(q, k, v, return_lse=True, return_rng=True, rng=state)
    assert len(found) == 3 and torch.equal(found[0], out) and found[2] is None
    strided = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(flash_cute.flash_attn_func(q, strided, v), out)


WIDENED: dict[str, tuple[dict[str, Any], str]] = {
    "q of e5m2": ({"q": torch.zeros(2, 20, 4, 32).to(E5M2)}, "q has dtype torch.float8_e5m2"),
    "v of 16 bits": ({"v": torch.zeros(2, 33, 2, 32, dtype=BF16)}, "v has dtype torch.bfloat16"),
    "softcap": ({"softcap": 5.0}, "softcap is given"),
    "dropout": ({"dropout_p": 0.1}, "dropout_p is given"),
    "slopes": ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is given"),
    "probabilities": ({"return_softmax": True}, "return_attn_probs is given"),
    "maxima": ({"return_row_max": True}, "return_max_logits is given"),
    "a gradient": ({"sink": torch.zeros(4, requires_grad=True)}, "sink requires grad"),
}


@pytest.mark.parametrize("name", WIDENED)
def test_reasons_to_widen(name):
    change, reason = WIDENED[name]
    call = FwdCall(*inputs("cpu"))
    assert why_widened(call) == ()
    assert why_widened(call._replace(**change)) == (reason,)
    (q, k, v), sequences = packed("cpu")
    assert why_widened(VarlenFwdCall(q, k, v, *sequences)) == ()


def test_reasons_that_are_no_arguments_of_the_op():
    call = FwdCall(*inputs("cpu"))
    assert why_widened(call, BF16) == why_widened(call, torch.float16) == ()
    assert why_widened(call, torch.float32) == ("out_dtype is torch.float32",)
    sparse = flash_cute.Sparse.from_block_map(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    assert why_widened(call, None, sparse) == ("sparse is given",)
    assert len(why_widened(call._replace(softcap=1.0, q=call.q.to(E5M2)), torch.float32)) == 3


@pytest.mark.parametrize("options", [
    {"softcap": 5.0}, {"alibi_slopes": torch.ones(4)}, {"return_attn_probs": True},
    {"return_max_logits": True}, {"out_dtype": torch.float32},
])  # fmt: skip
def test_widened_calls_are_those_of_16_bits(device, options):
    q, k, v = inputs(device)
    options = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
    got = flash_cute.flash_attn_func(q, k, v, **options)
    options.pop("out_dtype", None)
    expected = flash_cute.flash_attn_func(*(x.to(BF16) for x in (q, k, v)), **options)
    if isinstance(got, Tensor):
        got, expected = (got,), (expected.to(got.dtype),)
    assert same(got, expected)


def test_gradients_of_sinks(device):
    """By the widened way, as before."""
    q, k, v = inputs(device)
    sink = torch.randn(4, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(flash_cute.flash_attn_func(q, k, v, sink=sink).sum(), sink)
    wide = [x.to(BF16) for x in (q, k, v)]
    (expected,) = torch.autograd.grad(flash_cute.flash_attn_func(*wide, sink=sink).sum(), sink)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("value", [0.0, -2.0, math.inf, math.nan])
@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_bad_descales_are_refused_on_the_cpu(name, value, widened):
    q, k, v = inputs("cpu")
    options: dict[str, Any] = {"out_dtype": torch.float32} if widened else {}
    words = f"{name} holds {re.escape(str(value))}; expected positive finite numbers"
    own = {"q_descale": (2, 20, 4, 1), "k_descale": (2, 33, 2, 1), "v_descale": (2, 2, 32)}
    for shape in ((1,), (2, 2), own[name]):
        x = torch.ones(shape)
        x.view(-1)[-1] = value
        with pytest.raises(ValueError, match=words):
            flash_cute.flash_attn_func(q, k, v, **options, **{name: x})
    (q, k, v), sequences = packed("cpu")
    shape = (len(q if name == "q_descale" else k), 4 if name == "q_descale" else 2, 1)
    x = torch.ones(2, 2, 32) if name == "v_descale" else torch.ones(shape)
    x.view(-1)[-1] = value
    with pytest.raises(ValueError, match=words):
        flash_cute.flash_attn_varlen_func(q, k, v, *sequences, **options, **{name: x})
    if name != "v_descale":  # of rows that are not used they may be anything
        used = torch.tensor([20, 19], dtype=torch.int32)
        out = flash_cute.flash_attn_varlen_func(
            q, k, v, *sequences, seqused_q=used, seqused_k=used, **options, **{name: x}
        )
        assert out.isfinite().all()


def test_status_of_descales(device):
    good, bad = torch.ones(2, 2, device=device), torch.ones(2, 3, 2, 1, device=device)
    assert descale_status().tolist() == descale_status(0.5, None, good).tolist() == [0, 0, 0]
    for value, expected in ((0.0, 1), (-1.0, 1), (math.inf, 2), (math.nan, 4), (-math.inf, 3)):
        x = bad.clone()
        x[1, 2, 0] = value
        found = descale_status(good, x, x[:, :, 0, 0])
        assert found.tolist() == [0, expected, expected] and found.device.type == device
        assert found.dtype == torch.int32
    x = bad.clone().to(BF16)
    x.view(-1)[:3] = torch.tensor([0.0, math.inf, math.nan])
    assert descale_status(v_descale=x).tolist() == [0, 0, 7]
    assert descale_status(torch.ones(0, 2, device=device)).tolist() == [0, 0, 0]


def test_status_of_descales_compiled(device):
    torch._dynamo.reset()
    compiled = torch.compile(descale_status, fullgraph=True, backend="aot_eager")
    x = torch.tensor([1.0, math.nan], device=device)
    assert compiled(x, x.abs()).tolist() == descale_status(x, x.abs()).tolist() == [4, 4, 0]


@pytest.mark.parametrize(("x", "kind", "words"), [
    (0, ValueError, "k_descale is 0"), ("1", TypeError, "k_descale is str"),
    (torch.ones(2).int(), TypeError, "k_descale has dtype torch.int32"),
    (torch.ones(2, device="meta"), ValueError, "k_descale is on meta, the first tensor on cpu"),
])  # fmt: skip
def test_status_of_what_is_no_descale(x, kind, words):
    with pytest.raises(kind, match=words):
        descale_status(torch.ones(1), x)


def test_the_log_says_which_op(caplog):
    q, k, v = inputs("cpu")
    with plan_log.switched(), caplog.at_level(logging.INFO, "flash_cute"):
        flash_cute.flash_attn_func(q, k, v)
        flash_cute.flash_attn_func(q, k, v, softcap=1.0)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("fp8_fwd float8_e4m3fn q (2, 20, 4, 32)")
    assert second.startswith("fwd bfloat16 q (2, 20, 4, 32)")


def test_head_dims_that_no_gpu_has():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(1, 8, 2, d, dtype=E4M3, device="cuda") for d in (320, 320, 512))
        words = ", ".join(why_widened(FwdCall(q, k, v)))
    assert "q's head dim is 320, above 256, v's head dim is 512, above 256" in words


def test_fakes_take_the_same_way(device):
    """Also of CUDA tensors where there is no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for kind in {device, "cuda"}:
            q, k, v = (torch.empty(2, 8, 2, 16, dtype=E4M3, device=kind) for _ in "qkv")
            out, lse = flash_cute.flash_attn_func(q, k, v, return_lse=True)
            assert (out.dtype, out.shape, lse.shape) == (BF16, q.shape, (2, 2, 8))
            reasons = why_widened(FwdCall(q, k, v))
            assert (reasons == ()) == has_fp8_attention(torch.device(kind))
