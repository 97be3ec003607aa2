"""fp32 on CUDA: TF32 and 3xTF32 against the fp64 oracle, and 3xTF32 against SDPA in full fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_cute
from flash_cute.testing import bounds
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs

TF32_UNIT = 2.0**-11
GROUPED: dict[str, Any] = {"heads": 4, "heads_k": 2, "seqlen_q": 130, "seqlen_k": 201}
RULES: dict[str, Any] = {"softcap": 5.0, "alibi": "batch", "sink": True, "dropout_p": 0.2}
DIMS = [(1, 1), (40, 40), (59, 59), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256)]
DIMS += [(192, 128), (64, 128), (128, 40)]
CASES: dict[str, Case | VarlenCase] = {
    **{f"dims_{d}_{dv}": Case(**GROUPED, dim=d, dim_v=dv, is_causal=d != 64) for d, dv in DIMS},
    **{f"rules_{d}": Case(**GROUPED, **RULES, dim=d, window=(90, 20)) for d in (64, 128, 256)},
    "full": Case(seqlen_q=300, seqlen_k=270),
    "window": Case(seqlen_q=300, seqlen_k=270, window=(30, 20), dim=128),
    "diagonal": Case(seqlen_q=129, seqlen_k=129, window=(0, 0), dim=256),
    "rows_without_keys": Case(seqlen_q=200, seqlen_k=70, is_causal=True),
    "one_query": Case(heads=4, heads_k=1, seqlen_q=1, seqlen_k=400, dim=128),
    "softcap": Case(seqlen_q=100, seqlen_k=100, softcap=50.0),
    "alibi": Case(seqlen_q=100, seqlen_k=140, alibi="heads", dim=96),
    "sink": Case(seqlen_q=200, seqlen_k=70, sink=True, is_causal=True),
    "dropout": Case(seqlen_q=100, seqlen_k=140, dropout_p=0.17, dim=128),
    "dropout_all": Case(seqlen_q=100, seqlen_k=140, dropout_p=1.0),
    "negative_scale": Case(seqlen_q=100, seqlen_k=140, softmax_scale=-0.1),
    "large_logits": Case(seqlen_q=100, seqlen_k=140, spread=8.0),
    **{
        layout: Case(seqlen_q=130, seqlen_k=130, dim=60, layout=layout)
        for layout in ("heads_first", "qkvpacked", "expanded_heads", "odd_rows", "offset")
    },
    "odd_dim_and_rows": Case(seqlen_q=130, seqlen_k=130, dim=59, layout="odd_rows"),
    "varlen": VarlenCase(heads=4, heads_k=2, lengths_q=(64, 0, 1, 133), lengths_k=(164, 3, 1, 97)),
    "varlen_values": VarlenCase(
        **RULES, heads=3, heads_k=1, dim=192, dim_v=128, lengths_q=(90, 33), lengths_k=(90, 150),
        used_q=(70, 33), used_k=(90, 100), rows_before=5, rows_after=3, is_causal=True,
    ),
    "varlen_narrow_values": VarlenCase(
        dim=64, dim_v=24, lengths_q=(90, 33), lengths_k=(90, 150), used_q=(70, 30), rows_after=9
    ),
}  # fmt: skip


def check_forward(inputs: Inputs, out: Tensor, softmax_lse: Tensor, allow_tf32: bool) -> float:
    """As `bounds.check_forward`, with TF32's rounding unit if allow_tf32."""
    oracle = bounds.forward_oracle(inputs)
    if not allow_tf32:
        return bounds.check_forward(out, softmax_lse, oracle)
    unit = TF32_UNIT * (4 + 4 * oracle.logit_size)
    bound = unit * oracle.out.abs() + 2 * unit * oracle.out_of_abs_v + 1e-38
    bounds.compare(
        "softmax_lse", softmax_lse, oracle.softmax_lse, torch.full_like(oracle.softmax_lse, unit)
    )
    return bounds.compare("out", out, oracle.out, bound)


@pytest.mark.parametrize("allow_tf32", [False, True], ids=["tf32x3", "tf32"])
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(cuda, monkeypatch, matmul_precision, name, allow_tf32):
    inputs = make_inputs(CASES[name], cuda)
    out, lse, row_max, softmax = inputs.forward(
        return_row_max=True, return_softmax=True, allow_tf32=allow_tf32
    )
    ratio = check_forward(inputs, out, lse, allow_tf32)
    if allow_tf32:  # the unfused chain computes in TF32, too
        monkeypatch.setitem(bounds.ROUNDING_UNIT, torch.float32, TF32_UNIT)
        matmul_precision("tf32")
    else:
        oracle = bounds.forward_oracle(inputs)
        bounds.check_lse("row_max", row_max, oracle.row_max)
        bounds.check_softmax(softmax, oracle)
    grads, repeated = (
        inputs.backward(out, lse, inputs.dlse, deterministic=deterministic, allow_tf32=allow_tf32)
        for deterministic in (True, False)
    )
    print(
        f"{name}: forward {ratio:.3f}, "
        f"backward {bounds.check_gradients(grads, inputs, out, with_dlse=True):.3f} of the bound"
    )
    for key, grad in grads.items():
        bounds.check_same_bits(f"d{key}", repeated[key], grad)


def sdpa(inputs: Inputs, dtype: torch.dtype, is_causal: bool) -> list[Tensor]:
    """out, dq, dk and dv of SDPA's math backend in `dtype`, in its own order of products."""
    q, k, v = (
        x.detach().to(dtype).transpose(1, 2).requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v)
    )
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.to(dtype).transpose(1, 2))
    return [x.detach().transpose(1, 2) for x in (out, *grads)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen", [128, 1024, 4096])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_error_of_3xtf32_is_about_that_of_fp32(cuda, dim, seqlen, is_causal):
    case = Case(batch=1, seqlen_q=seqlen, seqlen_k=seqlen, dim=dim, is_causal=is_causal)
    inputs = make_inputs(case, cuda)
    out, lse, _, _ = inputs.forward()
    got = [out, *inputs.backward(out, lse).values()]
    oracle, chain = (sdpa(inputs, dtype, is_causal) for dtype in (torch.float64, torch.float32))
    names = ("out", "dq", "dk", "dv")
    ratios = {}
    for name, a, b, exact in zip(names, got, chain, oracle, strict=True):
        ratios[name] = float((a - exact).abs().max() / (b - exact).abs().max())
    print(
        f"dim {dim}, seqlen {seqlen}, causal {is_causal}:",
        {n: round(r, 2) for n, r in ratios.items()},
    )
    assert max(ratios.values()) <= 4, ratios


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precision_of_matmuls_is_that_of_the_call(cuda, matmul_precision, precision, packed):
    """Forward and its backward follow torch's switch at the time of the forward call."""
    inputs = make_inputs(Case(seqlen_q=70, seqlen_k=70), cuda)
    allow_tf32 = precision == "tf32"
    out, lse, _, _ = inputs.forward(allow_tf32=allow_tf32)
    grads = inputs.backward(out, lse, allow_tf32=allow_tf32)
    other = inputs.forward(allow_tf32=not allow_tf32)[0]
    assert not out.equal(other)
    qkv = torch.stack((inputs.q, inputs.k, inputs.v), 2).requires_grad_()
    matmul_precision(precision)
    if packed:
        got = flash_cute.flash_attn_qkvpacked_func(qkv)
    else:
        got = flash_cute.flash_attn_func(*qkv.unbind(2))
    bounds.check_same_bits("out", got, out)
    with torch.no_grad():
        bounds.check_same_bits("out", flash_cute.flash_attn_func(*qkv.unbind(2)), out)
    matmul_precision("ieee")
    (dqkv,) = torch.autograd.grad(got, qkv, inputs.dout)
    for i, name in enumerate("qkv"):
        bounds.check_same_bits(f"d{name}", dqkv[:, :, i], grads[name])


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values(cuda, value, tensor, allow_tf32):
    """NaN and infinity show up where the oracle has them, though infinity has no low part."""
    inputs = make_inputs(Case(seqlen_q=130, seqlen_k=130, heads=3), cuda)
    getattr(inputs, tensor)[1, 77, 2, 5] = value
    check_forward(inputs, *inputs.forward(allow_tf32=allow_tf32)[:2], allow_tf32)


@pytest.mark.parametrize("allow_tf32", [False, True])
def test_masked_keys_never_matter(cuda, allow_tf32):
    """NaN in keys and values that no row sees changes no bit, forward or backward."""
    inputs = make_inputs(Case(seqlen_q=60, seqlen_k=200, window=(40, 0)), cuda)

    def results() -> list[Tensor]:
        out, lse, _, _ = inputs.forward(allow_tf32=allow_tf32)
        return [out, lse, *inputs.backward(out, lse, allow_tf32=allow_tf32).values()]

    before = results()
    for x in (inputs.k, inputs.v):
        x[:, :100] = float("nan")
    for i, (got, expected) in enumerate(zip(results(), before, strict=True)):
        bounds.check_same_bits(f"result {i}", got, expected)


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
def test_the_largest_numbers_of_hidden_keys_reach_nothing(cuda, value, allow_tf32):
    """They are finite, also after rounding: 0 times them is 0."""
    inputs = make_inputs(Case(seqlen_q=64, seqlen_k=64, is_causal=True), cuda)
    hidden = slice(40, None)
    args = {"is_causal": True, "allow_tf32": allow_tf32}

    def run(value: float) -> tuple[Tensor, Tensor]:
        k, v, dout = inputs.k.clone(), inputs.v.clone(), inputs.dout.clone()
        out, lse, _, _ = torch.ops.flash_cute.fwd(inputs.q, k, v, **args)
        v[:, hidden] = value
        shown = torch.ops.flash_cute.fwd(inputs.q, k, v, **args)[0]
        k[:, hidden], dout[:, hidden] = value, 0.0
        dq = torch.ops.flash_cute.bwd(dout, inputs.q, k, inputs.v, out, lse, **args)[0]
        return shown[:, : hidden.start], dq[:, : hidden.start]

    for name, got, expected in zip(("out", "dq"), run(value), run(0.0), strict=True):
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_a_nan_on_the_gpu_stays_nan_with_infinities(cuda):
    inputs = make_inputs(Case(seqlen_q=64, seqlen_k=64), cuda)
    made = torch.zeros(1, device=cuda) / torch.zeros(1, device=cuda)
    v = inputs.v.clone()
    v[:, 3, :, 5], v[:, 5, :, 5] = made, torch.inf
    for allow_tf32 in (False, True):
        out = torch.ops.flash_cute.fwd(inputs.q, inputs.k, v, allow_tf32=allow_tf32)[0]
        assert out[..., 5].isnan().all()
        assert out[..., :5].isfinite().all() and out[..., 6:].isfinite().all()
