"""Turns the linear layers of a model into fp8 ones."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.parameter import UninitializedParameter

from flash_cute.core.model_copies import copied
from flash_cute.core.multihead import MultiHeadAttention
from flash_cute.core.plain_attributes import plain_modules
from flash_cute.precision.formats import FP8Config, checked_config
from flash_cute.precision.fp8_attention import FP8MultiheadAttention
from flash_cute.precision.fp8_linear import FP8LinearLayer
from flash_cute.precision.fp8_replaceable import reason_to_leave
from flash_cute.precision.fp8_scales import scales_of


def convert_model_to_fp8(
    model: nn.Module, fp8_config: FP8Config | None = None, inplace: bool = True
) -> nn.Module:
    """Replaces every nn.Linear, of any size, by an `FP8LinearLayer`.

    Parameters stay the same objects under the same names: existing optimizers still work, tied
    weights stay tied, and checkpoints fit both ways. nn.MultiheadAttention is replaced as a whole,
    because it never calls its ``out_proj``: all four projections then have fp8 products. The fused
    kernels that nn.TransformerEncoder and its layers use in eval are switched off, as they would
    bypass the layers. Attributes that were set on a replaced layer are kept.

    Not converted, with a warning that names them and says why: layers with anything that torch's
    class lacks and that would be lost: hooks of any kind (as those of `torch.nn.utils.prune`, and
    of the old weight_norm and spectral_norm), parametrizations, an own forward, method, property,
    parameter, buffer or module, parameters of a subclass of Tensor or of a dtype that is not
    floating; attention with ``add_bias_kv`` or ``add_zero_attn``; layers in a plain list, tuple or
    dict, where torch does not see them; and ``in_proj_weight`` of flash_cute's own attention
    layers, whose ``out_proj`` is converted. Subclasses that only define ``__init__``, and
    OptimizedLinear, are replaced. Layers in ``fp8_config.skip`` are not converted, without a
    warning.

    A converted model may be converted again: nothing changes, except that a given config replaces
    that of every fp8 layer.

    Args:
        model: any module; layers keep their device, dtype and mode.
        fp8_config: options. Default ``FP8Config()``.
        inplace: convert ``model`` itself (default), or a deep copy.

    Returns:
        The converted model: ``model`` itself if inplace, unless it is an nn.Linear: then a new
        layer with its Parameters.

    Raises:
        TypeError: ``model`` is not a module, or ``fp8_config`` not an FP8Config.
        ValueError: the model has no nn.Linear outside of ``skip``, a layer is lazy and has no
            weight yet, or ``skip`` has a name that the model lacks.

    Example::

        from flash_cute.precision import FP8LinearLayer, convert_model_to_fp8
        from torch import nn

        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        assert isinstance(convert_model_to_fp8(model)[2], FP8LinearLayer)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, not {type(model).__name__}")
    config = checked_config("fp8_config", fp8_config)
    if not inplace:
        model = copied(model)
    spared = layers_to_spare(model, config.skip)
    chosen, left = layers_to_convert(model, spared)
    hidden = hidden_layers(model, spared)
    if not (chosen or left or scales_of(model)):
        kind, besides = type(model).__name__, f"; {'; '.join(hidden)}" if hidden else ""
        raise ValueError(f"{kind} has no nn.Linear: nothing to convert to fp8{besides}")
    left += hidden
    if left:
        warnings.warn(f"not converted to fp8: {'; '.join(left)}", stacklevel=2)
    if fp8_config is not None:
        reconfigure(model, config, spared)
    model = replace(model, chosen, config)
    switch_fast_paths_off(model)
    return model


def layers_to_spare(model: nn.Module, skip: tuple[str, ...]) -> set[nn.Module]:
    """The modules that ``skip`` names, and their children."""
    named = dict(model.named_modules(remove_duplicate=False))
    if unknown := [name for name in skip if name not in named]:
        raise ValueError(f"skip: {type(model).__name__} has no module {', '.join(unknown)}")
    return {part for name in skip for part in named[name].modules()}


def layers_to_convert(
    model: nn.Module, spared: set[nn.Module]
) -> tuple[dict[str, nn.Module], list[str]]:
    """The modules to replace by name, a shared one under each of its names, and those that cannot
    be replaced, with the reason."""
    chosen: dict[str, nn.Module] = {}
    left: list[str] = []
    done = set(spared)
    for name, module in model.named_modules(remove_duplicate=False):
        if module in done:
            continue
        if isinstance(module, nn.MultiheadAttention):
            done.update(x for x in module.modules() if x is not module)  # it calls no child
        if isinstance(module, FP8MultiheadAttention):
            continue
        if isinstance(module, MultiHeadAttention):
            left.append(f"{name}.in_proj_weight" if name else "in_proj_weight")
        if isinstance(module, (nn.Linear, nn.MultiheadAttention)):
            refuse_lazy(name, module)
            if (reason := reason_to_leave(module)) is None:
                chosen[name] = module
            else:
                left.append(f"{name or 'the model'} ({type(module).__name__}) {reason}")
    return chosen, left


def hidden_layers(model: nn.Module, spared: set[nn.Module]) -> list[str]:
    """Layers in plain lists, tuples and dicts, which are not converted: path, class and reason.
    Some may be registered modules of the model, too."""
    found: dict[str, str] = {}
    for path, module in plain_modules(model):
        if isinstance(module, (nn.Linear, nn.MultiheadAttention)) and module not in spared:
            found.setdefault(path, type(module).__name__)
    reason = "is held where torch does not look for modules: make it an nn.ModuleList or a module"
    return [f"{path} ({kind}) {reason}" for path, kind in found.items()]


def refuse_lazy(name: str, module: nn.Module) -> None:
    """Refuses a layer whose sizes are not known yet."""
    if any(isinstance(p, UninitializedParameter) for p in module.parameters()):
        raise ValueError(f"{name} is lazy and has no weight yet: call the model once before")


def replace(model: nn.Module, chosen: dict[str, nn.Module], config: FP8Config) -> nn.Module:
    """Replaces the chosen modules by fp8 ones; returns the root, which may be one of them."""
    made: dict[nn.Module, nn.Module] = {}
    for name, module in chosen.items():
        if module not in made:
            made[module] = fp8_module(module, config)
        if not name:
            return made[module]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[module])
    return model


def fp8_module(module: nn.Module, config: FP8Config) -> nn.Module:
    """The fp8 module for a linear layer or an attention."""
    if isinstance(module, nn.MultiheadAttention):
        return FP8MultiheadAttention.from_attention(module, config)
    assert isinstance(module, nn.Linear)
    return FP8LinearLayer.from_linear(module, config)


def reconfigure(model: nn.Module, config: FP8Config, spared: set[nn.Module]) -> None:
    """Gives layers that are fp8 already another config, unless they have it or are spared."""
    for module in set(model.modules()) - spared:
        if isinstance(module, (FP8LinearLayer, FP8MultiheadAttention)):
            device = next(module.parameters()).device
            for scales in scales_of(module):
                if scales.config != config:
                    scales.configure(config, device)


def switch_fast_paths_off(model: nn.Module) -> None:
    """Makes torch's encoder call its layers in eval, instead of passing weights to a kernel."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
