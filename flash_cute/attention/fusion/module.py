"""A model with its blocks fused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion.config import FusionConfig, FusionStrategy, OptimizationLevel
from flash_cute.attention.fusion.encoder import EncoderAdapter, EncoderLayerAdapter
from flash_cute.attention.fusion.graphs import Graphs
from flash_cute.attention.fusion.llama import LlamaAdapter


class BlockAdapter(Protocol):
    """Recognises one kind of block, and makes its fused form."""

    name: str

    def matches(self, module: nn.Module) -> bool:
        """Whether it is of this kind."""

    def refusal(self, module: nn.Module) -> str | None:
        """What keeps a module of this kind from being fused; None if nothing does."""

    def fuse(self, module: nn.Module, config: FusionConfig) -> nn.Module:
        """The fused block, of the module's own submodules, under their names. Its attribute
        ``fused_steps`` names the steps; its method ``simplified``, if it has one, takes a call's
        arguments and gives them by name, with nothing left for forward to read on the host."""


_RECORDED = ("output_hidden_states", "output_attentions")
ADAPTERS: list[BlockAdapter] = [EncoderAdapter(), EncoderLayerAdapter(), LlamaAdapter()]


class UnifiedAttentionFusion(nn.Module):
    """A model that computes what ``model`` does, with fused blocks.

    The model is left as it is. Its parameters and buffers are shared: they are the same objects, so
    an optimizer of one trains the other. Keys of ``state_dict`` are the model's. What modules do
    besides, training mode and hooks, is not shared. Gradients of gradients are refused.

    Args:
        model: is, or holds, blocks of a kind in ``flash_cute.attention.fusion.ADAPTERS``.
        config: None is ``FusionConfig()``.

    Attributes:
        report: {name of a block: what is fused of it, or why it is left}.
        last_call: how the last call ran.

    Raises:
        NotImplementedError: no block can be fused; the message says why, and what can be.

    Example::

        layer = torch.nn.TransformerEncoderLayer(512, 8)
        fused = UnifiedAttentionFusion(layer, FusionConfig())
        out = fused(torch.randn(100, 2, 512))  # (seqlen, batch, d_model), as layer's
    """

    def __init__(self, model: nn.Module, config: FusionConfig | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
        if config is not None and not isinstance(config, FusionConfig):
            raise TypeError(f"config is {type(config).__name__}; expected a FusionConfig")
        self.config = FusionConfig() if config is None else replace(config)
        self.report: dict[str, str] = {}
        self.last_call = "no call so far"
        self.model = self._fused(shared_copy(model), "")
        if not any(text.startswith("fused") for text in self.report.values()):
            raise NotImplementedError(_refusal(model, self.report))
        self.training = model.training
        self.graphs = self._graphs()
        self.register_state_dict_post_hook(_without_prefix)
        self.register_load_state_dict_pre_hook(_with_prefix)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own arguments, and what it returns.

        NotImplementedError for ``output_hidden_states`` and ``output_attentions`` of Hugging Face's
        models, which record them in blocks that were replaced.
        """
        for name in _RECORDED:
            asked = kwargs.get(name)
            if asked is None:
                asked = getattr(getattr(self.model, "config", None), name, False)
            if asked:
                raise NotImplementedError(f"{name}: fused blocks record nothing")
        with self._precision():
            if not self.config.enable_mixed_precision:
                args, kwargs = self._cast(args), self._cast(kwargs)
            if torch.compiler.is_compiling():
                return self.model(*args, **kwargs)
            if self.graphs is None:
                self.last_call = "separate launches"
                return self.model(*args, **kwargs)
            call = self.model.simplified(*args, **kwargs)  # type: ignore[operator]
            reason = self.graphs.refusal(call)
            if reason is not None:
                self.last_call = f"separate launches: {reason}"
                return self.model(**call)
            self.last_call = "one CUDA graph"
            return self.graphs.run(call, self.model.seqlen_of(call))  # type: ignore[operator]

    def _graphs(self) -> Graphs | None:
        level = self.config.optimization_level
        whole = hasattr(self.model, "simplified")
        if level is not OptimizationLevel.AGGRESSIVE or not whole:
            return None
        return Graphs(self.model, self.config.target_sequence_length)

    def _fused(self, module: nn.Module, name: str) -> nn.Module:
        for adapter in ADAPTERS:
            if not adapter.matches(module):
                continue
            reason = adapter.refusal(module)
            if reason is not None:
                self.report[name] = f"left: {reason}"
                break
            fused: Any = adapter.fuse(module, self.config)
            self.report[name] = f"fused: {', '.join(fused.fused_steps)}"
            return fused
        for child_name, child in module.named_children():
            fused_child = self._fused(child, f"{name}.{child_name}" if name else child_name)
            setattr(module, child_name, fused_child)
        return module

    def _precision(self) -> AbstractContextManager[Any]:
        parameter = next(self.parameters())
        off = not self.config.enable_mixed_precision
        return torch.autocast(parameter.device.type, enabled=False) if off else nullcontext()

    def _cast(self, values: Any) -> Any:
        dtype = next(self.parameters()).dtype

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        if isinstance(values, dict):
            return {name: cast(x) for name, x in values.items()}
        return tuple(map(cast, values))


def create_unified_attention_fusion(
    model: nn.Module,
    fusion_strategy: FusionStrategy = FusionStrategy.FULL_BLOCK,
    optimization_level: OptimizationLevel = OptimizationLevel.BALANCED,
) -> UnifiedAttentionFusion:
    """:class:`UnifiedAttentionFusion` with these two options, the others being FusionConfig's.

    Example::

        from flash_cute.attention.fusion import OptimizationLevel

        transformer = torch.nn.TransformerEncoderLayer(d_model=512, nhead=8)
        fused = create_unified_attention_fusion(
            transformer, optimization_level=OptimizationLevel.AGGRESSIVE
        )
    """
    config = FusionConfig(strategy=fusion_strategy, optimization_level=optimization_level)
    return UnifiedAttentionFusion(model, config)


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the tree of modules, with the same parameters and buffers."""
    copies: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            new = copies[id(module)] = internals.copy_of(module)
            for name, child in module.named_children():
                setattr(new, name, copy(child))
        return copies[id(module)]

    return copy(model)


def _refusal(model: nn.Module, report: dict[str, str]) -> str:
    found = [f"{name or 'the model'} is {text}" for name, text in report.items()]
    supported = "; ".join(adapter.name for adapter in ADAPTERS)
    return (
        f"{type(model).__name__} has no block that can be fused"
        f"{': ' + '; '.join(found) if found else ''}. Supported: {supported}"
    )


_PREFIX = "model."


def _without_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(prefix + _PREFIX)]:
        state[prefix + key[len(prefix + _PREFIX) :]] = state.pop(key)


def _with_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[prefix + _PREFIX + key[len(prefix) :]] = state.pop(key)
