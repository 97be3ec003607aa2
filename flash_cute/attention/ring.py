"""``RingAttentionLayer``: attention with memory linear in the sequence length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cute.attention.config import AttentionConfig, AttentionPatterns
from flash_cute.attention.shared import (
    SharedAttention,
    check_length,
    with_pattern,
)


class RingAttentionLayer(SharedAttention):
    """Exact multi-head attention of very long sequences (Ring Attention, arXiv 2310.01889).

    On one device the kernels read keys and values tile by tile, so that a call holds only tensors
    of (batch, seqlen, d_model). If torch.distributed is initialised with several ranks, these, or
    those of ``group``, share each sequence: each passes its part, and keys and values travel around
    the ring; a rank holds its own part of all tensors, and one more part of keys and values.

    Args:
        config: an :class:`AttentionConfig` of pattern RING.
        group: a torch.distributed group instead of all ranks; one rank means one device. It is not
            saved with the layer: set ``layer.group`` after loading.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is expected.
        RuntimeError: in a call, if the layer was loaded and its group is not known.

    Example::

        import torch
        from flash_cute.attention import create_ring_attention

        ring = create_ring_attention(512, 8, max_sequence_length=100_000)
        out = ring(torch.randn(1, 2000, 512))
    """

    strategy = "ring"

    def __init__(self, config: AttentionConfig, group: Any = None) -> None:
        super().__init__(with_pattern(config, AttentionPatterns.RING), group)
        self.max_sequence_length = config.max_sequence_length

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attention of each token to all.

        Args:
            hidden_states: (batch, seqlen, d_model). With several ranks: this rank's part of the
                sequence; parts are in rank order, of any lengths.
            attention_mask: (batch, seqlen), bool or integers: 1 takes part, 0 does not; for the
                same tokens. Causal masks and windows count only the tokens that take part. With
                several ranks it makes each of them gather all keys and values.
            key, value: cross attention, as in :class:`flash_cute.core.AttentionLayer`; only on one
                device.
            is_causal: each token sees itself and those before it.

        Returns:
            (batch, seqlen, d_model). A token that takes no part has ``out_proj.bias``.

        Raises:
            TypeError, ValueError: an argument is refused by name, or sequences that are longer than
                ``max_sequence_length``. All ranks of a group raise the same message.
            NotImplementedError: with several ranks: cross attention, dropout in training, and a
                mask with a window that looks ahead.
        """
        ranks = self._world()
        if ranks == 1:
            self._check("hidden_states", hidden_states)
            check_length(hidden_states.shape[1], self.max_sequence_length)
            return super().forward(
                hidden_states, attention_mask, key=key, value=value, is_causal=is_causal
            )
        crosses = key is not None or value is not None
        return self._of_ranks(
            ranks, self.strategy, hidden_states, attention_mask, self._options(is_causal),
            self.max_sequence_length, crosses,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, max_sequence_length={self.max_sequence_length}"


def create_ring_attention(
    d_model: int,
    num_heads: int,
    max_sequence_length: int = 1_000_000,
    device: torch.device | None = None,
    *,
    group: Any = None,
    **fields: Any,
) -> RingAttentionLayer:
    """A :class:`RingAttentionLayer`.

    Args:
        d_model: width of tokens, a multiple of ``num_heads``.
        num_heads: heads of queries.
        max_sequence_length: longer sequences are refused. Nothing of this size is allocated.
        device: of the parameters; None is torch's default.
        group: a torch.distributed group instead of all ranks, which share each sequence if
            torch.distributed is initialised; one rank means one device.
        fields: other fields of :class:`AttentionConfig`, such as dtype or num_kv_heads.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is expected.

    Example::

        import torch
        from flash_cute.attention import create_ring_attention

        ring = create_ring_attention(d_model=64, num_heads=4)
        assert ring(torch.randn(2, 100, 64)).shape == (2, 100, 64)
    """
    config = AttentionConfig(
        d_model, num_heads, AttentionPatterns.RING, max_sequence_length=max_sequence_length,
        device=device, **fields,
    )  # fmt: skip
    return RingAttentionLayer(config, group)
