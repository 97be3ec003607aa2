"""Which ranks a layer shares its tokens with: by default, in copies, and once it was loaded; and
masks and options of which a rank knows its part alone."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_cute.attention import (
    FlashAttention3,
    create_context_parallel_attention,
    create_ring_attention,
)
from flash_cute.testing.ranks import Ranks

D, HEADS = 48, 4


def layer_of(kind: str, **fields: object) -> nn.Module:
    torch.manual_seed(0)
    if kind == "ring":
        return create_ring_attention(D, HEADS, dtype=torch.float64, **fields)
    return create_context_parallel_attention(D, HEADS, 2, dtype=torch.float64, **fields)


def error_of(layer: nn.Module, mask: Tensor | None = None, first: int = 5) -> float:
    """The error of a rank's tokens against one device with all tokens; the first rank has fewer."""
    alone = FlashAttention3(D, HEADS, dtype=torch.float64)
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(2, 12, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    rows = slice(0, first) if dist.get_rank() == 0 else slice(first, 12)
    with torch.no_grad():
        expected = alone(x, None if mask is None else mask != 0)
        out = layer(x[:, rows], None if mask is None else mask[:, rows])
    return (out - expected[:, rows]).abs().max().item()


def by_default(kind: str) -> list[float]:
    """As it is made without a group, copied, pickled, and saved and loaded as a whole."""
    layer = layer_of(kind)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    world = layer_of(kind, group=dist.group.WORLD)
    same = [layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded, world]
    same.append(pickle.loads(pickle.dumps(world)))
    return [error_of(each) for each in same]


@pytest.mark.parametrize("kind", ["ring", "context_parallel"])
def test_all_ranks_share_by_default_and_after_loading(two, kind):
    for errors in two.run(by_default, kind):
        assert max(errors) < 1e-12


def of_a_group(kind: str) -> tuple[str, float, float]:
    """A layer of a group that is not all ranks, loaded: what it says, and once its group is set."""
    group = dist.new_group([0, 1])
    layer = layer_of(kind, group=group)
    before = error_of(layer)
    loaded = pickle.loads(pickle.dumps(layer))
    told = ""
    try:
        error_of(loaded)
    except RuntimeError as error:
        told = str(error)
    loaded.group = group
    return told, before, error_of(pickle.loads(pickle.dumps(loaded)) if not told else loaded)


@pytest.mark.parametrize("kind", ["ring", "context_parallel"])
def test_a_group_that_is_not_saved_is_said(two, kind):
    for told, before, after in two.run(of_a_group, kind):
        assert "set its group" in told and max(before, after) < 1e-12


def of_one_rank() -> float:
    """A group of this rank alone is one device."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    layer = layer_of("ring", group=groups[dist.get_rank()])
    alone = FlashAttention3(D, HEADS, dtype=torch.float64)
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(1, 5 + dist.get_rank(), D, dtype=torch.float64)
    return (layer(x, key=x) - alone(x, key=x)).abs().max().item()


def not_of_this_rank() -> str:
    group = dist.new_group([0])
    try:
        layer_of("ring", group=group)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def test_groups_of_other_ranks(two):
    assert max(two.run(of_one_rank)) < 1e-12
    assert ["group is" in told for told in two.run(not_of_this_rank)] == [False, True]
    with pytest.raises(TypeError, match="group is str; expected a ProcessGroup"):
        create_ring_attention(D, HEADS, group="all")


def lengths_differ(kind: str) -> None:
    rank = dist.get_rank()
    layer = create_ring_attention(D, HEADS, 20 - 10 * rank, dtype=torch.float64)
    layer(torch.randn(1, 8, D, dtype=torch.float64))


def one_is_other(kind: str, what: str) -> None:
    """The second rank's call is another one."""
    is_other = dist.get_rank() == 1
    layer = layer_of(kind, **({"softcap": 2.0} if is_other and what == "softcap" else {}))
    x = torch.randn(1, 8, D, dtype=torch.float64)
    mask = torch.ones(1, 8)
    if what == "no mask" and is_other:
        mask = None
    elif what == "dtype of mask" and is_other:
        mask = mask.bool()
    key = x if what == "key" and is_other else None
    layer.train().dropout = 0.1 if what == "dropout" else 0.0
    layer(x, mask, key=key)


def test_layers_agree_on_all_of_a_call(two):
    for function, args, words in (
        (lengths_differ, ("ring",), "max_sequence_length 10"),
        *(
            (one_is_other, (kind, what), words)
            for kind in ("ring", "context_parallel")
            for what, words in (
                ("softcap", "softcap 2.0"), ("no mask", "ranks differ"),
                ("dtype of mask", "attention_mask torch.bool"),
                ("key", "rank 1: key or value is given"), ("dropout", "dropout is 0.1"),
            )
        ),
    ):  # fmt: skip
        first, second = two.outcomes(function, *args)
        assert first.message == second.message and words in first.message, (args, first)


MASK = torch.tensor([[1.0] * 3 + [0.0] * 9, [0.0] * 9 + [1.0] * 3])  # each on one rank alone


def masked(kind: str) -> list[float]:
    masks = [MASK, MASK.bool(), MASK.double(), MASK.long()]
    return [error_of(layer_of(kind), mask) for mask in masks]


def masked_wrongly(kind: str, mask: Tensor) -> None:
    error_of(layer_of(kind), mask)


@pytest.mark.parametrize("kind", ["ring", "context_parallel"])
def test_float_masks_count_as_a_whole(two, kind):
    assert max(map(max, two.run(masked, kind))) < 1e-12
    added = torch.zeros(2, 12)
    added[1, 4] = 1.0  # the first sequence has no 1 on any rank
    for wrong in (added, MASK * 0.5, MASK + torch.nan):
        first, second = two.outcomes(masked_wrongly, kind, wrong)
        assert first.message == second.message and "0 and 1" in first.message


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_float_masks_of_one_process(size):
    layer = create_context_parallel_attention(D, HEADS, size, dtype=torch.float64)
    alone = FlashAttention3(D, HEADS, dtype=torch.float64)
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(2, 12, D, dtype=torch.float64)
    for causal in (False, True):
        expected = alone(x, MASK.bool(), is_causal=causal)
        torch.testing.assert_close(layer(x, MASK, is_causal=causal), expected)
    with pytest.raises(ValueError, match="0 and 1"):
        layer(x, torch.zeros(2, 12))


def graphs_of_layers(kind: str, with_group: bool) -> int:
    """How many graphs twelve compiled layers make, each of them right."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    group = {"group": dist.new_group([0, 1])} if with_group else {}
    for layer in [layer_of(kind, **group) for _ in range(12)]:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        x = torch.randn(1, 6, D, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), layer(x))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_layers_of_one_group_share_a_graph():
    with Ranks(2, seconds=20.0, method="forkserver") as ranks:
        for kind in ("ring", "context_parallel"):
            for with_group in (False, True):
                assert ranks.run(graphs_of_layers, kind, with_group) == [1, 1]


def remade() -> tuple[list[float], list[bool]]:
    """Errors of layers before and after torch.distributed was ended and started again, and whether
    they communicate in another ContextParallel then, as one more call does not."""
    layers = [layer_of(kind) for kind in ("ring", "context_parallel")]
    errors = [error_of(layer) for layer in layers]
    before = [dict(layer._group.contexts) for layer in layers]
    store = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=ranks)
    errors += [error_of(layer) for layer in layers]
    made = [dict(layer._group.contexts) for layer in layers]
    errors += [error_of(layer) for layer in layers]
    kept = [dict(layer._group.contexts) for layer in layers]
    are_new = [a.keys() == b.keys() and all(a[x] is not b[x] for x in a)
               for a, b in zip(before, made, strict=True)]  # fmt: skip
    return errors, [*are_new, made == kept]


def test_contexts_are_remade_with_torch_distributed():
    with Ranks(2, seconds=20.0, method="forkserver") as ranks:
        for errors, right in ranks.run(remade):
            assert max(errors) < 1e-12 and all(right)
