"""vLLM: an attention backend over flash_cute's functions, for paged caches.

vLLM finds it if flash_cute is installed (a plugin of the group ``vllm.general_plugins``), as
``FLASH_CUTE``. It has the interface of vLLM 0.32 and 0.33.

Example::

    from flash_cute.integrations import vllm

    vllm.register()  # needed only where flash_cute is not installed, but on the path
    # From then on vllm.LLM(model, attention_config={"backend": "FLASH_CUTE"}) takes it.
"""

from __future__ import annotations

import logging
import re
from typing import Any

__all__ = ["NAME", "register"]

NAME = "FLASH_CUTE"
OLDEST = (0, 32)  # release of vLLM


def register() -> None:
    """Makes ``FLASH_CUTE`` a backend of vLLM, which uses it only if vLLM's attention config names
    it as ``backend`` or in ``backend_per_kind``.

    Raises:
        ImportError: vLLM is missing, or older than 0.32.

    Example::

        from flash_cute.integrations import vllm

        vllm.register()
    """
    release = _release()
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"vLLM {'.'.join(map(str, release))} is installed; flash_cute's backend has the "
            f"interface of {oldest} and newer: pip install 'vllm>={oldest}'"
        )
    from vllm.v1.attention.backends import registry

    named: Any = registry.AttentionBackendEnum
    if NAME not in named.__members__:
        registry.register_backend(NAME, f"{__name__}.backend.Backend")


def plugin() -> None:
    """vLLM's entry point: :func:`register`, which only logs a warning on an older vLLM."""
    try:
        register()
    except ImportError as error:
        logging.getLogger(__name__).warning("backend %s is not registered: %s", NAME, error)


def _release() -> tuple[int, ...]:
    import vllm

    return tuple(int(x) for x in re.findall(r"\d+", vllm.__version__)[:2])
