"""Error bounds of attention against the fp64 oracle, and the comparisons that enforce them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_cute.call.philox import dropout_rate
from flash_cute.testing.cases import Inputs

ROUNDING_UNIT = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
"""Largest relative error of rounding a number to the dtype."""


@dataclass(frozen=True)
class Oracle:
    """fp64 answers to one problem. `out_of_abs_v` is P|V|, the scale of rounding errors in out.

    `out_of_smallest` bounds what weights add to out that are too small for the dtype.
    `logit_size` is the scale of rounding errors in the logits: it bounds |q||k| softmax_scale and,
    with ALiBi, scores near the largest of a row, whose weights are not below 1 / (number of keys).
    """

    out: Tensor
    softmax_lse: Tensor
    row_max: Tensor
    softmax: Tensor
    out_of_abs_v: Tensor
    out_of_smallest: Tensor
    logit_size: float


def forward_oracle(inputs: Inputs) -> Oracle:
    """The oracle's forward in fp64, with V and |V| side by side in one call."""
    both = torch.cat((inputs.v, inputs.v.abs()), -1)
    out, softmax_lse, row_max, softmax = inputs.reference(v=both)
    out, out_of_abs_v = out.chunk(2, -1)
    logit_size = _logit_size(inputs)
    if inputs.options["alibi_slopes"] is not None:
        logit_size += largest(row_max) + math.log(1 + inputs.k.shape[-3])
    out_of_smallest = torch.full_like(out, smallest(inputs.q.dtype))
    if inputs.q.dtype == torch.float16:
        out_of_smallest *= 1 + _count_of_smallest(inputs, softmax_lse, row_max)
    return Oracle(out, softmax_lse, row_max, softmax, out_of_abs_v, out_of_smallest, logit_size)


def _count_of_smallest(inputs: Inputs, softmax_lse: Tensor, row_max: Tensor) -> Tensor:
    """How much the smallest fp16 number weighs in out, if every visible key has that weight.

    Weights are rounded relative to the row's largest one, and multiplied by `_keep_scale`.
    """
    off: dict[str, Any] = {
        "softcap": 0.0,
        "alibi_slopes": None,
        "sink": None,
        "dropout_p": 0.0,
        "rng": None,
    }
    mean, log_count, _, _ = inputs.reference(v=inputs.v.abs(), softmax_scale=0.0, **off)
    largest = (row_max - softmax_lse).exp().nan_to_num(0.0) * _keep_scale(inputs)
    return mean * (log_count.exp() * largest).transpose(-1, -2)[..., None]


def check_forward(out: Tensor, softmax_lse: Tensor, oracle: Oracle) -> float:
    """Assert |out - o64| <= u |o64| + 2u P64|V| elementwise, and softmax_lse close to the oracle's.

    Numbers that the dtype rounds to 0 are allowed in addition.
    For fp16 and bf16 u is the rounding unit: sums are fp32, so only P and out are rounded to it. In
    fp32 and fp64 logits and sums are rounded to the same unit; a logit's error is about
    |q||k| softmax_scale units and enters P as a relative error twice (numerator and denominator),
    hence u is `4 + 4 * logit_size` units.

    Returns:
        The largest error, as a fraction of its bound.

    Raises:
        AssertionError: NaN or infinities differ in position, or an element exceeds its bound; names
            the worst coordinate, what was got, what was expected and the bound.
    """
    unit = ROUNDING_UNIT[out.dtype]
    if out.dtype in (torch.float32, torch.float64):
        unit *= 4 + 4 * oracle.logit_size
    bound = unit * oracle.out.abs() + 2 * unit * oracle.out_of_abs_v + oracle.out_of_smallest
    worst = compare("out", out, oracle.out, bound)
    lse_error = check_lse("softmax_lse", softmax_lse, oracle.softmax_lse, oracle.logit_size)
    return max(worst, lse_error)


def check_lse(name: str, got: Tensor, expected: Tensor, logit_size: float = 0.0) -> float:
    """Assert that log-sums, or row maxima, are within 1e-5 + 2e-6 |expected| + 2^-24 logit_size.

    The last is what fp32 sums of products lose, of logits that ALiBi may cancel. For fp64 the bound
    is 2^-29 of that. Returns and raises as `check_forward`.
    """
    return compare(name, got, expected, _lse_bound(got.dtype, expected, logit_size))


def check_softmax(got: Tensor, oracle: Oracle) -> float:
    """Assert that the signed probabilities are the oracle's.

    A probability p is exp(logit - lse), rounded: to its dtype's unit come the bound of lse and the
    rounding of the logit, in fp32 or better; it grows with log(p). That leaves no room for another
    sign, unless p is so small that it may be rounded to 0. Returns and raises as `check_forward`.
    """
    statistic = torch.promote_types(got.dtype, torch.float32)
    logit_unit = 4 * ROUNDING_UNIT[statistic]
    lse = torch.tensor(largest(oracle.softmax_lse), device="cpu")
    relative = ROUNDING_UNIT[got.dtype] + float(_lse_bound(statistic, lse))
    relative += logit_unit * (1 + oracle.logit_size)
    p = oracle.softmax.abs()
    bound = relative * p + logit_unit * torch.special.entr(p) + smallest(got.dtype)
    return compare("softmax", got, oracle.softmax, bound)


def smallest(dtype: torch.dtype) -> float:
    """The error of flushing to 0: the dtype's least subnormal, and subnormals of fp32 and fp64."""
    own = torch.finfo(dtype)
    return max(own.tiny * own.eps, torch.finfo(torch.promote_types(dtype, torch.float32)).tiny)


def _lse_bound(dtype: torch.dtype, lse: Tensor, logit_size: float = 0.0) -> Tensor:
    unit = 2.0**-29 if dtype == torch.float64 else 1.0
    return unit * (1e-5 + 2e-6 * lse.abs() + ROUNDING_UNIT[torch.float32] * logit_size)


def compare(name: str, got: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Assert equal NaN and infinities, and |got - expected| <= bound elsewhere, elementwise.

    Returns and raises as `check_forward`.
    """
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    got = got.to(expected.dtype)
    error = (got - expected).abs()
    if error.numel() and error.max() < torch.inf and (error <= bound).all():  # else it says why
        return float((error / bound).nan_to_num(nan=0.0).max())  # 0 / 0 is none
    finite = got.isfinite() & expected.isfinite()
    same = (got == expected) | (got.isnan() & expected.isnan())
    excess = torch.where(finite & (error > 0), error / bound, torch.where(same, 0.0, torch.inf))
    excess = excess.nan_to_num(nan=torch.inf, posinf=torch.inf)
    ratio = float(excess.max()) if excess.numel() else 0.0
    if ratio <= 1:
        return ratio
    worst = torch.unravel_index(excess.argmax(), excess.shape)
    raise AssertionError(
        f"{name}{[int(i) for i in worst]}: got {got[worst]:.9g}, expected {expected[worst]:.9g}, "
        f"bound {bound[worst]:.3g}, error {ratio:.3g} times that; {int((excess > 1).sum())} of "
        f"{excess.numel()} elements are wrong"
    )


def check_same_bits(name: str, got: Tensor, expected: Tensor) -> None:
    """Assert equal shape, dtype and bytes (NaN equal to NaN of the same bits, +0 unequal to -0).

    Raises:
        AssertionError: names the first coordinate that differs.
    """
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{name}: dtype {got.dtype}, expected {expected.dtype}"
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    differs = got.contiguous().view(integers) != expected.contiguous().view(integers)
    if differs.any():
        first = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}{list(first)}: got {got[first]:.9g}, expected {expected[first]:.9g}; "
            f"the bits of {int(differs.sum())} of {differs.numel()} elements differ"
        )


def check_gradients(
    got: Mapping[str, Tensor], inputs: Inputs, out: Tensor, with_dlse: bool = False
) -> float:
    """Assert that every row's error is at most twice that of the unfused chain in the same dtype.

    A row is a vector along the last dim, its error the Euclidean distance to the fp64 gradient.
    Where rows have fewer than 8 numbers, chance often makes the chain nearly exact, so the chain's
    largest error counts for all of them. Where it overflows, as fp16 may by dropout's factor, it
    counts as exact. `gradient_floor` is allowed on top. So is what follows from `out`, the
    forward's answer that `got` (gradients by name: q, k, v, sink) starts from.

    Returns:
        The largest error, as a fraction of what is allowed.

    Raises:
        AssertionError: names the tensor, the row, its error, the chain's and the floor.
    """
    oracle, from_out, softmax_lse = _oracle_gradients(inputs, out, with_dlse)
    lse_size = 0.0 if inputs.options["alibi_slopes"] is None else largest(softmax_lse)
    chain = _Graph(inputs, None).gradients(inputs.dout, inputs.dlse if with_dlse else None)
    key_weights = _key_weights(inputs)
    ratios = [0.0]
    for name, expected in oracle.items():
        assert got[name].shape == expected.shape, f"d{name}: shape {got[name].shape}"
        error = (got[name].double() - expected).norm(dim=-1)
        chain_error = (chain[name].double() - expected).norm(dim=-1).nan_to_num(posinf=0.0)
        if expected.shape[-1] < 8 and expected.numel() > 0:
            chain_error = chain_error.max().expand_as(error)
        floor = gradient_floor(name, inputs, expected, key_weights, lse_size)
        floor += (1 + 4 * ROUNDING_UNIT[inputs.q.dtype]) * from_out[name].norm(dim=-1)
        excess = torch.where(error == 0, 0, error / (2 * chain_error + floor))
        excess = excess.nan_to_num(nan=torch.inf, posinf=torch.inf)
        ratios.append(float(excess.max()) if excess.numel() else 0.0)
        if ratios[-1] > 1:
            worst = torch.unravel_index(excess.argmax(), excess.shape)
            raise AssertionError(
                f"d{name}{[int(i) for i in worst]}: row error {error[worst]:.4g}, {ratios[-1]:.3g} "
                f"times what is allowed: twice the unfused chain's {chain_error[worst]:.4g} and a "
                f"floor of {floor[worst]:.3g}; {int((excess > 1).sum())} of {excess.numel()} rows "
                f"are wrong; norm of the row {expected[worst].norm():.4g}"
            )
    return max(ratios)


def gradient_floor(
    name: str, inputs: Inputs, expected: Tensor, key_weights: Tensor, lse_size: float
) -> Tensor:
    """The row error that a correct kernel may have, even where the chain is exact by luck.

    Three terms. Rounding the exact gradient to its dtype: u |row|, and the least number of the
    dtype an element; in 16 bits once more, for the one operand that makes a whole row if it is
    alone: dS or P of a query and its single key. Sums in fp32 (fp64 for fp64 inputs) in an order
    that is not the chain's: `steps` roundings, each one `unit` times the norms of a summand's
    operands and of the row.
    Summands of k and v are weighted by P, whose sums over the queries are `key_weights`. Steps are
    the errors of a logit and of the saved softmax_lse, from which P is recomputed, `logit_size`
    each, and 8 for exp2 and sums. ALiBi of far keys adds thousands to both, `lse_size`: what is
    lost of softmax_lse scales all P of a row alike, and hence its whole gradient of q.
    """
    unit = ROUNDING_UNIT[torch.promote_types(inputs.q.dtype, torch.float32)]
    norm_dout, norm_q, norm_k, norm_v = (
        row_norm(x) for x in (inputs.dout, inputs.q, inputs.k, inputs.v)
    )
    scale, keep_scale = _softmax_scale(inputs), max(1.0, _keep_scale(inputs))
    sizes: dict[str, Tensor | float] = {
        "q": scale * norm_dout * norm_v * norm_k,
        "k": scale * norm_dout * norm_v * norm_q * key_weights,
        "v": norm_dout * key_weights,
        "sink": norm_dout * norm_v,
    }
    row = expected.norm(dim=-1)
    steps = 8 + 2 * _logit_size(inputs)
    dtype = torch.float32 if name == "sink" else inputs.q.dtype
    roundings = 2 if dtype in (torch.float16, torch.bfloat16) else 1
    rounding = roundings * ROUNDING_UNIT[dtype] * row + expected.shape[-1] ** 0.5 * smallest(dtype)
    size = keep_scale * sizes[name]
    of_lse = 2 * lse_size * unit * (row if name == "q" else size + row)
    return rounding + steps * unit * (size + row) + of_lse


def _key_weights(inputs: Inputs) -> Tensor:
    """Sums of P over the queries of each key, at least 1, with k's shape without head dim."""
    ones = torch.ones_like(inputs.v[..., :1], dtype=torch.float64, requires_grad=True)
    out = inputs.reference(v=ones, dropout_p=0.0, rng=None)[0]
    if not out.requires_grad:  # no sequence
        return ones.detach()[..., 0]
    (weights,) = torch.autograd.grad(out.sum(), ones)
    return weights[..., 0].nan_to_num(1.0).clamp(min=1.0)


class _Graph:
    """The reference's forward with its autograd graph; dtype None is the unfused chain."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype | None) -> None:
        sink = inputs.options["sink"]
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        tensors = tensors if sink is None else {**tensors, "sink": sink}
        self.leaves = {
            name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in tensors.items()
        }
        self.out, self.softmax_lse, _, _ = inputs.reference(dtype, **self.leaves)

    def gradients(self, dout: Tensor | None, dlse: Tensor | None) -> dict[str, Tensor]:
        """Gradients by name, from those of out and of softmax_lse (ignored where that is -inf)."""
        seen = self.softmax_lse.isfinite()
        loss = self.softmax_lse.new_zeros(())
        if dout is not None:
            loss = loss + (self.out * dout).sum()
        if dlse is not None:
            loss = loss + (self.softmax_lse[seen] * dlse[seen]).sum()
        if not loss.requires_grad:  # no sequence, hence nothing that depends on the leaves
            return {name: torch.zeros_like(x) for name, x in self.leaves.items()}
        grads = torch.autograd.grad(
            loss, list(self.leaves.values()), retain_graph=True, materialize_grads=True
        )
        return dict(zip(self.leaves, grads, strict=True))


def _oracle_gradients(
    inputs: Inputs, out: Tensor, with_dlse: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """fp64 gradients, their change if they start from `out` instead of the exact out, and
    softmax_lse.

    Backward takes rowsum(dout * out) from the out that forward rounded and saved, so that sum is
    off by rowsum(dout * (out - o64)). Its error acts on the logits as a gradient of softmax_lse.
    """
    graph = _Graph(inputs, torch.float64)
    oracle = graph.gradients(inputs.dout, inputs.dlse if with_dlse else None)
    error = (inputs.dout.double() * (out.double() - graph.out.detach())).sum(-1)
    moved = graph.gradients(None, error.transpose(-1, -2))
    return oracle, moved, graph.softmax_lse.detach()


def largest(x: Tensor) -> float:
    """The largest magnitude of finite elements."""
    return float(x.abs().nan_to_num(0.0, posinf=0.0).max()) if x.numel() else 0.0


def row_norm(x: Tensor) -> float:
    """The largest Euclidean norm along the last dim, of finite rows."""
    norms = x.double().norm(dim=-1)
    return float(norms.nan_to_num(posinf=0.0).max()) if x.numel() else 0.0


def _softmax_scale(inputs: Inputs) -> float:
    scale = inputs.options["softmax_scale"]
    return inputs.q.shape[-1] ** -0.5 if scale is None else abs(scale)


def _keep_scale(inputs: Inputs) -> float:
    return dropout_rate(inputs.options["dropout_p"])[1]


def _logit_size(inputs: Inputs) -> float:
    return _softmax_scale(inputs) * row_norm(inputs.q) * row_norm(inputs.k)
