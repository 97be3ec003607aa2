"""Adaptive precision: the bytes of models, their results, and their reports."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.attention.fusion import UnifiedAttentionFusion
from flash_cute.precision import (
    AllocationStrategy,
    PrecisionConfig,
    PrecisionFormat,
    QuantizationMode,
    create_ultra_precision_module,
)
from flash_cute.testing.systems import contract
from flash_cute.testing.systems.findings import Findings, compare

MODELS = ("mlp", "mlp", "deep", "conv", "embedding", "tied", "encoder")
BASES = ("FP32", "FP16", "BF16", "FP8_E4M3", "INT8")
ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid", "softmax", "identity")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is packed, and one property to check."""

    seed: int = 0
    model: str = "mlp"
    also: str = ""
    dtype: str = "float32"
    width: int = 64
    activation: str = "relu"
    bias: bool = True
    base: str = "FP16"
    strategy: str = "UNIFORM"
    mode: str = "DYNAMIC"
    target: float = 0.4
    spread: int = 0  # powers of two between rows
    padding_idx: int = -1  # -1 is None
    argument: str = ""
    value: str = ""


def draw(pick: random.Random) -> Case:
    also = (
        "",
        "state",
        "copies",
        "leak",
        "repeat",
        "mode",
        "bad_first",
        "refusal",
        "hook",
        "fused",
    )
    fields: dict[str, Any] = {
        "seed": pick.randrange(2**31), "model": pick.choice(MODELS), "also": pick.choice(also),
        "dtype": pick.choice(("float32", "float32", "float16", "bfloat16")),
        "width": pick.choice((16, 40, 64, 128)), "activation": pick.choice(ACTIVATIONS),
        "bias": pick.random() < 0.7, "base": pick.choice(BASES),
        "strategy": pick.choice([s.name for s in AllocationStrategy]),
        "mode": pick.choice([m.name for m in QuantizationMode]),
        "target": pick.choice((0.0, 0.1, 0.3, 0.4, 0.6, 0.75)),
        "spread": pick.choice((0, 0, 3, 12, 24)), "padding_idx": pick.choice((-1, 0, 3)),
    }  # fmt: skip
    if fields["also"] == "refusal":
        fields["argument"] = pick.choice(tuple(REFUSED))
        fields["value"] = pick.choice(REFUSED[fields["argument"]])
    return Case(**fields)


REFUSED: contract.Refusals = {
    "entropy_threshold": ("minus_one", "nan", "inf", "text", "true", "none"),
    "target_memory_reduction": ("minus_one", "nan", "inf", "half", "text", "true", "none"),
    "gradient_weight": ("minus_one", "nan", "half", "text", "true", "none"),
    "activation_weight": ("minus_one", "nan", "half", "text", "true", "none"),
    "base_precision": ("text", "none", "zero"),
    "allocation_strategy": ("text", "none", "zero"),
    "quantization_mode": ("text", "none", "zero"),
    "model": ("text", "none"),
    "config": ("text", "zero"),
}


def _activation(name: str) -> nn.Module:
    made = {"relu": nn.ReLU(), "gelu": nn.GELU(), "tanh": nn.Tanh(), "sigmoid": nn.Sigmoid(),
            "softmax": nn.Softmax(-1), "identity": nn.Identity()}  # fmt: skip
    return made[name]


class _Tied(nn.Module):
    """An embedding whose weight is the last layer's, too."""

    def __init__(self, width: int, padding_idx: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, width, padding_idx)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


def model_of(case: Case, device: str, seed: int) -> nn.Module:
    """Its weights are scaled row by row by powers of two, down to 2^-spread."""
    torch.manual_seed(seed)
    width, bias = case.width, case.bias
    padding = None if case.padding_idx < 0 else case.padding_idx
    model: nn.Module = nn.Sequential(
        nn.Linear(width, width, bias), _activation(case.activation), nn.Linear(width, 24, bias)
    )
    if case.model == "deep":
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(width, width, bias), _activation(case.activation)]
        model = nn.Sequential(*layers, nn.LayerNorm(width), nn.Linear(width, 24, bias))
    elif case.model == "conv":
        model = nn.Sequential(nn.Conv1d(width, 16, 3, bias=bias, padding=1),
                              _activation(case.activation))  # fmt: skip
    elif case.model == "embedding":
        model = nn.Sequential(nn.Embedding(24, width, padding), nn.Linear(width, 24, bias))
    elif case.model == "tied":
        model = _Tied(width, padding)
    elif case.model == "encoder":
        model = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, bias=bias)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and case.spread and case.model in ("mlp", "conv", "embedding"):
                rows = torch.arange(len(parameter)).remainder(case.spread + 1)
                parameter.mul_(torch.exp2(-rows.float()).view(-1, *[1] * (parameter.dim() - 1)))
    return model.to(device, getattr(torch, case.dtype)).eval()


def input_of(case: Case, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if case.model in ("embedding", "tied"):
        return torch.randint(0, 24, (3, 5), generator=generator).to(device)
    shape = {"conv": (2, case.width, 7), "encoder": (2, 5, case.width)}.get(
        case.model, (5, case.width)
    )
    return torch.randn(shape, generator=generator).to(device, getattr(torch, case.dtype))


def config_of(case: Case) -> PrecisionConfig:
    return PrecisionConfig(
        base_precision=PrecisionFormat[case.base], target_memory_reduction=case.target,
        allocation_strategy=AllocationStrategy[case.strategy],
        quantization_mode=QuantizationMode[case.mode],
    )  # fmt: skip


def check(case: Case, device: str) -> Findings:
    find = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.also == "refusal":
            _check_refusal(find, case)
            return find
        model, x = model_of(case, device, case.seed), input_of(case, device, case.seed)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        try:
            small = create_ultra_precision_module(model, config_of(case), calibration=x)
        except ValueError as error:
            names_target = "target_memory_reduction" in str(error)
            find.that(names_target, f"refused by {str(error)[:200]}")
            return find
        kept = {n: p.detach() for n, p in model.named_parameters()}
        find.equal("the given model's weights", kept, before)
        if case.also == "bad_first":
            _check_bad_first(find, case, device)
        if device == "cpu":
            _check_bytes(find, case, model, small)
        restored = _restored(find, case, model, small)
        if not find.failures and case.model != "encoder":
            _check_values(find, case, small, model, restored, x)
        _check_also(find, case, small, x, device)
    return find


def _check_refusal(find: Findings, case: Case) -> None:
    name, value = case.argument, contract.BAD[case.value]

    def make() -> Any:
        if name == "model":
            return create_ultra_precision_module(value)
        if name == "config":
            return create_ultra_precision_module(nn.Linear(16, 16), value)
        return PrecisionConfig(**{name: value})

    find.refused(make, f"{name}={value!r}", name)


def _storages(module: nn.Module) -> int:
    """Bytes of all storages below a module, each once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


def _check_bytes(find: Findings, case: Case, model: nn.Module, small: Any) -> None:
    stats = small.get_precision_stats()
    bits = PrecisionFormat[case.base].bits
    base = sum(p.numel() * bits // 8 for p in {id(p): p for p in model.parameters()}.values())
    find.that(stats.base_bytes == base, f"base_bytes is {stats.base_bytes}; {base} are counted")
    held = _storages(small)
    find.that(stats.stored_bytes == held, f"stored_bytes is {stats.stored_bytes}; {held} are held")
    saved = 1 - held / base
    find.that(saved >= case.target - 1e-9, f"{saved:.4f} is saved; {case.target} was asked for")


def _restored(find: Findings, case: Case, model: nn.Module, small: Any) -> dict[str, Tensor]:
    """The restored weights of the module, by their names in the model."""
    stats, found = small.get_precision_stats(), dict[str, Tensor]()
    given = dict(model.named_parameters())
    for name, layer in stats.layers.items():
        packed = small.get_submodule(small._packed[name])
        weight = given[name].detach()
        with torch.no_grad():
            found[name] = packed()
        back, true = found[name].double(), weight.double()
        find.that(found[name].dtype == weight.dtype, f"{name} comes back in {found[name].dtype}")
        error = float((back - true).norm() / true.norm().clamp(min=1e-30))
        slack = 1e-2 * error + 1e-5
        own = layer.relative_error
        find.that(abs(own - error) <= slack, f"{name}: error {error:.3g}, reported {own:.3g}")
        rows, true_rows = back.flatten(1), true.flatten(1)
        lost = (rows == 0).all(1) & (true_rows != 0).any(1)
        find.that(
            not bool(lost.any()), f"{name}: {int(lost.sum())} rows that are not 0 come back as 0"
        )
        worst = float(
            ((rows - true_rows).norm(dim=1) / true_rows.norm(dim=1).clamp(min=1e-30)).max()
        )
        least = min(layout.format.bits for _, layout in layer.blocks)
        # Steps of rows far below the largest are few quanta of fp16: half of their numbers is kept.
        allowed = 1.0 if least <= 3 else 0.6
        find.that(worst <= allowed, f"{name}: a row is {worst:.3g} off with {least} bits")
        find.that(
            8 * layer.nbytes / weight.numel() == layer.bits, f"{name}: bits are not its bytes"
        )
    return found


def _rounds_inputs(case: Case) -> bool:
    return case.base in ("FP8_E4M3", "INT8") and case.mode != "WEIGHT_ONLY"


def _check_values(
    find: Findings, case: Case, small: Any, model: nn.Module, restored: dict[str, Tensor], x: Tensor
) -> None:
    """The module computes what the model does with the restored weights; so do gradients of inputs
    and of the remaining parameters."""
    dtype = getattr(torch, case.dtype)
    left = {n: p for n, p in model.named_parameters() if n not in restored}
    out = small(x)
    find.that(out.dtype == dtype, f"out has dtype {out.dtype}; expected {dtype}")
    if _rounds_inputs(case):
        with torch.no_grad():
            off = float((out.double() - model(x).double()).norm() / model(x).double().norm())
        find.that(off < 1.5, f"results are {off:.3g} off the model's")
        return
    packed = {name.removeprefix("model."): p for name, p in small.named_parameters()}
    find.that(len(packed) == len(left), f"parameters are {sorted(packed)}; expected {sorted(left)}")
    gradient = torch.randn_like(out.float())
    is_ids = not x.is_floating_point()

    def plain(**given: Any) -> Tensor:
        at = x if is_ids else given.pop("input")
        kind = torch.float64 if is_ids else at.dtype
        if is_ids and given:
            kind = next(iter(given.values())).dtype
        weights = {n: w.to(kind) for n, w in restored.items()}
        named: dict[str, Any] = {
            n: given.get(n, weights.get(n)) for n, _ in model.named_parameters()
        }
        named |= {n: w for n, w in weights.items()}
        if case.model == "tied":
            named["head.weight"] = named["embedding.weight"]
        return torch.func.functional_call(model, named, (at,), tie_weights=False)

    inputs: dict[str, Any] = dict(left) if is_ids else {"input": x, **left}
    if not inputs:
        return
    leaf = x if is_ids else x.detach().requires_grad_()
    result = small(leaf)
    wanted = ([] if is_ids else [leaf]) + list(packed.values())
    grads = torch.autograd.grad(result, wanted, gradient.to(result.dtype))
    names = ([] if is_ids else ["input"]) + list(left)
    got = {"out": result.detach()} | {f"d{n}": g for n, g in zip(names, grads, strict=True)}
    compare(find, got, plain, inputs, gradient, dtype)


def _check_bad_first(find: Findings, case: Case, device: str) -> None:
    """A first call with inf or NaN does not affect later ones."""
    if case.model in ("embedding", "tied") or case.dtype != "float32":
        return
    model = model_of(case, device, case.seed)
    x = input_of(case, device, case.seed + 1)
    try:
        small = create_ultra_precision_module(model, config_of(case))
    except ValueError:
        return  # the strategy needs samples, and none can be generated for the model
    bad = x.clone()
    bad.view(-1)[3] = float("inf") if case.seed % 2 else float("nan")
    with torch.no_grad():
        small(bad)
        out = small(x)
    find.that(bool(out.isfinite().all()), "after a batch with NaN results are not finite")
    off = float((out - model(x)).norm() / model(x).norm())
    find.that(off < 1.5, f"after a batch with NaN results are {off:.3g} off")


def _check_also(find: Findings, case: Case, small: Any, x: Tensor, device: str) -> None:
    def call(module: nn.Module) -> Tensor:
        return module(x).detach()

    if case.also == "state":
        other = Case(**{**vars(case), "strategy": "UNIFORM", "target": 0.0})
        model = model_of(case, device, case.seed + 5)
        fresh = create_ultra_precision_module(model, config_of(other), calibration=x)
        contract.state_dict_holds_all(find, small, fresh, call)
    elif case.also == "copies":
        # torch pickles no module with parametrizations, which hold packed weights.
        contract.copies_equal(find, small, call, ("deepcopy",))
    elif case.also == "leak":
        leaf = x.detach().requires_grad_() if x.is_floating_point() else x
        contract.nothing_is_left(find, lambda: small(leaf).sum())
    elif case.also == "repeat":
        find.equal("repeated call", call(small), call(small))
    elif case.also == "mode":
        contract.mode_reaches_all(find, small)
    elif case.also == "fused" and case.model == "encoder" and case.dtype == "float32":
        _check_fused(find, case, small, x, device)
    elif case.also == "hook" and case.model in ("mlp", "deep", "embedding"):
        last = small.model[-1]
        last.register_forward_hook(lambda module, given, out: out * 0 + 3)
        find.that(bool((call(small) == 3).all()), "a hook on the last layer does nothing")
    if case.model == "embedding" and device == "cpu":  # CUDA asserts, and is lost then
        _check_embedding(find, case, small)


def _check_embedding(find: Findings, case: Case, small: Any) -> None:
    """Ids out of range are refused, as nn.Embedding does."""
    first = small.model[0]
    for ids in (-1, 24):
        try:
            first(torch.tensor([0, ids], device=next(small.buffers()).device))
        except (IndexError, ValueError, RuntimeError):
            continue
        find.that(False, f"the embedding has a row for id {ids}")
    padding = None if case.padding_idx < 0 else case.padding_idx
    ought = {"num_embeddings": 24, "embedding_dim": case.width, "padding_idx": padding}
    for name, value in ought.items():
        got = getattr(first, name, "missing")
        find.that(got == value, f"{name} of the embedding is {got}; expected {value}")


def _check_fused(find: Findings, case: Case, small: Any, x: Tensor, device: str) -> None:
    """A fused model is packed, and rounds its inputs, as the original model.

    A number between two steps may be rounded to either, which changes a token: most are close.
    """
    fused = UnifiedAttentionFusion(model_of(case, device, case.seed))
    with torch.no_grad():
        true = small(x)
        out = create_ultra_precision_module(fused, config_of(case), calibration=x)(x)
    off = float((out - true).abs().flatten().median())
    size = float(true.abs().max())
    find.that(
        off <= 2e-4 * size, f"a packed fused model is typically off by {off:.3g} of {size:.3g}"
    )
