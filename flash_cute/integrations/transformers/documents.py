"""Documents that lie end to end in a row of a batch, and must not see each other.

transformers tells of them in one of three ways: a mask of numbers (:mod:`.masks`), ``position_ids``
that restart, and ``seq_idx``, the number of each token's document. A document begins where the
position does not grow, or the number changes, from one token that takes part to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.integrations.transformers import looks

_IN_GRAPHS = (
    "position_ids restart: under torch.compile packed sequences need cu_seq_lens_q, "
    "cu_seq_lens_k, max_length_q and max_length_k"
)


@dataclass(frozen=True)
class Documents:
    """Where the documents of a batch lie, once its rows are end to end.

    Attributes:
        tokens: int64 (total,), the tokens that take part; None for all.
        offsets: int32 (documents + 1,), where each begins among these.
        longest: the length of the longest.
    """

    tokens: Tensor | None
    offsets: Tensor
    longest: int

    @classmethod
    def of(cls, begins: Tensor, taking_part: Tensor | None) -> Documents:
        """Of bool (batch, seqlen): where one begins, and which tokens take part. Waits for the
        GPU."""
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
        """The way back; 0 for tokens that take no part."""
        if self.tokens is not None:
            zeros = rows.new_zeros((batch * seqlen, *rows.shape[1:]))
            rows = zeros.index_copy(0, self.tokens, rows)
        return rows.unflatten(0, (batch, seqlen))


def of_numbers(numbers: Tensor, layer: int | None) -> Documents | None:
    """Of a mask int32 (batch, seqlen) of numbers from 1 on, in a layer of this number. None in
    graphs, which ask when they run that there is one document alone: how many there are is not to
    be known in them."""
    if torch.compiler.is_compiling():
        internals.assert_in_graph((numbers == 1).all(), _IN_GRAPHS)
        return None
    look = looks.Look.at([numbers], layer)
    known, found = looks.found_before(look)
    if not known:
        if not (numbers > 0).all():
            raise ValueError(
                "attention_mask holds 0, and int32 numbers documents from 1; give padding as bool"
            )
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers.diff(dim=1) != 0
        found = Documents.of(begins, None)
        looks.keep(look, found)
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
    """What ``position_ids`` and ``seq_idx`` (batch or 1, seqlen_q) say of tokens that ``mask``,
    bool (batch, seqlen_k), lets take part, in a layer of this number; None if each row is one
    document, or nothing is said.

    Nothing is said of keys of other tokens, unless the layer is causal: its last keys are then the
    queries' own.

    Raises:
        ValueError: documents begin behind a cache, which belongs to one of them.
    """
    given = [x for x in (position_ids, seq_idx) if x is not None]
    told = [x for x in given if _tells(x, batch, seqlen_q)]
    if not told or seqlen_q == 1 or (seqlen_k != seqlen_q and not causal):
        return None
    own = None if mask is None else mask[:, -seqlen_q:]
    if _is_deferred(told[0]):
        more = _continued(told, own, batch, position_ids)
        internals.assert_in_graph(more.all(), _IN_GRAPHS)
        return None
    look = looks.Look.at(told if mask is None else [*told, mask], layer)
    known, found = looks.found_before(look)
    if not known:
        found = _found(_continued(told, own, batch, position_ids), own)
        looks.keep(look, found)
    if found is not None and seqlen_k != seqlen_q:
        raise ValueError(
            "position_ids restart (or seq_idx changes) behind a cache of "
            f"{seqlen_k - seqlen_q} tokens, which all documents would see; give packed documents "
            "without a cache, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"
        )
    return found


def _tells(x: Tensor, batch: int, seqlen: int) -> bool:
    """Whether it has a value for each query, which can be read."""
    if x.dim() != 2 or x.shape[1] != seqlen or x.shape[0] not in (1, batch):
        return False
    return not (x.is_meta or internals.is_fake(x))


def _is_deferred(x: Tensor) -> bool:
    """Whether values are looked at when a graph runs."""
    if torch.compiler.is_compiling():
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _continued(
    told: list[Tensor], mask: Tensor | None, batch: int, position_ids: Tensor | None
) -> Tensor:
    """bool (batch, seqlen - 1): whether tokens from the second on continue the document of the
    last one before that takes part, or are the first of their row, or take no part."""
    continued = torch.ones((), dtype=torch.bool, device=told[0].device)
    for x in told:
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
    if mask is not None:  # the first that takes part begins one, wherever it stands
        begins = begins | (mask & (mask.cumsum(1) == 1))
    return Documents.of(begins, mask)
