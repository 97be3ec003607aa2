"""A model with fused blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flash_cute import _torch_internals as internals
from flash_cute.attention.fusion.config import FusionConfig, FusionStrategy, OptimizationLevel
from flash_cute.attention.fusion.encoder import EncoderAdapter, EncoderLayerAdapter
from flash_cute.attention.fusion.graphs import Graphs
from flash_cute.attention.fusion.graphs import replace as replace_tensors
from flash_cute.attention.fusion.llama import LlamaAdapter
from flash_cute.attention.fusion.parts import FusedBlock, own_method
from flash_cute.attention.fusion.remembered import caching_trials
from flash_cute.attention.fusion.trial import fixed_settings, is_out_of_memory


class BlockAdapter(Protocol):
    """Recognises one kind of block, and makes its fused form."""

    name: str

    def matches(self, module: nn.Module) -> bool:
        """Whether a module is of this kind."""

    def refusal(self, module: nn.Module) -> str | None:
        """Why a module of this kind cannot be fused; None if it can."""

    def fuse(self, module: nn.Module, config: FusionConfig) -> nn.Module:
        """The fused block, with the module's own submodules under their names; an exception leaves
        the module unfused. Its attribute ``fused_steps`` names the steps; its method
        ``simplified``, if it has one, turns a call's arguments into keywords whose values forward
        need not read on the host."""


_RECORDED = ("output_hidden_states", "output_attentions")
ADAPTERS: list[BlockAdapter] = [EncoderAdapter(), EncoderLayerAdapter(), LlamaAdapter()]


class UnifiedAttentionFusion(nn.Module):
    """A model that computes what ``model`` does, with fused blocks.

    The model is not changed. Its parameters and buffers are shared objects, so an optimizer of one
    trains the other. Submodules, parameters and keys of ``state_dict`` have the model's names.
    Training mode and hooks are not shared. A submodule that is changed later (hooks, adapters,
    other modules, wrappers) is called from then on. Double backward is refused.

    Args:
        model: is, or holds, blocks of a kind in ``flash_cute.attention.fusion.ADAPTERS``.
        config: None is ``FusionConfig()``.

    Attributes:
        report: {name of a block: which steps are fused, or why it is left}.
        last_call: how the last call ran.
        model: the copy of the model with fused blocks.

    Raises:
        NotImplementedError: no block can be fused; the message says why, and which kinds can be.

    Example::

        import torch
        from flash_cute.attention.fusion import FusionConfig, UnifiedAttentionFusion

        layer = torch.nn.TransformerEncoderLayer(64, 4)
        fused = UnifiedAttentionFusion(layer, FusionConfig())
        out = fused(torch.randn(100, 2, 64))  # (seqlen, batch, d_model), as layer's
    """

    model: Any

    def __init__(self, model: nn.Module, config: FusionConfig | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
        if config is not None and not isinstance(config, FusionConfig):
            raise TypeError(f"config is {type(config).__name__}; expected a FusionConfig")
        self.config = FusionConfig() if config is None else replace(config)
        self.report: dict[str, str] = {}
        self.last_call = "no call so far"
        with caching_trials():
            fused = self._fused(shared_copy(model), "", {})
        if not any(text.startswith("fused") for text in self.report.values()):
            raise NotImplementedError(_refusal(model, self.report))
        internals.share_members(self, fused)
        self.__dict__["model"] = fused  # not a submodule: its children are this module's own
        self.training = model.training
        self.graphs = self._graphs()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own arguments and results.

        NotImplementedError for ``output_hidden_states`` and ``output_attentions`` of Hugging Face's
        models, whose recording blocks were replaced.
        """
        for name in _RECORDED:
            requested = kwargs.get(name)
            if requested is None:
                requested = getattr(getattr(self.model, "config", None), name, False)
            if requested:
                raise NotImplementedError(f"{name}: fused blocks record nothing")
        if not torch.compiler.is_compiling():
            vars(self.model).update(internals.former_parameters(self))
        with self._precision():
            if not self.config.enable_mixed_precision:
                args, kwargs = self._cast((args, kwargs))
            if torch.compiler.is_compiling():
                return self.model(*args, **kwargs)
            if self.graphs is None:
                self.last_call = "separate launches"
                return self.model(*args, **kwargs)
            call = self.model.simplified(*args, **kwargs)
            reason, frozen = self.graphs.check_call(call)
            if reason is not None:
                self.last_call = f"separate launches: {reason}"
                return self.model(**call)
            self.last_call = "one CUDA graph"
            return self.graphs.run(call, self.model.seqlen_of(call), frozen)

    def _graphs(self) -> Graphs | None:
        level = self.config.optimization_level
        whole = hasattr(self.model, "simplified")
        if level is not OptimizationLevel.AGGRESSIVE or not whole:
            return None
        return Graphs(self.model, self.config.target_sequence_length)

    def train(self, mode: bool = True) -> UnifiedAttentionFusion:
        """As of any module."""
        self.model.train(mode)
        self.training = mode
        return self

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """As of any module; ``model`` itself follows this one."""
        yield self
        yield from self.model.modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> UnifiedAttentionFusion:
        """As of any module: to all of :meth:`modules`, this one last."""
        self.model.apply(fn)
        fn(self)
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """As of any module."""
        return self.model.get_submodule(target) if target else self

    def _replicate_for_data_parallel(self) -> UnifiedAttentionFusion:
        replica = super()._replicate_for_data_parallel()
        copy = self.model._replicate_for_data_parallel()
        internals.share_members(copy, replica)
        replica.__dict__.update(model=copy, graphs=None)
        return replica

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint where to find a submodule that is named "model"."""
        return {"model": "_whole"} if "model" in internals.children(self) else {}

    @property
    def _whole(self) -> nn.Module:
        return self.model

    def _fused(
        self, module: nn.Module, name: str, done: dict[int, nn.Module], unless: str = ""
    ) -> nn.Module:
        """The fused form of a block, or the module with its children fused. ``unless`` is added to
        the report of fused blocks: it names methods of their parents that may not call them."""
        with fixed_settings():
            fused, text = _try_fuse(module, self.config)
        if text is not None:
            self.report[name] = text + unless * (fused is not None)
        if fused is not None:
            return fused
        if (method := own_method(module)) is not None:
            unless = f" (unless {name or 'the model'} has a {method} that does not call it)"
        children = internals.children(module)
        for child_name, child in children.items():
            if child is None:
                continue
            if id(child) not in done:
                path = f"{name}.{child_name}" if name else child_name
                done[id(child)] = self._fused(child, path, done, unless)
            children[child_name] = done[id(child)]
        return module

    def _precision(self) -> AbstractContextManager[Any]:
        if self.config.enable_mixed_precision:
            return nullcontext()
        return torch.autocast(next(self.parameters()).device.type, enabled=False)

    def _cast(self, values: Any) -> Any:
        """Casts fp16 to fp64 tensors to the dtype of the first parameter with one of these."""
        dtype = next((p.dtype for p in self.parameters() if p.dtype in _FLOATS), None)

        def cast(x: Tensor) -> Tensor:
            return x.to(dtype) if x.dtype in _FLOATS else x

        return values if dtype is None else replace_tensors(values, cast)


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _try_fuse(module: nn.Module, config: FusionConfig) -> tuple[nn.Module | None, str | None]:
    """(fused form or None, report) of a module; (None, None) if it is not a block."""
    try:
        adapter = next((adapter for adapter in ADAPTERS if adapter.matches(module)), None)
        if adapter is None:
            return None, None
        reason = adapter.refusal(module)
        if reason is None and isinstance(module, FusedBlock):
            reason = "it is fused already"
        if reason is None:
            fused: Any = adapter.fuse(module, config)
            return fused, f"fused: {', '.join(fused.fused_steps)}"
    except NotImplementedError as error:
        reason = str(error)
    except Exception as error:  # a block that the adapter did not expect
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
    return None, f"left: {reason}"


def create_unified_attention_fusion(
    model: nn.Module,
    fusion_strategy: FusionStrategy = FusionStrategy.FULL_BLOCK,
    optimization_level: OptimizationLevel = OptimizationLevel.BALANCED,
) -> UnifiedAttentionFusion:
    """:class:`UnifiedAttentionFusion` with these two options, and FusionConfig's other defaults.

    Example::

        import torch
        from flash_cute.attention.fusion import OptimizationLevel, create_unified_attention_fusion

        transformer = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4)
        fused = create_unified_attention_fusion(
            transformer, optimization_level=OptimizationLevel.AGGRESSIVE
        )
    """
    config = FusionConfig(strategy=fusion_strategy, optimization_level=optimization_level)
    return UnifiedAttentionFusion(model, config)


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy of the tree of modules that shares parameters and buffers. A module with several names
    is copied once."""
    copies: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if id(module) not in copies:
            new = copies[id(module)] = internals.copy_of(module)
            children = internals.children(new)
            for name, child in children.items():
                children[name] = None if child is None else copy(child)
        return copies[id(module)]

    return copy(model)


def _refusal(model: nn.Module, report: dict[str, str]) -> str:
    found = [f"{name or 'the model'} is {text}" for name, text in report.items()]
    supported = "; ".join(adapter.name for adapter in ADAPTERS)
    return (
        f"{type(model).__name__} has no block that can be fused"
        f"{': ' + '; '.join(found) if found else ''}. Supported: {supported}"
    )
