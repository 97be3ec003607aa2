"""Fused blocks of Llama's shape: what is recognised, and parts that are no longer plain."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_cute.attention.fusion import (
    FusionConfig,
    FusionStrategy,
    OptimizationLevel,
    UnifiedAttentionFusion,
)
from flash_cute.testing.systems import contract
from flash_cute.testing.systems.findings import Findings, compare
from flash_cute.testing.systems.llama_blocks import VARIANTS, Block, Model, rotary

ALSO = ("", "", "state", "names", "copies", "leak", "mode", "hook", "adapter", "files", "repeat",
        "training", "twice")  # fmt: skip
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
         "post_attention_layernorm", "self_attn", "mlp")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """Blocks in a row, their call, and one property to check."""

    seed: int = 0
    also: str = ""
    dtype: str = "float64"
    variants: tuple[str, ...] = ("plain",)
    heads: int = 4
    heads_k: int = 2
    dim: int = 4
    hidden: int = 12
    bias: bool = False
    batch: int = 2
    seqlen: int = 9
    mask: str = ""  # "bool", "float"
    is_rotated: bool = True
    strategy: str = "FULL_BLOCK"
    level: str = "BALANCED"
    saves_memory: bool = True
    part: str = "self_attn.q_proj"


def draw(pick: random.Random) -> Case:
    heads = pick.choice((1, 2, 4))
    return Case(
        seed=pick.randrange(2**31), also=pick.choice(ALSO),
        dtype=pick.choice(("float64", "float64", "float32", "bfloat16")),
        variants=tuple(pick.choice(VARIANTS) for _ in range(pick.choice((1, 1, 2, 3)))),
        heads=heads, heads_k=pick.choice([n for n in (1, 2, 4) if heads % n == 0]),
        dim=pick.choice((4, 8)), hidden=pick.choice((1, 12, 33)), bias=pick.random() < 0.3,
        batch=pick.choice((1, 2)), seqlen=pick.choice((1, 5, 9, 33, 70, 130)),
        mask=pick.choice(("", "", "bool", "float")), is_rotated=pick.random() < 0.7,
        strategy=pick.choice([s.name for s in FusionStrategy]),
        level=pick.choice([s.name for s in OptimizationLevel]),
        saves_memory=pick.random() < 0.6, part=pick.choice(PARTS),
    )  # fmt: skip


def model_of(case: Case, device: str, seed: int) -> Any:
    torch.manual_seed(seed)
    width = case.heads * case.dim
    model = Model([
        Block(width, case.heads, case.heads_k, case.hidden, case.bias, variant)
        for variant in case.variants
    ])  # fmt: skip
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model.to(device, getattr(torch, case.dtype)).eval()


def call_of(case: Case, device: str) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states, and the rest of a call."""
    generator = torch.Generator().manual_seed(case.seed)
    n, dtype = case.seqlen, getattr(torch, case.dtype)
    x = torch.randn(case.batch, n, case.heads * case.dim, generator=generator)
    given: dict[str, Any] = {}
    if case.is_rotated:
        given["position_embeddings"] = tuple(y.to(device, dtype) for y in rotary(n, case.dim))
    if case.mask:
        seen = torch.rand(case.batch, 1, n, n, generator=generator) < 0.7
        seen = seen.tril() | torch.eye(n, dtype=torch.bool)
        mask = seen
        if case.mask == "float":
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
        given["attention_mask"] = mask.to(device)
    return x.to(device, dtype), given


def check(case: Case, device: str) -> Findings:
    find = Findings()
    config = FusionConfig(
        FusionStrategy[case.strategy], OptimizationLevel[case.level],
        enable_memory_optimization=case.saves_memory,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, (x, given) = model_of(case, device, case.seed), call_of(case, device)
        if case.also == "twice":
            model.blocks.append(model.blocks[0])
        original = copy.deepcopy(model)
        for block in original.blocks:
            block.self_attn.is_written_out = True
        try:
            fused = UnifiedAttentionFusion(model, config)
        except NotImplementedError as error:
            find.that("plain" not in case.variants, f"a plain block is left: {str(error)[:300]}")
            return find
        for number, variant in enumerate(case.variants):
            report = fused.report.get(f"blocks.{number}", "")
            is_fused = report.startswith("fused")
            find.that(is_fused or variant != "plain", f"a plain block is {report or 'not named'}")
        _check_values(find, case, original, fused, x, given)
        _check_also(find, case, model, fused, x, given, config, device)
    return find


def _check_values(
    find: Findings, case: Case, original: nn.Module, fused: Any, x: Tensor, given: Any
) -> None:
    """In eval: values and gradients equal those of the original blocks, plain PyTorch, in fp64."""
    if case.also in ("training",):
        return
    parameters = dict(original.named_parameters())
    names = list(parameters)

    def plain(x: Tensor, **of: Tensor) -> Tensor:
        named = {name: of[f"p{i}"] for i, name in enumerate(names)}
        rest = dict(given)
        if (mask := rest.get("attention_mask")) is not None and mask.dtype != torch.bool:
            rest["attention_mask"] = mask.to(x.dtype)
        return torch.func.functional_call(original, named, (x,), rest)

    leaves = {"x": x} | {f"p{i}": p for i, p in enumerate(parameters.values())}
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(case.seed + 1))
    leaf = x.detach().clone().requires_grad_()
    own = list(fused.parameters())
    if not find.that(len(own) == len(names), f"{len(own)} parameters of {len(names)}"):
        return
    out = fused(leaf, **given)
    gradient = gradient.to(x.device)
    grads = torch.autograd.grad(out, [leaf, *own], gradient.to(out.dtype), allow_unused=True)
    got = {"out": out.detach()}
    for key, grad in zip(leaves, grads, strict=True):
        if find.that(grad is not None, f"no gradient reaches {key}"):
            got[f"d{key}"] = grad
    compare(find, got, plain, leaves, gradient, x.dtype)


class _Adapter(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.added = nn.Parameter(torch.ones_like(inner.weight))

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    @property
    def bias(self) -> Any:
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.added.t()


def _check_also(
    find: Findings, case: Case, model: Any, fused: Any, x: Tensor, given: Any,
    config: FusionConfig, device: str,
) -> None:  # fmt: skip
    def call(module: Callable[..., Tensor]) -> Tensor:
        return module(x, **given).detach()

    also, block = case.also, fused.model.blocks[0]
    if also == "state":
        fresh = UnifiedAttentionFusion(model_of(case, device, case.seed + 3), config)
        contract.state_dict_holds_all(find, fused, fresh, call)
    elif also == "names":
        ought = {n for n, _ in model.named_parameters()}
        of_fused = {n for n, _ in fused.named_parameters()}
        for name, keys in (("state_dict", set(fused.state_dict())), ("named_parameters", of_fused)):
            find.that(
                keys == ought, f"{name} has other names than the model: {sorted(keys - ought)[:2]}"
            )
    elif also == "copies":
        contract.copies_equal(find, fused, call)
    elif also == "repeat":
        find.equal("repeated call", call(fused), call(fused))
    elif also == "leak":
        contract.nothing_is_left(find, lambda: fused(x.requires_grad_(), **given).sum())
    elif also == "mode":
        contract.mode_reaches_all(find, fused)
    elif also == "training":
        _check_training(find, case, fused, call)
    elif also == "files":
        _check_files(find, model, fused)
    elif also == "hook":
        before, seen = call(fused), list[int]()
        block.get_submodule(case.part).register_forward_hook(lambda *_: seen.append(1))
        after = call(fused)
        find.that(len(seen) == 1, f"a hook of {case.part} is called {len(seen)} times")
        near = torch.allclose(after.double(), before.double(), rtol=5e-2, atol=5e-2)
        find.that(near, f"a hook of {case.part} that does nothing changes results")
    elif also == "adapter" and case.part.endswith("proj"):
        before = call(fused)
        parent, _, name = case.part.rpartition(".")
        of = block.get_submodule(parent)
        setattr(of, name, _Adapter(getattr(of, name)))
        one_key = case.seqlen == 1 and name in ("q_proj", "k_proj")
        with find.trying(f"a call with an adapter of {case.part}"):
            changed = not torch.equal(call(fused), before)
            find.that(changed or one_key, f"an adapter of {case.part} does nothing")


def _check_training(find: Findings, case: Case, fused: Any, call: Any) -> None:
    """In training a block's dropout is active, and nothing else changes."""
    before = call(fused)
    fused.train()
    torch.manual_seed(case.seed)
    first = call(fused)
    drops = {"dropout", "hidden_dropout"} & set(case.variants)
    if drops:
        find.that(not torch.equal(first, before), f"in training {sorted(drops)} do nothing")
    else:
        near = torch.allclose(first.double(), before.double(), rtol=5e-2, atol=5e-2)
        find.that(near, "results in training differ, and nothing is dropped")


def _check_files(find: Findings, model: Any, fused: Any) -> None:
    """A saved layer holds only its own weights."""
    for whole in (model, fused):
        for name, part in whole.named_modules():
            if isinstance(part, nn.Linear):
                file = io.BytesIO()
                torch.save(part.state_dict(), file)
                own = sum(p.nbytes for p in part.parameters())
                more = len(file.getvalue()) - own
                find.that(
                    more <= 4096, f"a file of {name} holds {more} bytes more than its weights"
                )
