"""The ops of e4m3 inputs as torch sees them: schemas, opcheck, fakes, compile, vmap, flops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_calls import descales_of, on, values
from fp8_oracle import offsets
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flash_cute.ops.typed import OPS

SCALES = "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
SCORE = (
    "float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, Tensor? sink=None, bool two_level=True, ScalarType? dtype=None"
)
SEQUENCES = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? block_table=None, "
)
ARGUMENTS = {
    "fp8_fwd": f"Tensor q, Tensor k, Tensor v, {SCALES}{SCORE}",
    "fp8_varlen_fwd": f"Tensor q, Tensor k, Tensor v, {SEQUENCES}{SCALES}{SCORE}",
}
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CALLS = ["dense", "rows", "packed", "pages"]


pytestmark = pytest.mark.usefixtures("served")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_schemas_are_pinned(name):
    schema = str(getattr(torch.ops.flash_cute, name).default._schema)
    assert schema == f"flash_cute::{name}({ARGUMENTS[name]}) -> (Tensor out, Tensor softmax_lse)"


def call_of(kind: str, device: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    names = ("q_descale", "k_descale", "v_descale")
    options: dict[str, Any] = {"sink": torch.tensor([0.1, 0.2, 0.3, 0.4], device=device)}
    if kind in ("dense", "rows"):
        q, k, v = values(2, 20, 4, 32), values(2, 33, 2, 32), values(2, 33, 2, 24)
        descales = descales_of("all" if kind == "rows" else "head", q, k, v, 2)
        options |= dict(zip(names, on(device, *descales), strict=True))
        return torch.ops.flash_cute.fp8_fwd.default, tuple(on(device, q, k, v)), options
    pages = kind == "pages"
    q = values(20, 4, 32)
    k, v = (values(5, 16, 2, 32) if pages else values(33, 2, 32) for _ in "kv")
    options |= dict(zip(names, on(device, *descales_of("all", q, k, v, 2)), strict=True))
    table = torch.tensor([[0, 3], [2, 1]]).int().to(device) if pages else None
    options |= {"block_table": table, "dtype": torch.float16, "is_causal": True}
    args = on(device, q, k, v, offsets("cpu", 9, 11), offsets("cpu", 13, 20))
    return torch.ops.flash_cute.fp8_varlen_fwd.default, (*args, 11, 20), options


@pytest.mark.parametrize("kind", CALLS)
def test_opcheck(device, kind):
    """torch's check of the schema compares e4m3 with operators that it does not have for it: that
    nothing is written into arguments is looked at here."""
    op, args, options = call_of(kind, device)
    given = {i: x.view(torch.uint8).clone() for i, x in enumerate(args) if isinstance(x, Tensor)}
    torch.library.opcheck(op, args, options, test_utils=OPCHECKS)
    assert all(torch.equal(args[i].view(torch.uint8), x) for i, x in given.items())


@pytest.mark.parametrize("kind", CALLS)
def test_fakes_tell_shape_dtype_and_strides(device, kind):
    op, args, options = call_of(kind, device)
    real = op(*args, **options)
    with FakeTensorMode() as mode:
        args, options = torch.utils._pytree.tree_map_only(
            torch.Tensor, mode.from_tensor, (args, options)
        )
        fake = op(*args, **options)
    told = [[(x.shape, x.dtype, x.stride(), x.device.type) for x in xs] for xs in (real, fake)]
    assert told[0] == told[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, descale: OPS.fp8_fwd(q, k, v, q_descale=descale, is_causal=True),
        fullgraph=True, dynamic=dynamic, backend="aot_eager",
    )  # fmt: skip
    for seqlen in (20, 33):
        args = on(device, values(2, seqlen, 4, 16), values(2, seqlen, 2, 16),
                  values(2, seqlen, 2, 16), torch.rand(2, seqlen, 4) + 0.5)  # fmt: skip
        expected = OPS.fp8_fwd(*args[:3], q_descale=args[3], is_causal=True)
        assert all(map(torch.equal, compiled(*args), expected))


def test_flops():
    _, args, options = call_of("dense", "cpu")
    with FlopCounterMode(display=False) as counter:
        OPS.fp8_fwd(*args, **options)
    assert counter.get_total_flops() == 2 * 2 * 4 * 20 * 33 * (32 + 24)
    _, args, options = call_of("packed", "cpu")
    with FlopCounterMode(display=False) as counter:
        OPS.fp8_varlen_fwd(*args, **options)
    assert counter.get_total_flops() == 2 * 4 * (9 * 13 + 11 * 20) * (32 + 32)


def check_mapped(op: Any, args: list[Tensor], in_dims: tuple[Any, ...]) -> None:
    samples = next(x.shape[d] for x, d in zip(args, in_dims, strict=True) if d is not None)
    expected = [
        op(*(x if d is None else x.select(d, i) for x, d in zip(args, in_dims, strict=True)))
        for i in range(samples)
    ]
    got = torch.func.vmap(op, in_dims)(*args)
    for x, *ys in zip(got, *expected, strict=True):
        torch.testing.assert_close(x, torch.stack(ys))


@pytest.mark.parametrize("which", ["all", "q", "descale", "sink"])
def test_vmap_of_dense_calls(device, which):
    def op(q, k, v, descale, sink):
        return OPS.fp8_fwd(q, k, v, k_descale=descale, sink=sink)

    q, k, v = (values(3, 2, n, h, 16) for n, h in ((9, 4), (12, 2), (12, 2)))
    args = [q, k, v, torch.rand(3, 2, 12, 2) + 0.5, torch.randn(3, 4)]
    names = ("q", "k", "v", "descale", "sink")
    in_dims = tuple(0 if which in ("all", name) else None for name in names)
    args = [x if d == 0 else x[0] for x, d in zip(args, in_dims, strict=True)]
    check_mapped(op, on(device, *args), in_dims)


def test_vmap_of_packed_calls(device):
    cu_q, cu_k = on(device, offsets("cpu", 4, 5), offsets("cpu", 8, 4))

    def op(q, k, v):
        return OPS.fp8_varlen_fwd(q, k, v, cu_q, cu_k, 5, 8)

    args = on(device, values(3, 9, 4, 16), values(3, 12, 2, 16), values(12, 2, 16))
    check_mapped(op, args, (0, 0, None))


def test_meta():
    q, k, v = (x.to("meta") for x in (values(2, 9, 4, 16), values(2, 7, 2, 16), values(2, 7, 2, 8)))
    out, lse = OPS.fp8_fwd(q, k, v, dtype=torch.float16)
    assert (out.shape, out.dtype, lse.shape) == ((2, 9, 4, 8), torch.float16, (2, 4, 9))
