"""Bad arguments of fusion, and changes of submodules: hooks, adapters, wrappers, fp8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_cute.attention.fusion import FusionConfig, UnifiedAttentionFusion
from flash_cute.precision import convert_model_to_fp8
from flash_cute.testing.systems import contract
from flash_cute.testing.systems.findings import Findings

REFUSED: contract.Refusals = {
    "strategy": ("text", "none", "zero"),
    "optimization_level": ("text", "none", "zero"),
    "enable_mixed_precision": ("text", "none", "two"),
    "enable_memory_optimization": ("text", "none", "two"),
    "target_sequence_length": contract.WHOLE,
    "model": ("text", "none"),
    "config": ("text", "zero"),
    "src_mask": ("text", "zero"),
    "src_key_padding_mask": ("text", "zero"),
}


def check_refusal(find: Findings, case: Any) -> None:
    """Checks a bad value of one argument."""
    name, value = case.argument, contract.BAD[case.value]
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

    def make() -> Any:
        if name in ("model", "config"):
            given = {"model": layer, "config": None} | {name: value}
            return UnifiedAttentionFusion(**given)
        if name.startswith("src"):
            return UnifiedAttentionFusion(layer)(torch.randn(1, 3, 8), **{name: value})
        return FusionConfig(**{name: value})

    find.refused(make, f"{name}={value!r}", name)


class _Adapter(nn.Module):
    """A linear layer with a low-rank addition, which replaces a layer as adapters do."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        weight = inner.weight
        self.down = nn.Parameter(torch.ones(1, weight.shape[1]).to(weight))
        self.up = nn.Parameter(torch.ones(weight.shape[0], 1).to(weight))

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    @property
    def bias(self) -> Tensor:
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.t() @ self.up.t()


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def check_part(find: Findings, case: Any, fused: Any, given: tuple[Tensor, Any]) -> None:
    """A change of a submodule of the fused model takes effect."""
    (src, masks), also = given, case.also

    def call(module: nn.Module) -> Tensor:
        return module(src, **masks).detach()

    block: Any = fused.model.layers[-1] if case.layers else fused.model
    before, name = call(fused), case.part
    if also == "fp8":
        convert_model_to_fp8(fused)
        find.that(not torch.equal(call(fused), before), "convert_model_to_fp8 changes nothing")
        return
    if also == "checkpoint":
        if not case.layers:
            return
        wrapped = fused.model.layers[-1] = _Checkpointed(block)
        find.that(torch.allclose(call(fused).double(), before.double(), rtol=1e-2, atol=1e-2),
                  "a checkpoint around a layer changes its results")  # fmt: skip
        find.that(wrapped.calls == 1, f"a wrapper of a layer is called {wrapped.calls} times")
        return
    part = block.get_submodule(name)
    seen: list[int] = []
    if also in ("hook", "pre_hook") and name != "self_attn.out_proj":
        # torch's own attention does not call out_proj.
        if also == "hook":
            part.register_forward_hook(lambda *_: seen.append(1))
        else:
            part.register_forward_pre_hook(lambda *_: seen.append(1))
        same = call(fused)
        uses = case.layers if case.is_tied and case.layers else 1
        find.that(len(seen) == uses, f"a {also} of {name} is called {len(seen)} times")
        find.that(torch.allclose(same.double(), before.double(), rtol=2e-2, atol=2e-2),
                  f"a {also} of {name} that does nothing changes results")  # fmt: skip
    if also in ("replaced", "adapter") and name in ("linear1", "linear2"):
        parent = block
        if also == "adapter":
            setattr(parent, name, _Adapter(part))
        else:
            other = nn.Linear(part.in_features, part.out_features).to(part.weight)
            setattr(parent, name, nn.Sequential(other))
        with find.trying(f"a call with another {name}"):
            changed = call(fused)
            if also == "adapter" and case.hidden > 1:
                find.that(not torch.equal(changed, before), f"an adapter of {name} does nothing")
            fused(src.detach().requires_grad_(), **masks).square().sum().backward()
            got = all(p.grad is not None for p in getattr(parent, name).parameters())
            find.that(got, f"no gradient reaches what stands in the place of {name}")
