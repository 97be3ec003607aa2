"""The attention functions with fp8 and descales, on meta tensors, written to, and under jvp."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flash_cute
from flash_cute.ops import has_fp8_attention
from flash_cute.testing.systems import oracle
from flash_cute.testing.systems.findings import Findings

KINDS = ("fp8", "fp8", "meta", "written", "jvp")
FORMS = ("separate", "qkvpacked", "kvpacked")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a function, dense or packed."""

    seed: int = 0
    kind: str = "fp8"
    dtype: str = "float16"  # of v, where q and k are fp8; else of all
    form: str = "separate"
    is_varlen: bool = False
    batch: int = 2
    seqlen: int = 5
    heads: int = 4
    heads_k: int = 2
    dim: int = 8
    causal: bool = False
    format: str = "e4m3"
    value_in_fp8: bool = False
    descale: str = "number"  # "", "number", "tensor", "heads", "rows" (of v channels)
    size: float = 1.0  # of the numbers, which descales bring back
    size_k: float = 1.0  # of k's


def draw(pick: random.Random) -> Case:
    kind = pick.choice(KINDS)
    heads = pick.choice((1, 2, 4))
    form = "separate" if kind in ("fp8", "jvp") else pick.choice(FORMS)
    return Case(
        seed=pick.randrange(2**31), kind=kind, form=form, is_varlen=pick.random() < 0.4,
        dtype=pick.choice(("float16", "bfloat16") if kind == "fp8" else ("float32", "float64")),
        batch=pick.choice((1, 2, 3)), seqlen=pick.choice((1, 5, 17, 40)), heads=heads,
        heads_k=heads if form == "qkvpacked" else pick.choice((1, heads)),
        dim=pick.choice((8, 16)), causal=pick.random() < 0.5,
        format=pick.choice(("e4m3", "e5m2")), value_in_fp8=pick.random() < 0.4,
        descale=pick.choice(("", "number", "tensor", "heads", "rows")),
        size=pick.choice((1.0, 1.0, 1e-3, 100.0, 1e4)), size_k=pick.choice((1.0, 1e-4, 1e3)),
    )  # fmt: skip


def check(case: Case, device: str) -> Findings:
    find = Findings()
    torch.manual_seed(case.seed)
    checks: dict[str, Callable[[Findings, Case, str], None]] = {
        "fp8": _check_fp8, "meta": _check_meta, "written": _check_written, "jvp": _check_jvp,
    }  # fmt: skip
    checks[case.kind](find, case, device)
    return find


def _shape(case: Case, heads: int) -> tuple[int, ...]:
    lead = (case.batch * case.seqlen,) if case.is_varlen else (case.batch, case.seqlen)
    return (*lead, heads, case.dim)


def _call(case: Case, tensors: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Sequences of one length, packed or not."""
    name = "flash_attn_varlen_" if case.is_varlen else "flash_attn_"
    name += "func" if case.form == "separate" else f"{case.form}_func"
    lengths: tuple[Any, ...] = ()
    if case.is_varlen:
        cu = torch.arange(case.batch + 1, dtype=torch.int32, device=tensors[0].device) * case.seqlen
        lengths = (cu, case.seqlen)
        if case.form != "qkvpacked":
            lengths = (cu, cu, case.seqlen, case.seqlen)
    return getattr(flash_cute, name)(*tensors, *lengths, causal=case.causal, **options)


def _check_fp8(find: Findings, case: Case, device: str) -> None:
    """q and k times their descales, in fp64; v may be fp8, too."""
    dtype = getattr(torch, case.dtype)
    formats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    largest = oracle.LARGEST[case.format]
    made, exact, options = [], [], dict[str, Any]()
    for name, heads in (("q", case.heads), ("k", case.heads_k), ("v", case.heads_k)):
        x = torch.randn(_shape(case, heads), device=device)
        in_fp8 = name != "v" or case.value_in_fp8
        if not in_fp8:
            made.append(x.to(dtype))
            exact.append(made[-1].double())
            continue
        size = case.size_k if name == "k" else case.size
        scale = min(size, largest / 8) if case.descale else 1.0
        made.append((x * scale).to(formats[case.format]))
        exact.append(made[-1].double())
        if case.descale:
            given, factor = _descale(case, 1 / scale, x.device)
            if case.descale == "rows":
                given = _finer(case, 1 / scale, name, heads, x.device)
                factor = given.double()
            options[f"{name}_descale"] = given
            if case.descale == "rows" and name != "v":
                exact[-1] = exact[-1] * factor
            elif case.descale == "rows":
                exact[-1] = exact[-1].view(case.batch, case.seqlen, heads, case.dim)
                exact[-1] = (exact[-1] * factor[:, None]).view(_shape(case, heads))
            elif factor.dim():  # of kv heads, q's heads being in groups of them
                factor = factor.repeat_interleave(heads // case.heads_k, -1)
                exact[-1] = exact[-1].view(case.batch, case.seqlen, heads, case.dim)
                exact[-1] = (exact[-1] * factor[:, None, :, None]).view(_shape(case, heads))
            else:
                exact[-1] = exact[-1] * factor
    out = _call(case, (made[0], made[1], made[2]), **options)
    window = (-1, 0) if case.causal else (-1, -1)
    q, k, v = (x.view(case.batch, case.seqlen, -1, case.dim) for x in exact)
    true, of_sizes = (
        torch.stack([
            oracle.attention(q[b], k[b], x[b], window=window)[0] for b in range(case.batch)
        ])
        for x in (v, v.abs())
    )  # fmt: skip
    # Factors are exact in 16 bits, except descales, which are rounded once.
    size = max(float(true.abs().max()), 1e-3)
    bound = 2.0**-5 * size
    if case.format == "e4m3" and case.value_in_fp8 and has_fp8_attention(out.device):
        bound += 1.1 * 2.0**-4 * (size + float(of_sizes.abs().max()))  # of rounded weights
    find.close("out", out.view(true.shape), true, bound)


def _descale(case: Case, number: float, device: torch.device) -> tuple[Any, Tensor]:
    if case.descale == "number":
        return number, torch.tensor(number, dtype=torch.float64, device=device)
    if case.descale == "tensor":
        return torch.tensor(number, device=device), torch.tensor(number, device=device).double()
    factor = number * (1 + torch.rand(case.batch, case.heads_k, device=device))
    return factor, factor.double()


def _finer(case: Case, number: float, name: str, heads: int, device: torch.device) -> Tensor:
    """Descales of rows of q and k, and of channels of v."""
    channels = (case.batch, heads, case.dim)
    shape = channels if name == "v" else (*_shape(case, heads)[:-1], 1)
    return number * (1 + torch.rand(shape, device=device))


def _inputs(case: Case, device: str) -> tuple[Tensor, ...]:
    dtype = getattr(torch, case.dtype)
    q, k, v = (
        torch.randn(_shape(case, n), device=device, dtype=dtype)
        for n in (case.heads, case.heads_k, case.heads_k)
    )
    if case.form == "qkvpacked":
        return (torch.stack((q, k, v), -3).requires_grad_(),)
    if case.form == "kvpacked":
        return q.requires_grad_(), torch.stack((k, v), -3).requires_grad_()
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _check_meta(find: Findings, case: Case, device: str) -> None:
    """A training step without memory has the shapes of one with it."""
    real = _inputs(case, device)
    meta = tuple(x.detach().to("meta").requires_grad_() for x in real)
    with find.trying("a step on meta tensors"):
        out = _call(case, meta)
        out.sum().backward()
        for x, y in zip(meta, real, strict=True):
            shape = None if x.grad is None else x.grad.shape
            find.that(shape == y.shape, f"a gradient on meta has shape {shape}")
    true = _call(case, real)
    find.that(out.shape == true.shape and out.dtype == true.dtype, "out on meta differs")


def _check_written(find: Findings, case: Case, device: str) -> None:
    """A result may be written in place; gradients are those of the new values, or refused."""
    first, second = _inputs(case, device), []
    with find.trying("a write to a result"):
        out = _call(case, first)
        out.mul_(2)
        try:
            out.sum().backward()
        except RuntimeError as error:  # out is saved for backward, which may say so
            find.that("modified by an inplace operation" in str(error), str(error)[:200])
            return
    for x in first:
        second.append(x.detach().clone().requires_grad_())
    (2 * _call(case, tuple(second))).sum().backward()
    if find.failures:
        return
    unit = 1e-9 if case.dtype == "float64" else 1e-5
    for number, (x, y) in enumerate(zip(first, second, strict=True)):
        assert x.grad is not None and y.grad is not None
        size = max(float(y.grad.abs().max()), 1e-3)
        find.close(f"gradient {number} after a write", x.grad, y.grad, unit * size)


def _check_jvp(find: Findings, case: Case, device: str) -> None:
    """Forward derivatives equal finite differences in fp64, or are refused; on the CPU."""
    inputs = tuple(x.detach() for x in _inputs(case, "cpu"))
    tangents = tuple(torch.randn_like(x) for x in inputs)
    try:
        both: Any = torch.func.jvp(lambda *x: _call(case, x), inputs, tangents)
    except (RuntimeError, NotImplementedError, ValueError):
        return
    step = 1e-5
    ahead, behind = (
        _call(
            case, tuple(x.double() + s * t.double() for x, t in zip(inputs, tangents, strict=True))
        )
        for s in (step, -step)
    )
    true = (ahead - behind) / (2 * step)
    find.close("jvp", both[1], true, 1e-3 * max(float(true.abs().max()), 1e-3))
