"""What kernels over a key/value cache clamp, as a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flash_cute.call import validate
from flash_cute.call.sizes import cache_capacity


def kvcache_status(
    k_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    seqlen_new: int | Tensor = 0,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    k_descale: Tensor | float | None = None,
    v_descale: Tensor | float | None = None,
) -> Tensor:
    """What :func:`flash_attn_with_kvcache` clamps in a call with these arguments, without waiting.

    Args:
        seqlen_new: rows of k, one number for all or int32 (batch,).
        k_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, k_descale, v_descale:
            those of the call, which says what they may be; only their kinds are looked at here.

    Returns:
        int32 (batch,), or (batch_cache,) if no argument has an entry a sequence. For each the sum
        of 1 if its length or what joins does not fit the cache, 2 if its page or row of the cache
        does not exist, 4 if its padding exceeds its length, 8 if a descale of its keys or values in
        use is not a positive finite number; 0 where nothing is wrong.

    Example::

        import torch
        from flash_cute import kvcache_status

        k_cache = torch.zeros(2, 1024, 8, 64)
        lengths = torch.tensor([500, 1024], dtype=torch.int32)  # the second is full
        assert kvcache_status(k_cache, lengths, seqlen_new=1).tolist() == [0, 1]
    """
    validate.tensor("k_cache", k_cache)
    if k_cache.dim() != 4 or (block_table is not None and block_table.dim() != 2):
        raise ValueError(
            f"k_cache has {k_cache.dim()} dimensions, expected 4; block_table, if given, has 2"
        )
    for name, x in (("cache_seqlens", cache_seqlens), ("seqlen_new", seqlen_new)):
        is_int = isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)
        if not (is_int or isinstance(x, Tensor) or (x is None and name == "cache_seqlens")):
            raise TypeError(f"{name} is {validate.kind_of(x)}; expected an int or an int32 tensor")
        fits = not isinstance(x, (int, torch.SymInt)) or validate.allowed(
            abs(x) <= validate.INT64_MAX
        )
        if not fits:
            raise ValueError(f"{name} does not fit int64; expected a length")
    if not isinstance(seqlen_new, Tensor):
        validate.count("seqlen_new", seqlen_new)
    num_blocks, page_size = k_cache.shape[:2]
    capacity = cache_capacity(k_cache, block_table)
    asked = capacity if cache_seqlens is None else cache_seqlens
    if not isinstance(asked, Tensor):
        others = (seqlen_new, cache_batch_idx, cache_leftpad, block_table)
        batch = next((len(x) for x in others if isinstance(x, Tensor)), num_blocks)
        asked = torch.full((batch,), asked, device=k_cache.device)
    asked = asked.long()
    used = asked.clamp(0, capacity)  # as the kernels take it
    length = (used + seqlen_new).clamp(max=capacity)
    status = ((asked < 0) | (asked + seqlen_new > capacity)).int()
    pages = None if cache_batch_idx is None else cache_batch_idx[:, None]
    if block_table is not None:
        first_rows = torch.arange(block_table.shape[1], device=length.device) * page_size
        pages = block_table.masked_fill(first_rows >= length[:, None], 0)
    if pages is not None:
        status += 2 * ((pages < 0) | (pages >= num_blocks)).any(-1).int()
    if cache_leftpad is not None:
        status += 4 * ((cache_leftpad < 0) | (cache_leftpad > used)).int()
    places = Places(k_cache, used, cache_batch_idx, cache_leftpad, block_table)
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        if descale is not None and validate.is_descale_tensor(descale, name, k_cache):
            status |= 8 * places.lack(descale).int()
    return status


class Places(NamedTuple):
    """Where the keys of each sequence lie: ``used`` (batch,) rows of its pages."""

    k_cache: Tensor
    used: Tensor
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    block_table: Tensor | None

    def lack(self, descale: Tensor) -> Tensor:
        """bool (batch,): whether a descale of a sequence's keys is not positive and finite."""
        wrong = ~((descale > 0) & (descale < torch.inf))
        if descale.dim() < 2:
            return wrong.any().expand(len(self.used))
        if descale.dim() == 2:
            return wrong.any(-1)
        rows = torch.arange(self.k_cache.shape[1], device=wrong.device)
        pages, of_row = self._pages(), wrong.any(-1)
        if 0 in (*wrong.shape[:2], pages.shape[1]):
            return torch.zeros_like(self.used, dtype=torch.bool)
        exists = (pages >= 0) & (pages < len(of_row))
        found = of_row[pages.clamp(0, len(of_row) - 1)] & exists[..., None]  # (batch,blocks,rows)
        blocks = torch.arange(pages.shape[1], device=wrong.device)[:, None]
        place = blocks * len(rows) + rows
        seen = place < self.used[:, None, None]
        if self.cache_leftpad is not None:
            seen &= place >= self.cache_leftpad[:, None, None]
        return (found & seen).flatten(1).any(-1)

    def _pages(self) -> Tensor:
        """int64 (batch, blocks)."""
        if self.block_table is not None:
            return self.block_table.long()
        if self.cache_batch_idx is not None:
            return self.cache_batch_idx.long()[:, None]
        return torch.arange(len(self.used), device=self.used.device)[:, None]
