"""Which keys each query sees, as one value that attention takes: :class:`Sparse`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_cute.sparse import blocks, density, intervals, mask_function
from flash_cute.sparse import validate as check
from flash_cute.sparse.keys import codes_of_keys
from flash_cute.sparse.lists import TILE, codes_of, tile_lists, tiles_of
from flash_cute.sparse.mask_function import MaskFunction
from flash_cute.sparse.topk import Choice

Block = tuple[int, int]


@dataclass(frozen=True, eq=False, repr=False)
class Sparse:
    """The pairs of queries and keys that attention computes, made by one of the constructors:
    :meth:`blocks`, :meth:`topk`, :meth:`intervals`, :meth:`from_flashmask`,
    :meth:`from_mask_function`, :meth:`from_block_map`.

    A causal mask and a window of the call hide pairs besides. A query that sees no key gets an
    output of 0 and a log-sum-exp of -inf. Everything lies on the device of what it was made of.

    Example::

        import torch
        from flash_cute import Sparse

        blocks = torch.rand(1, 1, 8, 8) < 0.3  # 1024 queries and keys
        sparse = Sparse.from_block_map(blocks | torch.eye(8, dtype=torch.bool))
        print(sparse.explain())
    """

    tile_lists: Tensor
    """int32 (batch or 1, heads or 1, tiles of queries, 1 + capacity, 2):
    :mod:`flash_cute.sparse.lists`."""
    tile_bits: Tensor | None
    """int32 (masks, 128, 4), the masks of tiles that have one: :mod:`flash_cute.sparse.bits`."""
    seqlen_q: int
    seqlen_k: int
    format: str
    """The constructor's name."""
    needs_causal: bool = False
    """Whether the call must be causal, as what this was made from says."""
    granularity: int = 1
    """Each aligned run of so many keys, up to 128, is visible to a query as a whole, or not at
    all."""

    @classmethod
    def blocks(
        cls,
        index: Tensor,
        counts: Tensor,
        full_index: Tensor | None = None,
        full_counts: Tensor | None = None,
        block: Block = (128, 128),
        mask_mod: MaskFunction | None = None,
        *,
        seqlens: tuple[int, int] | None = None,
    ) -> Sparse:
        """Of lists of key blocks, one for each block of queries: the tensors of torch's
        ``BlockMask`` (``kv_indices``, ``kv_num_blocks``, ``full_kv_indices``,
        ``full_kv_num_blocks``), or ``q2k`` lists of cuDNN and of video models.

        Args:
            index: int32 (batch or 1, heads or 1, query blocks, capacity), in any order; heads may
                be those of the keys or of the queries. Entries behind the counts, and those that
                name no block, are ignored.
            counts: int32 (batch or 1, heads or 1, query blocks), entries of each list.
            full_index, full_counts: likewise, blocks to which ``mask_mod`` does not apply.
            block: queries and keys of a block, each 64 or a multiple of 128.
            mask_mod: ``(batch, head, query, key) -> bool``, as torch's flex_attention has it, says
                which pairs of the blocks of ``index`` are visible; None: all. It is asked for many
                pairs at once, with int64 tensors that broadcast. The device is waited for once.
            seqlens: queries and keys; by default as many as the blocks hold, with as many blocks of
                keys as ``index`` has room for, as in ``BlockMask``.

        Raises:
            TypeError, ValueError: the dtype, the shape or the device of an argument, or a size of a
                block; what ``mask_mod`` returns.

        Example::

            import torch
            from flash_cute import Sparse
            from torch.nn.attention.flex_attention import create_block_mask

            def near(batch, head, query, key):
                return (query - key).abs() < 200

            mask = create_block_mask(near, None, None, 1024, 1024, device="cpu")
            sparse = Sparse.blocks(
                mask.kv_indices, mask.kv_num_blocks, mask.full_kv_indices, mask.full_kv_num_blocks,
                mask.BLOCK_SIZE, near, seqlens=mask.seq_lengths,
            )
            assert sparse.density < 0.4
        """
        block = check.block(block)
        if mask_mod is not None:
            check.function("mask_mod", mask_mod)
        check.lists_of_blocks("index", index, "counts", counts)
        if (full_index is None) != (full_counts is None):
            raise ValueError("full_index and full_counts go together; give both, or neither")
        default = (index.shape[2] * block[0], index.shape[3] * block[1])
        seqlens = check.seqlens(seqlens, index.shape[2], block[0]) or default
        blocks_k = -(-seqlens[1] // block[1])
        partial = blocks.block_map(index, counts, blocks_k)
        full = None
        if full_index is not None and full_counts is not None:
            check.lists_of_blocks("full_index", full_index, "full_counts", full_counts)
            check.same_blocks(index, full_index)
            full = blocks.block_map(full_index, full_counts, blocks_k)
        codes, masks = blocks.codes_of_blocks(partial, full, mask_mod, block, seqlens)
        lists = index.shape[3] + (0 if full_index is None else full_index.shape[3])
        most = lists * max(block[1] // TILE, 1) * (2 if block[0] < TILE else 1)
        runs = 1 if mask_mod is not None else min(block[1], TILE)
        return cls._of(codes, masks, seqlens, "blocks", granularity=runs, most=most)

    @classmethod
    def from_block_map(
        cls, map: Tensor, block: Block = (128, 128), *, seqlens: tuple[int, int] | None = None
    ) -> Sparse:
        """Of a map that says which blocks of keys each block of queries sees.

        Args:
            map: bool (batch or 1, heads or 1, query blocks, key blocks).
            block: as in :meth:`blocks`.
            seqlens: queries and keys; by default as many as the blocks hold.

        Example::

            import torch
            from flash_cute import Sparse

            strided = torch.arange(16)[:, None] % 4 == torch.arange(16) % 4
            sparse = Sparse.from_block_map(strided[None, None])
            assert sparse.density == 0.25
        """
        block = check.block(block)
        check.map_of_blocks(map)
        default = (map.shape[2] * block[0], map.shape[3] * block[1])
        seqlens = check.seqlens(seqlens, map.shape[2], block[0]) or default
        check.keys_of_map(map, block[1], seqlens[1])
        codes, _ = blocks.codes_of_blocks(map, None, None, block, seqlens)
        runs = min(block[1], TILE)
        return cls._of(codes, None, seqlens, "from_block_map", granularity=runs)

    @classmethod
    def topk(
        cls,
        indices: Tensor,
        granularity: int = 128,
        *,
        layout: str = "bshk",
        seqlen_k: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
    ) -> Sparse:
        """Of the blocks of keys that each query chose, a choice for each kv head.

        Args:
            indices: int32 or int64 (batch, seqlen_q, heads_k, k), or packed (total_q, heads_k, k)
                with ``cu_seqlens_q``; index i names the keys from i * granularity on of the query's
                own sequence. -1, and what names no block, is ignored. A query may choose none.
            granularity: keys of a block: 1, 2, 4, .. or 128.
            layout: "bshk" as above, or "bhsk": (batch, heads_k, seqlen_q, k), as layers of
                transformers have it.
            seqlen_k: keys of a sequence (of the longest, if packed); by default as many as queries.
            cu_seqlens_q: int32 (sequences + 1,), where packed sequences begin.
            max_seqlen_q: queries of the longest of them.

        Lists are made when a call needs them. If the query heads of a kv head are 16 or more (8 in
        long calls), a power of 2, and a call has no more than a causal mask and a
        softcap, its tiles hold few tokens, and compute little that these did not choose. Else tiles
        hold 128 tokens; the device is waited for once, to learn how many tiles are not visible as a
        whole, each of which takes 2 KB.

        Raises:
            TypeError, ValueError: the dtype or shape of ``indices``, another granularity or layout,
                or one of the two arguments of packed sequences without the other.

        Example::

            import torch
            from flash_cute import Sparse

            scores = torch.randn(1, 1024, 2, 8)  # of 8 blocks of 128 keys, for 2 kv heads
            sparse = Sparse.topk(scores.topk(3, -1).indices)
            assert abs(sparse.density - 3 / 8) < 1e-6
        """
        check.granularity(granularity)
        indices = check.by_sequence(indices, layout, cu_seqlens_q, max_seqlen_q)
        seqlen_q = indices.shape[2]
        seqlen_k = seqlen_q if seqlen_k is None else check.length("seqlen_k", seqlen_k)
        return _Topk.of(Choice(indices, granularity, seqlen_k))

    @classmethod
    def intervals(cls, first: Tensor, last: Tensor, *, seqlen_k: int | None = None) -> Sparse:
        """Of the keys from ``first`` on and before ``last``: causal masks, windows, documents,
        prefixes, and what else is one or two intervals a query.

        Args:
            first, last: int32 (batch or 1, heads or 1, seqlen_q), or (.., seqlen_q, n) with n 1 or
                2: query i sees the keys in any of its n intervals; one whose ``last`` is not above
                its ``first`` is empty, and both are clamped to the keys that there are.
            seqlen_k: keys; by default as many as queries.

        The device is waited for once, to learn how many tiles are visible in part.

        Raises:
            TypeError, ValueError: the dtype or shape of an argument, or more than 2 intervals.

        Example::

            import torch
            from flash_cute import Sparse

            i = torch.arange(1024, dtype=torch.int32)
            document = i // 300 * 300  # documents of 300 tokens, each causal
            sparse = Sparse.intervals(document[None, None], i[None, None] + 1)
            assert sparse.density < 0.2
        """
        first, last = check.intervals(first, last)
        seqlen_q = first.shape[2]
        seqlen_k = seqlen_q if seqlen_k is None else check.length("seqlen_k", seqlen_k)
        codes, masks = intervals.codes_of_rows(first, last, seqlen_k)
        return cls._of(codes, masks, (seqlen_q, seqlen_k), "intervals")

    @classmethod
    def from_flashmask(
        cls, startend_row_indices: Tensor, causal: bool, *, seqlen_q: int | None = None
    ) -> Sparse:
        """Of FlashMask's columns (arXiv 2410.01359): the queries that do not see each key.

        Args:
            startend_row_indices: int32 (batch or 1, heads or 1, seqlen_k, n). Hidden from key j are
                the queries from [.., j, 0] on, if ``causal`` and n is 1; from [.., j, 0] on and
                before [.., j, 1], if causal and n is 2; from [.., j, 0] on, and those before
                [.., j, 1], if not causal and n is 2; from [.., j, 0] on and before [.., j, 1], and
                from [.., j, 2] on and before [.., j, 3], if not causal and n is 4.
            causal: what the columns mean. The causal mask itself is not part of the result: give
                ``causal=True`` to the call, too, which refuses this value without it.
            seqlen_q: queries; by default as many as keys.

        Raises:
            TypeError, ValueError: the dtype or shape, or an n that does not go with ``causal``.

        Example::

            import torch
            from flash_cute import Sparse

            end = torch.arange(1024, dtype=torch.int32) // 300 * 300 + 300  # documents of 300
            sparse = Sparse.from_flashmask(end[None, None, :, None], causal=True)
            assert sparse.needs_causal
        """
        check.columns(startend_row_indices, causal)
        seqlen_k = startend_row_indices.shape[2]
        seqlen_q = seqlen_k if seqlen_q is None else check.length("seqlen_q", seqlen_q)
        first, last = intervals.of_flashmask(startend_row_indices, causal, seqlen_q)
        codes, masks = intervals.codes_of_columns(first, last, seqlen_q)
        return cls._of(codes, masks, (seqlen_q, seqlen_k), "from_flashmask", causal)

    @classmethod
    def from_mask_function(
        cls,
        fn: MaskFunction,
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device | str = "cpu",
    ) -> Sparse:
        """Of a function that says of each pair whether it is visible, as flex_attention's
        ``mask_mod`` and the mask functions of transformers do.

        Args:
            fn: ``(batch, head, query, key) -> bool``, asked for many pairs at once, with int64
                tensors that broadcast.
            batch, heads: 1 if the function does not depend on it; heads may be those of the keys.
            seqlen_q, seqlen_k: queries and keys.
            device: where the function computes, and the result lies.

        Every pair is asked for, some millions at a time, which takes longer than attention does: to
        be made once for many calls. The device is waited for once.

        Raises:
            TypeError, ValueError: a size is no int or negative; what ``fn`` returns.

        Example::

            from flash_cute import Sparse

            def prefix(batch, head, query, key):
                return (key < 100) | (key <= query)

            sparse = Sparse.from_mask_function(prefix, 1, 1, 1024, 1024)
            assert 0.5 < sparse.density < 0.6
        """
        check.function("fn", fn)
        sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        batch, heads, *seqlens = (check.length(name, x) for name, x in sizes.items())
        both, where = (seqlens[0], seqlens[1]), check.device(device)
        codes, masks = mask_function.codes_of_function(fn, batch, heads, both, where)
        return cls._of(codes, masks, both, "from_mask_function")

    def with_key_mask(self, keys: Tensor) -> Sparse:
        """The same without the keys that take no part, such as padding.

        Args:
            keys: bool (batch or 1, seqlen_k), True for keys that take part.

        The device is waited for once.

        Raises:
            TypeError, ValueError: the dtype, the shape or the device of ``keys``.

        Example::

            import torch
            from flash_cute import Sparse

            sparse = Sparse.from_block_map(torch.ones(1, 1, 2, 2, dtype=torch.bool))
            padding = torch.arange(256) < torch.tensor([[256], [64]])
            assert sparse.with_key_mask(padding).density == (1 + 0.25) / 2
        """
        check.kept_keys(keys, self)
        codes = codes_of(self.tile_lists, self.key_tiles)
        codes, masks = codes_of_keys(codes, self.tile_bits, keys, self.seqlen_k)
        seqlens = self.seqlen_q, self.seqlen_k
        return Sparse(tile_lists(codes), masks, *seqlens, self.format, self.needs_causal)

    @classmethod
    def _of(
        cls,
        codes: Tensor,
        masks: Tensor | None,
        seqlens: tuple[int, int],
        format: str,
        needs_causal: bool = False,
        granularity: int = 1,
        most: int | None = None,
    ) -> Sparse:
        """``most``, if given, is an upper bound of the tiles of any row of ``codes``."""
        return Sparse(tile_lists(codes, most), masks, *seqlens, format, needs_causal, granularity)

    def __repr__(self) -> str:
        sizes = f"{self.seqlen_q} queries x {self.seqlen_k} keys"
        lists = f"batch {self.batch}, heads {self.list_heads}"
        return f"<Sparse {self.format}: {sizes}, {lists}, {self.device}>"

    @property
    def density(self) -> float:
        """Pairs that are visible of seqlen_q * seqlen_k, on average over batch and heads; 0 without
        any pair. The device is waited for."""
        return self.visible_pairs() / max(self.visible_pairs_of_dense(), 1)

    def visible_pairs(self, causal: bool = False, window_size: Block = (-1, -1)) -> float:
        """Visible pairs of a (batch, head), on average, under a call's causal mask and window. The
        device is waited for.

        Example::

            import torch
            from flash_cute import Sparse

            sparse = Sparse.from_block_map(torch.eye(4, dtype=torch.bool)[None, None])
            assert sparse.visible_pairs(causal=True) == 4 * 128 * 129 / 2
        """
        check.band(causal, window_size)
        return density.visible_pairs(self, causal, window_size)

    def visible_pairs_of_dense(self, causal: bool = False, window_size: Block = (-1, -1)) -> int:
        """The same of a call without lists."""
        check.band(causal, window_size)
        return density.pairs_of_band(self.seqlen_q, self.seqlen_k, causal, window_size)

    def explain(self) -> str:
        """What it holds, in a few lines. The device is waited for.

        Example::

            import torch
            from flash_cute import Sparse

            print(Sparse.from_block_map(torch.eye(8, dtype=torch.bool)[None, None]).explain())
        """
        return density.explain(self)

    def check(
        self,
        batch: int,
        heads: int,
        heads_k: int,
        seqlens: tuple[int, int],
        device: torch.device,
        causal: bool,
    ) -> None:
        """Refuses a call of other sizes (of the longest sequences, if packed).

        Raises:
            ValueError: what differs, and from what.
        """
        check.call(self, batch, heads, heads_k, seqlens, device, causal)

    def token_lists(
        self, group: int, causal: bool, shift: int | Tensor | None = None
    ) -> Sparse | None:
        """Lists for rows that are all ``group`` query heads of a kv head, token after token, with
        the causal mask as part of them; None if there are none: :mod:`.token_tiles`. ``shift`` is
        how many more keys than queries the sequences have, by default by their sizes here."""
        return None

    @property
    def batch(self) -> int:
        """Sequences that have lists of their own; 1 for all."""
        return self.tile_lists.shape[0]

    @property
    def list_heads(self) -> int:
        """Heads that have lists of their own; 1 for all."""
        return self.tile_lists.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the lists lie."""
        return self.tile_lists.device

    @property
    def key_tiles(self) -> int:
        """Columns of the score matrix in tiles: what :func:`flash_cute.sparse.lists.transposed`
        takes."""
        return tiles_of(self.seqlen_k)


class _Topk(Sparse):
    """Of a choice of each query, whose lists of tiles of 128 queries are made when a call needs
    them."""

    _choice: Choice

    @classmethod
    def of(cls, choice: Choice) -> Sparse:
        """Not ``__init__``: graphs of torch 2.10 give that of a frozen dataclass its fields."""
        lengths = {"seqlen_q": choice.blocks.shape[2], "seqlen_k": choice.seqlen_k}
        others = {"granularity": choice.granularity, "format": "topk", "_choice": choice}
        made = object.__new__(cls)
        for name, x in (lengths | others).items():
            object.__setattr__(made, name, x)
        return made

    @property
    def tile_lists(self) -> Tensor:
        return self._choice.lists()[0]

    @property
    def tile_bits(self) -> Tensor | None:
        return self._choice.lists()[1]

    @property
    def batch(self) -> int:
        return self._choice.blocks.shape[0]

    @property
    def list_heads(self) -> int:
        return self._choice.blocks.shape[1]

    @property
    def device(self) -> torch.device:
        return self._choice.blocks.device

    def token_lists(
        self, group: int, causal: bool, shift: int | Tensor | None = None
    ) -> Sparse | None:
        more_keys = self.seqlen_k - self.seqlen_q
        found = self._choice.token_lists(group, causal, more_keys if shift is None else shift)
        if found is None:
            return None
        return Sparse(*found, self.seqlen_q * group, self.seqlen_k, "topk")
