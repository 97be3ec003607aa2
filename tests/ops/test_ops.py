"""The ops as torch sees them: schemas, fakes, autograd, opcheck, compile and export."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute.testing import bounds
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs

BF16 = torch.bfloat16
SCORE = (
    "float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
    "Tensor? sink=None, float dropout_p=0., Tensor? rng=None, "
)
SEQUENCES = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, bool zero_tensors=False, "
)
SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
RETURNS = ", bool return_softmax=False, bool return_row_max=False, bool allow_tf32=False"
LISTS = ", Tensor? tile_lists=None, Tensor? tile_bits=None"
ARGUMENTS = {
    "fwd": f"Tensor q, Tensor k, Tensor v, {SCORE}bool deterministic=False{RETURNS}{LISTS}",
    "bwd": f"{SAVED}Tensor? dlse=None, {SCORE}bool deterministic=False, bool allow_tf32=False"
    f"{LISTS}, Tensor? tile_ranks=None",
    "varlen_fwd": f"Tensor q, Tensor k, Tensor v, {SEQUENCES}Tensor? block_table=None, {SCORE}"
    f"bool deterministic=False{RETURNS}{LISTS}",
    "varlen_bwd": f"{SAVED}{SEQUENCES}Tensor? dlse=None, {SCORE}bool deterministic=False, "
    f"bool allow_tf32=False{LISTS}, Tensor? tile_ranks=None",
}
FWD_OUTPUTS = (
    "Tensor(a!) out, Tensor(b!)? softmax_lse=None, Tensor(c!)? row_max=None, "
    "Tensor(d!)? softmax=None"
)
BWD_OUTPUTS = (
    "Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor(d!)? dsink=None, "
    "Tensor(e!)? softmax_d=None"
)
FWD_RESULTS = "(Tensor out, Tensor softmax_lse, Tensor? row_max, Tensor? softmax)"
BWD_RESULTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor? dsink, Tensor softmax_d)"
FEATURES: dict[str, Any] = {
    "softcap": 3.0,
    "alibi": "batch",
    "sink": True,
    "dropout_p": 0.2,
    "dim_v": 24,
}
DENSE = {
    "plain": Case(seqlen_q=20, seqlen_k=33, dim=32, dtype=BF16),
    "grouped_causal": Case(
        heads=4, heads_k=2, seqlen_q=33, seqlen_k=20, is_causal=True, dtype=torch.float16
    ),
    "packed_window": Case(
        seqlen_q=20, seqlen_k=20, window=(5, 0), layout="qkvpacked", dim=40, dtype=BF16
    ),
    "heads_first": Case(seqlen_q=20, seqlen_k=33, layout="heads_first", dim=59, dtype=BF16),
    "features": Case(seqlen_q=20, seqlen_k=33, dim=32, **FEATURES, dtype=BF16),
}
VARLEN = {
    "plain": VarlenCase(lengths_q=(20, 0, 5), lengths_k=(9, 3, 12), dim=32, dtype=BF16),
    "grouped_causal": VarlenCase(heads=4, heads_k=1, is_causal=True, dtype=torch.float16),
    "used": VarlenCase(
        lengths_q=(9, 5), lengths_k=(9, 20), used_q=(4, 5), used_k=(9, 7), rows_after=3, dtype=BF16
    ),
    "packed": VarlenCase(lengths_q=(9, 5), lengths_k=(9, 5), layout="qkvpacked", dtype=BF16),
    "features": VarlenCase(lengths_q=(9, 5), lengths_k=(9, 20), dim=32, **FEATURES, dtype=BF16),
}
SAMPLES = [
    *(pytest.param(case, id=f"dense-{name}") for name, case in DENSE.items()),
    *(pytest.param(case, id=f"varlen-{name}") for name, case in VARLEN.items()),
]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_schemas_are_pinned(name):
    """Saved graphs rely on them: add arguments at the end, with a default, or not at all."""
    packet = getattr(torch.ops.flash_cute, name)
    outputs, results = (FWD_OUTPUTS, FWD_RESULTS) if "fwd" in name else (BWD_OUTPUTS, BWD_RESULTS)
    assert str(packet.default._schema) == f"flash_cute::{name}({ARGUMENTS[name]}) -> {results}"
    out_schema = f"flash_cute::{name}.out({ARGUMENTS[name]}, *, {outputs}) -> ()"
    assert str(packet.out._schema) == out_schema


KVCACHE = (
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k=None, Tensor? v=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? cache_seqlens=None, "
    "Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, Tensor? block_table=None, "
    "Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=0, Tensor? cu_seqlens_k_new=None, "
    "Tensor? rotary_seqlens=None, float? softmax_scale=None, bool is_causal=False, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., "
    "Tensor? alibi_slopes=None, Tensor? sink=None, bool rotary_interleaved=True, "
    "int num_splits=0, int split_size=0"
)
ATTEND_KVCACHE = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens=None, "
    "Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, Tensor? block_table=None, "
    "Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=0, float? softmax_scale=None, "
    "bool is_causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0., Tensor? alibi_slopes=None, Tensor? sink=None, int num_splits=0, "
    "int split_size=0"
)
INFERENCE = {
    "fwd_kvcache": KVCACHE,
    "attend_kvcache": ATTEND_KVCACHE,
    "attend_quantized_kvcache": ATTEND_KVCACHE.replace(
        "v_cache, ", "v_cache, Tensor? k_descale=None, Tensor? v_descale=None, "
    ),
    "combine": "Tensor out_partial, Tensor lse_partial, ScalarType? dtype=None",
}


@pytest.mark.parametrize("name", INFERENCE)
def test_schemas_of_inference_are_pinned(name):
    schema = str(getattr(torch.ops.flash_cute, name).default._schema)
    results = "(Tensor out, Tensor softmax_lse)"
    assert schema == f"flash_cute::{name}({INFERENCE[name]}) -> {results}"


def op_calls(inputs: Inputs) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """(op, args, kwargs) of forward, backward and their out overloads on `inputs`."""
    ops = torch.ops.flash_cute
    fwd, bwd = (ops.varlen_fwd, ops.varlen_bwd) if inputs.lengths else (ops.fwd, ops.bwd)
    options = inputs.lengths | inputs.options
    qkv = (inputs.q, inputs.k, inputs.v)
    with torch.no_grad():
        out, lse, _, _ = fwd(*qkv, **options)
    saved = (inputs.dout, *qkv, out, lse)
    outputs = {"out": torch.empty_like(out), "softmax_lse": torch.empty_like(lse)}
    grads = {f"d{x}": torch.empty_like(getattr(inputs, x)) for x in "qkv"}
    if inputs.options["sink"] is not None:
        grads["dsink"] = torch.empty_like(inputs.options["sink"], dtype=torch.float32)
    return {
        "fwd": (fwd.default, qkv, options),
        "bwd": (bwd.default, saved, options | {"dlse": inputs.dlse}),
        "fwd_out": (fwd.out, qkv, options | outputs),
        "bwd_out": (bwd.out, saved, options | grads),
    }


@pytest.mark.parametrize("op", ["fwd", "bwd", "fwd_out", "bwd_out"])
@pytest.mark.parametrize("case", SAMPLES)
def test_opcheck(make, case, op):
    """All of torch's own checks: schema, autograd registration, fakes, AOT with dynamic shapes."""
    inputs = make(case)
    function, args, kwargs = op_calls(inputs)[op]
    torch.library.opcheck(function, args, kwargs)
    if op == "fwd":
        leaves = tuple(x.detach().requires_grad_() for x in args)
        torch.library.opcheck(function, leaves, kwargs)


@pytest.mark.parametrize("case", SAMPLES)
@pytest.mark.parametrize("returns", [False, True])
def test_fakes_tell_shape_dtype_and_strides(make, case, returns):
    asked = {"return_row_max": returns, "return_softmax": returns}
    for op, (function, args, kwargs) in op_calls(make(case)).items():
        kwargs = kwargs | (asked if op == "fwd" else {})
        real = function(*args, **kwargs)
        with FakeTensorMode() as mode:
            fake_args, fake_kwargs = torch.utils._pytree.tree_map_only(
                torch.Tensor, mode.from_tensor, (args, kwargs)
            )
            fake = function(*fake_args, **fake_kwargs)
        assert [describe(x) for x in fake or ()] == [describe(x) for x in real or ()]


def describe(x: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.dtype, x.stride(), x.device.type)


@pytest.mark.parametrize("case", SAMPLES)
def test_gradients_flow_through_the_op(make, case):
    """opcheck is content with an op that has no autograd formula."""
    inputs = make(case)
    names = ["q", "k", "v"] + (["sink"] if case.sink else [])
    leaves = {x: getattr(inputs, x, None) for x in "qkv"} | {"sink": inputs.options["sink"]}
    leaves = {name: leaves[name].detach().requires_grad_() for name in names}
    function, _, kwargs = op_calls(inputs)["fwd"]
    out, lse, _, _ = function(**(kwargs | leaves))
    assert out.requires_grad and lse.requires_grad
    seen = torch.where(lse.isfinite(), lse, 0.0)
    loss = (out * inputs.dout).sum() + (seen * inputs.dlse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    grads = dict(zip(names, grads, strict=True))
    bounds.check_gradients(grads, inputs, out.detach(), with_dlse=True)


def test_statistics_have_no_gradient(make):
    inputs = make(Case(seqlen_q=20, seqlen_k=33, dropout_p=0.2, dtype=BF16))
    leaf = dataclasses.replace(inputs, q=inputs.q.requires_grad_())
    _, lse, row_max, softmax = leaf.forward(return_row_max=True, return_softmax=True)
    assert lse.requires_grad and not row_max.requires_grad and not softmax.requires_grad


def test_one_gradient_at_a_time(make):
    """Backward works if only one leaf needs a gradient, and if only one output has one."""
    inputs = make(Case(seqlen_q=20, seqlen_k=33, dtype=BF16))
    expected = inputs.backward(*inputs.forward()[:2])
    for name in "kv":
        leaf = getattr(inputs, name).detach().requires_grad_()
        out = dataclasses.replace(inputs, **{name: leaf}).forward()[0]
        bounds.check_same_bits(name, torch.autograd.grad(out, leaf, inputs.dout)[0], expected[name])
    leaf = inputs.q.detach().requires_grad_()
    lse = dataclasses.replace(inputs, q=leaf).forward()[1]
    assert torch.autograd.grad(lse.sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize("case", [DENSE["plain"], VARLEN["plain"]], ids=["dense", "varlen"])
def test_double_backward_raises(make, case):
    inputs = make(case)
    leaf = inputs.q.detach().requires_grad_()
    out = dataclasses.replace(inputs, q=leaf).forward()[0]
    (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="not differentiable again"):
        torch.autograd.grad(grad.sum(), leaf)


def test_paged_keys_have_no_gradient(make):
    inputs = make(VarlenCase(page_size=16))
    with pytest.raises(NotImplementedError, match="block_table"):
        dataclasses.replace(inputs, k=inputs.k.requires_grad_()).forward()


def dense_step(seqlen: int, device: str) -> tuple[Any, ...]:
    inputs = make_inputs(Case(seqlen_q=seqlen, seqlen_k=seqlen, dim=32, dtype=BF16), device)
    return inputs.q, inputs.k, inputs.v


def packed_step(seqlen: int, device: str) -> tuple[Any, ...]:
    return (torch.stack(dense_step(seqlen, device), 2),)


def varlen_step(seqlen: int, device: str) -> tuple[Any, ...]:
    lengths = (seqlen, 3, seqlen - 5)
    case = VarlenCase(lengths_q=lengths, lengths_k=lengths, dim=32, dtype=BF16)
    inputs = make_inputs(case, device)
    return inputs.q, inputs.k, inputs.v, *inputs.lengths.values()


def attend_varlen(q, k, v, cu_q, cu_k, max_q, max_k, used_q, used_k):
    return flash_cute.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)


def attend(q, k, v):
    return flash_cute.flash_attn_func(q, k, v, causal=True, window_size=(16, 0))


COMPILED: dict[str, tuple[Callable[..., Any], Callable[[int, str], tuple[Any, ...]]]] = {
    "dense": (attend, dense_step),
    "packed": (flash_cute.flash_attn_qkvpacked_func, packed_step),
    "varlen": (attend_varlen, varlen_step),
}


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_compile_with_dynamic_lengths(device, name, with_grad):
    """One full graph, at most compiled twice over ten lengths, forward and backward as in eager."""
    torch._dynamo.reset()
    function, step = COMPILED[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (19, 20, 33, 64, 65, 100, 128, 129, 200, 257):
        args = step(seqlen, device)
        leaves = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
        for leaf in leaves:
            leaf.requires_grad_(with_grad)
        results = []
        for call in (compiled, function):
            out = call(*args)
            grads = torch.autograd.grad(out.sum(), leaves) if with_grad else ()
            results.append((out, *grads))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
            if device == "cpu":
                bounds.check_same_bits("compiled", got, expected)
        bounds.check_same_bits("out", results[0][0], results[1][0])
    assert counter.frame_count <= 2


def test_compile_with_automatic_dynamic_lengths(device):
    """dynamic=None: one static graph, then one dynamic."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for seqlen in (17, 33, 64, 100, 129):
        args = dense_step(seqlen, device)
        bounds.check_same_bits("out", compiled(*args), attend(*args))
    assert counter.frame_count <= 2


def test_compile_with_scales_that_change(device):
    """A float that differs from call to call is a symbol of the graph."""
    torch._dynamo.reset()
    q, k, v = dense_step(33, device)
    call = partial(flash_cute.flash_attn_func, q, k, v)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for scale in (0.1, 0.2, 0.3):
        options = {"softmax_scale": scale, "softcap": 10 * scale}
        bounds.check_same_bits("out", compiled(**options), call(**options))


def test_compile_with_dropout(device):
    """The seed is drawn inside of the graph: two calls of one compiled function differ."""
    torch._dynamo.reset()
    q, k, v = dense_step(64, device)
    compiled = torch.compile(
        lambda q, k, v: flash_cute.flash_attn_func(q, k, v, dropout_p=0.5),
        fullgraph=True,
        backend="aot_eager",
    )
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


def test_inductor(device):
    torch._dynamo.reset()
    q, k, v = dense_step(64, device)
    compiled = torch.compile(lambda q, k, v: attend(q * 2, k, v).relu(), fullgraph=True)
    expected = attend(q * 2, k, v).relu()
    torch.testing.assert_close(compiled(q, k, v), expected, rtol=2e-2, atol=2e-3)
    if device == "cpu":
        bounds.check_same_bits("compiled", compiled(q, k, v), expected)


def longest_of_data(*args, packed: bool = False):
    """Attention whose max_seqlen are computed from the offsets' values, unknown when compiling."""
    q, k, v, cu_q, cu_k, *_ = args
    max_q, max_k = (int((cu[1:] - cu[:-1]).max().item()) for cu in (cu_q, cu_k))
    if packed:
        qkv = torch.stack((q, k, v), 1)
        return flash_cute.flash_attn_varlen_qkvpacked_func(qkv, cu_q, max_q)
    return flash_cute.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compile_with_longest_lengths_of_data(device, packed, with_grad):
    torch._dynamo.reset()
    function = partial(longest_of_data, packed=packed)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (33, 64, 129):
        args = varlen_step(seqlen, device)
        leaves = [x.requires_grad_(with_grad) for x in args[:3]]
        results = []
        for call in (compiled, function):
            out = call(*args)
            grads = torch.autograd.grad(out.sum(), leaves) if with_grad else ()
            results.append((out, *grads))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)
            if device == "cpu":
                bounds.check_same_bits("compiled", got, expected)
    assert counter.frame_count <= 2


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_compile_refuses_negative_lengths_of_data(device):
    torch._dynamo.reset()
    compiled = torch.compile(longest_of_data, fullgraph=True, backend="aot_eager")
    q, k, v, offsets, *_ = varlen_step(33, device)
    compiled(q, k, v, offsets, offsets)
    descending = torch.tensor([9, 6, 3, 0], dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match=">= 0"):
        compiled(q, k, v, descending, offsets)


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return flash_cute.flash_attn_func(q, k, v, causal=True)


def test_export_with_dynamic_seqlen(device):
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shapes = {name: {1: seqlen} for name in "qkv"}
    exported = torch.export.export(Attention(), dense_step(64, device), dynamic_shapes=shapes)
    for length in (2, 63, 257):
        args = dense_step(length, device)
        bounds.check_same_bits("out", exported.module()(*args), Attention()(*args))


def test_meta_tensors(device):
    """Meta tensors go through the functions; nothing is computed."""
    q, k, v = (x.to("meta") for x in dense_step(64, device))
    out = flash_cute.flash_attn_func(q, k, v)
    assert out.is_meta and out.shape == q.shape


def test_export_with_a_dynamic_number_of_sequences(device):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, cu_seqlens):
            return flash_cute.flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, 40, 40, softmax_scale=q.shape[-1] ** -0.5
            )

    def step(*offsets: int) -> tuple[torch.Tensor, ...]:
        qkv = torch.randn(3, offsets[-1], 2, 16, device=device, dtype=torch.bfloat16)
        return (*qkv, torch.tensor(offsets, device=device, dtype=torch.int32))

    rows, sequences = torch.export.Dim("rows", min=2), torch.export.Dim("sequences", min=2)
    shapes = ({0: rows},) * 3 + ({0: sequences},)
    exported = torch.export.export(
        Attention(), step(0, 20, 60), dynamic_shapes=shapes, strict=False
    )
    for args in (step(0, 20, 60), step(0, 20, 30, 70)):
        bounds.check_same_bits("out", exported.module()(*args), Attention()(*args))
