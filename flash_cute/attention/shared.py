"""Layers whose tokens several ranks of torch.distributed share: what they have in common."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_cute import _torch_internals as internals
from flash_cute.attention.config import AttentionConfig, AttentionPatterns
from flash_cute.attention.parts import attend_masked_part
from flash_cute.core.multihead import MultiHeadAttention
from flash_cute.core.padding import check_mask


class GroupOfLayer:
    """A group that copies of a module share, and that is not saved with it."""

    def __init__(self, value: Any) -> None:
        self.id = _id_of(value)

    @property
    def value(self) -> Any:
        return _GROUPS[self.id]

    def __deepcopy__(self, memo: Any) -> GroupOfLayer:
        return self

    def __reduce__(self) -> Any:
        return GroupOfLayer, (None,)


class SharedAttention(MultiHeadAttention):
    """:class:`MultiHeadAttention` of a config, over the tokens of this process or of a group."""

    strategy = "auto"

    def __init__(self, config: AttentionConfig, group: Any = None) -> None:
        import flash_cute.distributed  # noqa: F401  before calls are traced or counted

        super().__init__(
            config.d_model, config.num_heads, config.num_kv_heads, config.dropout, config.bias,
            config.score(), config.device, config.dtype,
        )  # fmt: skip
        self.config = config
        self._group = GroupOfLayer(group)

    def _options(self, is_causal: bool) -> dict[str, Any]:
        options = self.score | {"dropout_p": self.dropout if self.training else 0}
        options["causal"] = is_causal or options["causal"]
        return options

    def _check_call(self, x: Tensor, mask: Tensor | None) -> None:
        self._check("hidden_states", x)
        if mask is not None:
            check_mask(mask, x)

    def _of_ranks(
        self,
        size: int,
        strategy: str,
        x: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
        longest: int | None,
    ) -> Tensor:
        """Of this rank's tokens, those of ``size`` ranks being in rank order."""
        if torch.compiler.is_compiling():
            return self._in_graph(size, strategy, x, mask, options, longest)
        from flash_cute.distributed import cp_attention, cp_ops

        cp = context(size, self._group.value, strategy)
        problem = None
        try:
            self._check_call(x, mask)
        except (TypeError, ValueError) as error:
            problem = error
        rows = x.shape[1] if problem is None else 0
        plan = cp.plan_of_parts(
            rows, problem, causal=options["causal"], window_size=options["window_size"]
        )
        check_length(plan.total, longest)
        if mask is not None:
            x = without(mask, x)
        q, k, v = self._heads(x).split(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2
        )
        if mask is None:
            return self.out_proj(cp_attention(q, k, v, plan, **options).flatten(-2))
        cp.agree("attention with attention_mask")
        k, v = (cp_ops.gather(y, plan.key) for y in (k, v))
        mask = cp_ops.gather((mask != 0).to(torch.uint8), plan.key)
        start = sum(plan.rows(rank) for rank in range(cp.rank))
        out = attend_masked_part(q, k, v, start, mask, options)
        return self.out_proj(out.flatten(-2))

    def _in_graph(
        self,
        size: int,
        strategy: str,
        x: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
        longest: int | None,
    ) -> Tensor:
        """The same in a graph, where every rank has as many tokens: asked when the graph runs."""
        from flash_cute.distributed import cp_attention, cp_ops

        if mask is not None:
            raise NotImplementedError(
                "attention_mask is given, which layers of ranks do not take in torch.compile"
            )
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            return cp_ops.refuse(x, self.d_model, _name_of(size, self._group.id, strategy))
        rows = len(range(x.shape[1]))  # a number, by which the graph is specialised
        key = _equal_plan(
            size, self._group.id, strategy, rows, options["causal"], options["window_size"]
        )
        plan = _PLANS[key]
        check_length(size * rows, longest)
        q, k, v = self._heads(x).split(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2
        )
        return self.out_proj(cp_attention(q, k, v, plan, **options).flatten(-2))

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={x}" for name, x in self.config.score().items())
        return f"{super().extra_repr()}, {options}"


def without(mask: Tensor, x: Tensor) -> Tensor:
    """x with 0 for tokens that take no part, so that these reach no gradient either."""
    return x.masked_fill((mask == 0).unsqueeze(-1), 0)


def check_length(seqlen: int, longest: int | None) -> None:
    """Refuses longer sequences than a layer is made for."""
    if longest is not None and seqlen > longest:
        raise ValueError(
            f"hidden_states have {seqlen} tokens; the layer's max_sequence_length is {longest}"
        )


def refuse_cross_attention(key: Tensor | None, value: Tensor | None) -> None:
    """Tokens that are shared out attend to themselves."""
    if key is not None or value is not None:
        raise NotImplementedError(
            "key or value is given: cross attention is not supported where devices share tokens; "
            "use flash_cute.core.AttentionLayer"
        )


def with_pattern(config: AttentionConfig, pattern: AttentionPatterns) -> AttentionConfig:
    """The config, if it is one of this pattern."""
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"config is {type(config).__name__}; expected an AttentionConfig")
    if config.pattern is not pattern:
        raise ValueError(f"pattern is {config.pattern}; expected {pattern}")
    return config


_GROUPS: list[Any] = []  # of layers: a graph can name a group by a number alone
atexit.register(_GROUPS.clear)  # why: flash_cute/distributed/groups.py


_PLANS: dict[str, Any] = {}  # of graphs


def _id_of(group: Any) -> int:
    if group not in _GROUPS:
        _GROUPS.append(group)
    return _GROUPS.index(group)


@internals.constant_in_graphs
def _name_of(size: int, group_id: int, strategy: str) -> str:
    return context(size, _GROUPS[group_id], strategy).name


@internals.constant_in_graphs
def _equal_plan(
    size: int, group_id: int, strategy: str, rows: int, causal: bool, window: tuple[int, int]
) -> str:
    """The key in ``_PLANS`` of a plan of ranks with as many tokens each; asks nobody."""
    cp = context(size, _GROUPS[group_id], strategy)
    sizes = [rows] * size
    plan = cp.plan_alone(sum(sizes), causal=causal, window_size=window, sizes=sizes)
    return _PLANS.setdefault(plan.key, plan).key


_CONTEXTS: dict[tuple[int, int, str], Any] = {}


def context(size: int, group: Any, strategy: str) -> Any:
    """The ContextParallel of ``size`` consecutive ranks of a group, None being all: made once."""
    from flash_cute.distributed import ContextParallel

    whole = dist.group.WORLD if group is None else group
    kind = (size, _id_of(whole), strategy)
    if kind not in _CONTEXTS:
        of_all = dist.get_process_group_ranks(whole)
        if size != len(of_all):
            first = dist.get_rank(whole) // size * size
            ranks = of_all[first : first + size]
            whole = dist.new_group(ranks, use_local_synchronization=True)
        _CONTEXTS[kind] = ContextParallel(whole, strategy=strategy, layout="contiguous")
    return _CONTEXTS[kind]
