"""``DynamicSparseAttention``: attention that leaves out most pairs of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.attention.config import AttentionPatterns, SparseAttentionConfig
from flash_cute.core.multihead import MultiHeadAttention
from flash_cute.core.padding import Packing, packing
from flash_cute.functional import flash_attn_func, flash_attn_varlen_func
from flash_cute.sparse.choose import BlockChoice, budget_of, choose_blocks
from flash_cute.sparse.gate import LearnedGate
from flash_cute.sparse.grid import BlockGrid, grid_of
from flash_cute.sparse.patterns import SparsePattern

BREAK_EVEN = 0.06  # sparsity; below it lists of blocks cost more than they save


class DynamicSparseAttention(MultiHeadAttention):
    """Multi-head attention that computes some blocks of the scores alone, and never the others.

    Each query's softmax is over the keys that it keeps: the result is exact attention under the
    mask that the blocks are, and so are all gradients. What is left out is really skipped. The
    parameters are those of ``nn.MultiheadAttention``; LEARNED has a ``gate`` besides.

    Blocks are of 128 x 128 tokens from 4096 tokens on, of 64 x 64 from 1024 on, and below of half
    of that as often as it takes to have 16 in a row; each row keeps at least one. From 16 tokens on
    the realised sparsity is within 0.06 of ratios up to 0.9; :attr:`last_sparsity` has it. If a
    call would leave out less than 6 % of the pairs it runs dense, as it does at ratio 0, and is
    exact: :meth:`explain` says so.

    A small error at a high ratio takes attention that few keys get, as in long documents.
    Attention that is spread evenly has none: 90 % of its terms left out are an error of that size.

    LEARNED's gate gets no gradient from a model's loss: what is kept is no smooth function of it.
    It learns by :meth:`distill_loss`, which compares it with the attention that blocks truly get.

    Args:
        config: a :class:`flash_cute.attention.SparseAttentionConfig`.
        block_mask: what BLOCK_SPARSE keeps, bool (blocks, blocks), (heads, blocks, blocks) or
            (batch or 1, heads, blocks, blocks), heads being those of queries, of keys or 1; rows
            are blocks of queries. It fits sequences of as many blocks, and the ratio is its own.
            None keeps the nearest blocks.
        block_size: tokens of a block of ``block_mask``: 64 or 128.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is expected.

    Example::

        import torch
        from flash_cute.attention import create_sparse_attention

        attention = create_sparse_attention(64, 4, sparsity_ratio=0.8)
        out = attention(torch.randn(1, 2048, 64))
        print(f"{attention.last_sparsity:.2f} of the pairs were left out")
    """

    block_mask: Tensor | None

    def __init__(
        self,
        config: SparseAttentionConfig,
        block_mask: Tensor | None = None,
        block_size: int = 128,
    ) -> None:
        if not isinstance(config, SparseAttentionConfig):
            raise TypeError(f"config is {type(config).__name__}; expected a SparseAttentionConfig")
        super().__init__(
            config.d_model, config.num_heads, config.num_kv_heads, config.dropout, config.bias,
            config.score(), config.device, config.dtype,
        )  # fmt: skip
        self.config = config
        self.block_size = block_size
        if block_mask is not None:
            block_mask = self._checked(block_mask)
        self.register_buffer("block_mask", block_mask, persistent=False)
        self.gate: LearnedGate | None = None
        if config.sparse_pattern is SparsePattern.LEARNED:
            self.gate = LearnedGate(
                self.num_heads, self.num_kv_heads, self.head_dim, config.device, config.dtype
            )
        self._left_out: Tensor | float | None = None

    @property
    def last_sparsity(self) -> float | None:
        """The share of visible pairs that the last call left out, over all heads, of which it waits
        for the GPU; None before the first."""
        return None if self._left_out is None else float(self._left_out)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attention of each token to those that its block keeps.

        Args:
            hidden_states: (batch, seqlen, d_model).
            attention_mask: (batch, seqlen), bool or integers: 1 takes part, 0 does not. Tokens that
                take part are moved to the front of their sequences, and blocks are of these.
            key, value: refused: blocks are of a sequence with itself.
            is_causal: each token sees itself and those before it.

        Returns:
            (batch, seqlen, d_model). A token that takes no part has ``out_proj.bias``.

        Raises:
            TypeError, ValueError: an argument that does not fit, by name.
            NotImplementedError: cross attention.
        """
        self._check("hidden_states", hidden_states)
        if key is not None or value is not None:
            raise NotImplementedError(
                "key or value is given: sparse patterns are of a sequence with itself; use "
                "flash_cute.core.AttentionLayer"
            )
        options = self.score | {"dropout_p": self.dropout if self.training else 0}
        options["causal"] = is_causal or options["causal"]
        if self._is_dense(hidden_states.shape[1], options["causal"]):
            self._left_out = 0.0
            return super().forward(hidden_states, attention_mask, is_causal=is_causal)
        if attention_mask is None:
            q, k, v = self._split(hidden_states)
            choice = self.choose(q, k, options["causal"])
            out = flash_attn_func(q, k, v, sparse=choice.value(), **options)
            return self.out_proj(out.flatten(-2))
        return self._masked(hidden_states, packing(attention_mask, hidden_states), options)

    def _masked(self, x: Tensor, packed: Packing, options: dict[str, Any]) -> Tensor:
        q, k, v = self._split(packed.pack(x))
        whole_q, whole_k = (y.unflatten(0, x.shape[:2]) for y in (q, k))
        choice = self.choose(whole_q, whole_k, options["causal"], packed.lengths)
        out = flash_attn_varlen_func(
            q, k, v, packed.offsets, packed.offsets, x.shape[1], x.shape[1],
            seqused_q=packed.lengths, seqused_k=packed.lengths, sparse=choice.value(), **options,
        )  # fmt: skip
        return packed.unpack(self.out_proj(out.flatten(-2)))

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return self._heads(x).split(heads, dim=-2)

    def choose(
        self, q: Tensor, k: Tensor, causal: bool, lengths: Tensor | None = None
    ) -> BlockChoice:
        """The blocks that a call of q (batch, seqlen, heads, dim) and k (batch, seqlen, heads_k,
        dim) keeps, of which :attr:`last_sparsity` then tells; ``lengths`` (batch,) are the tokens
        of each sequence."""
        config = self.config
        if self.block_mask is not None:
            grid = BlockGrid(q.shape[1], self.block_size, causal)
            self._check_blocks(grid, len(q))
            choice = BlockChoice(self.block_mask, grid, lengths)
        else:
            choice = choose_blocks(
                q, k, config.sparse_pattern, config.sparsity_ratio, causal=causal,
                softmax_scale=config.softmax_scale, threshold=config.threshold,
                stride=config.stride, seed=config.seed, gate=self.gate, lengths=lengths,
            )  # fmt: skip
        if not torch.compiler.is_exporting():  # a program has no attributes to set
            self._left_out = choice.sparsity()
        return choice

    def distill_loss(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """LEARNED's own loss: how far the gate is from the attention that blocks truly get, the KL
        divergence in nats, meaned over blocks of queries and heads. Its gradient reaches the gate
        alone; add it to a model's loss, or train the gate by it while the model stands still. It
        computes q k^T, in the time that attention takes without fused kernels.

        Example::

            import torch
            from flash_cute.attention import create_sparse_attention

            attention = create_sparse_attention(64, 4, pattern="learned", sparsity_ratio=0.5)
            optimizer = torch.optim.Adam(attention.gate.parameters(), 1e-2)
            x = torch.randn(1, 512, 64)
            for _ in range(3):
                optimizer.zero_grad()
                attention.distill_loss(x).backward()
                optimizer.step()

        Raises:
            NotImplementedError: another pattern, which has no gate.
        """
        if self.gate is None:
            raise NotImplementedError(
                f"sparse_pattern is {self.config.sparse_pattern}, which learns nothing; "
                f"{SparsePattern.LEARNED} has a gate to distill"
            )
        self._check("hidden_states", hidden_states)
        if hidden_states.numel() == 0:  # no block is far from its attention
            return torch.stack([0 * x.sum() for x in self.gate.parameters()]).sum()
        lengths, x = None, hidden_states.detach()
        if attention_mask is not None:
            packed = packing(attention_mask, x)
            lengths, x = packed.lengths, packed.pack(x).unflatten(0, x.shape[:2])
        with torch.no_grad():
            q, k, _ = self._split(x)
        grid = grid_of(x.shape[1], is_causal or self.config.causal)
        return self.gate.distill_loss(
            q, k, grid, softmax_scale=self.config.softmax_scale, lengths=lengths
        )

    def explain(self, seqlen: int, is_causal: bool = False) -> str:
        """What a call of ``seqlen`` tokens without a mask does: its blocks, the sparsity, and
        whether it runs dense."""
        if type(seqlen) is not int or type(is_causal) is not bool:
            raise TypeError(
                f"seqlen is {seqlen!r}, and is_causal {is_causal!r}; expected an int and a bool"
            )
        if seqlen < 1:
            raise ValueError(f"seqlen is {seqlen}; expected 1 or more tokens")
        config, causal = self.config, is_causal or self.config.causal
        grid = grid_of(seqlen, causal)
        head = f"{config.sparse_pattern.value}, {seqlen} tokens" + ", causal" * causal
        if self.block_mask is not None:
            size = self.block_size
            return f"{head}: the blocks of {size} x {size} that block_mask keeps"
        blocks = f"{head}, {grid.blocks} blocks of {grid.block} a side"
        if config.threshold is not None:
            kept = f"each row keeps the fewest that hold {config.threshold} of its attention"
        else:
            left_out = self._planned(grid)
            kept = f"leaves out {left_out:.3f} of the visible pairs, asked {config.sparsity_ratio}"
        runs = "dense" if self._is_dense(seqlen, causal) else "sparse"
        return f"{blocks}: {kept}; runs {runs} (dense below a sparsity of {BREAK_EVEN})"

    def _planned(self, grid: BlockGrid) -> float:
        if self.config.sparsity_ratio == 0:
            return 0.0
        return budget_of(self.config.sparse_pattern, grid, self.config.sparsity_ratio).sparsity

    def _is_dense(self, seqlen: int, causal: bool) -> bool:
        config = self.config
        if config.sparsity_ratio == 0:
            return True
        if self.block_mask is not None:
            return seqlen == 0
        grid = grid_of(seqlen, causal)
        return grid.blocks < 2 or (config.threshold is None and self._planned(grid) < BREAK_EVEN)

    def _checked(self, mask: Any) -> Tensor:
        """The map that BLOCK_SPARSE was given, as (batch or 1, heads or 1, blocks, blocks)."""
        if self.config.sparse_pattern is not SparsePattern.BLOCK_SPARSE:
            raise ValueError(
                f"block_mask is given, and sparse_pattern {self.config.sparse_pattern}; it is "
                f"{SparsePattern.BLOCK_SPARSE}'s"
            )
        if self.config.sparsity_ratio != SparseAttentionConfig.sparsity_ratio:
            raise ValueError(
                f"sparsity_ratio is {self.config.sparsity_ratio} and block_mask is given, which "
                "says what is kept; leave the ratio out"
            )
        if self.block_size not in (64, 128):
            raise ValueError(f"block_size is {self.block_size}; supported: 64, 128")
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"block_mask is {given}; expected a torch.Tensor of bool")
        if mask.dim() not in (2, 3, 4) or mask.shape[-1] != mask.shape[-2]:
            raise ValueError(
                f"block_mask has shape {tuple(mask.shape)}; expected (blocks, blocks), with heads "
                "or batch and heads before"
            )
        mask = mask[(None,) * (4 - mask.dim())].to(self.in_proj_weight.device)
        if mask.shape[1] not in (1, self.num_kv_heads, self.num_heads):
            raise ValueError(
                f"block_mask has {mask.shape[1]} heads; expected 1, {self.num_kv_heads} or "
                f"{self.num_heads}"
            )
        seen = mask.tril() if self.config.causal else mask
        if not mask.is_meta and not bool(seen.any(-1).all()):
            raise ValueError("block_mask has a row without a visible block; give each row one")
        return mask

    def _check_blocks(self, grid: BlockGrid, batch: int) -> None:
        assert self.block_mask is not None
        entries, _, blocks, _ = self.block_mask.shape
        if blocks != grid.blocks or entries not in (1, batch):
            raise ValueError(
                f"block_mask has {blocks} blocks of {self.block_size} for {entries} sequences; "
                f"hidden_states have {grid.seqlen} tokens in {batch}"
            )

    def extra_repr(self) -> str:
        config = self.config
        kept = f"sparse_pattern={config.sparse_pattern.value}, causal={config.causal}"
        by = f"sparsity_ratio={config.sparsity_ratio}"
        if config.threshold is not None:
            by = f"threshold={config.threshold}"
        return f"{super().extra_repr()}, {kept}, {by}"


def create_sparse_attention(
    d_model: int,
    num_heads: int,
    sparsity_ratio: float = 0.9,
    pattern: SparsePattern | str = SparsePattern.DYNAMIC_THRESHOLD,
    *,
    block_mask: Tensor | None = None,
    block_size: int = 128,
    **fields: Any,
) -> DynamicSparseAttention:
    """A :class:`DynamicSparseAttention`.

    Args:
        d_model: width of tokens, a multiple of ``num_heads``.
        num_heads: heads of queries.
        sparsity_ratio: share of the visible (query, key) pairs that is left out, 0 to 0.95.
        pattern: which are kept: a :class:`SparsePattern`, or its value.
        block_mask, block_size: BLOCK_SPARSE's map, and the tokens of its blocks.
        fields: others of :class:`SparseAttentionConfig`, as causal, threshold, dtype or
            num_kv_heads.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is expected.

    Example::

        import torch
        from flash_cute.attention import SparsePattern, create_sparse_attention

        attention = create_sparse_attention(64, 4, 0.9, SparsePattern.LOCAL_GLOBAL, causal=True)
        assert attention(torch.randn(1, 2048, 64)).shape == (1, 2048, 64)
    """
    config = SparseAttentionConfig(
        d_model, num_heads, AttentionPatterns.SPARSE, sparsity_ratio=sparsity_ratio,
        sparse_pattern=pattern,  # type: ignore[arg-type]
        **fields,
    )  # fmt: skip
    return DynamicSparseAttention(config, block_mask, block_size)
