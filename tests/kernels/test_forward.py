"""fwd against the fp64 oracle: dims, lengths, masks, features, layouts, special values, poison."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any

import checks
import pytest
import torch

from flash_cute import reference
from flash_cute.call.philox import dropout_keep
from flash_cute.native import library
from flash_cute.testing import bounds, memory
from flash_cute.testing.cases import LAYOUTS, Case, Inputs, VarlenCase, lay_out_inputs, make_inputs
from flash_cute.testing.kernels import forward_families

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DIMS = (1, 7, 8, 40, 59, 64, 72, 80, 96, 104, 111, 128)
EDGES = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257)
NAN, INF = math.nan, math.inf
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(make, dim, dtype):
    checks.forward(
        make(Case(seqlen_q=65, seqlen_k=130, dim=dim, dtype=dtype, is_causal=dim % 2 == 0))
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen_q", EDGES)
def test_lengths_at_tile_edges(make, seqlen_q, is_causal):
    for seed, seqlen_k in enumerate(EDGES):
        case = Case(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, dtype=BF16)
        checks.forward(make(case, seed))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 70), (40, 150), (150, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("left", range(6))
def test_windows(make, left, is_causal, seqlen_q, seqlen_k):
    """Every corner of the table of both sides: exactly the visible keys have a weight."""
    sides = (-1, 0, 1, seqlen_k - 1, seqlen_k, 2**31 - 1)
    for right in sides:
        window = (sides[left], right)
        sizes = {"batch": 1, "heads": 1, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "dim": 16}
        inputs = make(Case(**sizes, is_causal=is_causal, window=window, dtype=BF16))
        checks.forward(inputs)
        softmax = inputs.forward(return_softmax=True)[3]
        seen = reference.visible(seqlen_q, seqlen_k, is_causal, *window, device=softmax.device)
        assert torch.equal(softmax[0, 0] > 0, seen)


def test_window_of_64_bits(make):
    wide = make(Case(window=(2**40, 2**33), dtype=BF16))
    full = dataclasses.replace(wide, options=wide.options | {"window_size_left": -1})
    full.options["window_size_right"] = -1
    bounds.check_same_bits("out", wide.forward()[0], full.forward()[0])


@pytest.mark.parametrize(("heads", "heads_k"), [(4, 4), (4, 2), (4, 1), (6, 3), (9, 3), (16, 1)])
def test_grouped_heads(make, heads, heads_k):
    checks.forward(make(Case(heads=heads, heads_k=heads_k, seqlen_q=100, seqlen_k=130, dtype=BF16)))


def takes(inputs: Inputs) -> bool:
    """Whether a kernel that is in use takes the call: not all layouts suit all families."""
    try:
        inputs.forward()
    except RuntimeError as error:
        assert "16-byte boundaries" in str(error)
        return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [59, 64])
def test_layouts(make, dim, layout):
    """No layout changes the result beyond the bound; on CUDA not a bit as long as the same family
    of kernels does the call, NaN in every gap or not."""
    batch = 1 if layout == "wild_unit_strides" else 2
    sizes = {"batch": batch, "seqlen_q": 130, "seqlen_k": 130, "dim": dim, "dtype": BF16}
    inputs = make(Case(**sizes, layout=layout, is_causal=True))
    out, _ = checks.forward(inputs)
    if not out.is_cuda:
        return
    q, k, v = (x.contiguous() for x in (inputs.q, inputs.k, inputs.v))
    dense = dataclasses.replace(inputs, q=q, k=k, v=v)
    for family in forward_families(out.device):
        with library.only(family):
            if family != "fwd_sm80_" and not (takes(inputs) and takes(dense)):
                continue
            results, expected = inputs.forward(), dense.forward()
            bounds.check_same_bits(f"{family}: out", results[0], expected[0])
            bounds.check_same_bits(f"{family}: softmax_lse", results[1], expected[1])


def test_layout_of_each_tensor(make):
    """q, k and v with strides of three kinds: none is read with another's."""
    inputs = make(Case(seqlen_q=130, seqlen_k=130, dtype=BF16))
    q = lay_out_inputs(inputs.q, inputs.k, inputs.v, "heads_first")[0]
    k = lay_out_inputs(inputs.q, inputs.k, inputs.v, "padded_rows")[1]
    v = lay_out_inputs(inputs.q, inputs.k, inputs.v, "qkvpacked")[2]
    checks.forward(dataclasses.replace(inputs, q=q, k=k, v=v))


FEATURES = {
    "softcap": {"softcap": 3.0},
    "large_softcap": {"softcap": 1e4},
    "alibi_heads": {"alibi": "heads"},
    "alibi_batch": {"alibi": "batch"},
    "sink": {"sink": True},
    "dropout": {"dropout_p": 0.17},
    "dropout_half": {"dropout_p": 0.5},
    "dropout_all": {"dropout_p": 1.0},
    "value_dim": {"dim_v": 24},
    "dim_256": {"dim": 256},
    "scores": {"softcap": 2.0, "alibi": "batch", "sink": True},
    "everything": {"softcap": 5.0, "alibi": "heads", "sink": True, "dropout_p": 0.3, "dim_v": 80},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("window", [(-1, -1), (20, 10)], ids=["full", "window"])
def test_features(make, window, feature, dtype):
    sizes = {"heads": 4, "heads_k": 2, "seqlen_q": 70, "seqlen_k": 90}
    checks.forward(make(Case(**sizes, dtype=dtype, window=window, **FEATURES[feature])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_no_key(make, dtype):
    inputs = make(Case(seqlen_q=256, seqlen_k=3, is_causal=True, dtype=dtype))
    out, lse = checks.forward(inputs)
    assert not out[:, :253].signbit().any() and not out[:, :253].any()
    assert (lse[..., :253] == -INF).all() and lse[..., 253:].isfinite().all()


def test_sink_of_rows_that_see_no_key(make):
    inputs = make(Case(seqlen_q=40, seqlen_k=3, is_causal=True, sink=True, dtype=BF16))
    out, lse = checks.forward(inputs)
    assert not out[:, :37].any()
    bounds.check_lse("lse", lse[..., :37], inputs.options["sink"][:, None].expand(2, 2, 37))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)], ids=str)
def test_zero_sizes(make, shape, dtype):
    batch, seqlen_q, seqlen_k = shape
    inputs = make(Case(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype))
    out, lse, _, _ = inputs.forward()
    assert out.shape == inputs.q.shape and lse.shape == (batch, 2, seqlen_q)
    assert not out.any() and (lse == -INF).all()


@pytest.mark.parametrize("tensor", ["q", "k"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("is_causal", [False, True])
def test_special_values_stay_in_their_rows(make, is_causal, value, tensor):
    """NaN and infinity show up where the oracle has them; all other rows keep their bits."""
    inputs = make(Case(seqlen_q=130, seqlen_k=130, heads=3, dtype=BF16, is_causal=is_causal))
    before = inputs.forward()[0]
    getattr(inputs, tensor)[1, 77, 2, 5] = value
    out, _ = checks.forward(inputs)
    finite = bounds.forward_oracle(inputs).out.isfinite()
    finite[1, :, 2] = False
    bounds.check_same_bits("out", out[finite], before[finite])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_special_values_in_v(make, value):
    inputs = make(Case(seqlen_q=70, seqlen_k=130, dtype=BF16))
    inputs.v[0, 100, 1, 7] = value
    checks.forward(inputs)


def test_masked_keys_never_matter(make):
    """NaN in keys and values that no row sees changes no bit."""
    inputs = make(Case(seqlen_q=60, seqlen_k=200, window=(40, 0), dtype=BF16))
    before = inputs.forward()
    for x in (inputs.k, inputs.v):
        x[:, :100] = NAN
    for got, expected in zip(inputs.forward()[:2], before[:2], strict=True):
        bounds.check_same_bits("out or softmax_lse", got, expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-30, 10.0])
def test_softmax_scales(make, scale):
    checks.forward(make(Case(dim=16, seqlen_q=70, seqlen_k=130, softmax_scale=scale, dtype=BF16)))


def constant_logits(make, case: Case, logit: float) -> Inputs:
    """Inputs whose logits are all near `logit`, off by the noise in q alone."""
    inputs = make(case)
    size = (abs(logit) * case.dim**-0.5) ** 0.5
    inputs.k.fill_(size)
    inputs.q.copy_((inputs.q * 0.02 + 1) * math.copysign(size, logit))
    return inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("logit", [-120.0, 120.0])
def test_logits_far_from_zero(make, logit, dtype):
    sizes = {"batch": 1, "seqlen_q": 65, "seqlen_k": 192}
    checks.forward(constant_logits(make, Case(**sizes, dtype=dtype, is_causal=True), logit))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("logit", [-2.45e5, 2.45e5])
def test_logits_at_the_end_of_fp32(make, logit, dtype):
    """At 2.45e5 a unit of fp32 is 1.6 % of P; more than a few units are an error all the same."""
    sizes = {"batch": 1, "seqlen_q": 65, "seqlen_k": 192}
    inputs = constant_logits(make, Case(**sizes, dtype=dtype, is_causal=True), logit)
    out, lse, _, _ = inputs.forward()
    oracle = bounds.forward_oracle(inputs)
    unit = bounds.ROUNDING_UNIT[dtype] + 4 * abs(logit) * 2**-24
    bounds.compare("out", out, oracle.out, 2 * unit * oracle.out_of_abs_v)
    bounds.check_lse("softmax_lse", lse, oracle.softmax_lse)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "value"), [(BF16, 133120.0), (torch.float16, 65504.0)], ids=str)
def test_huge_inputs(make, dtype, value, sign):
    inputs = make(Case(seqlen_q=130, seqlen_k=300, dtype=dtype))
    for x in (inputs.q, inputs.k, inputs.v):
        x.fill_(value)
    inputs.q[:, 1::2] *= sign  # rows with scores far below 0 alternate with rows far above
    out, _, _, _ = inputs.forward()
    assert out.isfinite().all()
    expected = torch.full_like(out, value, dtype=torch.float64)
    bounds.compare("out", out, expected, expected * 2**-8)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("softmax_scale", [0.125, -0.125])
def test_softcap_of_small_and_large_scores(make, softmax_scale, dim):
    """CUDA goes another way where all scores of a warp are small under the cap."""
    sizes = {"seqlen_q": 200, "seqlen_k": 700, "dim": dim}
    inputs = make(Case(**sizes, softcap=40.0, softmax_scale=softmax_scale, dtype=BF16))
    inputs.k[:, 250:400] *= 8.0
    out, lse, _, _ = inputs.forward()
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("large", [False, True])
def test_scores_that_rise_under_softcap(make, large, dim, dtype):
    """From key to key by less than what CUDA lets be, and in the end by more; of other rows they
    fall, and are all 0, or negative. Where some are large it goes another way in between."""
    inputs = make(Case(seqlen_q=200, seqlen_k=700, dim=dim, softcap=100.0, dtype=dtype))
    scores = torch.linspace(24, -12, 700, device=inputs.k.device)  # CUDA begins with the last keys
    if large:
        scores[300:320] = 60.0
    inputs.k.copy_(scores[None, :, None, None] / math.sqrt(dim))
    inputs.q.fill_(1)
    inputs.q[:, 3::4] = -1
    inputs.q[:, 2::16] = 0
    inputs.q[:, 64:128] /= 8
    out, lse, _, _ = inputs.forward()
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))


def test_huge_score_after_small_ones(make):
    """The last key's score is huge, in a tile that forward meets first on CUDA; and the first's."""
    for key in (0, -1):
        inputs = make(Case(seqlen_q=130, seqlen_k=300, dtype=BF16))
        inputs.q.abs_()
        inputs.k[:, key] = 2.0**30
        out, _, _, _ = inputs.forward()
        expected = inputs.v[:, key, None].double().expand(-1, out.shape[1], -1, -1)
        bounds.compare("out", out, expected, expected.abs() * 2**-8)


def test_row_next_to_one_that_becomes_huge(make):
    """Both rows in one warp on CUDA, whose maxima are then taken exactly from some tile on."""
    inputs = make(Case(seqlen_q=16, seqlen_k=300, softmax_scale=1.0, dtype=BF16))
    inputs.q.zero_()
    inputs.k.zero_()
    inputs.q[:, :, :, :2] = 1.0
    inputs.q[:, 5, :, :3] = torch.tensor([0.0, 0.0, 2.0**20], dtype=BF16)
    inputs.k[..., 0] = 2.0**22
    inputs.k[:, :100, :, 1] = 2.0
    inputs.k[:, :40, :, 2] = 2.0**10
    out, lse, _, _ = inputs.forward()
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))


def test_sharp_softmax(make):
    checks.forward(make(Case(seqlen_q=130, seqlen_k=260, spread=30.0, dtype=BF16)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_uninitialized_memory_never_shows(make, device, is_causal):
    sizes = {"seqlen_q": 200, "seqlen_k": 70}
    inputs = make(Case(**sizes, is_causal=is_causal, dtype=BF16))
    if device == "cuda":
        memory.fill_freed_memory(device)
        out, lse, _, _ = inputs.forward()
    else:
        with memory.uninitialized_is_nan():
            out, lse, _, _ = inputs.forward()
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))


@pytest.mark.parametrize("row_padding", [0, 8, 3])
@pytest.mark.parametrize("dim", [59, 64])
@pytest.mark.parametrize("seqlen_q", [1, 65, 130])
def test_out_overload_writes_its_outputs_only(make, device, seqlen_q, dim, row_padding):
    inputs = make(Case(seqlen_q=seqlen_q, seqlen_k=70, dim=dim, dtype=BF16))
    out_of_line = inputs.q.is_cuda and row_padding % 8 != 0
    with library.only("_sm80_") if out_of_line else nullcontext():  # as the call below
        expected = inputs.forward()
    out = memory.GuardedTensor(inputs.q.shape, BF16, device, row_padding)
    lse = memory.GuardedTensor(expected[1].shape, torch.float32, device)
    op = torch.ops.flash_cute.fwd.out
    arguments = (inputs.q, inputs.k, inputs.v)
    op(*arguments, **inputs.options, out=out.tensor, softmax_lse=lse.tensor)
    bounds.check_same_bits("out", out.tensor, expected[0])
    bounds.check_same_bits("softmax_lse", lse.tensor, expected[1])
    out.check("out")
    lse.check("softmax_lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_row_max_and_softmax(make, dropout_p, dtype):
    """row_max is the largest final score; softmax is P, negative where dropout drops it."""
    features = {"dropout_p": dropout_p, "softcap": 4.0, "alibi": "heads", "sink": True}
    inputs = make(Case(seqlen_q=70, seqlen_k=40, is_causal=True, dtype=dtype, **features))
    _, _, row_max, softmax = inputs.forward(return_row_max=True, return_softmax=True)
    oracle = bounds.forward_oracle(inputs)
    assert softmax.dtype == dtype
    bounds.check_lse("row_max", row_max, oracle.row_max)
    bounds.check_softmax(softmax, oracle)
    assert bool((softmax < 0).any()) == (dropout_p > 0)


@pytest.mark.parametrize("top", [-1.0, -8.0])
def test_row_max_of_negative_scores_under_softcap(make, top):
    """Maxima that rise from tile to tile of keys and stay below 0; of one row they are 0."""
    case = Case(seqlen_q=200, seqlen_k=700, dim=64, softcap=100.0, dtype=BF16)
    inputs = make(case)
    scores = top - torch.linspace(0, 4, 700, device=inputs.k.device)  # of queries of ones
    inputs.q.fill_(1).narrow(1, 7, 1).zero_()
    inputs.k.copy_(scores[None, :, None, None] / math.sqrt(64))
    out, softmax_lse, row_max, _ = inputs.forward(return_row_max=True)
    oracle = bounds.forward_oracle(inputs)
    assert oracle.row_max.max() == 0 and oracle.row_max.min() < top + 0.1
    bounds.check_forward(out, softmax_lse, oracle)
    bounds.check_lse("row_max", row_max, oracle.row_max)


def test_outputs_that_are_not_requested_are_none(make):
    assert make(Case(dtype=BF16)).forward()[2:] == (None, None)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_dropout_keeps_its_share(make, dropout_p):
    """The keep rate over 2 * 4 * 256 * 256 elements is within 5 standard deviations."""
    case = Case(heads=4, seqlen_q=256, seqlen_k=256, dim=8, dropout_p=dropout_p, dtype=BF16)
    inputs = make(case)
    softmax = inputs.forward(return_softmax=True)[3]
    keep = round((1 - dropout_p) * 65536) / 65536
    deviation = (keep * (1 - keep) / softmax.numel()) ** 0.5
    assert abs(float((softmax > 0).float().mean()) - keep) < 5 * deviation


RNG = {"zero": (0, 0), "wide": (2**63 - 1, 2**40 + 3), "negative": (-7, -(2**33))}


@pytest.mark.parametrize("rng", RNG)
@pytest.mark.parametrize("dropout_p", [0.0001, 0.17, 1.0])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_dropout_mask_is_that_of_philox(make, packed, dropout_p, rng):
    """Bit for bit: q is 0, so that no weight is rounded to 0 and every sign shows."""
    same: dict[str, Any] = {"heads": 3, "dropout_p": dropout_p, "dtype": BF16}
    dense = Case(**same, seqlen_q=130, seqlen_k=275)
    varlen = VarlenCase(**same, lengths_q=(130, 130), lengths_k=(275, 275), rows_before=3)
    inputs = make(varlen if packed else dense)
    inputs.q.zero_()
    inputs.options["rng"].copy_(torch.tensor(RNG[rng]))
    softmax = inputs.forward(return_softmax=True)[3].flatten(0, 1)
    places = (torch.arange(n, device=softmax.device) for n in softmax.shape)
    keep = dropout_keep(inputs.options["rng"], dropout_p, *places)
    assert torch.equal(softmax > 0, keep) and torch.equal(softmax < 0, ~keep)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (700, 100)], ids=str)
def test_long_sequences(cuda, window, dim):
    sizes = {"heads": 6, "heads_k": 2, "seqlen_q": 1030, "seqlen_k": 2049}
    checks.forward(make_inputs(Case(**sizes, dim=dim, window=window, dtype=BF16), cuda))


@pytest.mark.parametrize("shape", [(66000, 1, 2), (1, 66000, 2)], ids=["batch", "heads"])
def test_more_than_65535_blocks(cuda, shape):
    batch, heads, seqlen = shape
    case = Case(batch=batch, heads=heads, seqlen_q=seqlen, seqlen_k=seqlen, dim=8, dtype=BF16)
    checks.forward(make_inputs(case, cuda))


@pytest.mark.xdist_group("memory")
def test_offsets_beyond_31_bits(cuda):
    """q, k, v and out of 2^31 + 2^23 elements each; the first and last rows against the oracle."""
    shape = (1, 257, 65536, 128)
    q, k, v = (torch.empty(shape, dtype=BF16, device=cuda).normal_() for _ in range(3))
    out, lse, _, _ = torch.ops.flash_cute.fwd(q, k, v)
    assert out.numel() > 2**31
    for heads in (slice(0, 2), slice(65534, 65536)):
        case = make_inputs(Case(batch=1), cuda)
        part = dataclasses.replace(case, q=q[:, :, heads], k=k[:, :, heads], v=v[:, :, heads])
        bounds.check_forward(out[:, :, heads], lse[:, heads], bounds.forward_oracle(part))


@pytest.mark.xdist_group("memory")
def test_strides_beyond_31_bits(cuda):
    """A batch stride of 2^31 + 64 elements in q, k and v, which share one storage of 4 GiB."""
    storage = torch.empty(2**31 + 2**16, dtype=BF16, device=cuda)
    inputs = make_inputs(Case(seqlen_q=65, seqlen_k=65, heads=1, dtype=BF16), cuda)
    views = []
    for i, x in enumerate((inputs.q, inputs.k, inputs.v)):
        strides = (2**31 + 64, 192, 64, 1)
        views.append(storage.as_strided(x.shape, strides, 64 * i).copy_(x))
    checks.forward(dataclasses.replace(inputs, q=views[0], k=views[1], v=views[2]))
