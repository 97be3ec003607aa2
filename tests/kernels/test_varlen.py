"""varlen_fwd and varlen_bwd: lengths, gaps, pages, unread padding, malformed offsets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import checks
import pytest
import torch

from flash_cute.testing import bounds, memory
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs
from flash_cute.testing.verify import verify_families

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NAN = math.nan
BF16 = torch.bfloat16
LENGTHS = {
    "mixed": ((64, 0, 1, 33), (64, 0, 1, 33)),
    "tile_edges": ((63, 64, 65, 127, 128, 129), (129, 127, 65, 64, 128, 63)),
    "queries_without_keys": ((70, 65, 0, 3), (0, 130, 70, 0)),
    "keys_without_queries": ((0, 0, 70), (130, 64, 70)),
    "all_empty": ((0, 0), (0, 0)),
    "no_sequence": ((), ()),
    "decoding": ((1, 1, 1, 1), (1, 255, 257, 70)),
    "long_and_empty": ((0, 260, 0, 0, 65, 0), (300, 65, 0, 1, 260, 0)),
}
PADDED: dict[str, Any] = {
    "lengths_q": (70, 33, 64, 1),
    "lengths_k": (70, 130, 64, 5),
    "rows_before": 3,
    "rows_after": 9,
}
USED: dict[str, Any] = {"used_q": (65, 0, 64, 1), "used_k": (64, 70, 0, 5)}


def check(inputs: Inputs, with_dlse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, _, _ = inputs.forward()
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))
    if inputs.lengths.get("block_table") is None:
        grads = inputs.backward(out, lse, inputs.dlse if with_dlse else None)
        bounds.check_gradients(grads, inputs, out, with_dlse)
    return out, lse


def check_same(got: Inputs, expected: Inputs) -> None:
    """Equal bits of all outputs and gradients; of dq where it is repeatable, i.e. on the CPU."""
    for x, y in zip(got.forward()[:2], expected.forward()[:2], strict=True):
        bounds.check_same_bits("out or softmax_lse", x, y)
    grads = checks.gradients(expected)
    for name, grad in checks.gradients(got).items():
        if name == "q" and grad.is_cuda:
            assert (grad.isnan() == grads[name].isnan()).all()
        else:
            bounds.check_same_bits(f"d{name}", grad, grads[name])


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(make, lengths, is_causal, dtype):
    lengths_q, lengths_k = LENGTHS[lengths]
    check(
        make(VarlenCase(lengths_q=lengths_q, lengths_k=lengths_k, is_causal=is_causal, dtype=dtype))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 40, 59, 64, 72, 104, 111, 128])
def test_head_dims(make, dim, dtype):
    check(make(VarlenCase(lengths_q=(65, 3), lengths_k=(70, 130), dim=dim, dtype=dtype)))


@pytest.mark.parametrize("window", [(-1, 0), (20, 0), (0, 0), (10, 30), (-1, 5), (2**31 - 1, 3)])
def test_windows(make, window):
    lengths = {"lengths_q": (70, 40, 150), "lengths_k": (70, 150, 40)}
    check(make(VarlenCase(**lengths, window=window, dtype=BF16)))


@pytest.mark.parametrize("heads_k", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(make, is_causal, heads_k):
    check(make(VarlenCase(**PADDED, heads=4, heads_k=heads_k, is_causal=is_causal, dtype=BF16)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_used_lengths_and_gaps(make, is_causal, dtype):
    """Rows that no sequence uses: out 0, lse -inf, gradients 0."""
    inputs = make(VarlenCase(**PADDED, **USED, is_causal=is_causal, dtype=dtype))
    out, lse = check(inputs, with_dlse=True)
    grads = checks.gradients(inputs)
    unused_q, unused_k = unused_rows(inputs)
    assert not out[unused_q].any() and (lse[:, unused_q] == -math.inf).all()
    assert not out[unused_q].signbit().any()
    assert not grads["q"][unused_q].any()
    assert not grads["k"][unused_k].any() and not grads["v"][unused_k].any()


def unused_rows(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of the rows of q and of k that no sequence of `inputs` uses."""
    masks = []
    for side, x in (("q", inputs.q), ("k", inputs.k)):
        unused = torch.ones(len(x), dtype=torch.bool, device=x.device)
        starts = inputs.lengths[f"cu_seqlens_{side}"][:-1].tolist()
        for start, used in zip(starts, inputs.lengths[f"seqused_{side}"].tolist(), strict=True):
            unused[start : start + used] = False
        masks.append(unused)
    return masks[0], masks[1]


@pytest.mark.parametrize("value", [NAN, math.inf])
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_never_matters(make, is_causal, value):
    """Equal bits, whether the rows that no sequence uses hold 0 or NaN."""
    zero = make(VarlenCase(**PADDED, **USED, is_causal=is_causal, dtype=BF16))
    unused_q, unused_k = unused_rows(zero)
    tensors = {"q": unused_q, "dout": unused_q, "k": unused_k, "v": unused_k}
    for name, rows in tensors.items():
        getattr(zero, name)[rows] = 0
    filled = {name: getattr(zero, name).clone() for name in tensors}
    for name, rows in tensors.items():
        filled[name][rows] = value
    check_same(dataclasses.replace(zero, **filled), zero)


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_sequences_never_mix(make, sequence):
    """NaN all over one sequence leaves every bit of the others."""
    inputs = make(VarlenCase(lengths_q=(70, 65, 64, 1), lengths_k=(65, 130, 70, 5), dtype=BF16))
    before, lse_before, _, _ = inputs.forward()
    grads_before = checks.gradients(inputs)
    others = []
    for side, names in (("q", ("q", "dout")), ("k", ("k", "v"))):
        first, last = inputs.lengths[f"cu_seqlens_{side}"][sequence : sequence + 2].tolist()
        for name in names:
            getattr(inputs, name)[first:last] = NAN
        total = len(getattr(inputs, side))
        others.append([row for row in range(total) if not first <= row < last])
    out, lse, _, _ = inputs.forward()
    grads = checks.gradients(inputs)
    bounds.check_same_bits("out", out[others[0]], before[others[0]])
    bounds.check_same_bits("softmax_lse", lse[:, others[0]], lse_before[:, others[0]])
    for name in "kv":
        got, expected = grads[name][others[1]], grads_before[name][others[1]]
        bounds.check_same_bits(f"d{name}", got, expected)
    assert grads["q"][others[0]].isfinite().all()


@pytest.mark.parametrize(
    "layout", ["heads_first", "padded_rows", "odd_rows", "offset", "expanded_heads", "kvpacked"]
)
@pytest.mark.parametrize("dim", [59, 64])
def test_layouts(make, dim, layout):
    check(make(VarlenCase(**PADDED, layout=layout, dim=dim, dtype=BF16, is_causal=True)))


def test_packed_layout(make):
    lengths = {"lengths_q": (70, 1, 64), "lengths_k": (70, 1, 64)}
    check(make(VarlenCase(**lengths, layout="qkvpacked", dtype=BF16, is_causal=True)))


FEATURES = {
    "softcap": {"softcap": 3.0},
    "alibi_heads": {"alibi": "heads"},
    "alibi_batch": {"alibi": "batch"},
    "sink": {"sink": True},
    "dropout": {"dropout_p": 0.17},
    "value_dim": {"dim_v": 24},
    "everything": {"softcap": 5.0, "alibi": "heads", "sink": True, "dropout_p": 0.3, "dim_v": 80},
}


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("used", [{}, USED], ids=["whole", "used"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(make, feature, used, dtype):
    features = FEATURES[feature]
    case = VarlenCase(**PADDED, **used, **features, heads=4, heads_k=2, is_causal=True, dtype=dtype)
    check(make(case))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_dropout_counts_positions_within_a_sequence(make, dtype):
    """The mask of a sequence of the batch is that of a dense problem of the same place."""
    lengths = {"lengths_q": (70, 70), "lengths_k": (90, 90), "rows_before": 5}
    varlen = make(VarlenCase(**lengths, dropout_p=0.3, dtype=dtype))
    dense = make(Case(seqlen_q=70, seqlen_k=90, dropout_p=0.3, dtype=dtype))
    q, k, v = (x[5:].unflatten(0, (2, -1)) for x in (varlen.q, varlen.k, varlen.v))
    dense = dataclasses.replace(dense, q=q, k=k, v=v)
    dense.options["rng"] = varlen.options["rng"]
    out, _, _, softmax = dense.forward(return_softmax=True)
    results = varlen.forward(return_softmax=True)
    expected, size = out.flatten(0, 1).double(), bounds.forward_oracle(dense).out_of_abs_v
    bound = (1e-5 + 2 * bounds.ROUNDING_UNIT[dtype]) * size.flatten(0, 1)
    bounds.compare("out", results[0][5:], expected, bound)
    assert torch.equal(results[3] < 0, softmax < 0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_pages(make, page_size, is_causal):
    """Keys and values through a block table; rows of pages that no sequence fills are NaN."""
    case = VarlenCase(
        lengths_q=(1, 70, 3, 2), lengths_k=(65, 130, 0, 5), page_size=page_size, is_causal=is_causal
    )
    check(make(case))


PAGED = {
    "dropout": {"dropout_p": 0.3, "window": (50, 3)},
    "everything": {"dropout_p": 0.3, "softcap": 4.0, "alibi": "batch", "sink": True, "heads": 4},
    "softcap": {"softcap": 4.0, "is_causal": True},
    "used_q": {"used_q": (1, 50, 3, 0), "sink": True},
    "odd_dims": {"dim": 59, "dim_v": 111},
    "fp32": {"dtype": torch.float32, "alibi": "heads"},
    "cut": {"max_seqlen": 64},
}


@pytest.mark.parametrize("name", PAGED)
def test_features_over_pages(make, name):
    """Also features that kernels over a cache lack; `verify` requests all optional results."""
    lengths = {"lengths_q": (1, 70, 3, 2), "lengths_k": (65, 130, 0, 5)}
    verify_families(make(VarlenCase(**lengths, page_size=16, **PAGED[name])))


def test_pages_with_used_lengths(make):
    lengths = {"lengths_q": (4, 70), "lengths_k": (65, 130), "used_k": (60, 17)}
    check(make(VarlenCase(**lengths, page_size=16)))


def test_pages_outside_of_the_cache_read_as_zero(make):
    inputs = make(VarlenCase(lengths_q=(3, 70), lengths_k=(64, 128), page_size=16))
    table = inputs.lengths["block_table"]
    zeroed = dataclasses.replace(inputs, k=inputs.k.clone(), v=inputs.v.clone())
    wild = dataclasses.replace(inputs, lengths=inputs.lengths | {"block_table": table.clone()})
    for block, page in enumerate((-1, len(inputs.k), 2**31 - 1, -(2**31))):
        for x in (zeroed.k, zeroed.v):
            x[table[1, block]] = 0
        wild.lengths["block_table"][1, block] = page
    for got, expected in zip(wild.forward()[:2], zeroed.forward()[:2], strict=True):
        bounds.check_same_bits("out or softmax_lse", got, expected)


def with_lengths(inputs: Inputs, **changes: Any) -> Inputs:
    """`inputs` with some varlen arguments replaced; lists become int32 tensors."""
    tensors = {
        name: torch.tensor(value, dtype=torch.int32, device=inputs.q.device)
        if isinstance(value, list)
        else value
        for name, value in changes.items()
    }
    return dataclasses.replace(inputs, lengths=inputs.lengths | tensors)


MALFORMED = {
    "last_beyond_total": ([0, 64, 200], [0, 64, 128]),
    "last_is_int32_max": ([0, 64, 2**31 - 1], [0, 64, 128]),
    "first_is_negative": ([-7, 64, 128], [0, 64, 128]),
    "int32_min": ([-(2**31), 64, 128], [0, 64, 128]),
    "all_beyond": ([200, 300, 400], [128, 128, 128]),
    "decreasing": ([0, 64, 10], [0, 64, 64]),
}


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_offsets_are_clamped(make, name, side):
    """Offsets are cut to [0, total], lengths to [0, max_seqlen]; nothing else is touched."""
    case = VarlenCase(lengths_q=(64, 64), lengths_k=(64, 64), max_seqlen=128, dtype=BF16)
    inputs = make(case)
    malformed, meant = MALFORMED[name]
    got = with_lengths(inputs, **{f"cu_seqlens_{side}": malformed})
    check_same(got, with_lengths(inputs, **{f"cu_seqlens_{side}": meant}))


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_offsets_that_end_with_zeros(make, side, deterministic):
    """The sequences before them have all their rows."""
    case = VarlenCase(
        lengths_q=(170, 64, 64, 64), lengths_k=(170, 64, 64, 64), max_seqlen=362, dtype=BF16,
        sink=True,
    )  # fmt: skip
    inputs = make(case)
    got, meant = (
        with_lengths(inputs, **{f"cu_seqlens_{side}": offsets})
        for offsets in ([0, 170, 234, 0, 0], [0, 170, 234, 234, 234])
    )
    check_same(got, meant)
    out, lse = meant.forward()[:2]
    grads, expected = (x.backward(out, lse, deterministic=deterministic) for x in (got, meant))
    for name in grads:
        torch.testing.assert_close(grads[name], expected[name])


@pytest.mark.parametrize("used", [[-5, 1000], [-(2**31), 2**31 - 1]], ids=str)
def test_malformed_used_lengths_are_clamped(make, used):
    inputs = make(VarlenCase(lengths_q=(64, 70), lengths_k=(64, 70), dtype=BF16))
    got = with_lengths(inputs, seqused_q=used, seqused_k=used)
    check_same(got, with_lengths(inputs, seqused_q=[0, 70], seqused_k=[0, 70]))


def test_small_max_seqlen_cuts_sequences(make):
    inputs = make(VarlenCase(lengths_q=(64, 200), lengths_k=(200, 64), dtype=BF16, is_causal=True))
    cut = with_lengths(inputs, max_seqlen_q=70, max_seqlen_k=70)
    check_same(cut, with_lengths(inputs, seqused_q=[64, 70], seqused_k=[70, 64]))


def test_max_seqlen_k_of_zero_leaves_no_key(make):
    inputs = make(VarlenCase(lengths_q=(64, 200), lengths_k=(200, 64), dtype=BF16))
    inputs = with_lengths(inputs, max_seqlen_k=0)
    out, lse = inputs.forward()[:2]
    assert not out.any() and bool((lse == -torch.inf).all())
    for deterministic in (False, True):
        grads = inputs.backward(out, lse, deterministic=deterministic)
        assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("dim", [40, 80, 96, 128, 192, 256])
def test_keys_without_queries_between_others(make, dim):
    """So many tiles that a CTA has several, with queries and without, one after the other."""
    case = VarlenCase(
        heads=8, dim=dim, lengths_q=(64, 0, 130, 0, 1) * 3, lengths_k=(64, 70, 130, 200, 300) * 3,
        dtype=BF16,
    )  # fmt: skip
    check(make(case))


@pytest.mark.parametrize("zero_tensors", [False, True])
def test_uninitialized_memory_never_shows(make, device, zero_tensors):
    inputs = make(VarlenCase(**PADDED, **USED, is_causal=True, dtype=BF16))
    if device == "cuda":
        memory.fill_freed_memory(device)
        out, lse, _, _ = inputs.forward(zero_tensors=zero_tensors)
        memory.fill_freed_memory(device)
        grads = inputs.backward(out, lse, zero_tensors=zero_tensors)
    else:
        with memory.uninitialized_is_nan():
            out, lse, _, _ = inputs.forward(zero_tensors=zero_tensors)
            grads = inputs.backward(out, lse, zero_tensors=zero_tensors)
    bounds.check_forward(out, lse, bounds.forward_oracle(inputs))
    bounds.check_gradients(grads, inputs, out)


def test_out_overloads_write_their_outputs_only(make, device):
    inputs = make(VarlenCase(**PADDED, **USED, is_causal=True, dtype=BF16))
    expected, expected_lse, _, _ = inputs.forward()
    out = memory.GuardedTensor(expected.shape, BF16, device)
    lse = memory.GuardedTensor(expected_lse.shape, torch.float32, device)
    tensors, arguments = (inputs.q, inputs.k, inputs.v), inputs.lengths | inputs.options
    op = torch.ops.flash_cute.varlen_fwd.out
    op(*tensors, **arguments, out=out.tensor, softmax_lse=lse.tensor)
    bounds.check_same_bits("out", out.tensor, expected)
    bounds.check_same_bits("softmax_lse", lse.tensor, expected_lse)
    grads = {x: memory.GuardedTensor(getattr(inputs, x).shape, BF16, device) for x in "qkv"}
    saved = (inputs.dout, *tensors, expected, expected_lse)
    outputs = {f"d{name}": guard.tensor for name, guard in grads.items()}
    torch.ops.flash_cute.varlen_bwd.out(*saved, **arguments, **outputs)
    bounds.check_gradients({name: guard.tensor for name, guard in grads.items()}, inputs, expected)
    for name, guard in {"out": out, "softmax_lse": lse, **grads}.items():
        guard.check(name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_and_row_max(make, dtype):
    lengths = {"lengths_q": (20, 0, 33), "lengths_k": (33, 5, 20), "rows_before": 2}
    inputs = make(VarlenCase(**lengths, dropout_p=0.3, is_causal=True, dtype=dtype))
    _, _, row_max, softmax = inputs.forward(return_row_max=True, return_softmax=True)
    oracle = bounds.forward_oracle(inputs)
    assert softmax.shape == (3, 2, 33, 33)
    bounds.check_lse("row_max", row_max, oracle.row_max)
    bounds.check_softmax(softmax, oracle)


def test_many_sequences(cuda):
    """More than 65535 sequences, some of them empty."""
    lengths = tuple(i % 3 for i in range(66_000))
    inputs = make_inputs(VarlenCase(lengths_q=lengths, lengths_k=lengths, dim=8, dtype=BF16), cuda)
    out, lse, _, _ = inputs.forward()
    last = slice(int(inputs.lengths["cu_seqlens_q"][-4]), None)
    tail = VarlenCase(lengths_q=lengths[-3:], lengths_k=lengths[-3:], dim=8, dtype=BF16)
    part = {name: getattr(inputs, name)[last] for name in ("q", "k", "v", "dout")}
    alone = dataclasses.replace(make_inputs(tail, cuda), **part)
    oracle = bounds.forward_oracle(alone)
    bounds.check_forward(out[last], lse[:, last], oracle)
