"""Ops check for themselves too, whoever calls them; outputs that are given stay as they were."""

from __future__ import annotations

import gc
import math
from functools import partial

import pytest
import torch
from bad_arguments import BF16, INT32, Change, good_arguments, on, strided, to, vector

from flash_cute.native import library
from flash_cute.testing import memory
from flash_cute.testing.kernels import forward_families

NAN = math.nan
ROWS_FIRST = r"softmax_lse has shape \(2, 8, 4\).*expected \(2, 4, 8\)"


def rows_first(lse: torch.Tensor) -> torch.Tensor:
    """A statistic (batch, heads, rows) as (batch, rows, heads), of as many elements."""
    return lse.transpose(-1, -2).contiguous()


def same_place(out: torch.Tensor) -> torch.Tensor:
    """fp32 (batch, heads, rows) in the memory of bf16 (batch, rows, heads, dim)."""
    batch, rows, heads, _ = out.shape
    elements = out.flatten().view(torch.float32)
    return elements[: batch * heads * rows].view(batch, heads, rows)


OPS: dict[str, tuple[Change, str]] = {
    "k_of_another_batch": (on("k", lambda x: x[:1]), "batch sizes differ: q has 2, k 1"),
    "k_of_another_dim": (on("k", lambda x: x[..., :8].contiguous()), "q and k differ in head dim"),
    "v_of_another_seqlen": (on("v", lambda x: x[:, :5]), r"seqlen|\bv\b"),
    "k_dtype": (on("k", torch.Tensor.half), r"dtype|\bk\b"),
    "heads_not_a_multiple": (on("q", lambda x: x[:, :, :3]), r"q has 3 heads and k .*\(GQA\)"),
    "q_of_3_dims": (on("q", lambda x: x[0]), r"\bq\b"),
    "out_shape": (on("out", lambda x: x[:1]), "out"),
    "out_dtype": (on("out", lambda x: torch.full_like(x, NAN, dtype=torch.float32)), "out"),
    "lse_shape": (on("softmax_lse", lambda x: x[..., :5]), "softmax_lse"),
    "lse_dtype": (on("softmax_lse", lambda x: x.double()), "softmax_lse"),
    "lse_of_rows_first": (on("softmax_lse", rows_first), ROWS_FIRST),
    "out_expanded": (on("out", lambda x: x[:, :1].expand_as(x)), "out has elements that share"),
    "lse_is_out": (lambda a: {"softmax_lse": same_place(a["out"])}, "softmax_lse shares memory"),
    "out_is_q": (lambda a: {"out": a["q"]}, "out shares memory with q"),
    "dropout_without_rng": (to(dropout_p=0.3), "rng|dropout"),
    "rng_dtype": (vector("rng", 2, dtype=INT32), "rng"),
    "rng_shape": (vector("rng", 3, dtype=torch.int64), "rng"),
    "dropout_above_1": (to(dropout_p=1.5), "dropout_p is 1.5; expected a probability in"),
    "softcap_negative": (to(softcap=-1.0), "softcap is -1.*positive"),
    "softcap_subnormal": (to(softcap=1e-40), "softcap is 1e-40.*normal"),
    "softcap_nan": (to(softcap=NAN), "softcap is nan"),
    "softcap_large": (to(softcap=1e300), "softcap is 1e.?300"),
    "scale_nan": (to(softmax_scale=NAN), "softmax_scale is nan; expected None or a number"),
    "window_minus_2": (to(window_size_left=-2), "window_size_left is -2; -1 means unbounded"),
    "return_softmax": (to(return_softmax=True), "return_softmax: the out overload"),
    "return_row_max": (to(return_row_max=True), "return_row_max: the out overload"),
    "alibi_shape": (vector("alibi_slopes", 3), "alibi"),
    "alibi_dtype": (vector("alibi_slopes", 4, dtype=BF16), "alibi"),
    "alibi_strided": (strided("alibi_slopes", 4), "alibi"),
    "sink_shape": (vector("sink", 3), "sink"),
    "sink_dtype": (vector("sink", 4, dtype=INT32), "sink"),
    "sink_strided": (strided("sink", 4), "sink"),
    "bits_without_lists": (
        vector("tile_bits", 1, 128, 4, dtype=INT32), "tile_bits is given, and tile_lists is None"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_ops_write_nothing_when_they_raise(device, name):
    change, word = OPS[name]
    arguments = good_arguments("func", device)
    out = memory.GuardedTensor(arguments["q"].shape, BF16, device)
    lse = memory.GuardedTensor((2, 4, 8), torch.float32, device)
    arguments |= {"out": out.tensor, "softmax_lse": lse.tensor}
    changed = arguments | change(arguments)
    if "rng" in name:
        changed["dropout_p"] = 0.3
    with pytest.raises((RuntimeError, ValueError, TypeError), match=rf"\b(?:{word})"):
        torch.ops.flash_cute.fwd.out(**changed)
    assert out.tensor.isnan().all() and lse.tensor.isnan().all()
    out.check("out")
    lse.check("softmax_lse")
    torch.ops.flash_cute.fwd.out(**arguments)
    assert out.tensor.isfinite().all() and lse.tensor.isfinite().all()


def in_fp32(*names: str) -> Change:
    """Only some of the gradients in fp32, which is all three or none."""
    return lambda a: {x: torch.full_like(a[x], NAN, dtype=torch.float32) for x in names}


OPS_OF_BACKWARD: dict[str, tuple[Change, str]] = {
    "dout_shape": (on("dout", lambda x: x[:1]), "dout"),
    "dout_dtype": (on("dout", torch.Tensor.float), "dout"),
    "out_shape": (on("out", lambda x: x[:, :5]), "out"),
    "lse_shape": (on("softmax_lse", lambda x: x[..., :5]), "softmax_lse"),
    "lse_dtype": (on("softmax_lse", torch.Tensor.double), "softmax_lse"),
    "lse_of_rows_first": (on("softmax_lse", rows_first), ROWS_FIRST),
    "dlse_shape": (vector("dlse", 2, 4, 5), "dlse"),
    "dlse_dtype": (vector("dlse", 2, 4, 8, dtype=BF16), "dlse"),
    "dlse_of_rows_first": (vector("dlse", 2, 8, 4), ROWS_FIRST.replace("softmax_lse", "dlse")),
    "dlse_of_1_dim": (vector("dlse", 64), r"dlse has shape \(64,?\).*expected \(2, 4, 8\)"),
    "dropout_without_rng": (to(dropout_p=0.3), "rng"),
    "alibi_shape": (vector("alibi_slopes", 3), "alibi"),
    "sink_shape": (vector("sink", 3), "sink"),
    "dq_shape": (on("dq", lambda x: x[:1]), "dq"),
    "dk_dtype": (on("dk", lambda x: torch.full_like(x, NAN, dtype=torch.float32)), "dk"),
    "fp32_dq_and_dk": (in_fp32("dq", "dk"), "d[qkv]"),
    "fp32_dq_alone": (lambda a: in_fp32("dq")(a) | {"dk": None, "dv": None}, "d[qkv]"),
    "dv_shape": (on("dv", lambda x: x[..., :8]), "dv"),
    "dsink_shape": (on("dsink", lambda x: x[:3]), "dsink"),
    "dsink_dtype": (on("dsink", lambda x: torch.full_like(x, NAN, dtype=BF16)), "dsink"),
    "dk_expanded": (on("dk", lambda x: x[:, :, :1].expand_as(x)), "dk has elements that share"),
    "dv_is_dk": (lambda a: {"dv": a["dk"]}, "dv shares memory"),
    "dk_is_k": (lambda a: {"dk": a["k"]}, "dk shares memory with k"),
    "dq_is_dout": (lambda a: {"dq": a["dout"]}, "dq shares memory with dout"),
    "dsink_is_dq": (lambda a: {"dsink": same_place(a["dq"])[0, 0, :4]}, "dsink shares memory"),
    "dsink_without_sink": (to(sink=None), "dsink"),
    "sink_without_dsink": (to(dsink=None), "dsink"),
}


@pytest.mark.parametrize("name", OPS_OF_BACKWARD)
def test_backward_ops_write_nothing_when_they_raise(device, name):
    change, word = OPS_OF_BACKWARD[name]
    arguments = good_arguments("func", device) | {"sink": torch.ones(4, device=device)}
    out, lse, _, _ = torch.ops.flash_cute.fwd(**arguments)
    shapes = {f"d{x}": (arguments[x].shape, BF16) for x in "qkv"} | {"dsink": ((4,), torch.float32)}
    guarded = {x: memory.GuardedTensor(*kind, device) for x, kind in shapes.items()}
    arguments |= {"dout": torch.ones_like(out), "out": out, "softmax_lse": lse}
    arguments |= {x: guard.tensor for x, guard in guarded.items()}
    with pytest.raises((RuntimeError, ValueError, TypeError), match=rf"\b(?:{word})"):
        torch.ops.flash_cute.bwd.out(**(arguments | change(arguments)))
    for x, guard in guarded.items():
        assert guard.tensor.isnan().all(), x
        guard.check(x)
    torch.ops.flash_cute.bwd.out(**arguments)
    assert all(guard.tensor.isfinite().all() for guard in guarded.values())


@pytest.mark.parametrize("name", ["softmax_lse", "dlse", "dout"])
@pytest.mark.parametrize("function", ["func", "varlen_func"])
def test_backward_and_its_fake_refuse_what_does_not_fit_forward(device, function, name):
    varlen = "varlen_" if "varlen" in function else ""
    fwd, bwd = (getattr(torch.ops.flash_cute, varlen + x) for x in ("fwd", "bwd"))
    arguments = good_arguments(function, device)
    out, lse, _, _ = fwd(**arguments)
    arguments |= {"dout": torch.ones_like(out), "out": out, "softmax_lse": lse, "dlse": lse}
    arguments[name] = rows_first(arguments[name])
    fake = {x: y.to("meta") if isinstance(y, torch.Tensor) else y for x, y in arguments.items()}
    for given in (arguments, fake):
        with pytest.raises((RuntimeError, ValueError), match=rf"{name} has shape .*expected \("):
            bwd(**given)


def test_out_overload_refuses_gradients(device):
    arguments = good_arguments("func", device)
    arguments["q"].requires_grad_()
    arguments["out"] = torch.empty_like(arguments["q"])
    arguments["softmax_lse"] = torch.empty(2, 4, 8, device=device)
    with pytest.raises(RuntimeError, match="out"):
        torch.ops.flash_cute.fwd.out(**arguments)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_an_out_overload_writes_has_another_version(device, mode):
    """So that autograd notices when it has saved it. Inference tensors have no version."""
    arguments = good_arguments("func", device)
    outputs = {x: arguments["q"].clone() for x in ("out", "dq")}
    outputs |= {x: arguments[x].clone() for x in "kv"}
    lse = torch.empty(2, 4, 8, device=device)
    grads = {"dq": outputs["dq"], "dk": outputs["k"], "dv": outputs["v"]}
    before = [x._version for x in (lse, *outputs.values())]
    with mode():
        torch.ops.flash_cute.fwd.out(**arguments, out=outputs["out"], softmax_lse=lse)
        torch.ops.flash_cute.bwd.out(
            outputs["out"], *arguments.values(), outputs["out"], lse, **grads
        )
    assert [x._version for x in (lse, *outputs.values())] == [x + 1 for x in before]


def test_out_overloads_write_into_inference_tensors_anywhere(device):
    arguments = good_arguments("func", device)
    expected, expected_lse, _, _ = torch.ops.flash_cute.fwd(**arguments)
    with torch.inference_mode():
        inference = {name: x.clone() for name, x in arguments.items()}
    for given in (arguments, inference):
        with torch.inference_mode():
            out, lse = (torch.full_like(x, NAN) for x in (expected, expected_lse))
        torch.ops.flash_cute.fwd.out(**given, out=out, softmax_lse=lse)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("softcap", [-1.0, 1e-40])
def test_an_error_frees_what_the_op_was_given(cuda, softcap):
    q = torch.randn(1, 8, 2, 16, device=cuda, dtype=torch.float16)
    before = torch.cuda.memory_allocated()
    slopes, sink = torch.ones(2, device=cuda), torch.zeros(2, device=cuda)
    with pytest.raises(RuntimeError, match="softcap is"):
        torch.ops.flash_cute.fwd(q, q, q, softcap=softcap, alibi_slopes=slopes, sink=sink)
    del slopes, sink
    gc.collect()  # the error's frames
    assert torch.cuda.memory_allocated() == before


def test_more_tiles_than_a_grid_holds(cuda):
    """The rows outside of the one sequence that has any stay as they were too."""
    q, out = (torch.full((4, 2048, 32), x, device=cuda, dtype=BF16) for x in (1.0, NAN))
    lse = torch.full((2048, 4), NAN, device=cuda)
    crowd = torch.full((2**20 + 1,), 3, device=cuda, dtype=INT32)  # a tile for each of its heads
    crowd[0] = 1
    for family in forward_families(cuda):
        with library.only(family), pytest.raises(RuntimeError, match="invalid configuration"):
            torch.ops.flash_cute.varlen_fwd.out(
                q, q, q, crowd, crowd, 2**28, 2**28, out=out, softmax_lse=lse
            )
        assert out.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("op", ["fwd", "fwd_kvcache", "attend_kvcache"])
def test_ops_name_their_own_arguments(op):
    q = torch.ones(1, 8, 2, 16)
    call = partial(getattr(torch.ops.flash_cute, op), q, q, q)
    with pytest.raises(ValueError, match=r"^window_size_right is -7"):
        call(window_size_right=-7)
    with pytest.raises(ValueError, match=r"^window_size_left is -2"):
        call(window_size_left=-2, window_size_right=-7)
