"""DTensors in the public functions: two processes over gloo, exact in every placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import flash_cute
from flash_cute.testing.ranks import Ranks

BATCH, SEQLEN, HEADS, DIM = 4, 7, 8, 16


def gathered(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def compare(mesh, placements, heads_k, **options):
    """Results and gradients of sharded tensors against those of whole ones."""
    torch.manual_seed(5)
    shapes = [(BATCH, SEQLEN, n, DIM) for n in (HEADS, heads_k, heads_k)]
    whole = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    dout = torch.randn(shapes[0], dtype=torch.float64)
    sink, slopes = torch.randn(HEADS, dtype=torch.float64), torch.rand(HEADS)
    extras = {"sink": sink.requires_grad_(), "alibi_slopes": slopes}
    extras = {name: x for name, x in extras.items() if options.pop(name, False)}
    options |= {"causal": True, "return_lse": True}
    expected = flash_cute.flash_attn_func(*whole, **extras, **options)
    leaves = whole + [x for x in extras.values() if x.requires_grad]
    expected = [*expected, *torch.autograd.grad(expected[0], leaves, dout)]

    qkv_places = [placements] * 3
    if heads_k == 1:  # one kv head for all
        kept = [Replicate() if x == Shard(2) else x for x in placements]
        qkv_places = [placements, kept, kept]
    parts = [
        distribute_tensor(x.detach(), mesh, p).requires_grad_()
        for x, p in zip(whole, qkv_places, strict=True)
    ]
    on_heads = [Shard(0) if x == Shard(2) else Replicate() for x in placements]
    extra_parts = {
        name: distribute_tensor(x.detach(), mesh, on_heads).requires_grad_(x.requires_grad)
        for name, x in extras.items()
    }
    got = flash_cute.flash_attn_func(*parts, **extra_parts, **options)
    assert tuple(got[0].placements) == tuple(placements), (got[0].placements, placements)
    leaves = parts + [x for x in extra_parts.values() if x.requires_grad]
    dout_part = distribute_tensor(dout, mesh, placements)
    got = [*got, *torch.autograd.grad(got[0], leaves, dout_part)]
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(gathered(x), y)


def dense(mesh) -> None:
    for placement in (Shard(0), Shard(2), Replicate()):
        for heads_k in (8, 2, 1):
            compare(mesh, [placement], heads_k)
        compare(mesh, [placement], 2, sink=True, alibi_slopes=True, softcap=2.0)


def heads_that_do_not_divide(mesh) -> None:
    """3 kv heads on 2 devices: DTensor redistributes, and the result is right."""
    q, k = torch.randn(2, 5, 6, 8), torch.randn(2, 5, 3, 8)
    expected = flash_cute.flash_attn_func(q, k, k)
    parts = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, k)]
    torch.testing.assert_close(gathered(flash_cute.flash_attn_func(*parts)), expected)


def varlen(mesh) -> None:
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = (torch.randn(12, n, 16, dtype=torch.float64).requires_grad_() for n in (4, 2, 2))
    for x in (q, k, v):
        dist.broadcast(x.detach(), 0)
    expected = flash_cute.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True)
    expected = [expected, *torch.autograd.grad(expected.square().sum(), (q, k, v))]
    parts = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in (q, k, v)]
    offsets = distribute_tensor(cu, mesh, [Replicate()])
    got = flash_cute.flash_attn_varlen_func(*parts, offsets, offsets, 7, 7, causal=True)
    assert tuple(got.placements) == (Shard(1),)
    got = [got, *torch.autograd.grad(got.square().sum(), parts)]
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(gathered(x), y)
    try:
        rows = [distribute_tensor(x.detach(), mesh, [Shard(0)]) for x in (q, k, v)]
        flash_cute.flash_attn_varlen_func(*rows, offsets, offsets, 7, 7)
    except Exception as error:
        assert "sharded along the sequence" in str(error), error
    else:
        raise AssertionError("not refused")


def refusals(mesh) -> None:
    q = torch.randn(2, 6, 4, 8)
    for placement, dropout_p, message in (
        (Shard(1), 0.0, "sharded along the sequence"),
        (Shard(0), 0.3, "dropout"),
    ):
        x = distribute_tensor(q, mesh, [placement])
        rng = distribute_tensor(torch.zeros(2, dtype=torch.int64), mesh, [Replicate()])
        try:
            flash_cute.flash_attn_func(x, x, x, dropout_p, rng=rng if dropout_p else None)
        except Exception as error:
            assert message in str(error), error
        else:
            raise AssertionError("not refused")


def compiled(mesh) -> None:
    x = torch.randn(2, 6, 4, 8)
    dist.broadcast(x, 0)
    part = distribute_tensor(x, mesh, [Shard(2)])
    run = torch.compile(flash_cute.flash_attn_func, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gathered(run(part, part, part)), flash_cute.flash_attn_func(x, x, x))


def e4m3(mesh) -> None:
    """Widened, as the op of e4m3 inputs takes no DTensors."""
    local = [torch.randn(2, 6, n, 8).to(torch.float8_e4m3fn) for n in (4, 2, 2)]
    parts = [DTensor.from_local(x, mesh, [Shard(0)]) for x in local]
    got = flash_cute.flash_attn_func(*parts, causal=True)
    expected = flash_cute.flash_attn_func(*(x.to(torch.bfloat16) for x in local), causal=True)
    assert tuple(got.placements) == (Shard(0),) and torch.equal(got.to_local(), expected)


def on_the_mesh(check: Callable) -> None:
    torch.manual_seed(0)
    check(init_device_mesh("cpu", (dist.get_world_size(),)))


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "check",
    [dense, heads_that_do_not_divide, varlen, refusals, compiled, e4m3],
    ids=lambda x: x.__name__,
)
def test_on_two_processes(two: Ranks, check: Callable) -> None:
    two.run(on_the_mesh, check)
