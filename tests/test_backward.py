"""bwd against fp64 gradients: twice the unfused chain's error, row by row; exact zeros; poison."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flash_cute.testing import bounds, memory
from flash_cute.testing.cases import LAYOUTS, Case, Inputs, VarlenCase, make_inputs
from flash_cute.testing.verify import verify

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DIMS = (1, 7, 8, 40, 59, 64, 72, 80, 96, 104, 111, 128)
EDGES = (1, 63, 64, 65, 127, 128, 129, 257)
NAN = math.nan
BF16 = torch.bfloat16


def gradients(inputs: Inputs, with_dlse: bool = False) -> dict[str, torch.Tensor]:
    out, lse, _, _ = inputs.forward()
    return inputs.backward(out, lse, inputs.dlse if with_dlse else None)


def check(inputs: Inputs, with_dlse: bool = False) -> dict[str, torch.Tensor]:
    out, lse, _, _ = inputs.forward()
    grads = inputs.backward(out, lse, inputs.dlse if with_dlse else None)
    bounds.check_gradients(grads, inputs, out, with_dlse)
    return grads


def check_same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, grad in expected.items():
        bounds.check_same_bits(f"d{name}", got[name], grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(make, dim, dtype):
    check(make(Case(seqlen_q=65, seqlen_k=130, dim=dim, dtype=dtype, is_causal=dim % 2 == 0)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen_q", EDGES)
def test_lengths_at_tile_edges(make, seqlen_q, is_causal):
    for seed, seqlen_k in enumerate(EDGES):
        case = Case(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, dtype=BF16)
        check(make(case, seed))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 70), (40, 150), (150, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("left", range(6))
def test_windows(make, left, is_causal, seqlen_q, seqlen_k):
    """Every corner of the table of both sides, as in test_forward."""
    sides = (-1, 0, 1, seqlen_k - 1, seqlen_k, 2**31 - 1)
    for right in sides:
        sizes = {"batch": 1, "heads": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "dim": 32}
        check(make(Case(**sizes, is_causal=is_causal, window=(sides[left], right), dtype=BF16)))


@pytest.mark.parametrize(("heads", "heads_k"), [(4, 2), (4, 1), (6, 3), (16, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_heads(make, heads, heads_k, dtype):
    check(make(Case(heads=heads, heads_k=heads_k, seqlen_q=100, seqlen_k=130, dtype=dtype)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [59, 64])
def test_layouts(make, dim, layout):
    """q, k, v and dout in every layout; gradients are those of the values, gaps of NaN unread."""
    batch = 1 if layout == "wild_unit_strides" else 2
    sizes = {"batch": batch, "seqlen_q": 130, "seqlen_k": 130, "dim": dim, "dtype": BF16}
    grads = check(make(Case(**sizes, layout=layout, is_causal=True)))
    assert all(grad.is_contiguous() for grad in grads.values())


FEATURES = {
    "softcap": {"softcap": 3.0},
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
    check(make(Case(**sizes, dtype=dtype, window=window, **FEATURES[feature])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradient_of_lse(make, is_causal, dtype):
    inputs = make(Case(seqlen_q=130, seqlen_k=70, is_causal=is_causal, dtype=dtype))
    check(inputs, with_dlse=True)


@pytest.mark.parametrize("sink_dtype", DTYPES, ids=str)
def test_gradient_of_lse_with_sink(make, sink_dtype):
    sink = {"sink": True, "sink_dtype": sink_dtype}
    grads = check(
        make(Case(seqlen_q=130, seqlen_k=70, is_causal=True, dtype=BF16, **sink)), with_dlse=True
    )
    assert grads["sink"].dtype == torch.float32


def test_lse_gradient_at_rows_that_see_no_key(make):
    """Their lse is a constant, so even a NaN gradient of it reaches nothing."""
    inputs = make(Case(seqlen_q=70, seqlen_k=30, is_causal=True, dtype=BF16))
    before = gradients(inputs, with_dlse=True)
    inputs.dlse[..., :40] = NAN
    inputs.dout[:, :40] = NAN
    check_same_gradients(gradients(inputs, with_dlse=True), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_rows_have_zero_gradients(make, dtype):
    grads = check(make(Case(seqlen_q=256, seqlen_k=3, is_causal=True, dtype=dtype)))
    assert not grads["q"][:, :253].any()


def test_unseen_keys_have_zero_gradients(make):
    grads = check(make(Case(seqlen_q=60, seqlen_k=200, window=(40, 0), dtype=BF16)))
    assert not grads["k"][:, :100].any() and not grads["v"][:, :100].any()


def test_masked_keys_never_matter(make):
    inputs = make(Case(seqlen_q=60, seqlen_k=200, window=(40, 0), dtype=BF16))
    before = gradients(inputs)
    for x in (inputs.k, inputs.v):
        x[:, :100] = NAN
    after = gradients(inputs)
    if after["q"].is_cuda:
        zeroed = {"k": inputs.k.nan_to_num(), "v": inputs.v.nan_to_num()}
        out = inputs.forward()[0]
        bounds.check_gradients(after, dataclasses.replace(inputs, **zeroed), out)
        before.pop("q")
    check_same_gradients(after, before)


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
    check(inputs)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30])
def test_softmax_scales(make, scale):
    inputs = make(Case(dim=16, seqlen_q=70, seqlen_k=130, softmax_scale=scale, dtype=BF16))
    grads = check(inputs)
    assert scale != 0.0 or not (grads["q"].any() or grads["k"].any())


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)], ids=str)
def test_zero_sizes(make, shape, dtype):
    batch, seqlen_q, seqlen_k = shape
    inputs = make(Case(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype))
    for name, grad in gradients(inputs).items():
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
    expected = gradients(inputs, with_dlse=True)
    check_same_gradients(dict(zip("qkv", grads, strict=True)), {x: expected[x] for x in names})


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
    check(make_inputs(Case(**sizes, dim=dim, window=window, dtype=BF16), cuda))


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
    expected = gradients(inputs)
    got = gradients(dataclasses.replace(inputs, dout=strided))
    for name in "kv":
        bounds.check_same_bits(f"d{name}", got[name], expected[name])
    bounds.check_gradients(got, inputs, inputs.forward()[0])


@pytest.mark.parametrize("dropout_p", [2.0**-18, 1 - 2.0**-18, 1.0])
def test_dropout_of_nothing_and_of_everything(make, dropout_p):
    inputs = make(Case(seqlen_q=65, seqlen_k=70, dropout_p=dropout_p, dtype=torch.float16))
    verify(inputs, with_dlse=True)


# Where Hopper cuts the work on a tile of keys into parts: of heads, of queries, of both. Some parts
# have nothing to do: where tiles of keys are seen by fewer queries than others, or by none.
PARTED = {
    "multi-query": Case(heads=16, heads_k=1, batch=1, seqlen_q=500, seqlen_k=700),
    "group of 6": Case(heads=12, heads_k=2, batch=1, seqlen_q=600, seqlen_k=600, is_causal=True),
    "group of 3": Case(heads=6, heads_k=2, batch=1, seqlen_q=577, seqlen_k=513),
    "one head": Case(heads=1, batch=1, seqlen_q=1000, seqlen_k=1000, is_causal=True),
    "window": Case(heads=1, batch=1, seqlen_q=1000, seqlen_k=2000, window=(500, 200)),
    "rows without keys": Case(heads=2, batch=1, seqlen_q=2000, seqlen_k=700, is_causal=True),
    "sink": Case(heads=8, heads_k=2, batch=1, seqlen_q=500, seqlen_k=300, sink=True),
    "rules": Case(heads=4, batch=1, seqlen_q=900, seqlen_k=300, alibi="heads", dropout_p=0.2),
    "varlen": VarlenCase(
        heads=8, heads_k=2, lengths_q=(700, 0, 65, 300), lengths_k=(600, 70, 0, 130)
    ),
    "varlen causal": VarlenCase(
        heads=1,
        lengths_q=(1400, 64, 700),
        lengths_k=(900, 1, 129),
        rows_before=3,
        is_causal=True,
    ),
}
PARTED_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))


def parted(name: str, dims: tuple[int, int]) -> Case | VarlenCase:
    dim, dim_v = dims
    return dataclasses.replace(PARTED[name], dim=dim, dim_v=dim_v, dtype=BF16)


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", PARTED)
def test_cases_are_parted(name, dims):
    case = PARTED[name]
    left, right = case.window
    if isinstance(case, VarlenCase):
        count, varlen = len(case.lengths_q), True
        seqlens = (sum(case.lengths_q) // count, sum(case.lengths_k) // count)
    else:
        count, varlen, seqlens = case.batch, False, (case.seqlen_q, case.seqlen_k)
    heads = (case.heads, case.heads_k or case.heads)
    window = (left, 0 if case.is_causal else right)
    parts = torch.ops.flash_cute.preferred_parts(count, *heads, *seqlens, *dims, *window, varlen)
    assert math.prod(parts) > 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", PARTED)
def test_parts(cuda, name, dims, deterministic):
    inputs = make_inputs(parted(name, dims), cuda)
    memory.fill_freed_memory(cuda)
    verify(inputs, with_dlse=True, deterministic=deterministic)


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", [name for name in PARTED if "varlen" not in name])
def test_parts_write_their_outputs_only(cuda, name, dims):
    inputs = make_inputs(parted(name, dims), cuda)
    out, lse, _, _ = inputs.forward()
    guarded = {x: memory.GuardedTensor(getattr(inputs, x).shape, BF16, cuda, 8) for x in "qkv"}
    outputs = {f"d{x}": guard.tensor for x, guard in guarded.items()}
    grads = {x: guard.tensor for x, guard in guarded.items()}
    if inputs.options["sink"] is not None:
        outputs["dsink"] = grads["sink"] = torch.full((inputs.q.shape[2],), NAN, device=cuda)
    saved = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    torch.ops.flash_cute.bwd.out(*saved, **inputs.options, **outputs)
    bounds.check_gradients(grads, inputs, out)
    for x, guard in guarded.items():
        guard.check(f"d{x}")


def check_same_bits_again(inputs: Inputs) -> None:
    out, lse, _, _ = inputs.forward()
    for names, deterministic in (("kv", False), ("qkv", True)):
        expected = inputs.backward(out, lse, deterministic=deterministic)
        for _ in range(20):
            grads = inputs.backward(out, lse, deterministic=deterministic)
            check_same_gradients(grads, {x: expected[x] for x in names})


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", PARTED)
def test_parts_give_the_same_bits_again(cuda, name, dims):
    check_same_bits_again(make_inputs(parted(name, dims), cuda))


# More than twice as many tiles of keys as SMs: CTAs of Hopper take one after the other, of many
# steps, of one, of none where nobody sees the keys, and of sequences with fewer than the longest.
MANY_TILES = {
    "full": Case(heads=30, batch=3, seqlen_q=150, seqlen_k=300),
    "causal": Case(heads=30, batch=3, seqlen_q=300, seqlen_k=300, is_causal=True),
    "one step": Case(heads=24, batch=3, seqlen_q=30, seqlen_k=400),
    "unseen keys": Case(heads=16, batch=3, seqlen_q=100, seqlen_k=700, window=(150, 10)),
    "rows without keys": Case(heads=45, batch=3, seqlen_q=300, seqlen_k=140, is_causal=True),
    "grouped": Case(heads=60, heads_k=30, batch=3, seqlen_q=140, seqlen_k=300, sink=True),
    "rules": Case(heads=30, batch=3, seqlen_q=150, seqlen_k=300, alibi="heads", dropout_p=0.2),
    "softcap": Case(heads=30, batch=3, seqlen_q=150, seqlen_k=300, softcap=9.0, is_causal=True),
    "varlen": VarlenCase(
        heads=8, lengths_q=(300, 0, 65, 1) * 6, lengths_k=(290, 70, 0, 400) * 6, rows_before=3
    ),
    "varlen causal": VarlenCase(
        heads=6,
        heads_k=3,
        lengths_q=(200, 64, 0, 150) * 12,
        lengths_k=(300, 1, 129, 140) * 12,
        is_causal=True,
    ),
}


@pytest.mark.parametrize(
    ("dtype", "deterministic"), [(BF16, False), (torch.float16, True)], ids=str
)
@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", MANY_TILES)
def test_many_tiles(cuda, name, dims, dtype, deterministic):
    dim, dim_v = dims
    case = dataclasses.replace(MANY_TILES[name], dim=dim, dim_v=dim_v, dtype=dtype)
    inputs = make_inputs(case, cuda)
    memory.fill_freed_memory(cuda)
    verify(inputs, with_dlse=True, deterministic=deterministic)


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", MANY_TILES)
def test_many_tiles_give_the_same_bits_again(cuda, name, dims):
    dim, dim_v = dims
    case = dataclasses.replace(MANY_TILES[name], dim=dim, dim_v=dim_v, dtype=BF16)
    check_same_bits_again(make_inputs(case, cuda))
