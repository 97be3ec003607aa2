"""``ContextParallelAttention``: a sequence over several devices, in one process or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_cute.attention.config import AttentionConfig, AttentionPatterns, checked_device
from flash_cute.attention.query_slice import attend_masked_slice, attend_slice
from flash_cute.attention.shared import (
    SharedAttention,
    refuse_cross_attention,
    with_pattern,
    zero_masked_tokens,
)

Device = torch.device | str | int


class ContextParallelAttention(SharedAttention):
    """Exact multi-head attention with tokens split over several devices (context parallelism).

    Without torch.distributed one process drives all devices: a call takes and returns whole
    sequences, and each device computes its part of the tokens. If torch.distributed is initialised
    with several ranks, ``context_parallel_size`` consecutive ones share a sequence: each passes its
    part, in rank order, and gets the same part back; gradients of parameters are partial sums, to
    be summed over ranks as data parallelism does. Parameters are those of
    :class:`flash_cute.core.AttentionLayer` for every size.

    Args:
        config: an :class:`AttentionConfig` of pattern CONTEXT_PARALLEL.
        device_mesh: the ``context_parallel_size`` devices of one process; some may be the same.
            None means all GPUs, used in turn, or the CPU.
        group: a torch.distributed group instead of all ranks. It is not saved with the layer: set
            ``layer.group`` after loading.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is expected.
        RuntimeError: in a call, if the layer was loaded and its group is not known.

    Example::

        import torch
        from flash_cute.attention import create_context_parallel_attention

        attention = create_context_parallel_attention(512, 8, context_parallel_size=4)
        out = attention(torch.randn(2, 1000, 512))
    """

    def __init__(
        self,
        config: AttentionConfig,
        device_mesh: Sequence[Device] | None = None,
        group: Any = None,
    ) -> None:
        super().__init__(with_pattern(config, AttentionPatterns.CONTEXT_PARALLEL), group)
        self.context_parallel_size = config.context_parallel_size
        self.device_mesh = _devices(device_mesh, config.context_parallel_size)

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
            hidden_states: (batch, seqlen, d_model): whole sequences, or with torch.distributed this
                rank's part of each; parts are in rank order, of any lengths.
            attention_mask: (batch, seqlen), bool or integers: 1 takes part, 0 does not; for the
                same tokens. Causal masks and windows count only the tokens that take part.
            key, value: not supported.
            is_causal: each token sees itself and those before it.

        Returns:
            (batch, seqlen, d_model), on the device of hidden_states. A token that takes no part has
            ``out_proj.bias``.

        Raises:
            TypeError, ValueError: an argument that does not fit; all ranks raise the same message.
            NotImplementedError: cross attention; dropout in training, in one process over several
                devices, over ranks that do not divide the heads, or over ranks with a mask; a mask
                with a window that looks ahead.
        """
        crosses = key is not None or value is not None
        options = self._options(is_causal)
        ranks = self._ranks()
        if ranks > 1:
            balanced = options["causal"] or options["dropout_p"] > 0
            strategy = "all_gather"
            if balanced and self.num_heads % ranks == 0:
                strategy = "ulysses"
            return self._of_ranks(
                ranks, strategy, hidden_states, attention_mask, options, None, crosses
            )
        refuse_cross_attention(crosses)
        self._check_call(hidden_states, attention_mask)
        is_here = len(self.device_mesh) == 1 and self.device_mesh[0] == hidden_states.device
        if is_here or hidden_states.is_meta:
            return super().forward(hidden_states, attention_mask, is_causal=is_causal)
        return self._of_devices(hidden_states, attention_mask, options)

    def _ranks(self) -> int:
        """How many processes share a sequence; 1: one process drives all devices."""
        world = self._world()
        if world == 1:
            return 1
        if world % self.context_parallel_size:
            raise ValueError(
                f"context_parallel_size is {self.context_parallel_size}; it must divide the "
                f"{world} ranks of torch.distributed"
            )
        return self.context_parallel_size

    def _of_devices(self, x: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        from flash_cute.distributed.layouts import layout

        if options["dropout_p"]:
            raise NotImplementedError(
                f"dropout is {options['dropout_p']}: what is dropped would depend on "
                "context_parallel_size; call eval(), or use one device or torch.distributed with "
                "ranks that divide the heads"
            )
        if mask is not None:
            mask = mask != 0
            x = zero_masked_tokens(mask, x)
        size, seqlen = len(self.device_mesh), x.shape[1]
        name = "zigzag" if options["causal"] else "contiguous"
        runs = layout(name, (seqlen,), size, (-1, -1), 1)
        pieces = sorted(
            (run.start, run.length, self.device_mesh[i]) for i, part in enumerate(runs)
            for run in part
        )  # fmt: skip
        if not pieces:
            return super().forward(x)
        weights = {device: self._on(device) for device in dict.fromkeys(p[2] for p in pieces)}
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = []
        for start, length, device in pieces:
            weight, bias, *_ = weights[device]
            tokens = x.narrow(1, start, length).to(device, non_blocking=True)
            heads = F.linear(tokens, weight, bias).unflatten(-1, (-1, self.head_dim))
            qkv.append(heads.split(sizes, dim=-2))
        gathered = {
            device: [
                torch.cat([of[i].to(device, non_blocking=True) for of in qkv], 1) for i in (1, 2)
            ]
            for device in weights
        }
        outs = []
        for (start, _, device), (q, _, _) in zip(pieces, qkv, strict=True):
            k, v = gathered[device]
            if mask is None:
                out = attend_slice(q, k, v, start, options)
            else:
                out = attend_masked_slice(q, k, v, start, mask.to(device), options)
            _, _, weight, bias = weights[device]
            outs.append(F.linear(out.flatten(-2), weight, bias).to(x.device, non_blocking=True))
        return torch.cat(outs, 1)

    def _on(self, device: torch.device) -> tuple[Any, ...]:
        """The parameters copied to a device; autograd returns their gradients."""
        parameters = (
            self.in_proj_weight, self.in_proj_bias, self.out_proj.weight, self.out_proj.bias
        )  # fmt: skip
        return tuple(None if p is None else p.to(device, non_blocking=True) for p in parameters)

    def extra_repr(self) -> str:
        devices = ", ".join(map(str, self.device_mesh))
        return (
            f"{super().extra_repr()}, context_parallel_size={self.context_parallel_size}, "
            f"device_mesh=[{devices}]"
        )


def _devices(device_mesh: Sequence[Device] | None, size: int) -> list[torch.device]:
    if device_mesh is None:
        count = torch.cuda.device_count()
        if not count:
            return [torch.device("cpu")] * size
        return [torch.device("cuda", i % count) for i in range(size)]
    if isinstance(device_mesh, (str, torch.device)):
        raise TypeError(f"device_mesh is {device_mesh!r}; expected a list of devices")
    devices = [checked_device("device_mesh", device) for device in device_mesh]
    if not 1 <= len(devices) <= size:
        raise ValueError(
            f"device_mesh has {len(devices)} devices; expected 1 to context_parallel_size, {size}: "
            "fewer are used in turn"
        )
    return [devices[i % len(devices)] for i in range(size)]


def create_context_parallel_attention(
    d_model: int,
    num_heads: int,
    context_parallel_size: int,
    device_mesh: list[torch.device] | None = None,
    *,
    group: Any = None,
    **fields: Any,
) -> ContextParallelAttention:
    """A :class:`ContextParallelAttention`.

    Args:
        d_model: width of tokens, a multiple of ``num_heads``.
        num_heads: heads of queries.
        context_parallel_size: devices, or ranks of torch.distributed, that share a sequence.
        device_mesh: the devices of one process; some may be the same, and fewer than the size are
            used in turn. None means all GPUs, or the CPU. Parameters are made on torch's default
            device, or ``device``.
        group: a torch.distributed group instead of all ranks, which share sequences if
            torch.distributed is initialised.
        fields: other fields of :class:`AttentionConfig`, such as device, dtype or num_kv_heads.

    Raises:
        TypeError, ValueError: names the argument, what was given and what is expected.

    Example::

        import torch
        from flash_cute.attention import create_context_parallel_attention

        attention = create_context_parallel_attention(64, 4, context_parallel_size=2)
        assert attention(torch.randn(2, 100, 64)).shape == (2, 100, 64)
    """
    config = AttentionConfig(
        d_model, num_heads, AttentionPatterns.CONTEXT_PARALLEL,
        context_parallel_size=context_parallel_size, **fields,
    )  # fmt: skip
    return ContextParallelAttention(config, device_mesh, group)
