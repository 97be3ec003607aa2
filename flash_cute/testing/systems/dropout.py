"""Counts what attention layers drop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.testing.systems.findings import Findings

P = 0.25


def check(find: Findings, case: Any, layer: Any, inputs: dict[str, Tensor | None]) -> None:
    """With equal weights 1/n and values of 1 each head's row is (kept / n) / (1 - p): a whole
    number of keys, about (1 - p) n of them. In eval nothing is dropped."""
    n, p = case.seqlen_k or case.seqlen, P
    if case.devices > 1 or case.mask or case.window != (-1, -1):
        return
    if case.is_causal or case.pattern == "causal" or case.kind == "fp8" or not case.bias:
        return
    width = case.heads * case.dim
    with torch.no_grad():
        layer.in_proj_weight.zero_()
        layer.in_proj_bias.zero_()[-(case.heads_k or case.heads) * case.dim :] = 1.0
        layer.out_proj.weight.copy_(torch.eye(width))
        layer.out_proj.bias.zero_()
    given = {name: inputs.get(name) for name in ("key", "value")}
    out = layer.train()(inputs["x"], **given).detach().double()
    kept = out.unflatten(-1, (case.heads, case.dim)) * (1 - p) * n
    slack = {"float64": 1e-3, "float32": 1e-3, "float16": 2e-3 * n, "bfloat16": 1.2e-2 * n}
    rest = float((kept - kept.round()).abs().max())
    find.that(rest <= max(slack[case.dtype], 1e-3), f"dropout keeps parts of keys: {rest}")
    same = bool((kept == kept[..., :1]).all())
    find.that(same, "dims of one head differ in what was dropped")
    rows, total = kept[..., 0].numel(), float(kept[..., 0].sum())
    deviation = (rows * n * p * (1 - p)) ** 0.5
    off = abs(total - rows * n * (1 - p))
    find.that(off <= 6 * deviation + rows * n * 2e-3 + 1, f"dropout keeps {total} of {rows * n}")
    whole = layer.eval()(inputs["x"], **given).double()
    find.close("out in eval", whole, torch.ones_like(whole), 0.01)
