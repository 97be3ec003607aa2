"""Registers the attn_implementation with transformers, and removes it.

transformers treats any name with "flash" in it as flash attention, which static caches and
continuous batching need, and then looks for functions with that name: two of its functions are
wrapped to find these. transformers' release is checked first: older ones lack some names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import flash_cute
from flash_cute.integrations.transformers.attention import attention
from flash_cute.integrations.transformers.masks import mask

NAME = "flash_cute"
_OF_BLOCKS = "MiniMaxAI/msa"  # listed by models that give block_indices to attention
OLDEST = (5, 20)  # release of transformers
# Models that refuse flash attention because of tokens that see each other in both directions, those
# of an image or of a prompt, which blocks.py supports.
_WITH_BLOCKS = tuple(
    f"transformers.models.{module}.modeling_{module}.{name}{kind}"
    for module, name in (
        ("gemma3", "Gemma3"),
        ("gemma4", "Gemma4"),
        ("gemma4_unified", "Gemma4Unified"),
        ("paligemma", "PaliGemma"),
    )
    for kind in ("Model", "ForConditionalGeneration")
)


def register() -> None:
    """Makes ``attn_implementation="flash_cute"`` available to every model that supports flash
    attention. Existing models switch to it by ``set_attn_implementation``.

    Raises:
        ImportError: transformers is missing, or older than 5.20.

    Example::

        import torch
        from flash_cute.integrations.transformers import register
        from transformers import LlamaConfig, LlamaForCausalLM

        register()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=100, num_attention_heads=4, **sizes))
        model.set_attn_implementation("flash_cute")
        ids = torch.randint(100, (1, 50))
        model(ids, labels=ids).loss.backward()
    """
    _refuse_older_releases()
    of_attention, of_masks = _interfaces()
    of_attention.register(NAME, attention)
    of_masks.register(NAME, mask)
    loader, choice = _wrapped()
    _wrap(*loader, _functions)
    _wrap(*choice, _choose)


def _refuse_older_releases() -> None:
    """Refuses older releases, whose different arguments would give wrong results silently."""
    oldest = ".".join(map(str, OLDEST))
    remedy = f"flash_cute supports {oldest} and newer: pip install 'transformers>={oldest}'"
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"transformers is not installed; {remedy}", name="transformers"
        ) from error
    release = tuple(int(x) for x in re.findall(r"\d+", transformers.__version__)[:2])
    if release < OLDEST:
        raise ImportError(f"transformers {transformers.__version__} is installed; {remedy}")


def unregister() -> None:
    """Undoes :func:`register`. Models that use the name can no longer be called.

    Example::

        from flash_cute.integrations.transformers import register, unregister

        register()
        unregister()
    """
    for interface in _interfaces():
        interface._global_mapping.pop(NAME, None)
    for owner, name in _wrapped():
        original = getattr(getattr(owner, name), "__wrapped__", None)
        if original is not None:
            setattr(owner, name, original)
    if _flash()._loaded_implementation == NAME:
        _flash()._loaded_implementation = None


def _flash() -> Any:
    from transformers import modeling_flash_attention_utils

    return modeling_flash_attention_utils


def _interfaces() -> tuple[Any, Any]:
    """transformers' registries of attention and of masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    return AttentionInterface, AttentionMaskInterface


def _wrapped() -> tuple[tuple[Any, str], ...]:
    """The functions that are wrapped: one loads functions by an implementation's name, the other
    chooses a model's implementation."""
    from transformers import PreTrainedModel

    return (_flash(), "_lazy_imports"), (PreTrainedModel, "_check_and_adjust_attn_implementation")


def _wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replaces a function by ``function(original, ...)``, once."""
    original = getattr(owner, name)
    if getattr(original, "is_of_flash_cute", False):
        return

    @wraps(original)
    def wrapped(*args: Any, **named: Any) -> Any:
        return function(original, *args, **named)

    wrapped.is_of_flash_cute = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _functions(original: Callable[..., Any], implementation: str | None, *args: Any, **named: Any):
    """The functions of the implementation: three of attention, and those of padding."""
    if implementation != NAME:
        return original(implementation, *args, **named)
    return (
        flash_cute.flash_attn_func,
        flash_cute.flash_attn_varlen_func,
        flash_cute.flash_attn_with_kvcache,
        _flash()._pad_input,
        _flash()._unpad_input,
    )


def _choose(original: Callable[..., str], model: Any, name: str | None, *args: Any, **named: Any):
    """The name itself, if the model supports flash attention, dense or over blocks of keys.

    transformers would replace it if a model lists its implementations.
    """
    if name != NAME:
        return original(model, name, *args, **named)
    listed = getattr(model, "_compatible_flash_implementations", None)
    code = sys.modules[type(model).__module__]
    has_class_of_its_own = hasattr(code, "is_flash_attn_available")  # that calls flash-attn
    is_other = listed and not any("flash" in x for x in listed)
    supports = model._supports_flash_attn or any(
        f"{x.__module__}.{x.__qualname__}" in _WITH_BLOCKS for x in type(model).__mro__
    )
    is_dense = supports and not has_class_of_its_own and not is_other
    if not is_dense and _OF_BLOCKS not in (listed or ()):
        raise ValueError(
            f'{type(model).__name__} does not support attn_implementation="{NAME}": flash '
            'attention cannot compute its attention; use "sdpa" or "eager"'
        )
    _flash().lazy_import_flash_attention(NAME)
    return name
