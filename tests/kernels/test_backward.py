"""bwd against fp64: each row within twice the unfused chain's error; exact zeros; NaNs unread."""

from __future__ import annotations

import dataclasses
import math

import checks
import pytest
import torch

from flash_cute.testing import bounds, memory
from flash_cute.testing.cases import LAYOUTS, Case, make_inputs
from flash_cute.testing.verify import verify

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DIMS = (1, 7, 8, 40, 59, 64, 72, 80, 96, 104, 111, 128)
EDGES = (1, 63, 64, 65, 127, 128, 129, 257)
NAN = math.nan
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(make, dim, dtype):
    checks.backward(
        make(Case(seqlen_q=65, seqlen_k=130, dim=dim, dtype=dtype, is_causal=dim % 2 == 0))
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen_q", EDGES)
def test_lengths_at_tile_edges(make, seqlen_q, is_causal):
    for seed, seqlen_k in enumerate(EDGES):
        case = Case(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, dtype=BF16)
        checks.backward(make(case, seed))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 70), (40, 150), (150, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("left", range(6))
def test_windows(make, left, is_causal, seqlen_q, seqlen_k):
    """Every pair of edge values of the left and right window size, as in test_forward."""
    sides = (-1, 0, 1, seqlen_k - 1, seqlen_k, 2**31 - 1)
    for right in sides:
        sizes = {"batch": 1, "heads": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "dim": 32}
        checks.backward(
            make(Case(**sizes, is_causal=is_causal, window=(sides[left], right), dtype=BF16))
        )


@pytest.mark.parametrize(("heads", "heads_k"), [(4, 2), (4, 1), (6, 3), (16, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_heads(make, heads, heads_k, dtype):
    checks.backward(
        make(Case(heads=heads, heads_k=heads_k, seqlen_q=100, seqlen_k=130, dtype=dtype))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [59, 64])
def test_layouts(make, dim, layout):
    """q, k, v and dout in every layout; NaNs in the gaps between values are not read."""
    batch = 1 if layout == "wild_unit_strides" else 2
    sizes = {"batch": batch, "seqlen_q": 130, "seqlen_k": 130, "dim": dim, "dtype": BF16}
    grads = checks.backward(make(Case(**sizes, layout=layout, is_causal=True)))
    assert all(grad.is_contiguous() for grad in grads.values())


FEATURES = {
    "softcap": {"softcap": 3.0},
    "large_softcap": {"softcap": 1e4},
    "alibi_heads": {"alibi": "heads"},
    "alibi_batch": {"alibi": "batch"},
    "sink": {"sink": True},
    "dropout": {"dropout_p": 0.17},
    "dropout_all": {"dropout_p": 1.0},
    "value_dim": {"dim_v": 24},
    "dim_256": {"dim": 256},
    "everything": {"softcap": 5.0, "alibi": "heads", "sink": True, "dropout_p": 0.3, "dim_v": 80},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("window", [(-1, -1), (20, 10)], ids=["full", "window"])
def test_features(make, window, feature, dtype):
    sizes = {"heads": 4, "heads_k": 2, "seqlen_q": 70, "seqlen_k": 90}
    checks.backward(make(Case(**sizes, dtype=dtype, window=window, **FEATURES[feature])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradient_of_lse(make, is_causal, dtype):
    inputs = make(Case(seqlen_q=130, seqlen_k=70, is_causal=is_causal, dtype=dtype))
    checks.backward(inputs, with_dlse=True)


@pytest.mark.parametrize("sink_dtype", DTYPES, ids=str)
def test_gradient_of_lse_with_sink(make, sink_dtype):
    sink = {"sink": True, "sink_dtype": sink_dtype}
    grads = checks.backward(
        make(Case(seqlen_q=130, seqlen_k=70, is_causal=True, dtype=BF16, **sink)), with_dlse=True
    )
    assert grads["sink"].dtype == torch.float32


def test_lse_gradient_at_rows_that_see_no_key(make):
    """Their lse is a constant, so even a NaN gradient of it reaches nothing."""
    inputs = make(Case(seqlen_q=70, seqlen_k=30, is_causal=True, dtype=BF16))
    before = checks.gradients(inputs, with_dlse=True)
    inputs.dlse[..., :40] = NAN
    inputs.dout[:, :40] = NAN
    checks.same_gradients(checks.gradients(inputs, with_dlse=True), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_have_zero_gradients(make, dtype):
    grads = checks.backward(make(Case(seqlen_q=256, seqlen_k=3, is_causal=True, dtype=dtype)))
    assert not grads["q"][:, :253].any()


def test_unseen_keys_have_zero_gradients(make):
    grads = checks.backward(make(Case(seqlen_q=60, seqlen_k=200, window=(40, 0), dtype=BF16)))
    assert not grads["k"][:, :100].any() and not grads["v"][:, :100].any()


def test_masked_keys_never_matter(make):
    inputs = make(Case(seqlen_q=60, seqlen_k=200, window=(40, 0), dtype=BF16))
    before = checks.gradients(inputs)
    for x in (inputs.k, inputs.v):
        x[:, :100] = NAN
    after = checks.gradients(inputs)
    if after["q"].is_cuda:
        zeroed = {"k": inputs.k.nan_to_num(), "v": inputs.v.nan_to_num()}
        out = inputs.forward()[0]
        bounds.check_gradients(after, dataclasses.replace(inputs, **zeroed), out)
        before.pop("q")
    checks.same_gradients(after, before)


@pytest.mark.parametrize("seqlen_k", [64, 192])
@pytest.mark.parametrize("seqlen_q", [1, 64, 192])
@pytest.mark.parametrize("logit", [-120.0, 120.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_far_from_zero(make, logit, seqlen_q, seqlen_k, dtype):
    """All logits near -120: exp(-lse) overflows fp32, and the padding of a tile would too."""
    inputs = make(Case(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype))
    size = (abs(logit) / 8) ** 0.5
    inputs.q.copy_(inputs.q * 1.5 + math.copysign(size, logit))
    inputs.k.copy_(inputs.k * 1.5 + size)
    checks.backward(inputs)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30])
def test_softmax_scales(make, scale):
    inputs = make(Case(dim=16, seqlen_q=70, seqlen_k=130, softmax_scale=scale, dtype=BF16))
    grads = checks.backward(inputs)
    assert scale != 0.0 or not (grads["q"].any() or grads["k"].any())


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)], ids=str)
def test_zero_sizes(make, shape, dtype):
    batch, seqlen_q, seqlen_k = shape
    inputs = make(Case(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype))
    for name, grad in checks.gradients(inputs).items():
        assert grad.shape == getattr(inputs, name).shape and not grad.any()


def test_expanded_dout(make):
    """out.sum() hands backward a dout whose strides are all 0."""
    inputs = make(Case(seqlen_q=130, seqlen_k=70, dtype=BF16))
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = dataclasses.replace(inputs, **dict(zip("qkv", leaves, strict=True))).attend()
    out.sum().backward()
    ones = dataclasses.replace(inputs, dout=torch.ones_like(inputs.dout))
    grads = {name: x.grad for name, x in zip("qkv", leaves, strict=True)}
    bounds.check_gradients(grads, ones, out.detach())


@pytest.mark.parametrize("is_causal", [False, True])
def test_uninitialized_memory_never_shows(make, device, is_causal):
    inputs = make(Case(seqlen_q=200, seqlen_k=70, is_causal=is_causal, dtype=BF16))
    out, lse, _, _ = inputs.forward()
    if device == "cuda":
        memory.fill_freed_memory(device)
        grads = inputs.backward(out, lse)
    else:
        with memory.uninitialized_is_nan():
            grads = inputs.backward(out, lse)
    bounds.check_gradients(grads, inputs, out)


@pytest.mark.parametrize("row_padding", [0, 8])
@pytest.mark.parametrize("dim", [59, 64])
@pytest.mark.parametrize("seqlen_q", [1, 65, 130])
def test_out_overload_writes_its_outputs_only(make, device, seqlen_q, dim, row_padding):
    inputs = make(Case(seqlen_q=seqlen_q, seqlen_k=70, dim=dim, dtype=BF16))
    out, lse, _, _ = inputs.forward()
    guarded = {
        name: memory.GuardedTensor(getattr(inputs, name).shape, BF16, device, row_padding)
        for name in "qkv"
    }
    outputs = {f"d{name}": guard.tensor for name, guard in guarded.items()}
    saved = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    torch.ops.flash_cute.bwd.out(*saved, **inputs.options, **outputs)
    bounds.check_gradients({name: guard.tensor for name, guard in guarded.items()}, inputs, out)
    for name, guard in guarded.items():
        guard.check(f"d{name}")


def test_autograd_equals_the_op(make):
    inputs = make(Case(seqlen_q=70, seqlen_k=130, dtype=BF16))
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, _, _ = torch.ops.flash_cute.fwd(*leaves, **inputs.options)
    grads = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    names = "kv" if out.is_cuda else "qkv"
    expected = checks.gradients(inputs, with_dlse=True)
    checks.same_gradients(dict(zip("qkv", grads, strict=True)), {x: expected[x] for x in names})


def test_softmax_d(make):
    """softmax_d is rowsum(dout * out) - dlse, as fp32."""
    inputs = make(Case(seqlen_q=70, seqlen_k=130, dtype=BF16))
    out, lse, _, _ = inputs.forward()
    saved = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    softmax_d = torch.ops.flash_cute.bwd(*saved, inputs.dlse, **inputs.options)[4]
    products = (inputs.dout.double() * out.double()).transpose(1, 2)
    bound = 2**-20 * products.abs().sum(-1) + 2**-20 * inputs.dlse.abs()
    bounds.compare("softmax_d", softmax_d, products.sum(-1) - inputs.dlse, bound)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (700, 100)], ids=str)
def test_long_sequences(cuda, window, dim):
    sizes = {"heads": 6, "heads_k": 2, "seqlen_q": 1030, "seqlen_k": 2049}
    checks.backward(make_inputs(Case(**sizes, dim=dim, window=window, dtype=BF16), cuda))


@pytest.mark.parametrize("shape", [(66000, 1, 2), (1, 66000, 2)], ids=["batch", "heads"])
def test_more_than_65535_blocks(cuda, shape):
    batch, heads, seqlen = shape
    case = Case(batch=batch, heads=heads, seqlen_q=seqlen, seqlen_k=seqlen, dim=8, dtype=BF16)
    inputs = make_inputs(case, cuda)
    out, lse, _, _ = inputs.forward()
    grads = inputs.backward(out, lse)
    for some in (slice(0, 9), slice(-9, None)):
        part = (some,) if batch > 1 else (slice(None), slice(None), some)
        tensors = {name: getattr(inputs, name)[part] for name in ("q", "k", "v", "dout")}
        got = {name: grad[part] for name, grad in grads.items()}
        bounds.check_gradients(got, dataclasses.replace(inputs, **tensors), out[part])


@pytest.mark.xdist_group("memory")
def test_offsets_beyond_31_bits(cuda):
    """Every tensor of 2^31 + 2^23 elements; the first and last heads against the oracle."""
    shape = (1, 257, 65536, 128)
    q, k, v, dout = (torch.empty(shape, dtype=BF16, device=cuda).normal_() for _ in range(4))
    out, lse, _, _ = torch.ops.flash_cute.fwd(q, k, v)
    grads = torch.ops.flash_cute.bwd(dout, q, k, v, out, lse)[:3]
    for heads in (slice(0, 2), slice(65534, 65536)):
        tensors = {"q": q, "k": k, "v": v, "dout": dout}
        part = {name: x[:, :, heads] for name, x in tensors.items()}
        inputs = dataclasses.replace(make_inputs(Case(batch=1), cuda), **part)
        got = {name: grad[:, :, heads] for name, grad in zip("qkv", grads, strict=True)}
        bounds.check_gradients(got, inputs, out[:, :, heads])


def test_long_rows_of_dout(cuda):
    """dout with a row stride of 9728 elements: its last row starts beyond 2^31."""
    case = Case(batch=1, heads=1, seqlen_q=230_000, seqlen_k=16, dim=64, dtype=BF16)
    inputs = make_inputs(case, cuda)
    wide = torch.empty(1, case.seqlen_q, 1, 9728, dtype=BF16, device=cuda)
    strided = wide[..., :64].copy_(inputs.dout)
    expected = checks.gradients(inputs)
    got = checks.gradients(dataclasses.replace(inputs, dout=strided))
    for name in "kv":
        bounds.check_same_bits(f"d{name}", got[name], expected[name])
    bounds.check_gradients(got, inputs, inputs.forward()[0])


@pytest.mark.parametrize("dropout_p", [2.0**-18, 1 - 2.0**-18, 1.0])
def test_dropout_of_nothing_and_of_everything(make, dropout_p):
    inputs = make(Case(seqlen_q=65, seqlen_k=70, dropout_p=dropout_p, dtype=torch.float16))
    verify(inputs, with_dlse=True)
