"""The reference of an attention layer: multi-head attention from its own weights, in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

Projection = tuple[Tensor, Tensor | None]
_ROWS = 512  # queries at a time

_NAMES = (  # of separate projections: query, key, value, output
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
)


def projections_of(named: Mapping[str, Tensor]) -> list[Projection] | None:
    """(weight, bias) of query, key, value and output, from a layer's parameters by name, or from
    tensors with their names and shapes, such as gradients. None if there are other parameters, or
    the names are not known."""
    marks = ("in_proj_weight", "q_proj.weight")
    firsts = [name for name in named if name.endswith(marks)]
    if len(firsts) != 1:
        return None
    prefix = firsts[0].removesuffix(marks[0]).removesuffix(marks[1])
    own = {name.removeprefix(prefix): p for name, p in named.items() if name.startswith(prefix)}
    if len(own) != len(named):
        return None
    return _packed(own) if marks[0] in own else _separate(own)


def _packed(own: dict[str, Tensor]) -> list[Projection] | None:
    """Queries have as many rows as the weight has columns; keys and values share the others."""
    biases, weight = own.pop("in_proj_bias", None), own.pop("in_proj_weight")
    keys, left = divmod(len(weight) - weight.shape[1], 2)
    if keys <= 0 or left:
        return None
    rows = [weight.shape[1], keys, keys]
    weights = weight.split(rows)
    parts: Sequence[Tensor | None] = (None,) * 3 if biases is None else biases.split(rows)
    out = own.pop("out_proj.weight", None)
    found = [*zip(weights, parts, strict=True)]
    return None if out is None else _if_all(own, [*found, (out, own.pop("out_proj.bias", None))])


def _separate(own: dict[str, Tensor]) -> list[Projection] | None:
    for names in _NAMES:
        if all(f"{name}.weight" in own for name in names):
            found = [(own.pop(f"{n}.weight"), own.pop(f"{n}.bias", None)) for n in names]
            return _if_all(own, found)
    return None


def _if_all(left: dict[str, Tensor], found: list[Projection]) -> list[Projection] | None:
    """The projections, if the layer has no other parameters."""
    return None if left else found


def attend(x: Tensor, projections: list[Projection], num_heads: int, causal: bool) -> Tensor:
    """x (batch, seqlen, d_model) through softmax attention, in fp64; query heads may share those of
    keys and values."""
    *inputs, (out_weight, out_bias) = projections
    head_dim = len(inputs[0][0]) // num_heads
    q, k, v = (
        linear(x, weight, bias).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for weight, bias in inputs
    )
    k, v = (y.repeat_interleave(num_heads // y.shape[1], 1) for y in (k, v))
    columns = torch.arange(x.shape[1], device=x.device)
    heads = []
    for rows in columns.split(_ROWS):  # bounds the memory of long sequences' scores
        scores = q[:, :, rows] @ k.transpose(-1, -2) * head_dim**-0.5
        if causal:
            scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
        heads.append(scores.softmax(-1) @ v)
    return linear(torch.cat(heads, 2).transpose(1, 2).flatten(2), out_weight, out_bias)
