"""Tiles of the score matrix of equally long sequences: their ranges, and their contents.

Query heads that share a kv head form a group. Folded tensors have n = batch * heads_k in front, and
a tile stacks the rows of a group: it is one batched matrix product of (n, group * rows, dim) and
(n, keys, dim), so that grouped-query attention copies no key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flash_cute.call.philox import dropout_keep, dropout_rate

QUERY_BLOCK = 128
KEY_BLOCK = 512


def compute_dtype(x: Tensor) -> torch.dtype:
    """dtype of all arithmetic and of row statistics: fp64 for fp64 inputs, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def fold(x: Tensor, heads_k: int) -> Tensor:
    """(batch, seqlen, heads, dim) as (batch * heads_k, group, seqlen, dim) in the compute dtype."""
    batch, seqlen, heads, dim = x.shape
    group = heads // max(heads_k, 1)
    by_head = x.to(compute_dtype(x)).view(batch, seqlen, heads_k, group, dim)
    return by_head.permute(0, 2, 3, 1, 4).reshape(batch * heads_k, group, seqlen, dim)


def unfold_into(target: Tensor, folded: Tensor) -> None:
    """Rounds ``folded`` (n, group * seqlen, dim) into ``target`` (batch, seqlen, heads, dim)."""
    batch, seqlen, heads, dim = target.shape
    target.copy_(folded.reshape(batch, heads, seqlen, dim).transpose(1, 2))


def select(x: Tensor, rows: slice) -> Tensor:
    """Rows of a folded tensor (n, group, seqlen, dim) as in a tile: (n, group * rows, dim)."""
    return x[:, :, rows].flatten(1, 2)


def positions(rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """int64 positions of the rows and of the keys of a tile."""
    of_rows, of_keys = (torch.arange(x.start, x.stop, device="cpu") for x in (rows, keys))
    return of_rows, of_keys


def product(a: Tensor, b: Tensor, hidden: Tensor | None) -> Tensor:
    """``a @ b`` for a (n, rows, cols) and b (n, cols, dim), without hidden pairs.

    ``hidden`` is bool (rows, cols) or (n, rows, cols), or None for no hidden pair. ``a`` must be 0
    for hidden pairs, which suffices for finite rows of b. Other rows of b are left out of the
    product, and added only to the rows that see them.
    """
    if hidden is None or b.isfinite().all():
        return torch.bmm(a, b)
    not_finite = ~b.isfinite().all(-1, keepdim=True)  # (n, cols, 1)
    total = torch.bmm(a, b.masked_fill(not_finite, 0))
    for col in not_finite.any(0).flatten().nonzero().flatten().tolist():
        row = b[:, col, None].masked_fill(~not_finite[:, col, None], 0)
        total += (a[:, :, col, None] * row).masked_fill_(hidden[..., col, None], 0)
    return total


class Blocks(Protocol):
    """Keys or values (n, keys, dim) in the compute dtype: a tensor, or what makes a block of one
    when it is asked for."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: tuple[slice, slice], /) -> Tensor: ...


@dataclass(frozen=True)
class Options:
    """The options of a call that turn products q·k into attention weights, normalised."""

    scale: float
    window: tuple[int, int]  # keys visible before and after the diagonal; negative: all
    softcap: float  # 0: off
    slopes: Tensor | None  # (1 or batch, heads)
    sink: Tensor | None  # (heads,)
    dropout_p: float
    rng: Tensor | None  # (2,)

    @classmethod
    def of(cls, call: Any) -> Options:
        """The options of a call of any attention op; those over a cache have no dropout."""
        dtype, dim = compute_dtype(call.q), call.q.shape[-1]
        slopes, sink, dropout_p = call.alibi_slopes, call.sink, getattr(call, "dropout_p", 0.0)
        return cls(
            scale=max(dim, 1) ** -0.5 if call.softmax_scale is None else call.softmax_scale,
            window=(call.window_size_left, 0 if call.is_causal else call.window_size_right),
            softcap=call.softcap,
            slopes=None if slopes is None else torch.atleast_2d(slopes.to(dtype)),
            sink=None if sink is None else sink.to(dtype),
            dropout_p=dropout_p,
            rng=call.rng if dropout_p else None,
        )

    def band(self, seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
        """(low, high): key j is visible from query i if i + low <= j <= i + high."""
        left, right = self.window
        shift, all_keys = seqlen_k - seqlen_q, seqlen_q + seqlen_k  # no larger window hides less
        low = shift - min(left, all_keys) if left >= 0 else -seqlen_q
        high = shift + min(right, all_keys) if right >= 0 else seqlen_k
        return low, high

    @property
    def has_rules(self) -> bool:
        """Whether weights are more than a softmax of scaled scores."""
        return (
            self.softcap > 0
            or self.dropout_p > 0
            or self.slopes is not None
            or self.sink is not None
        )

    @property
    def keep_scale(self) -> float:
        """Factor of the probabilities that dropout keeps; 0 if it keeps none."""
        return dropout_rate(self.dropout_p)[1]


class Tiles:
    """The scores of equally long sequences, by tiles of the shape (n, group * rows, keys).

    q is (batch, seqlen_q, heads, dim), k (batch, seqlen_k, heads_k, dim). ``first`` is the index of
    the first sequence in the whole batch. Slices of rows and of keys address a tile.
    """

    def __init__(self, q: Tensor, k: Tensor, options: Options, first: int = 0) -> None:
        self.batch, self.seqlen_q, self.heads, _ = q.shape
        self.seqlen_k, self.heads_k = k.shape[1:3]
        self.q = fold(q, self.heads_k)
        self.k = fold(k, self.heads_k).flatten(0, 1)
        self.group = self.q.shape[1]
        self.options = options
        self.first = first
        self.shift = self.seqlen_k - self.seqlen_q
        self.low, self.high = options.band(self.seqlen_q, self.seqlen_k)

    def statistic(self, x: Tensor) -> Tensor:
        """A view of row statistics (batch, heads, seqlen_q) as (n, group, seqlen_q, 1)."""
        split = x.view(self.batch, self.heads_k, self.group, x.shape[-1], 1)
        return split.flatten(0, 1)

    def of_heads(self, x: Tensor, rows: slice) -> Tensor:
        """Values of heads, (1 or batch, heads), for each row of a tile: (n, group * rows, 1)."""
        count = rows.stop - rows.start
        values = x.expand(self.batch, self.heads)[..., None].expand(-1, -1, count)
        return values.reshape(self.batch * self.heads_k, self.group * count, 1)

    def query_blocks(self) -> Iterator[slice]:
        """All rows, block by block."""
        for start in range(0, self.seqlen_q, QUERY_BLOCK):
            yield slice(start, min(start + QUERY_BLOCK, self.seqlen_q))

    def key_blocks(self, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """The keys that any of ``rows`` sees, block by block.

        The second item is a bool mask (group * rows, keys), True for hidden pairs, or None if
        every row sees every key.
        """
        begin, end = self._clamp(rows.start + self.low), self._clamp(rows.stop + self.high)
        full_begin = self._clamp(rows.stop - 1 + self.low)
        full_end = self._clamp(rows.start + self.high + 1)
        if full_begin >= full_end:
            full_begin = full_end = end
        parts = ((begin, full_begin, True), (full_begin, full_end, False), (full_end, end, True))
        for part_begin, part_end, is_partial in parts:
            for start in range(part_begin, part_end, KEY_BLOCK):
                keys = slice(start, min(start + KEY_BLOCK, part_end))
                yield keys, self._hidden(rows, keys) if is_partial else None

    def _clamp(self, key: int) -> int:
        return min(max(key, 0), self.seqlen_k)

    def _hidden(self, rows: slice, keys: slice) -> Tensor:
        diagonal = rows.start - keys.start
        tile = torch.ones(
            rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool, device="cpu"
        )
        visible = tile.tril_(self.high + diagonal).triu_(self.low + diagonal)
        return visible.logical_not_().repeat(self.group, 1)

    def scores(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Scores after scale, softcap and ALiBi; and the tanh of softcap, None without it."""
        q, k = select(self.q, rows), self.block_of_keys(keys)
        scores = q.new_empty((*q.shape[:2], k.shape[1]))
        scores.baddbmm_(q, k.transpose(1, 2), beta=0, alpha=self.options.scale)
        tanh = None
        if self.options.softcap > 0:
            tanh = scores.div_(self.options.softcap).tanh_()
            scores = tanh * self.options.softcap
        if self.options.slopes is not None:
            distance = self.distance(rows, keys).to(scores.dtype)
            scores.addcmul_(self.slopes(rows), distance, value=-1)
        return scores, tanh

    def block_of_keys(self, keys: slice) -> Tensor:
        """The keys (n, keys, dim)."""
        return self.k[:, keys]

    def slopes(self, rows: slice) -> Tensor:
        """ALiBi's slopes of the rows of a tile: (n, group * rows, 1)."""
        slopes = self.options.slopes
        assert slopes is not None
        if len(slopes) > 1:
            slopes = slopes[self.first : self.first + self.batch]
        return self.of_heads(slopes, rows)

    def distance(self, rows: slice, keys: slice) -> Tensor:
        """ALiBi's distances, int64 (group * rows, keys)."""
        i, j = positions(rows, keys)
        return (i[:, None] + self.shift - j).abs_().repeat(self.group, 1)

    def probabilities(
        self, rows: slice, keys: slice, hidden: Tensor | None, lse: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """exp(scores - lse), 0 where hidden, for ``lse`` (n, group * rows, 1); and the tanh.

        A row whose lse is -inf sees nothing: its probabilities are 0.
        """
        scores, tanh = self.scores(rows, keys)
        p = scores.sub_(lse.masked_fill(lse == -torch.inf, torch.inf)).exp_()
        return (p if hidden is None else p.masked_fill_(hidden, 0)), tanh

    def dropped(self, rows: slice, keys: slice) -> Tensor | None:
        """A tile of bool, True where dropout drops; None without dropout."""
        options = self.options
        if options.dropout_p == 0:
            return None
        bh = torch.arange(self.batch * self.heads, device="cpu") + self.first * self.heads
        keep = dropout_keep(options.rng, options.dropout_p, bh, *positions(rows, keys))
        return keep.logical_not_().view(len(self.q), self.group * keep.shape[1], keep.shape[2])
