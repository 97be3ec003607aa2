"""Lists for rows that are all query heads of a kv head, token after token: a tile of 128 rows holds
few tokens, and visits the blocks of keys that these chose alone.

With a group of g query heads a tile has n = 128 / g tokens. If a tile of keys holds m blocks that a
token may choose, the n tokens see it in one of 2 ** (n * m) patterns: bit t * m + i says whether
token t chose block i. All tiles of a pattern share one mask; those that the causal diagonal crosses
have masks of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_cute.sparse import bits
from flash_cute.sparse.lists import HALF, QUADRANTS, TILE, tiles_of

_MOST_BITS = 16  # of a pattern: 65,536 masks of 2 KB
_FEW_PATTERNS = 256  # whose masks are made for any call; more only for as many tiles
_MOST_MASKS = 1 << 22  # that codes can number


def exist(shape: Sequence[int], granularity: int, seqlen_k: int, group: int, causal: bool) -> bool:
    """Whether a choice int (batch, heads, seqlen_q, k) has such lists, for ``group`` query heads a
    kv head."""
    if group < 2 or TILE % group:
        return False
    batch, heads, seqlen_q, k = shape
    tokens, tiles_k = TILE // group, tiles_of(seqlen_k)
    rows = batch * heads * -(-seqlen_q // tokens)
    pattern_bits, own_masks = tokens * (TILE // granularity), 2 * rows if causal else 0
    if pattern_bits > _MOST_BITS or tiles_k >= 1 << (31 - _MOST_BITS):
        return False
    patterns = 1 << pattern_bits
    is_worth_them = patterns <= max(_FEW_PATTERNS, rows * min(tokens * k, tiles_k))
    return is_worth_them and patterns + own_masks <= _MOST_MASKS


def lists_of_tokens(
    chosen: Tensor, granularity: int, seqlen_k: int, group: int, causal: bool, shift: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Lists of ``seqlen_q * group`` rows, and their masks, of which the causal mask is part, of a
    choice of int32 blocks that exist, or -1. ``shift`` is how many more keys than queries there
    are, int32 (batch,) of sequences of several lengths. The device is not waited for."""
    tokens, of_tile = TILE // group, TILE // granularity
    seqlen_q, k = chosen.shape[2:]
    rows = -(-seqlen_q // tokens)
    token = torch.arange(rows * tokens, dtype=torch.int32, device=chosen.device)
    # Among the keys: (tokens,) or (batch, 1, tokens).
    place = token + (shift if isinstance(shift, int) else shift[:, None, None])
    if len(token) > seqlen_q:  # else a graph does not know the strides of what pad() returns
        chosen = pad(chosen, (0, 0, 0, len(token) - seqlen_q), value=-1)
    seen = chosen >= 0
    if causal:
        seen &= chosen <= place[..., None].div(granularity, rounding_mode="floor")
    bit = (token % tokens)[:, None] * of_tile + chosen % of_tile
    words = ((chosen // of_tile) << _MOST_BITS) + bit
    none = tiles_of(seqlen_k) << _MOST_BITS
    words = torch.where(seen, words, none).unflatten(2, (rows, tokens)).flatten(3)
    counts, columns, patterns = _by_column(words, none, min(tokens * k, tiles_of(seqlen_k)))
    masks = _masks_of_patterns(tokens, granularity, chosen.device)
    codes = _codes(masks, 0)[patterns]
    if causal:
        first = place[..., ::tokens]
        # Tiles of keys that the diagonal crosses within the tokens of one tile.
        crossed = 1 if isinstance(shift, int) and shift % tokens == 0 else 2
        for i in range(crossed):
            diagonal = first.div(TILE, rounding_mode="floor") + i
            is_crossed = columns == diagonal[..., None]
            below = _masks_below(first - diagonal * TILE, tokens)
            own = (masks[(patterns * is_crossed).sum(-1)] & below).flatten(0, 2)
            own_codes = _codes(own, len(masks)).view_as(counts)
            codes = torch.where(is_crossed, own_codes[..., None], codes)
            masks = torch.cat((masks, own))
    entries = torch.stack((columns, codes), -1)
    return torch.cat((pad(counts[..., None, None], (0, 1)), entries), -2), masks


def _by_column(words: Tensor, none: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``words`` (.., m), each column * 2 ** 16 + bit or ``none``: how many columns a row has,
    (..), and these in ascending order with their patterns, (.., capacity), 0 behind the last."""
    words = words.sort(-1).values
    before, after = pad(words[..., :-1], (1, 0), value=-1), pad(words[..., 1:], (0, 1), value=none)
    column, is_listed = words >> _MOST_BITS, words < none
    begins = is_listed & (column != before >> _MOST_BITS)
    ends = is_listed & (column != after >> _MOST_BITS)
    bit = torch.ones_like(words).bitwise_left_shift(words & (_MOST_BITS - 1))
    sums = torch.where(is_listed & (words != before), bit, 0).cumsum(-1, dtype=torch.int32)
    slot = torch.where(ends, begins.cumsum(-1) - 1, capacity)
    room = words.new_zeros((*words.shape[:-1], capacity + 1))
    columns, until = (room.scatter(-1, slot, x)[..., :-1] for x in (column, sums))
    counts = begins.sum(-1, dtype=torch.int32)
    is_entry = torch.arange(capacity, dtype=torch.int32, device=words.device) < counts[..., None]
    patterns = torch.where(is_entry, until - pad(until[..., :-1], (1, 0)), 0)
    return counts, columns, patterns


def _masks_of_patterns(tokens: int, granularity: int, device: torch.device) -> Tensor:
    """The mask of each pattern, int32 (patterns, 128, 4)."""
    of_tile = TILE // granularity
    bit = torch.arange(tokens * of_tile, dtype=torch.int32, device=device).view(tokens, of_tile)
    pattern = torch.arange(1 << bit.numel(), dtype=torch.int32, device=device)[:, None, None]
    seen = pattern.bitwise_right_shift(bit) & 1  # (patterns, tokens, blocks)
    block = torch.eye(of_tile, dtype=torch.bool, device=device).repeat_interleave(granularity, -1)
    of_tokens = (seen[..., None] * bits.packed(block)).sum(-2, dtype=torch.int32)
    return of_tokens.repeat_interleave(TILE // tokens, 1)


def _masks_below(first: Tensor, tokens: int) -> Tensor:
    """The masks of the causal diagonal, int32 (.., 128, 4): token t of a row of tiles sees the keys
    of its tile up to ``first + t``."""
    token = torch.arange(tokens, dtype=torch.int32, device=first.device)[:, None]
    key = torch.arange(TILE, dtype=torch.int32, device=first.device)
    of_tokens = bits.packed(key <= first[..., None, None] + token)
    return of_tokens.repeat_interleave(TILE // tokens, -2)


def _codes(masks: Tensor, number: int) -> Tensor:
    """The codes (m,) of tiles that have these masks (m, 128, 4), the first of them ``number``."""
    halves = masks.unflatten(2, (2, -1)).unflatten(1, (2, HALF))  # (m, 2, 64, 2, 2)
    some, every = (halves != 0).any(-1).any(2), (halves == -1).all(-1).all(2)
    quadrants = bits.quadrants(some)[:, 0, 0]
    numbers = 1 + number + torch.arange(len(masks), dtype=torch.int32, device=masks.device)
    is_plain = (some == every).all(-1).all(-1)
    return torch.where(is_plain, quadrants, quadrants + QUADRANTS * numbers)
