"""Fused encoder layers and encoders: values, gradients, and submodules that were changed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_cute.attention.fusion import (
    FusionConfig,
    FusionStrategy,
    OptimizationLevel,
    UnifiedAttentionFusion,
)
from flash_cute.testing.systems import contract, oracle
from flash_cute.testing.systems.findings import Findings, compare, with_gradients
from flash_cute.testing.systems.fusion_parts import REFUSED, check_part, check_refusal

ALSO = (
    "", "state", "names", "copies", "repeat", "leak", "mode", "hook", "pre_hook", "replaced",
    "adapter", "fp8", "slope", "checkpoint", "shared", "refusal", "wrapped", "unbatched", "no_grad",
    "autocast", "autocast_off",
)  # fmt: skip
PARTS = ("self_attn.out_proj", "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1",
         "dropout2", "self_attn")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of encoder layers, its call, and one property to check."""

    seed: int = 0
    also: str = ""
    dtype: str = "float64"
    layers: int = 0  # 0 is one layer without an encoder
    is_tied: bool = False  # one layer under all names
    heads: tuple[int, ...] = (2,)  # of each layer in turn, cyclically
    dim: int = 4
    hidden: int = 12
    bias: bool = True
    norm_first: tuple[bool, ...] = (False,)
    batch_first: bool = True
    activation: str = "relu"
    eps: float = 1e-5
    has_norm: bool = False
    batch: int = 2
    seqlen: int = 5
    mask: str = ""  # "causal", "bool", "float", "heads"
    padding: str = ""  # "bool", "float"
    is_causal: bool = False
    training: bool = False
    strategy: str = "FULL_BLOCK"
    level: str = "BALANCED"
    saves_memory: bool = True
    part: str = "linear1"
    argument: str = ""
    value: str = ""


def draw(pick: random.Random) -> Case:
    heads = tuple(pick.choice((1, 2, 4)) for _ in range(pick.choice((1, 1, 2))))
    fields: dict[str, Any] = {
        "seed": pick.randrange(2**31), "also": pick.choice(ALSO),
        "dtype": pick.choice(("float64", "float64", "float32", "bfloat16", "float16")),
        "layers": pick.choice((0, 0, 1, 2, 3)),
        "is_tied": pick.random() < 0.1, "heads": heads, "dim": pick.choice((4, 8)),
        "hidden": pick.choice((1, 12, 33)), "bias": pick.random() < 0.7,
        "norm_first": tuple(pick.random() < 0.5 for _ in range(pick.choice((1, 1, 2)))),
        "batch_first": pick.random() < 0.6,
        "activation": pick.choice(("relu", "gelu", "gelu_tanh", "silu", "tanh")),
        "eps": pick.choice((1e-5, 1e-3)), "has_norm": pick.random() < 0.3,
        "batch": pick.choice((1, 2, 3)), "seqlen": pick.choice((1, 5, 17, pick.randint(2, 40))),
        "mask": pick.choice(("", "", "causal", "bool", "float", "heads")),
        "padding": pick.choice(("", "", "bool", "float")), "training": pick.random() < 0.5,
        "strategy": pick.choice([s.name for s in FusionStrategy]),
        "level": pick.choice([s.name for s in OptimizationLevel]),
        "saves_memory": pick.random() < 0.6, "part": pick.choice(PARTS),
    }  # fmt: skip
    if fields["activation"] == "relu" and fields["dtype"] != "float64":
        fields["activation"] = "gelu"  # relu's slope jumps, and roundings move numbers across 0
    fields["is_causal"] = fields["mask"] == "causal" and pick.random() < 0.5
    if fields["also"] == "refusal":
        fields["argument"] = pick.choice(tuple(REFUSED))
        fields["value"] = pick.choice(REFUSED[fields["argument"]])
    return Case(**fields)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


_TRUE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = _ACTIVATIONS | {
    "gelu": oracle.gelu,
    "gelu_tanh": lambda x: oracle.gelu(x, "tanh"),
}


def _activation(name: str) -> Any:
    return nn.GELU("tanh") if name == "gelu_tanh" else _ACTIVATIONS[name]


def model_of(case: Case, device: str, seed: int, dropout: float = 0.0) -> nn.Module:
    """A model whose parameters all matter; layers differ in their heads and the place of norms."""
    torch.manual_seed(seed)
    width = 4 * case.dim
    made = [
        nn.TransformerEncoderLayer(
            width, case.heads[i % len(case.heads)], case.hidden, dropout,
            _activation(case.activation), case.eps, case.batch_first,
            case.norm_first[i % len(case.norm_first)], case.bias,
        )
        for i in range(max(case.layers, 1))
    ]  # fmt: skip
    made = made[:1] * len(made) if case.is_tied else made
    model: nn.Module = made[0]
    if case.layers:
        norm = nn.LayerNorm(width) if case.has_norm else None
        model = nn.TransformerEncoder(made[0], 1, norm, enable_nested_tensor=False)
        model.layers, model.num_layers = nn.ModuleList(made), len(made)
    if case.also == "wrapped":
        model = nn.Sequential(nn.Identity(), model, nn.Linear(width, width))
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name and "weight" in name else 0.0, 0.25)
    return model.to(device, getattr(torch, case.dtype)).train(case.training)


@dataclass(frozen=True)
class Inputs:
    """src, the masks, and both masks as keyword arguments of torch's layers."""

    src: Tensor
    given: dict[str, Any]
    mask: Tensor | None
    padding: Tensor | None


def inputs_of(case: Case, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    n, dtype = case.seqlen, getattr(torch, case.dtype)
    src = torch.randn(case.batch, n, 4 * case.dim, generator=generator)
    src = src if case.batch_first else src.transpose(0, 1).contiguous()
    mask: Tensor | None = None
    if case.mask == "causal":
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
    elif case.mask == "bool":
        mask = torch.rand(n, n, generator=generator) < 0.3
        mask.fill_diagonal_(False)
    elif case.mask == "float":
        mask = torch.randn(n, n, generator=generator).to(dtype)
    elif case.mask == "heads" and len(set(case.heads)) == 1:
        mask = torch.randn(case.batch * case.heads[0], n, n, generator=generator).to(dtype)
    padding: Tensor | None = None
    if case.padding:
        lengths = torch.randint(1, n + 1, (case.batch, 1), generator=generator)
        hidden = torch.arange(n) >= lengths
        padding = hidden
        if mask is not None and mask.dtype == torch.bool:  # key 0 stays visible to all rows
            mask = mask & ~torch.zeros_like(mask).index_fill(1, torch.tensor([0]), True)
        if case.padding == "float":
            padding = torch.zeros(case.batch, n, dtype=dtype).masked_fill(hidden, -torch.inf)
    name = "src_mask" if not case.layers else "mask"
    given: dict[str, Any] = {name: None if mask is None else mask.to(device)}
    given["src_key_padding_mask"] = None if padding is None else padding.to(device)
    if case.is_causal:
        given["is_causal"] = True
    given = {key: x for key, x in given.items() if x is not None}
    return Inputs(
        src.to(device, dtype), given, None if mask is None else mask.to(device),
        None if padding is None else padding.to(device),
    )  # fmt: skip


def _added(mask: Tensor, kind: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill(mask, -torch.inf)
    return mask.to(kind)


def plain(case: Case, inputs: Inputs, names: list[str]) -> Callable[..., Tensor]:
    """The model as a function of src and of its parameters, in plain PyTorch."""

    def attend(x: Tensor, of: dict[str, Tensor], heads: int) -> Tensor:
        qkv = oracle.linear(x, of["self_attn.in_proj_weight"], of.get("self_attn.in_proj_bias"))
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in qkv.chunk(3, -1))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        if inputs.mask is not None:
            added = _added(inputs.mask, x.dtype)
            scores = scores + (added if added.dim() == 2 else added.unflatten(0, (len(x), heads)))
        if inputs.padding is not None:
            scores = scores + _added(inputs.padding, x.dtype)[:, None, None]
        out = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v).transpose(1, 2).flatten(2)
        weight, bias = of["self_attn.out_proj.weight"], of.get("self_attn.out_proj.bias")
        return oracle.linear(out, weight, bias)

    def layer(x: Tensor, of: dict[str, Tensor], number: int) -> Tensor:
        heads = case.heads[number % len(case.heads)]
        act = _TRUE_ACTIVATIONS[case.activation]

        def norm(y: Tensor, name: str) -> Tensor:
            return oracle.layer_norm(y, of[f"{name}.weight"], of.get(f"{name}.bias"), case.eps)

        def feed(y: Tensor) -> Tensor:
            hidden = act(oracle.linear(y, of["linear1.weight"], of.get("linear1.bias")))
            return oracle.linear(hidden, of["linear2.weight"], of.get("linear2.bias"))

        if case.norm_first[number % len(case.norm_first)]:
            x = x + attend(norm(x, "norm1"), of, heads)
            return x + feed(norm(x, "norm2"))
        x = norm(x + attend(x, of, heads), "norm1")
        return norm(x + feed(x), "norm2")

    def call(src: Tensor, **parameters: Tensor) -> Tensor:
        of_all = {name: parameters[f"p{i}"] for i, name in enumerate(names)}
        x = src if case.batch_first else src.transpose(0, 1)
        for number in range(max(case.layers, 1)):
            number = 0 if case.is_tied else number
            prefix = f"layers.{number}." if case.layers else ""
            of = {n.removeprefix(prefix): p for n, p in of_all.items() if n.startswith(prefix)}
            x = layer(x, of, number)
        if case.layers and case.has_norm:
            x = oracle.layer_norm(x, of_all["norm.weight"], of_all.get("norm.bias"), 1e-5)
        return x if case.batch_first else x.transpose(0, 1)

    return call


def config_of(case: Case) -> FusionConfig:
    return FusionConfig(
        FusionStrategy[case.strategy], OptimizationLevel[case.level],
        enable_memory_optimization=case.saves_memory,
    )  # fmt: skip


def check(case: Case, device: str) -> Findings:
    find = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.also == "refusal":
            check_refusal(find, case)
            return find
        model, inputs = model_of(case, device, case.seed), inputs_of(case, device)
        fused = UnifiedAttentionFusion(model, config_of(case))
        find.that(fused.training == model.training, "the fused model is in another mode")
        tensors = {"src": inputs.src, **{n: x for n, x in inputs.given.items() if x is not True}}
        if case.also == "wrapped":
            if inputs.given:
                return find
            _check_wrapped(find, case, model, fused, inputs)
            return find
        contract.inputs_are_kept(find, tensors, lambda: fused(inputs.src, **inputs.given))
        _check_values(find, case, model, fused, inputs)
        _check_also(find, case, model, fused, inputs, device)
    return find


def _check_values(find: Findings, case: Case, model: nn.Module, fused: Any, inputs: Inputs) -> None:
    named = dict(model.named_parameters())
    names = list(named)
    leaves = {"src": inputs.src} | {f"p{i}": p for i, p in enumerate(named.values())}
    gradient = torch.randn(inputs.src.shape, generator=torch.Generator().manual_seed(case.seed + 1))
    gradient = gradient.to(inputs.src.device)
    src = inputs.src.detach().clone().requires_grad_()
    out = fused(src, **inputs.given)
    dtype = getattr(torch, case.dtype)
    find.that(out.dtype == dtype, f"out has dtype {out.dtype}; expected {dtype}")
    grads = torch.autograd.grad(out, [src, *named.values()], gradient.to(dtype), allow_unused=True)
    got = {"out": out.detach()}
    for key, name, grad in zip(leaves, ["src", *names], grads, strict=True):
        if find.that(grad is not None, f"no gradient reaches {name}"):
            got[f"d{key}"] = grad
    compare(find, got, plain(case, inputs, names), leaves, gradient, dtype)


def _check_wrapped(
    find: Findings, case: Case, model: nn.Module, fused: Any, inputs: Inputs
) -> None:
    """A block inside a larger model: results and gradients equal the model's own."""
    parameters = list(model.parameters())
    gradient = torch.randn_like(inputs.src)
    leaves = {"src": inputs.src}
    got = with_gradients(lambda src: fused(src), leaves, gradient)
    true = with_gradients(lambda src: model(src), leaves, gradient)
    size = 1e-9 if case.dtype == "float64" else 5e-2
    for name, x in true.items():
        find.close(name, got[name], x, size * float(x.abs().max()) + 1e-6)
    find.that(len(list(fused.parameters())) == len(parameters), "parameters were added or lost")


def _check_also(
    find: Findings, case: Case, model: nn.Module, fused: Any, inputs: Inputs, device: str
) -> None:
    def call(module: nn.Module) -> Tensor:
        return module(inputs.src, **inputs.given).detach()

    also = case.also
    if also == "state":
        fresh = UnifiedAttentionFusion(model_of(case, device, case.seed + 3), config_of(case))
        contract.state_dict_holds_all(find, fused, fresh, call)
    elif also == "names":
        named = fused.named_parameters(remove_duplicate=False)
        keys = {"the model": set(model.state_dict()), "the fused": set(fused.state_dict()),
                "its parameters": {n for n, _ in named}}  # fmt: skip
        find.that(len(set(map(frozenset, keys.values()))) == 1, "names differ: state_dict of the "
                  "model, of the fused model, and its named_parameters")  # fmt: skip
    elif also == "copies":
        contract.copies_equal(find, fused, call)
    elif also == "repeat":
        find.equal("repeated call", call(fused), call(fused))
    elif also == "leak":
        src = inputs.src.detach().requires_grad_()
        contract.nothing_is_left(find, lambda: fused(src, **inputs.given).sum())
    elif also == "mode":
        contract.mode_reaches_all(find, fused)
        before = [m.training for m in model.modules()]
        fused.train(not case.training)
        same = before == [m.training for m in model.modules()]
        find.that(same, "fused.train() changes the mode of the given model")
    elif also in ("hook", "pre_hook", "replaced", "adapter", "fp8", "checkpoint"):
        check_part(find, case, fused, (inputs.src, inputs.given))
    elif also == "slope" and case.dtype == "float64":
        dropping = UnifiedAttentionFusion(model_of(case, device, case.seed, 0.3), config_of(case))
        contract.slope_matches(find, lambda x: dropping.train()(x, **inputs.given), inputs.src,
                               torch.randn_like(inputs.src), case.seed)  # fmt: skip
    elif also == "no_grad":
        with torch.no_grad():
            out = fused(inputs.src, **inputs.given)
        unit = {"float64": 1e-10, "float32": 1e-4}.get(case.dtype, 5e-2)
        find.close("out without gradients", out, call(fused), unit * float(out.abs().max()) + 1e-9)
    elif also.startswith("autocast") and case.dtype == "float32":
        _check_autocast(find, case, model, inputs, device)
    elif also == "unbatched" and case.mask != "heads":
        _check_unbatched(find, case, fused, inputs)
    elif also == "shared":
        own = {id(p) for p in model.parameters()}
        find.that({id(p) for p in fused.parameters()} == own, "parameters are other objects")


def _check_unbatched(find: Findings, case: Case, fused: Any, inputs: Inputs) -> None:
    """A sequence without a batch dimension has the result of a batch of one."""
    dim = 0 if case.batch_first else 1
    one = dict(inputs.given)
    if inputs.padding is not None:
        one["src_key_padding_mask"] = inputs.padding[:1]
    batch = fused(inputs.src.narrow(dim, 0, 1), **one).squeeze(dim)
    if inputs.padding is not None:
        one["src_key_padding_mask"] = inputs.padding[0]
    alone = fused(inputs.src.select(dim, 0), **one)
    unit = {"float64": 1e-10, "float32": 1e-4}.get(case.dtype, 5e-2)
    find.close("out without a batch", alone, batch, unit * float(batch.abs().max()) + 1e-9)


def _check_autocast(
    find: Findings, case: Case, model: nn.Module, inputs: Inputs, device: str
) -> None:
    """Under autocast results are as exact as bf16; if the config switches it off, as fp32."""
    is_off = case.also == "autocast_off"
    config = replace(config_of(case), enable_mixed_precision=not is_off)
    fused = UnifiedAttentionFusion(model, config)
    with torch.no_grad():
        named = {n: p.double() for n, p in model.named_parameters()}
        parameters = {f"p{i}": p for i, p in enumerate(named.values())}
        true = plain(case, inputs, list(named))(inputs.src.double(), **parameters)
        with torch.autocast(device, torch.bfloat16):
            out = fused(inputs.src, **inputs.given)
    size = float(true.abs().max())
    find.close("out under autocast", out, true, (1e-4 if is_off else 0.1) * size + 1e-6)
