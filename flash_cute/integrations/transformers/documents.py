"""Documents laid end to end in a row of a batch, which must not see each other.

transformers marks them in one of three ways: a mask of numbers (:mod:`.masks`), ``position_ids``
that restart, or ``seq_idx``, the number of each token's document. Of the tokens that take part, one
begins a document if its position is not above the previous one's, or if the number changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.integrations.transformers import mask_cache

_IN_GRAPHS = (
    "position_ids restart: under torch.compile packed sequences need cu_seq_lens_q, "
    "cu_seq_lens_k, max_length_q and max_length_k"
)


@dataclass(frozen=True)
class Documents:
    """The documents of a batch, whose rows are laid end to end.

    Attributes:
        tokens: int64 (total,), the tokens that take part; None for all.
        offsets: int32 (documents + 1,), where each begins in ``tokens``.
        longest: the length of the longest.
    """

    tokens: Tensor | None
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, begins: Tensor, taking_part: Tensor | None) -> Documents:
        """From bool (batch, seqlen): where documents begin, and which tokens take part. Waits for
        the GPU."""
        tokens, flat = None, begins.flatten()
        if taking_part is not None:
            tokens = taking_part.flatten().nonzero().flatten()
            flat = flat[tokens]
        starts = flat.nonzero().flatten().int()
        offsets = torch.cat([starts, starts.new_tensor([flat.numel()])])
        return cls(tokens, offsets, int(offsets.diff().max()) if len(starts) else 0)

    def rows(self, x: Tensor) -> Tensor:
        """(batch, seqlen, heads, dim) to (total, heads, dim)."""
        flat = x.flatten(0, 1)
        return flat if self.tokens is None else flat.index_select(0, self.tokens)

    def unpacked(self, rows: Tensor, batch: int, seqlen: int) -> Tensor:
        """The inverse of :meth:`rows`; 0 for tokens that take no part."""
        if self.tokens is not None:
            zeros = rows.new_zeros((batch * seqlen, *rows.shape[1:]))
            rows = zeros.index_copy(0, self.tokens, rows)
        return rows.unflatten(0, (batch, seqlen))


def of_numbers(numbers: Tensor, layer: int | None) -> Documents | None:
    """The documents of a mask int32 (batch, seqlen) of numbers from 1 on, in layer ``layer``. None
    in graphs, which cannot know the number of documents: they check when they run that there is
    only one."""
    if torch.compiler.is_compiling():
        internals.assert_in_graph((numbers == 1).all(), _IN_GRAPHS)
        return None
    key = mask_cache.CacheKey.at([numbers], layer)
    known, found = mask_cache.cached_result(key)
    if not known:
        if not (numbers > 0).all():
            raise ValueError(
                "attention_mask holds 0, and int32 numbers documents from 1; give padding as bool"
            )
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers.diff(dim=1) != 0
        found = Documents.of(begins, None)
        mask_cache.store(key, found)
    return found


def of_positions(
    position_ids: Tensor | None,
    seq_idx: Tensor | None,
    mask: Tensor | None,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    layer: int | None,
) -> Documents | None:
    """The documents by ``position_ids`` and ``seq_idx`` (batch or 1, seqlen_q) of the tokens that
    ``mask``, bool (batch, seqlen_k), keeps, in layer ``layer``; None if each row is one document,
    or neither is usable.

    They describe the queries' tokens, so other keys need a causal layer, whose last keys are the
    queries' own.

    Raises:
        ValueError: documents begin behind a cache, which belongs to one of them.
    """
    given = [x for x in (position_ids, seq_idx) if x is not None]
    usable = [x for x in given if _has_value_per_query(x, batch, seqlen_q)]
    if not usable or seqlen_q == 1 or (seqlen_k != seqlen_q and not causal):
        return None
    own = None if mask is None else mask[:, -seqlen_q:]
    if _is_deferred(usable[0]):
        more = _continued(usable, own, batch, position_ids)
        internals.assert_in_graph(more.all(), _IN_GRAPHS)
        return None
    key = mask_cache.CacheKey.at(usable if mask is None else [*usable, mask], layer)
    known, found = mask_cache.cached_result(key)
    if not known:
        found = _found(_continued(usable, own, batch, position_ids), own)
        mask_cache.store(key, found)
    if found is not None and seqlen_k != seqlen_q:
        raise ValueError(
            "position_ids restart (or seq_idx changes) behind a cache of "
            f"{seqlen_k - seqlen_q} tokens, which all documents would see; give packed documents "
            "without a cache, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"
        )
    return found


def _has_value_per_query(x: Tensor, batch: int, seqlen: int) -> bool:
    """Whether it is a tensor with one value per query."""
    if x.dim() != 2 or x.shape[1] != seqlen or x.shape[0] not in (1, batch):
        return False
    return not (x.is_meta or internals.is_fake(x))


def _is_deferred(x: Tensor) -> bool:
    """Whether values can be read only when a graph runs."""
    if torch.compiler.is_compiling():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _continued(
    usable: list[Tensor], mask: Tensor | None, batch: int, position_ids: Tensor | None
) -> Tensor:
    """bool (batch, seqlen - 1), for tokens from the second on: False if a token begins a document
    after an earlier token of its row, among the tokens that take part."""
    continued = torch.ones((), dtype=torch.bool, device=usable[0].device)
    for x in usable:
        here, last = x[:, 1:], x[:, :-1]
        if mask is not None:
            places = torch.arange(x.shape[1], device=x.device)
            lasts = torch.where(mask, places, 0).cummax(1).values[:, :-1]
            last = x.expand(batch, -1).gather(1, lasts)
        continued = continued & (here > last if x is position_ids else here == last)
    if mask is not None:
        continued = continued | ~mask[:, 1:] | (mask.cumsum(1)[:, :-1] == 0)
    return continued.expand(batch, -1)


def _found(continued: Tensor, mask: Tensor | None) -> Documents | None:
    if continued.all():
        return None
    begins = torch.cat([torch.ones_like(continued[:, :1]), ~continued], 1)
    if mask is not None:  # the first token that takes part begins one, wherever it is
        begins = begins | (mask & (mask.cumsum(1) == 1))
    return Documents.of(begins, mask)
