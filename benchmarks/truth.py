"""What results of a case are held to: fp64 attention of a sample of its heads, and limits."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from flash_cute.reference import attention

from .suites import Case, Inputs

# A result is wrong when ||x - x64|| / ||x64|| exceeds the limit of its input dtype: about twice
# what a correct kernel shows, and less than a forgotten softcap, or a window that is off by one.
RELATIVE_LIMITS = {"bf16": 6e-3, "fp16": 8e-4, "e4m3": 1e-1}
# ... or when any single row is off by this share of its own norm (at least of the mean norm).
ROW_LIMIT = 0.5

_SAMPLED_ROWS = 2**15  # query rows compared, spread over whole (batch, kv head) pairs
_SCORES_AT_ONCE = 2**25  # of the reference, elements of fp64
_RULES = {"softcap", "alibi_slopes", "dropout_p"}  # options that change more than a mask


@dataclass(frozen=True)
class Truth:
    """The fp64 results of one (batch, kv head) pair: out and dq (seqlen_q, heads / heads_k, dim),
    dk and dv (seqlen_k, dim); only "out" without a backward."""

    batch: int
    head_k: int
    values: dict[str, torch.Tensor]


def reference(case: Case, x: Inputs, backward: bool, seed: int) -> list[Truth]:
    """Unfused fp64 attention, in chunks of rows, of a sample of whole (batch, kv head) pairs.

    Whole pairs, because a row of dk needs every query. The first and the last pair are always
    there; 4 to 64 more are drawn at random, as many as hold 2**15 query rows.
    """
    pairs = [(b, h) for b in range(case.batch) for h in range(case.heads_k)]
    count = min(len(pairs), max(4, min(64, _SAMPLED_ROWS // case.seqlen_q)))
    drawn = {pairs[0], pairs[-1], *random.Random(seed).sample(pairs, count)}
    truth = _ruled_truth if _RULES & x.options.keys() else _pair_truth
    return [Truth(b, h, truth(case, x, b, h, backward)) for b, h in sorted(drawn)]


def _ruled_truth(
    case: Case, x: Inputs, batch: int, head_k: int, backward: bool
) -> dict[str, torch.Tensor]:
    """From flash_cute's reference and its autograd, not in chunks: one pair fits in memory."""
    tensors = (_pair(case, t, batch, head_k)[None].double() for t in (x.q, x.k, x.v))
    leaves = [t.requires_grad_(backward) for t in tensors]
    options = dict(x.options)
    if (slopes := options.get("alibi_slopes")) is not None:
        options["alibi_slopes"] = slopes.view(case.heads_k, -1)[head_k]
    first = batch * case.heads_k + head_k  # dropout counts heads through all batches
    out = attention(*leaves, is_causal=case.causal, first=first, **options).out
    values = {"out": out.detach()[0]}
    if backward:
        dout = _pair(case, x.dout, batch, head_k)[None].double()
        dq, dk, dv = (t[0] for t in torch.autograd.grad(out, leaves, dout))
        values |= {"dq": dq, "dk": dk[:, 0], "dv": dv[:, 0]}
    return values


def _pair_truth(
    case: Case, x: Inputs, batch: int, head_k: int, backward: bool
) -> dict[str, torch.Tensor]:
    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return _pair(case, tensor, batch, head_k).float().double()

    q, dout = wide(x.q), wide(x.dout)  # (seqlen_q, group, dim)
    k, v = wide(x.k)[:, 0], wide(x.v)[:, 0]  # (seqlen_k, dim)
    scale = case.dim**-0.5
    out, dq, dk, dv = (torch.zeros_like(t) for t in (dout, q, k, v))
    rows = max(1, _SCORES_AT_ONCE // (q.shape[1] * case.seqlen_k))
    keys = torch.arange(case.seqlen_k, device=q.device)
    for start in range(0, case.seqlen_q, rows):
        part = slice(start, start + rows)
        scores = torch.einsum("igd,jd->igj", q[part], k) * scale
        if case.causal:
            own = keys[case.seqlen_k - case.seqlen_q :][part, None]
            hidden = keys > own  # (rows, seqlen_k)
            if case.window is not None:
                hidden |= keys < own - case.window
            scores.masked_fill_(hidden[:, None], -math.inf)
        p = scores.softmax(-1)
        out[part] = torch.einsum("igj,jd->igd", p, v)
        if backward:
            dp = torch.einsum("igd,jd->igj", dout[part], v)
            ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
            dq[part] = torch.einsum("igj,jd->igd", ds, k)
            dk += torch.einsum("igj,igd->jd", ds, q[part])
            dv += torch.einsum("igj,igd->jd", p, dout[part])
    return {"out": out, "dq": dq, "dk": dk, "dv": dv} if backward else {"out": out}


def _pair(case: Case, tensor: torch.Tensor, batch: int, head_k: int) -> torch.Tensor:
    """The heads of a (batch, seqlen, heads, dim) tensor that belong to one kv head."""
    group = tensor.shape[2] // case.heads_k
    return tensor[batch, :, head_k * group : (head_k + 1) * group]


def check(
    case: Case, results: dict[str, torch.Tensor], truths: list[Truth] | None, slack: float = 1.0
) -> tuple[dict[str, dict[str, float | None]], str]:
    """Errors of the named results (batch, seqlen, heads, dim), and what is wrong ("" if nothing).

    Without truths, that of dropout with random numbers of a library's own, no errors are known.

    Errors: "relative", ||x - x64|| / ||x64|| over the sample, and "worst_row", the largest
    ||row - row64|| / max(||row64||, mean ||row64||); None where they are not finite. That no
    element is NaN or infinite is checked on the whole tensor. The relative error may be ``slack``
    times the limit.
    """
    errors: dict[str, dict[str, float | None]] = {}
    faults = []
    for name, result in results.items():
        if truths is None:
            faults += [] if bool(torch.isfinite(result).all()) else [f"{name}: not finite"]
            continue
        relative, worst_row = _error(case, name, result, truths)
        if not (relative <= slack * RELATIVE_LIMITS[case.dtype] and worst_row <= ROW_LIMIT):
            faults.append(f"{name}: relative error {relative:.2g}, worst row {worst_row:.2g}")
        elif not bool(torch.isfinite(result).all()):
            faults.append(f"{name}: not finite outside the compared rows")
        measured = {"relative": relative, "worst_row": worst_row}
        errors[name] = {k: e if math.isfinite(e) else None for k, e in measured.items()}
    return errors, "; ".join(faults)


def _error(case: Case, name: str, result: torch.Tensor, truths: list[Truth]) -> tuple[float, float]:
    """(relative error, worst row) of one result over all sampled pairs."""
    square, true_square, worst = 0.0, 0.0, 0.0
    for truth in truths:
        expected = truth.values[name]
        actual = _pair(case, result, truth.batch, truth.head_k).double().reshape(expected.shape)
        norms = expected.norm(dim=-1)
        misses = (actual - expected).norm(dim=-1)
        row = (misses / norms.clamp_min(norms.mean())).max().item()
        worst = row if math.isnan(row) else max(worst, row)
        square += misses.square().sum().item()
        true_square += norms.square().sum().item()
    return math.sqrt(square / true_square), worst
