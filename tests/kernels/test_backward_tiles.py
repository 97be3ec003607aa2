"""How bwd cuts its work on Hopper: tiles of keys in parts, many tiles one after the other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import checks
import pytest
import torch
from planned import plan

from flash_cute.kernels import Plan
from flash_cute.testing import bounds, memory
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs
from flash_cute.testing.verify import verify

NAN = math.nan
BF16 = torch.bfloat16

# Where Hopper cuts the work on a tile of keys into parts: of heads, of queries, of both. Some parts
# have nothing to do: where tiles of keys are seen by fewer queries than others, or by none.
PARTED = {
    "multi-query": Case(heads=16, heads_k=1, batch=1, seqlen_q=500, seqlen_k=700),
    "group of 6": Case(heads=12, heads_k=2, batch=1, seqlen_q=600, seqlen_k=600, is_causal=True),
    "group of 3": Case(heads=6, heads_k=2, batch=1, seqlen_q=577, seqlen_k=513),
    "one head": Case(heads=1, batch=1, seqlen_q=1000, seqlen_k=1000, is_causal=True),
    "window": Case(heads=1, batch=1, seqlen_q=1000, seqlen_k=2000, window=(500, 200)),
    "rows without keys": Case(heads=2, batch=1, seqlen_q=2000, seqlen_k=700, is_causal=True),
    "sink": Case(heads=8, heads_k=2, batch=1, seqlen_q=500, seqlen_k=300, sink=True),
    "rules": Case(heads=4, batch=1, seqlen_q=900, seqlen_k=300, alibi="heads", dropout_p=0.2),
    # More queries than the L2 cache holds: CTAs that are ahead wait for the others.
    "long way": Case(heads=32, heads_k=2, batch=1, seqlen_q=8300, seqlen_k=130),
    # More tiles than SMs, of which the last ones are cut: of other heads, or the late keys of some.
    "last heads": Case(
        heads=68, heads_k=34, batch=4, seqlen_q=1500, seqlen_k=100, window=(900, -1)
    ),
    "last keys": Case(heads=47, batch=1, seqlen_q=1200, seqlen_k=300),
    "last keys of groups": Case(
        heads=94, heads_k=47, batch=1, seqlen_q=1200, seqlen_k=300, sink=True
    ),
    "varlen": VarlenCase(
        heads=8, heads_k=2, lengths_q=(700, 0, 65, 300), lengths_k=(600, 70, 0, 130)
    ),
    "varlen causal": VarlenCase(
        heads=1,
        lengths_q=(1400, 64, 700),
        lengths_k=(900, 1, 129),
        rows_before=3,
        is_causal=True,
    ),
}
PARTED_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))


def parted(name: str, dims: tuple[int, int]) -> Case | VarlenCase:
    dim, dim_v = dims
    return dataclasses.replace(PARTED[name], dim=dim, dim_v=dim_v, dtype=BF16)


def planned(
    case: Case | VarlenCase,
    dims: tuple[int, int],
    length: Callable[[Sequence[int]], int],
    deterministic: bool = False,
) -> Plan:
    """The plan of a case; `length` is that of all packed sequences."""
    if isinstance(case, VarlenCase):
        count, varlen = len(case.lengths_q), True
        seqlens = (length(case.lengths_q), length(case.lengths_k))
    else:
        count, varlen, seqlens = case.batch, False, (case.seqlen_q, case.seqlen_k)
    left, right = case.window
    found = plan(
        "bwd", count, case.heads, case.heads_k or case.heads, *seqlens, *dims, left=left,
        right=0 if case.is_causal else right, varlen=varlen, deterministic=deterministic,
    )  # fmt: skip
    assert found is not None and found.kernel.arch == 90
    return found


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", PARTED)
def test_cases_are_parted(name, dims):
    found = planned(PARTED[name], dims, lambda lengths: sum(lengths) // len(lengths))
    assert found.num_splits > 1
    assert (found.whole_tiles > 0) == name.startswith("last")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", PARTED)
def test_parts(cuda, name, dims, deterministic):
    inputs = make_inputs(parted(name, dims), cuda)
    memory.fill_freed_memory(cuda)
    verify(inputs, with_dlse=True, deterministic=deterministic)


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", [name for name in PARTED if "varlen" not in name])
def test_parts_write_their_outputs_only(cuda, name, dims):
    inputs = make_inputs(parted(name, dims), cuda)
    out, lse, _, _ = inputs.forward()
    guarded = {x: memory.GuardedTensor(getattr(inputs, x).shape, BF16, cuda, 8) for x in "qkv"}
    outputs = {f"d{x}": guard.tensor for x, guard in guarded.items()}
    grads = {x: guard.tensor for x, guard in guarded.items()}
    if inputs.options["sink"] is not None:
        outputs["dsink"] = grads["sink"] = torch.full((inputs.q.shape[2],), NAN, device=cuda)
    saved = (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse)
    torch.ops.flash_cute.bwd.out(*saved, **inputs.options, **outputs)
    bounds.check_gradients(grads, inputs, out)
    for x, guard in guarded.items():
        guard.check(f"d{x}")


def check_same_bits_again(inputs: Inputs) -> None:
    out, lse, _, _ = inputs.forward()
    for names, deterministic in (("kv", False), ("qkv", True)):
        expected = inputs.backward(out, lse, deterministic=deterministic)
        for _ in range(20):
            grads = inputs.backward(out, lse, deterministic=deterministic)
            checks.same_gradients(grads, {x: expected[x] for x in names})


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", PARTED)
def test_parts_give_the_same_bits_again(cuda, name, dims):
    check_same_bits_again(make_inputs(parted(name, dims), cuda))


# More than twice as many tiles of keys as SMs: CTAs of Hopper take one after the other, of many
# steps, of one, of none if no query sees the keys, and of sequences with fewer than the longest.
MANY_TILES = {
    "full": Case(heads=30, batch=3, seqlen_q=150, seqlen_k=300),
    "causal": Case(heads=30, batch=3, seqlen_q=300, seqlen_k=300, is_causal=True),
    "one step": Case(heads=24, batch=3, seqlen_q=30, seqlen_k=400),
    "unseen keys": Case(heads=16, batch=3, seqlen_q=100, seqlen_k=700, window=(150, 10)),
    "rows without keys": Case(heads=45, batch=3, seqlen_q=300, seqlen_k=140, is_causal=True),
    "grouped": Case(heads=60, heads_k=30, batch=3, seqlen_q=140, seqlen_k=300, sink=True),
    "grouped causal": Case(
        heads=60, heads_k=30, batch=3, seqlen_q=300, seqlen_k=300, is_causal=True
    ),
    "grouped window": Case(
        heads=60, heads_k=30, batch=3, seqlen_q=400, seqlen_k=400, window=(130, 0)
    ),
    "groups of 16 causal": Case(
        heads=128, heads_k=8, batch=3, seqlen_q=140, seqlen_k=1300, is_causal=True
    ),
    "rules": Case(heads=30, batch=3, seqlen_q=150, seqlen_k=300, alibi="heads", dropout_p=0.2),
    "softcap": Case(heads=30, batch=3, seqlen_q=150, seqlen_k=300, softcap=9.0, is_causal=True),
    "varlen": VarlenCase(
        heads=8, lengths_q=(300, 0, 65, 1) * 6, lengths_k=(290, 70, 0, 400) * 6, rows_before=3
    ),
    "varlen causal": VarlenCase(
        heads=6,
        heads_k=3,
        lengths_q=(200, 64, 0, 150) * 12,
        lengths_k=(300, 1, 129, 140) * 12,
        is_causal=True,
    ),
}


# Queries that see more keys than sums of dQ are opened for: key tiles add as they come.
MANY_KEYS = {
    "full": Case(heads=2, batch=1, seqlen_q=300, seqlen_k=4300),
    "causal": Case(heads=2, batch=1, seqlen_q=700, seqlen_k=8400, is_causal=True),
    "window": Case(heads=2, batch=1, seqlen_q=300, seqlen_k=4600, window=(4200, 100)),
    "grouped causal": Case(
        heads=4, heads_k=2, batch=1, seqlen_q=300, seqlen_k=4600, is_causal=True
    ),
    "grouped window": Case(
        heads=4, heads_k=2, batch=1, seqlen_q=1500, seqlen_k=1500, window=(1200, 0)
    ),
    "varlen": VarlenCase(heads=2, lengths_q=(300, 0, 90), lengths_k=(4300, 70, 130)),
}


def order_of_dq(case: Case | VarlenCase, dims: tuple[int, int]) -> str | None:
    return planned(case, dims, max).dq_accumulate


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
def test_cases_have_both_orders_of_dq(dims):
    assert {order_of_dq(case, dims) for case in MANY_KEYS.values()} == {"atomic"}
    opened = {
        name for name, case in MANY_TILES.items() if order_of_dq(case, dims) == "first_stores"
    }
    assert opened >= {"full", "causal", "unseen keys", "grouped", "grouped causal", "varlen"}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
def test_large_groups_walk_down_and_up(dims, deterministic):
    order = planned(MANY_TILES["groups of 16 causal"], dims, max, deterministic).key_order
    assert order.down_and_up
    assert order.tiles_of_set < 132  # of all 264


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", MANY_KEYS)
def test_many_keys(cuda, name, dims):
    dim, dim_v = dims
    inputs = make_inputs(
        dataclasses.replace(MANY_KEYS[name], dim=dim, dim_v=dim_v, dtype=BF16), cuda
    )
    memory.fill_freed_memory(cuda)
    verify(inputs, with_dlse=True)


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize(
    ("dtype", "deterministic"), [(BF16, False), (torch.float16, True)], ids=str
)
@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", MANY_TILES)
def test_many_tiles(cuda, name, dims, dtype, deterministic):
    dim, dim_v = dims
    case = dataclasses.replace(MANY_TILES[name], dim=dim, dim_v=dim_v, dtype=dtype)
    inputs = make_inputs(case, cuda)
    memory.fill_freed_memory(cuda)
    verify(inputs, with_dlse=True, deterministic=deterministic)


@pytest.mark.parametrize("dims", PARTED_DIMS, ids=str)
@pytest.mark.parametrize("name", MANY_TILES)
def test_many_tiles_give_the_same_bits_again(cuda, name, dims):
    dim, dim_v = dims
    case = dataclasses.replace(MANY_TILES[name], dim=dim, dim_v=dim_v, dtype=BF16)
    check_same_bits_again(make_inputs(case, cuda))
