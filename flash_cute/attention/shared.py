"""The base of layers whose tokens are split over ranks of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_cute.attention.config import AttentionConfig, AttentionPatterns
from flash_cute.attention.query_slice import attend_masked_slice
from flash_cute.core.multihead import MultiHeadAttention
from flash_cute.core.padding import check_mask


class SharedAttention(MultiHeadAttention):
    """:class:`MultiHeadAttention` of a config, over the tokens of this process or of a group."""

    strategy = "auto"

    def __init__(self, config: AttentionConfig, group: Any = None) -> None:
        # Imported here: before calls are traced or counted, and not with this module.
        from flash_cute.distributed.layer_group import layer_group

        super().__init__(
            config.d_model, config.num_heads, config.num_kv_heads, config.dropout, config.bias,
            config.score(), config.device, config.dtype,
        )  # fmt: skip
        self.config = config
        self._group = layer_group(group)

    @property
    def group(self) -> Any:
        """The torch.distributed group whose ranks share each sequence; None is all ranks, if
        torch.distributed is initialised. It may be set, for instance after loading."""
        return self._group.value

    @group.setter
    def group(self, group: Any) -> None:
        from flash_cute.distributed.layer_group import layer_group

        self._group = layer_group(group)

    def _world(self) -> int:
        """Ranks of the group; 1 without torch.distributed."""
        group = self._group.value
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(group)

    def _options(self, is_causal: bool) -> dict[str, Any]:
        options = self.score | {"dropout_p": self.dropout if self.training else 0}
        options["causal"] = is_causal or options["causal"]
        return options

    def _check_call(self, x: Tensor, mask: Tensor | None) -> None:
        self._check("hidden_states", x)
        if mask is not None:
            check_mask(mask, x)

    def _check_kind(self, x: Tensor) -> None:
        """Refuses inputs that cannot be projected: the other ranks would wait for this one."""
        weight = self.in_proj_weight
        if x.device != weight.device:
            raise ValueError(
                f"hidden_states is on {x.device}, the parameters on {weight.device}; move one"
            )
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"hidden_states has dtype {x.dtype}, the parameters {weight.dtype}; cast one, or "
                "use torch.autocast"
            )

    def _split_heads(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """q, k and v of tokens; masked tokens are 0."""
        heads = self._heads(x if mask is None else zero_masked_tokens(mask, x))
        return heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2)

    def _of_ranks(
        self,
        size: int,
        strategy: str,
        x: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
        longest: int | None,
        crosses: bool,
    ) -> Tensor:
        """Attention of this rank's tokens; ``size`` ranks have the sequence in rank order.
        ``crosses``: the call is cross attention."""
        if torch.compiler.is_compiling():
            return self._in_graph(size, strategy, x, mask, options, longest, crosses)
        from flash_cute.distributed import cp_attention
        from flash_cute.distributed.layer_group import context

        cp = context(self._group, size, strategy)
        problem, rows, qkv = None, 0, tuple[Tensor, ...]()
        try:
            refuse_cross_attention(crosses)
            self._check_call(x, with_any_floats(mask))
            self._check_kind(x)
            if mask is not None and options["dropout_p"]:
                raise NotImplementedError(
                    f"dropout is {options['dropout_p']} and attention_mask is given: what is "
                    "dropped would depend on the number of ranks; call eval()"
                )
            qkv, rows = self._split_heads(x, mask), x.shape[1]
        except Exception as error:  # whatever it is, the other ranks must not wait
            problem = error
        plan = cp.plan_of_parts(
            rows, problem, f", max_sequence_length {longest}", causal=options["causal"],
            window_size=options["window_size"],
        )  # fmt: skip
        check_length(plan.total, longest)
        if mask is None:
            q, k, v = qkv
            return self.out_proj(cp_attention(q, k, v, plan, **options).flatten(-2))
        return self.out_proj(_attend_masked(cp, plan, qkv, mask, options).flatten(-2))

    def _in_graph(
        self,
        size: int,
        strategy: str,
        x: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
        longest: int | None,
        crosses: bool,
    ) -> Tensor:
        """:meth:`_of_ranks` in a graph: all ranks have equally many tokens, which is checked when
        the graph runs."""
        from flash_cute.distributed import cp_attention, cp_ops
        from flash_cute.distributed.layer_group import equal_plan, name_of

        def check() -> None:
            refuse_cross_attention(crosses)
            self._check_call(x, None)
            self._check_kind(x)
            check_length(size * x.shape[1], longest)
            if mask is not None:
                raise NotImplementedError(
                    "attention_mask is not supported in torch.compile if ranks share the tokens"
                )

        problem = cp_ops.problem_in_graph(check, x)
        if problem is not None:
            context_name = name_of(self._group.id, size, strategy)
            return cp_ops.refuse(x, self.d_model, *problem, context_name)
        rows = len(range(x.shape[1]))  # a number, by which the graph is specialised
        plan = equal_plan(
            self._group.id, size, strategy, rows, options["causal"], options["window_size"]
        )
        q, k, v = self._split_heads(x, None)
        return self.out_proj(cp_attention(q, k, v, plan, **options).flatten(-2))

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={x}" for name, x in self.config.score().items())
        return f"{super().extra_repr()}, {options}"


def _attend_masked(
    cp: Any, plan: Any, qkv: tuple[Tensor, ...], mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention of this rank's queries, with all keys, values and the mask gathered."""
    from flash_cute.distributed import cp_ops, description

    q, k, v = qkv
    cp.agree(description.of_masked(plan, (q, k, v, mask), options))
    k, v = (cp_ops.gather(y, plan.key) for y in (k, v))
    if not mask.is_floating_point():
        mask = (mask != 0).to(torch.uint8)
    mask = cp_ops.gather(mask, plan.key)
    check_mask(mask, k)  # after gathering, so that all ranks get the same answer
    start = sum(plan.rows(rank) for rank in range(cp.rank))
    return attend_masked_slice(q, k, v, start, mask != 0, options)


def with_any_floats(mask: Any) -> Any:
    """The mask; floats are replaced, since they are checked after gathering."""
    in_floats = isinstance(mask, Tensor) and mask.is_floating_point()
    return mask != 0 if in_floats else mask


def zero_masked_tokens(mask: Tensor, x: Tensor) -> Tensor:
    """x with 0 for masked tokens, so that their values reach no gradient either."""
    return x.masked_fill((mask == 0).unsqueeze(-1), 0)


def check_length(seqlen: int, longest: int | None) -> None:
    """Refuses longer sequences than a layer is made for."""
    if longest is not None and seqlen > longest:
        raise ValueError(
            f"hidden_states have {seqlen} tokens; the layer's max_sequence_length is {longest}"
        )


def refuse_cross_attention(crosses: bool) -> None:
    """Refuses cross attention, which split tokens do not support."""
    if crosses:
        raise NotImplementedError(
            "key or value is given: cross attention is not supported where devices share tokens; "
            "use flash_cute.core.AttentionLayer"
        )


def with_pattern(config: AttentionConfig, pattern: AttentionPatterns) -> AttentionConfig:
    """Checks that it is a config of this pattern, and returns it."""
    if not isinstance(config, AttentionConfig):
        raise TypeError(f"config is {type(config).__name__}; expected an AttentionConfig")
    if config.pattern is not pattern:
        raise ValueError(f"pattern is {config.pattern}; expected {pattern}")
    return config
