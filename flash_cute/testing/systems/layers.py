"""Attention layers with all their options together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.attention import (
    AttentionConfig,
    AttentionPatterns,
    FlashAttention3,
    FP8AttentionConfig,
    create_attention,
    create_context_parallel_attention,
    create_ring_attention,
)
from flash_cute.core import AttentionLayer
from flash_cute.testing.systems import contract, dropout, oracle
from flash_cute.testing.systems.findings import Findings, compare, with_gradients

KINDS = ("plain", "config", "config", "flash3", "ring", "context_parallel", "fp8")
ALSO = ("", "state", "copies", "repeat", "leak", "dropout", "slope", "refusal", "hook", "mode")
POISON = {"nan": float("nan"), "inf": float("inf"), "large": 1e4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer, its call, and one property to check besides values and gradients (``also``)."""

    seed: int = 0
    kind: str = "config"
    also: str = ""
    dtype: str = "float64"
    autocast: bool = False
    batch: int = 2
    seqlen: int = 7
    seqlen_k: int = 0  # of cross attention; 0 is none
    has_value: bool = False
    heads: int = 2
    heads_k: int = 0  # 0 is heads
    dim: int = 4
    bias: bool = True
    pattern: str = "full"
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float = 0.0  # 0 is None
    softcap: float = 0.0
    deterministic: bool = False
    devices: int = 1
    scaling: str = "tensor"
    format: str = "e4m3"
    mask: str = ""  # its dtype
    shape: str = "random"  # of the mask
    poison: str = ""
    strides: str = "contiguous"
    training: bool = False
    argument: str = ""  # of a refusal
    value: str = ""


def draw(pick: random.Random) -> Case:
    kind = pick.choice(KINDS)
    dtype = pick.choice(("float64",) * 3 + ("float32",) * 2 + ("bfloat16", "float16"))
    heads = pick.choice((1, 2, 3, 4, 6))
    grouped = [n for n in range(1, heads + 1) if heads % n == 0]
    seqlen = pick.choice((0, 1, 2, 5, 16, 17, pick.randint(1, 70)))
    fields: dict[str, Any] = {
        "seed": pick.randrange(2**31), "kind": kind, "also": pick.choice(ALSO), "dtype": dtype,
        "batch": pick.choice((0, 1, 1, 2, 3)), "seqlen": seqlen, "heads": heads,
        "dim": pick.choice((1, 3, 4, 8, 16)), "bias": pick.random() < 0.7,
        "is_causal": pick.random() < 0.3, "training": pick.random() < 0.5,
        "strides": pick.choice(("contiguous", "transposed", "sliced", "expanded")),
    }  # fmt: skip
    if fields["also"] == "refusal":
        fields["argument"] = pick.choice(tuple(REFUSED))
        fields["value"] = pick.choice(REFUSED[fields["argument"]])
        return Case(**fields)
    if kind not in ("plain",):
        fields["heads_k"] = pick.choice((0, *grouped))
        fields["softcap"] = pick.choice((0.0, 0.0, 0.7, 5.0))
        fields["scale"] = pick.choice((0.0, 0.0, 0.3, -0.2))
        fields["deterministic"] = pick.random() < 0.3
        sides = (-1, 0, 1, 3, seqlen, 2**40)
        if pick.random() < 0.5:
            fields["window"] = (pick.choice(sides), pick.choice(sides))
    if kind in ("config", "flash3", "fp8"):
        fields["pattern"] = pick.choice(("full", "causal"))
    if kind == "context_parallel":
        fields["devices"] = pick.choice((1, 2, 3))
    if kind == "fp8":
        fields["dtype"] = "float64"  # rounding is not continuous: others flip at ties
        fields["scaling"] = pick.choice(("tensor", "head"))
        fields["format"] = pick.choice(("e4m3", "e5m2"))
    if kind != "context_parallel" and pick.random() < 0.3:
        fields |= {"seqlen_k": pick.choice((1, 4, 19)), "has_value": pick.random() < 0.5}
    if pick.random() < 0.5:
        fields["mask"] = pick.choice(("bool", "int64", "int32", "uint8", "float32"))
        fields["shape"] = pick.choice(("random", "left", "right", "all", "one_empty"))
        fields["poison"] = pick.choice(("", *POISON))
    fields["autocast"] = fields["dtype"] == "float32" and pick.random() < 0.2
    return Case(**fields)


# --- refusals ------------------------------------------------------------------------------------

REFUSED: contract.Refusals = {
    "d_model": (*contract.WHOLE, "none"),
    "num_heads": (*contract.WHOLE, "none"),
    "num_kv_heads": contract.WHOLE,
    "dropout": contract.PROBABILITY,
    "window_size": contract.WINDOW,
    "softmax_scale": ("nan", "inf", "text", "pair"),
    "softcap": ("minus_one", "nan", "inf", "text", "none"),
    "context_parallel_size": (*contract.WHOLE, "none"),
    "max_sequence_length": (*contract.WHOLE, "none"),
    "bias": ("text", "none", "two"),
    "deterministic": ("text", "none"),
    "pattern": ("text", "minus_one", "none"),
    "format": ("text", "minus_one", "none"),
    "scaling": ("text", "minus_one", "none"),
}


def _check_refusal(find: Findings, case: Case) -> None:
    """Checks a bad value of one argument of a constructor."""
    name, value = case.argument, contract.BAD[case.value]

    def make() -> Any:
        sizes: dict[str, Any] = {"d_model": 8, "num_heads": 2}
        if case.kind == "plain" and name in ("d_model", "num_heads", "dropout"):
            return AttentionLayer(**(sizes | {name: value}))
        if name in ("format", "scaling"):
            return FP8AttentionConfig(**(sizes | {name: value}))
        if case.kind == "ring" and name not in ("context_parallel_size", "pattern"):
            return create_ring_attention(**(sizes | {name: value}))
        if case.kind == "context_parallel" and name not in ("max_sequence_length", "pattern"):
            sizes["context_parallel_size"] = 1
            return create_context_parallel_attention(**(sizes | {name: value}))
        return create_attention(AttentionConfig(**(sizes | {name: value})))

    words = (name, "num_heads") if name == "d_model" else (name,)
    find.refused(make, f"{name}={value!r}", *words)


# --- the layer, its inputs, and expected results --------------------------------------------------


def make(case: Case, device: str, seed: int, p: float = 0.0) -> nn.Module:
    """The layer with random parameters, all of which matter."""
    width = case.heads * case.dim
    dtype = getattr(torch, case.dtype)
    kind: dict[str, Any] = {"device": device, "dtype": dtype}
    fields = {
        "num_kv_heads": case.heads_k or None, "bias": case.bias, "window_size": case.window,
        "softmax_scale": case.scale or None, "softcap": case.softcap,
        "deterministic": case.deterministic, "dropout": p, **kind,
    }  # fmt: skip
    layer: nn.Module
    pattern = AttentionPatterns(case.pattern)
    if case.kind == "plain":
        layer = AttentionLayer(width, case.heads, p, case.bias, **kind)
    elif case.kind == "ring":
        layer = create_ring_attention(width, case.heads, **fields)
    elif case.kind == "context_parallel":
        mesh: list[Any] = [torch.device(device)] * case.devices
        layer = create_context_parallel_attention(width, case.heads, case.devices, mesh, **fields)
    elif case.kind == "fp8":
        layer = create_attention(FP8AttentionConfig(
            width, case.heads, pattern, format=case.format, scaling=case.scaling, **fields
        ))  # fmt: skip
    else:
        config = AttentionConfig(width, case.heads, pattern, **fields)
        layer = FlashAttention3(config) if case.kind == "flash3" else create_attention(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            fan = max(parameter.shape[-1], 1) ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan)
    return layer.train(case.training)


def _tokens(case: Case, seqlen: int, generator: torch.Generator) -> Tensor:
    """(batch, seqlen, width) in the case's dtype and strides."""
    shape = (case.batch, seqlen, case.heads * case.dim)
    x = torch.randn(shape, generator=generator).to(getattr(torch, case.dtype))
    if case.strides == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if case.strides == "sliced":
        return torch.cat((x, x + 1), -1)[..., : shape[-1]]
    if case.strides == "expanded" and case.batch:
        return x[:1].expand(shape)
    return x


def _mask(case: Case, seqlen: int, generator: torch.Generator) -> Tensor | None:
    if not case.mask:
        return None
    shape = (case.batch, seqlen)
    if case.shape == "random":
        part = torch.rand(shape, generator=generator) < 0.6
    elif case.shape == "all":
        part = torch.ones(shape, dtype=torch.bool)
    else:
        lengths = torch.randint(
            1, seqlen + 1 if seqlen else 2, (case.batch, 1), generator=generator
        )
        part = torch.arange(seqlen) < lengths
        part = part.flip(1) if case.shape == "left" else part
    if case.shape == "one_empty" and case.batch:
        part[0] = False
    if case.mask == "float32":  # documented: with a 1 in each sequence
        part[:, :1] = True
    return part.to(getattr(torch, case.mask))


def inputs_of(case: Case, device: str) -> dict[str, Tensor | None]:
    """x, and by the case key, value and mask; masked tokens hold NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    made: dict[str, Tensor | None] = {"x": _tokens(case, case.seqlen, generator)}
    if case.seqlen_k:
        made["key"] = _tokens(case, case.seqlen_k, generator)
        if case.has_value:
            made["value"] = _tokens(case, case.seqlen_k, generator)
    mask = _mask(case, case.seqlen_k or case.seqlen, generator)
    made["mask"] = mask
    if mask is not None and case.poison:
        for name in ("key", "value") if case.seqlen_k else ("x",):
            if (x := made.get(name)) is not None:
                made[name] = x.masked_fill((mask == 0)[..., None], POISON[case.poison])
    return {name: None if x is None else x.to(device) for name, x in made.items()}


def plain(case: Case) -> Callable[..., Tensor]:
    """The layer as a function of its inputs and parameters, in plain PyTorch."""
    is_causal = case.is_causal or case.pattern == "causal"
    window = (case.window[0], 0 if is_causal else case.window[1])
    heads, heads_k, dim = case.heads, case.heads_k or case.heads, case.dim
    options: dict[str, Any] = {
        "scale": case.scale or None, "window": window, "softcap": case.softcap,
    }  # fmt: skip

    def rounded(x: Tensor) -> Tensor:
        if case.kind != "fp8" or not x.numel():
            return x
        dims = (0, 1, 3) if case.scaling == "head" else (0, 1, 2, 3)
        return x + (oracle.fp8_power_of_two(x, case.format, dims) - x).detach()

    def call(
        x: Tensor, in_w: Tensor, in_b: Tensor | None, out_w: Tensor, out_b: Tensor | None,
        key: Tensor | None = None, value: Tensor | None = None, mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        of_keys = x if key is None else key
        part = torch.ones(of_keys.shape[:2], dtype=torch.bool, device=x.device)
        part = part if mask is None else mask != 0
        if key is None:
            x = of_keys = x.masked_fill(~part[..., None], 0)
        of_keys = of_keys.masked_fill(~part[..., None], 0)
        of_values = of_keys if value is None else value.masked_fill(~part[..., None], 0)
        cuts = (heads * dim, heads_k * dim, heads_k * dim)
        weights = in_w.split(cuts)
        biases = (None,) * 3 if in_b is None else in_b.split(cuts)
        qkv = [
            oracle.linear(tokens, w, b).unflatten(-1, (-1, dim))
            for tokens, w, b in zip((x, of_keys, of_values), weights, biases, strict=True)
        ]
        if case.kind == "fp8":  # only tokens that take part determine a scale
            hidden = ~part[..., None, None]
            qkv = [y if y is qkv[0] and key is not None else y.masked_fill(hidden, 0) for y in qkv]
        q, k, v = map(rounded, qkv)
        rows = []
        for b in range(len(x)):
            there = part[b] if key is None else torch.ones_like(x[b, :, 0], dtype=torch.bool)
            out, _ = oracle.attention(q[b, there], k[b, part[b]], v[b, part[b]], **options)
            whole = x.new_zeros(x.shape[1], heads * dim)
            rows.append(whole.index_put((there.nonzero()[:, 0],), out.flatten(1)))
        attended = torch.stack(rows) if rows else x.new_zeros(0, x.shape[1], heads * dim)
        return oracle.linear(attended, out_w, out_b)

    return call


def names_of(layer: Any) -> dict[str, Tensor | None]:
    """The parameters, as the oracle names them."""
    return {
        "in_w": layer.in_proj_weight, "in_b": layer.in_proj_bias,
        "out_w": layer.out_proj.weight, "out_b": layer.out_proj.bias,
    }  # fmt: skip


def _is_refused(case: Case) -> bool:
    """Whether several devices do not support it, as documented: a mask and a window that looks
    ahead."""
    right = 0 if case.is_causal or case.pattern == "causal" else case.window[1]
    looks_ahead = right > 0 or (right < 0 and case.window[0] >= 0)
    return case.devices > 1 and bool(case.mask) and looks_ahead


def check(case: Case, device: str) -> Findings:
    find = Findings()
    if case.also == "refusal":
        _check_refusal(find, case)
        return find
    layer = make(case, device, case.seed)
    inputs = inputs_of(case, device)

    def call(module: nn.Module, x: Tensor | None = None) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=case.autocast):
            return module(
                inputs["x"] if x is None else x, inputs["mask"], key=inputs.get("key"),
                value=inputs.get("value"), is_causal=case.is_causal,
            )  # fmt: skip

    if _is_refused(case):
        try:
            call(layer)
        except NotImplementedError:
            return find
        is_empty = not case.batch * case.seqlen
        find.that(is_empty, "several devices take a mask and a window that looks ahead")
        return find
    contract.inputs_are_kept(find, inputs, lambda: call(layer))
    _check_values(find, case, layer, inputs, device)
    _check_also(find, case, layer, call, device, inputs)
    return find


def _check_values(
    find: Findings, case: Case, layer: nn.Module, inputs: dict[str, Tensor | None], device: str
) -> None:
    def product(**given: Any) -> Tensor:
        parameters = {
            "in_proj_weight": given.pop("in_w"), "in_proj_bias": given.pop("in_b"),
            "out_proj.weight": given.pop("out_w"), "out_proj.bias": given.pop("out_b"),
        }  # fmt: skip
        x, mask = given.pop("x"), given.pop("mask")
        named = {name: p for name, p in parameters.items() if p is not None}
        with torch.autocast(device, torch.bfloat16, enabled=case.autocast):
            return torch.func.functional_call(
                layer, named, (x, mask), {"is_causal": case.is_causal, **given}
            )

    everything = inputs | names_of(layer)
    floats = {n: x for n, x in everything.items() if n != "mask"}
    shape = inputs["x"].shape if inputs["x"] is not None else ()
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(case.seed + 1)).to(device)
    mask = inputs["mask"]
    got = with_gradients(lambda **x: product(mask=mask, **x), floats, gradient)
    dtype = torch.bfloat16 if case.autocast else getattr(torch, case.dtype)
    find.that(got["out"].dtype == dtype, f"out has dtype {got['out'].dtype}; expected {dtype}")
    call = plain(case)
    compare(find, got, lambda **x: call(mask=mask, **x), floats, gradient, dtype)


def _check_also(
    find: Findings, case: Case, layer: Any, call: Callable[..., Any], device: str,
    inputs: dict[str, Tensor | None],
) -> None:  # fmt: skip
    if case.also == "state":
        contract.state_dict_holds_all(find, layer, make(case, device, case.seed + 7), call)
    elif case.also == "copies":
        contract.copies_equal(find, layer, call)
    elif case.also == "repeat":
        find.equal("repeated call", call(layer), call(layer))
    elif case.also == "leak":
        contract.nothing_is_left(find, lambda: call(layer).sum())
    elif case.also == "mode":
        contract.mode_reaches_all(find, layer)
    elif case.also == "hook" and case.devices == 1 and inputs["mask"] is None:
        layer.out_proj.register_forward_hook(lambda *_: _[2] * 0 + 3.0)
        out = call(layer)
        find.that(bool((out == 3).all()), "a hook on out_proj does nothing")
    elif case.also == "dropout" and case.batch * case.seqlen:
        dropping = make(case, device, case.seed, p=dropout.P)
        dropout.check(find, case, dropping, inputs)
    elif case.also == "slope" and _has_slope(case):
        dropping = make(case, device, case.seed, p=0.3).train()
        x = inputs["x"]
        assert x is not None
        gradient = torch.randn_like(x)
        contract.slope_matches(find, lambda y: call(dropping, y), x, gradient, case.seed)


def _has_slope(case: Case) -> bool:
    """Whether finite differences with dropout are possible: in fp64, without rounding."""
    smooth = case.dtype == "float64" and case.kind != "fp8"
    return smooth and case.devices == 1 and not case.mask and case.batch * case.seqlen > 0
