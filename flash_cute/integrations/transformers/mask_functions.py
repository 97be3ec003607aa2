"""Recognises transformers' mask functions.

They are closures: the functions and numbers that they combine are read by name. Closures with other
names are not recognised.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

MODULE = "transformers.masking_utils"  # of transformers' own mask functions

CAUSAL = "causal_mask_function"
BIDIRECTIONAL = "bidirectional_mask_function"
WINDOW = "sliding_window_overlay.<locals>.inner_mask"
WINDOW_OF_BOTH_SIDES = "sliding_window_bidirectional_overlay.<locals>.inner_mask"
SEQUENCES = "packed_sequence_mask_function.<locals>.inner_mask"
# Mask functions that arguments of attention replace.
BANDS = {
    CAUSAL,
    BIDIRECTIONAL,
    WINDOW,
    WINDOW_OF_BOTH_SIDES,
    "chunked_overlay.<locals>.inner_mask",  # within one chunk, as transformers checks
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
}
_BLOCKS = "blockwise_overlay.<locals>.inner_mask"
_AND = "and_masks.<locals>.and_mask"
_OR = "or_masks.<locals>.or_mask"


def named(name: str) -> Any:
    return getattr(importlib.import_module(MODULE), name)


def names(mask_function: Callable[..., Any]) -> Iterator[str]:
    """The mask functions that one combines."""
    name = mask_function.__qualname__
    if mask_function.__module__ != MODULE:
        yield f"{mask_function.__module__}.{name}"
    elif name != _AND:
        yield name
    for part in _parts(mask_function):
        yield from names(part)


def band(mask_function: Callable[..., Any]) -> tuple[int, int] | None:
    """(left, right) of the sliding window in a mask function."""
    name = mask_function.__qualname__
    if name == WINDOW:
        return _captured(mask_function, "sliding_window") - 1, 0
    if name == WINDOW_OF_BOTH_SIDES:
        side = _captured(mask_function, "sliding_window")
        return side, side
    return next((x for x in map(band, _parts(mask_function)) if x is not None), None)


def without_blocks(
    mask_function: Callable[..., Any],
) -> tuple[Callable[..., Any], Tensor | None]:
    """Splits ``causal or block``, ``window and (causal or block)`` or ``(window and causal) or
    block`` (:func:`is_window_before_blocks`) into the causal part and the block numbers (batch,
    keys), negative for tokens outside of blocks; tokens of a block, such as an image's, see each
    other in both directions.

    Any other function is returned with None.
    """
    if _is(mask_function, _OR):
        parts = _captured(mask_function, "mask_functions")
        is_causal = set(names(parts[0])) in ({CAUSAL}, {CAUSAL, WINDOW})
        if len(parts) == 2 and is_causal and _is(parts[1], _BLOCKS):
            return parts[0], _captured(parts[1], "block_sequence_ids")
    if _is(mask_function, _AND):
        first, *others = _captured(mask_function, "mask_functions")
        causal, numbers = without_blocks(first)
        if numbers is not None and len(others) == 1 and _is(others[0], WINDOW):
            return named("and_masks")(others[0], causal), numbers
    return mask_function, None


def is_window_before_blocks(mask_function: Callable[..., Any]) -> bool:
    """Whether it is ``(window and causal) or block``: a block's tokens see each other beyond the
    window, as PaliGemma's prompts do."""
    return _is(mask_function, _OR) and _is(_captured(mask_function, "mask_functions")[0], _AND)


def _is(mask_function: Callable[..., Any], name: str) -> bool:
    return mask_function.__module__ == MODULE and mask_function.__qualname__ == name


def _parts(mask_function: Callable[..., Any]) -> tuple[Any, ...]:
    """The mask functions in the closure of one of transformers' own."""
    if _is(mask_function, _AND):
        return _captured(mask_function, "mask_functions")
    if _is(mask_function, "remap_positions_for_packed_sequence.<locals>.inner_mask"):
        return (_captured(mask_function, "mask_function"),)
    return ()


def _captured(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
