"""Modules with the names and behaviour of flash-attn's, for programs that were written for it.

Only ``install()`` makes ``import flash_attn`` (2.8) and ``import flash_attn_interface``
(FlashAttention-3) import them. They can also be imported by their own names:
``from flash_cute.compat.flash_attn import flash_attn_func``.

Example::

    import flash_cute.compat

    flash_cute.compat.install()
    from flash_attn import flash_attn_func  # flash_cute's kernels

Programs that look for the distribution ``flash-attn`` find it after ``install(metadata=True)``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from flash_cute.call import validate
from flash_cute.compat import distribution

_HERE = "flash_cute.compat"
# Names that programs import, and the modules of flash_cute that replace them.
MODULES = {
    name: f"{_HERE}.{name}"
    for name in (
        "flash_attn",
        "flash_attn.bert_padding",
        "flash_attn.flash_attn_interface",
        "flash_attn.layers",
        "flash_attn.layers.rotary",
        "flash_attn_2_cuda",
        "flash_attn_interface",
    )
}
_replaced: dict[str, ModuleType] | None = None  # None while not installed


def install(metadata: bool = False) -> None:
    """Makes ``import flash_attn``, ``flash_attn_2_cuda`` and ``flash_attn_interface`` import these
    modules, until :func:`uninstall`. A second call only adds the metadata, if requested.

    Call it before the program imports them: earlier imports do not change. An installed flash-attn
    cannot be imported meanwhile.

    Args:
        metadata: whether ``importlib.metadata.version("flash-attn")`` is ``flash_attn.__version__``
            in this process. transformers, Megatron and others check it, often once, when they are
            imported: call this before. They may then import parts of flash-attn that do not exist
            here (``flash_attn.ops``, ``modules``, ``losses``). FlashAttention-3 has no metadata.

    Raises:
        TypeError, ValueError: ``metadata`` is not a bool.

    Example::

        import importlib.metadata

        import flash_cute.compat
        import torch

        flash_cute.compat.install(metadata=True)
        import flash_attn

        assert importlib.metadata.version("flash-attn") == flash_attn.__version__
        q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        out = flash_attn.flash_attn_func(q, k, v, causal=True)  # flash_cute's
    """
    global _replaced
    validate.flag("metadata", metadata)
    if metadata:
        distribution.announce()
    if _replaced is not None:
        return
    replaced = {x: m for x, m in sys.modules.items() if x in MODULES or x.startswith("flash_attn.")}
    for name in replaced:
        del sys.modules[name]
    _replaced = replaced
    sys.modules |= {name: importlib.import_module(module) for name, module in MODULES.items()}


def uninstall() -> None:
    """Undoes :func:`install`: restores earlier modules, and removes the metadata.

    Example::

        import flash_cute.compat

        flash_cute.compat.install()
        import flash_attn  # flash_cute's

        flash_cute.compat.uninstall()  # the next import finds flash-attn itself, if it is there
    """
    global _replaced
    distribution.withdraw()
    if _replaced is None:
        return
    for name in [x for x in sys.modules if x in MODULES or x.startswith("flash_attn.")]:
        del sys.modules[name]
    sys.modules |= _replaced
    _replaced = None
