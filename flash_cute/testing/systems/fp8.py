"""Linear layers and attention with fp8 products."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.precision import FP8Config, FP8Format, FP8LinearLayer, convert_model_to_fp8
from flash_cute.precision.fp8_attention import FP8MultiheadAttention
from flash_cute.testing.systems import contract, oracle
from flash_cute.testing.systems.findings import Findings

KINDS = ("linear", "linear", "delayed", "delayed", "attention", "refusal")
FORMATS = ("e4m3", "e5m2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer, or an attention."""

    seed: int = 0
    kind: str = "linear"
    also: str = ""
    dtype: str = "float32"
    rows: int = 5
    inputs: int = 6
    outputs: int = 4
    bias: bool = True
    forward: str = "e4m3"
    backward: str = "e5m2"
    margin: int = 0
    size: float = 1.0  # of the input's numbers
    frozen: str = ""  # "input", "weight"
    autocast: bool = False
    history: int = 3
    uses: tuple[str, ...] = ()  # of a layer with delayed scales: train, eval, bad, load, grown
    heads: int = 2
    seqlen: int = 5
    seqlen_k: int = 0
    batch_first: bool = True
    need_weights: bool = False
    mask: str = ""  # "padding", "causal", "both"
    argument: str = ""
    value: str = ""


def draw(pick: random.Random) -> Case:
    kind = pick.choice(KINDS)
    fields: dict[str, Any] = {
        "seed": pick.randrange(2**31), "kind": kind, "rows": pick.choice((0, 1, 3, 17)),
        "inputs": pick.choice((1, 6, 16, 33)), "outputs": pick.choice((1, 4, 16, 35)),
        "bias": pick.random() < 0.7, "forward": pick.choice(FORMATS),
        "backward": pick.choice(FORMATS), "margin": pick.choice((0, 0, 1, 3)),
        "size": pick.choice((1.0, 1.0, 1e-5, 300.0)),
        "dtype": pick.choice(("float32", "float32", "float64", "bfloat16", "float16")),
        "also": pick.choice(("", "state", "copies", "leak", "repeat", "mode")),
    }  # fmt: skip
    if kind == "linear":
        fields["frozen"] = pick.choice(("", "", "input", "weight"))
        fields["autocast"] = fields["dtype"] == "float32" and pick.random() < 0.3
    elif kind == "delayed":
        fields["history"] = pick.choice((1, 2, 3, 16))
        uses = ("train", "train", "train", "eval", "eval", "bad", "load", "grown")
        fields["uses"] = tuple(pick.choice(uses) for _ in range(pick.randint(2, 8)))
        fields["rows"] = max(fields["rows"], 1)
    elif kind == "attention":
        fields |= {
            "heads": pick.choice((1, 2, 4)), "inputs": pick.choice((1, 4, 8)),
            "seqlen": pick.choice((1, 5, 12)), "seqlen_k": pick.choice((0, 0, 3, 7)),
            "batch_first": pick.random() < 0.5, "need_weights": pick.random() < 0.5,
            "mask": pick.choice(("", "padding", "causal", "both")), "rows": pick.choice((1, 3)),
            "size": pick.choice((1.0, 1.0, 60.0)),
        }  # fmt: skip
    elif kind == "refusal":
        fields["argument"] = pick.choice(tuple(REFUSED))
        fields["value"] = pick.choice(REFUSED[fields["argument"]])
    return Case(**fields)


REFUSED: contract.Refusals = {
    "history_length": contract.WHOLE,
    "margin": ("minus_one", "true", "nan", "half", "text", "none"),
    "growth_interval": contract.WHOLE,
    "loss_scale": ("zero", "minus_one", "nan", "inf", "text", "true"),
    "scaling": ("text", "none", "minus_one"),
    "forward_format": ("text", "none", "zero"),
    "backward_format": ("text", "none", "zero"),
    "skip": ("text", "minus_one", "none"),
    "in_features": ("minus_one", "half", "text", "true", "nan"),
    "out_features": ("minus_one", "half", "text", "true", "nan"),
    "fp8_config": ("text", "zero"),
}


def check(case: Case, device: str) -> Findings:
    find = Findings()
    checks = {
        "linear": _check_linear, "delayed": _check_delayed, "attention": _check_attention,
        "refusal": _check_refusal,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checks[case.kind](find, case, device)
    return find


def _check_refusal(find: Findings, case: Case, device: str) -> None:
    name, value = case.argument, contract.BAD[case.value]

    def make() -> Any:
        if name.endswith("_features"):
            return FP8LinearLayer(**({"in_features": 4, "out_features": 4} | {name: value}))
        if name == "fp8_config":
            return convert_model_to_fp8(nn.Linear(4, 4), value)
        return FP8Config(**{name: value})

    find.refused(make, f"{name}={value!r}", name)


# --- one layer -----------------------------------------------------------------------------------


def config_of(case: Case, scaling: str = "dynamic") -> FP8Config:
    return FP8Config(
        forward_format=FP8Format(case.forward), backward_format=FP8Format(case.backward),
        scaling=scaling, history_length=case.history, margin=case.margin,
    )  # fmt: skip


def layer_of(case: Case, device: str, seed: int, scaling: str = "dynamic") -> FP8LinearLayer:
    torch.manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    config = config_of(case, scaling)
    return FP8LinearLayer(case.inputs, case.outputs, case.bias, config, dtype=dtype).to(device)


def rows_of(case: Case, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.rows, case.inputs, generator=generator) * case.size
    return x.to(device, getattr(torch, case.dtype))


def products(
    case: Case, x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor,
    bounds: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """out, dx, dweight and dbias of rounded operands in fp64; ``bounds`` are delayed scales'."""
    of = bounds or {}
    x8 = oracle.fp8_scaled(x, case.forward, case.margin, of.get("input"))
    w8 = oracle.fp8_scaled(weight, case.forward, case.margin, of.get("weight"))
    dy8 = oracle.fp8_scaled(dy, case.backward, case.margin, of.get("gradient"))
    out = x8 @ w8.t()
    return {
        "out": out if bias is None else out + bias.double(),
        "dx": dy8 @ w8,
        "dweight": dy8.t() @ x8,
        "dbias": dy.double().sum(0),
    }


def run(layer: nn.Module, x: Tensor, dy: Tensor, frozen: str = "") -> dict[str, Tensor]:
    """The same by the layer."""
    leaf = x.detach().requires_grad_(frozen != "input")
    out = layer(leaf)
    named = {"x": leaf, **dict(layer.named_parameters())}
    wanted = {name: y for name, y in named.items() if y.requires_grad}
    grads = torch.autograd.grad(out, list(wanted.values()), dy.to(out.dtype))
    names = [f"d{name}" for name in wanted]
    return {"out": out.detach()} | dict(zip(names, grads, strict=True))


def _compare(
    find: Findings, case: Case, got: dict[str, Tensor], true: dict[str, Tensor], when: str = ""
) -> None:
    """The bound: sums of at most 35 products in fp32, and one rounding to the dtype."""
    unit = {"float32": 2e-6, "float64": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}[case.dtype]
    tiny = 2.0**-24 if case.dtype == "float16" else 1e-30
    for name, x in true.items():
        if name in got:
            size = float(x.abs().max()) if x.numel() else 0.0
            if case.dtype == "float16" and size > 6e4:
                continue  # the true result overflows fp16
            find.close(f"{name}{when}", got[name], x, unit * size + tiny)


def _check_linear(find: Findings, case: Case, device: str) -> None:
    layer = layer_of(case, device, case.seed)
    x = rows_of(case, device, case.seed)
    dy = torch.randn(case.rows, case.outputs).to(x)
    inputs = {"x": x, "weight": layer.weight}
    layer.weight.requires_grad_(case.frozen != "weight")

    def step() -> dict[str, Tensor]:
        with torch.autocast(device, torch.bfloat16, enabled=case.autocast):
            return run(layer, x, dy, case.frozen)

    got = contract.inputs_are_kept(find, inputs, step)
    dtype = torch.bfloat16 if case.autocast else x.dtype
    find.that(got["out"].dtype == dtype, f"out has dtype {got['out'].dtype}")
    dy = dy.to(dtype)
    true = products(case, x, layer.weight, layer.bias, dy)
    _compare(find, replace(case, dtype="bfloat16") if case.autocast else case, got, true)
    if case.also == "state":
        fresh = layer_of(case, device, case.seed + 1)
        contract.state_dict_holds_all(find, layer, fresh, lambda m: m(x))
        plain = nn.Linear(case.inputs, case.outputs, case.bias)
        find.that(
            plain.state_dict().keys() == layer.state_dict().keys(), "keys are not nn.Linear's"
        )
    elif case.also == "copies":
        contract.copies_equal(find, layer, lambda m: m(x))
    elif case.also == "leak":
        contract.nothing_is_left(find, lambda: layer(x.requires_grad_()).sum())
    elif case.also == "repeat":
        find.equal("repeated call", step(), got)
    elif case.also == "mode":
        contract.mode_reaches_all(find, layer)


class _History:
    """The expected histories of a layer with delayed scales, newest first."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: dict[str, list[float]] = {"input": [], "weight": [], "gradient": []}

    def bound(self, role: str, x: Tensor, record: bool) -> Tensor:
        """The value that determines the scale of x."""
        own = x.detach().abs().max().float()
        past = max([*self.seen[role][: self.length], 0.0])
        if record:
            self.seen[role].insert(0, float(own) if bool(own.isfinite()) else 0.0)
        if past == 0 or not record:
            return own
        limit = torch.tensor(past, device=x.device)
        return torch.maximum(own, limit) if role == "weight" else limit


def _check_delayed(find: Findings, case: Case, device: str) -> None:
    """In training scales follow the largest values of the last uses, for weights also the present
    one; in eval all are dynamic. Values that are not finite do not count. Loading may clear all
    histories, or none."""
    layer = layer_of(case, device, case.seed, "delayed")
    known = [_History(case.history)]
    for number, use in enumerate(case.uses):
        x = rows_of(case, device, case.seed + number) * (1 + number % 3)
        dy = torch.randn(case.rows, case.outputs).to(x)
        if use == "load":
            other = layer_of(case, device, case.seed + number).state_dict()
            layer.load_state_dict({name: 8 * value for name, value in other.items()})
            known.append(_History(case.history))
        elif use == "grown":
            layer.weight.data.mul_(4)
        record = use in ("train", "bad")
        layer.train(record)
        if use == "bad":
            x[0, 0] = torch.nan
        roles = {"input": x, "weight": layer.weight, "gradient": dy}
        bounds = [{role: h.bound(role, y, record) for role, y in roles.items()} for h in known]
        got = run(layer, x, dy)
        if use == "bad":
            continue
        found = [Findings() for _ in known]
        for one, of in zip(found, bounds, strict=True):
            true = products(case, x, layer.weight, layer.bias, dy, of)
            _compare(one, case, got, true, f" of use {number} ({use})")
        fitting = [h for h, one in zip(known, found, strict=True) if not one.failures]
        if not fitting:
            find.failures += found[0].failures
            return
        known, find.worst = fitting, max(find.worst, min(one.worst for one in found))


# --- attention -----------------------------------------------------------------------------------


def _check_attention(find: Findings, case: Case, device: str) -> None:
    torch.manual_seed(case.seed)
    width, dtype = case.heads * case.inputs, torch.float32
    dtype = torch.float16 if case.dtype == "float16" else dtype
    first = {"bias": case.bias, "batch_first": case.batch_first}
    plain = nn.MultiheadAttention(width, case.heads, device=device, **first).to(dtype)
    layer = FP8MultiheadAttention.from_attention(plain, config_of(case)).eval()
    shape = (case.rows, case.seqlen, width)
    x = torch.randn(shape, device=device).to(dtype) * case.size
    key = x
    if case.seqlen_k:
        key = torch.randn(case.rows, case.seqlen_k, width, device=device).to(dtype) * case.size
    keys = key.shape[1]
    masks: dict[str, Any] = {}
    if case.mask in ("padding", "both"):
        lengths = torch.randint(1, keys + 1, (case.rows, 1), device=device)
        masks["key_padding_mask"] = torch.arange(keys, device=device) >= lengths
    if case.mask in ("causal", "both"):
        masks["attn_mask"] = ~oracle.band(case.seqlen, keys, (-1, keys - case.seqlen), x.device)
        masks["attn_mask"] = torch.ones_like(masks["attn_mask"]).triu(1)
    x_given = x if case.batch_first else x.transpose(0, 1)
    key_given = x_given if key is x else (key if case.batch_first else key.transpose(0, 1))
    with torch.no_grad():
        out, weights = layer(x_given, key_given, key_given, need_weights=case.need_weights, **masks)
    out = out if case.batch_first else out.transpose(0, 1)
    find.that(out.dtype == dtype, f"out has dtype {out.dtype}")
    true, true_weights = _attention(case, plain, x, key, masks)
    _mostly_close(find, "out", out, true, dtype)
    if case.need_weights:
        _mostly_close(find, "weights", weights, true_weights, dtype)
    else:
        find.that(weights is None, "weights are given unasked")


def _attention(case: Case, plain: Any, x: Tensor, key: Tensor, masks: Any) -> tuple[Tensor, Tensor]:
    """(out, mean weights), projections by rounded operands and the rest in fp64."""
    parts = [(x, slice(None))]
    if key is not x:
        parts = [
            (y, slice(i * x.shape[-1], (i + 1) * x.shape[-1])) for i, y in enumerate((x, key, key))
        ]
    projected = []
    for y, rows in parts:
        bias = None if plain.in_proj_bias is None else plain.in_proj_bias[rows].double()
        w8 = oracle.fp8_scaled(plain.in_proj_weight[rows], case.forward, case.margin)
        y8 = oracle.fp8_scaled(y, case.forward, case.margin)
        projected.append(oracle.linear(y8, w8, bias))
    q, k, v = projected[0].chunk(3, -1) if len(parts) == 1 else projected
    q, k, v = (y.unflatten(-1, (case.heads, -1)).transpose(1, 2) for y in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if "attn_mask" in masks:
        scores = scores.masked_fill(masks["attn_mask"], -torch.inf)
    if "key_padding_mask" in masks:
        scores = scores.masked_fill(masks["key_padding_mask"][:, None, None], -torch.inf)
    weights = scores.softmax(-1)
    out = (weights @ v).transpose(1, 2).flatten(2)
    dtype = x.dtype
    out8 = oracle.fp8_scaled(out.to(dtype), case.forward, case.margin)
    w8 = oracle.fp8_scaled(plain.out_proj.weight, case.forward, case.margin)
    bias = None if plain.out_proj.bias is None else plain.out_proj.bias.double()
    return oracle.linear(out8, w8, bias).detach(), weights.mean(1).detach()


def _mostly_close(find: Findings, name: str, got: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    """Results agree within roundings of the projections, except few elements for which a number
    between two fp8 neighbours was rounded to the other: at most their distance (2^-2 of e5m2)."""
    if not find.that(got.shape == true.shape, f"{name} has shape {tuple(got.shape)}"):
        return
    size = max(float(true.abs().max()), 1e-6)
    error = (got.double() - true).abs().nan_to_num(torch.inf)
    most = float(error.max())
    find.that(most <= 0.25 * size, f"{name} is off by {most:.3g}, values are up to {size:.3g}")
    typical = float(error.flatten().median())
    allowed = (2e-2 if dtype == torch.float16 else 2e-3) * size
    find.that(typical <= allowed, f"{name} is typically off by {typical:.3g} of {size:.3g}")
