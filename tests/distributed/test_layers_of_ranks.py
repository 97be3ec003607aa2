"""Layers whose tokens are split over ranks equal one process: outputs and all gradients."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_cute.attention import (
    FlashAttention3,
    create_context_parallel_attention,
    create_ring_attention,
)
from flash_cute.testing.ranks import Raised

D, HEADS = 48, 12


def layer_of(kind: str, ranks: int) -> nn.Module:
    torch.manual_seed(0)
    if kind == "ring":
        return create_ring_attention(D, HEADS, group=dist.group.WORLD, dtype=torch.float64)
    return create_context_parallel_attention(
        D, HEADS, ranks, num_kv_heads=4 if kind == "grouped" else None, dtype=torch.float64
    )


def part(x: Tensor, uneven: bool) -> slice:
    """The slice of this rank's tokens; if uneven, rank 0 has only two."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if not uneven:
        sizes = [len(y) for y in torch.arange(x.shape[1]).chunk(ranks)]
    else:
        rest = torch.arange(x.shape[1] - 2).chunk(ranks - 1)
        sizes = [2, *map(len, rest)]
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def errors_of(kind: str, masked: bool, causal: bool, uneven: bool) -> float:
    layer = layer_of(kind, dist.get_world_size())
    alone = FlashAttention3(
        D, HEADS, num_kv_heads=getattr(layer, "num_kv_heads", None), dtype=torch.float64
    )
    alone.load_state_dict(layer.state_dict())
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 26, D, generator=generator, dtype=torch.float64)
    dout = torch.randn(2, 26, D, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 26, generator=generator) > 0.3 if masked else None
    if mask is not None:
        x[~mask] = torch.nan
    whole, mine = x.clone().requires_grad_(), x[:, part(x, uneven)].clone().requires_grad_()
    expected = alone(whole, mask, is_causal=causal)
    (expected * dout).sum().backward()
    rows = part(x, uneven)
    out = layer(mine, None if mask is None else mask[:, rows], is_causal=causal)
    (out * dout[:, rows]).sum().backward()
    pairs = [(out, expected[:, rows]), (mine.grad, whole.grad[:, rows])]
    for p, q in zip(layer.parameters(), alone.parameters(), strict=True):
        total = p.grad.clone()
        dist.all_reduce(total)  # each rank has its part
        pairs.append((total, q.grad))
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("kind", ["context_parallel", "grouped", "ring"])
def test_ranks_equal_one_process(ranks, kind):
    for masked, causal, uneven in (
        (False, False, False), (False, True, True), (True, False, True), (True, True, False)
    ):  # fmt: skip
        errors = ranks.run(errors_of, kind, masked, causal, uneven)
        assert max(errors) < 1e-10, (masked, causal, uneven, errors)


def shares_of_flops() -> list[int]:
    from torch.utils.flop_counter import FlopCounterMode

    flops = []
    x = torch.randn(1, 64 // dist.get_world_size(), D, dtype=torch.float64)
    for layer, tokens in (
        (layer_of("context_parallel", dist.get_world_size()), x),
        (FlashAttention3(D, HEADS, dtype=torch.float64), torch.cat([x] * dist.get_world_size(), 1)),
    ):
        with FlopCounterMode(display=False) as counter:
            layer(tokens.requires_grad_()).sum().backward()
        flops.append(counter.get_total_flops())
    return flops


def test_each_rank_does_its_share(four):
    for mine, whole in four.run(shares_of_flops):
        assert mine == whole // 4


def error_in_subgroups() -> float:
    """The error of a layer on four ranks in two groups of two, each with its own sequence."""
    torch.manual_seed(dist.get_rank() // 2)
    x = torch.randn(1, 20, D, dtype=torch.float64)
    layer = layer_of("context_parallel", 2)
    alone = FlashAttention3(D, HEADS, dtype=torch.float64)
    alone.load_state_dict(layer.state_dict())
    rows = slice(0, 10) if dist.get_rank() % 2 == 0 else slice(10, 20)
    return (layer(x[:, rows]) - alone(x)[:, rows]).abs().max().item()


def test_groups_of_consecutive_ranks(four):
    assert max(four.run(error_in_subgroups)) < 1e-12


def wrong_on_one(kind: str) -> None:
    layer = layer_of(kind, 2)
    width = D + 1 if dist.get_rank() == 1 else D
    layer(torch.randn(1, 8, width, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["ring", "context_parallel"])
def test_all_ranks_raise_the_error_of_one(two, kind):
    first, second = two.outcomes(wrong_on_one, kind)
    assert isinstance(first, Raised) and first.kind == second.kind == "ValueError"
    assert first.message == second.message and "rank 1: hidden_states has shape" in first.message


def too_long() -> None:
    layer = create_ring_attention(D, HEADS, 15, group=dist.group.WORLD, dtype=torch.float64)
    layer(torch.randn(1, 8, D, dtype=torch.float64))


def test_max_sequence_length_counts_the_tokens_of_all_ranks(two):
    for outcome in two.outcomes(too_long):
        assert "hidden_states have 16 tokens; the layer's max_sequence_length is 15" in (
            outcome.message
        )


def saved_and_copied() -> bool:
    layer = layer_of("ring", 2)
    x = torch.randn(1, 5, D, dtype=torch.float64)
    expected = layer(x)
    same = copy.deepcopy(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    same.load_state_dict(torch.load(file))
    return torch.equal(same(x), expected)


def test_state_and_copies(two):
    assert all(two.run(saved_and_copied))


# --- in a graph -----------------------------------------------------------------------------------


def in_a_graph(kind: str, causal: bool) -> float:
    """The error of a compiled layer against the same layer in eager mode, over two lengths."""
    torch._dynamo.reset()
    layer = layer_of(kind, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    errors = []
    for seqlen in (7, 9, 12):
        torch.manual_seed(dist.get_rank())
        x = torch.randn(2, seqlen, D, dtype=torch.float64)
        results = []
        for function in (layer, compiled):
            leaf = x.clone().requires_grad_()
            out = function(leaf, is_causal=causal)
            gradients = torch.autograd.grad(out.square().sum(), (leaf, *layer.parameters()))
            results.append((out.detach(), *gradients))
        errors += [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]
    return max(errors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["ring", "context_parallel", "grouped"])
def test_fullgraph(two, kind, causal):
    assert max(two.run(in_a_graph, kind, causal)) < 1e-12


def differ_in_a_graph(kind: str, wrong: str) -> None:
    """The second call differs on the second rank alone."""
    torch._dynamo.reset()
    compiled = torch.compile(layer_of(kind, 2), fullgraph=True, backend="aot_eager")
    compiled(torch.randn(1, 8, D, dtype=torch.float64))
    is_wrong = dist.get_rank() == 1
    seqlen = 9 if wrong == "length" and is_wrong else 8
    width = D + 1 if wrong == "width" and is_wrong else D
    compiled(
        torch.randn(1, seqlen, width, dtype=torch.float64),
        is_causal=wrong == "causal" and is_wrong,
    )  # fmt: skip


@pytest.mark.parametrize("wrong", ["length", "width", "causal"])
@pytest.mark.parametrize("kind", ["ring", "context_parallel"])
def test_all_ranks_raise_the_error_of_one_in_a_graph(two, kind, wrong):
    first, second = two.outcomes(differ_in_a_graph, kind, wrong)
    assert isinstance(first, Raised) and first.kind == second.kind == "ValueError"
    words = "rank 1: hidden_states has shape" if wrong == "width" else "ranks differ: rank 0 has"
    assert first.message == second.message and words in first.message
    assert max(two.run(in_a_graph, kind, False)) < 1e-12


# --- one process ---------------------------------------------------------------------------------


def test_one_process_over_devices_trains_and_refuses():
    devices = [torch.device("cpu")] * 2
    layer = create_context_parallel_attention(D, HEADS, 4, devices * 2)
    assert "device_mesh=[cpu, cpu, cpu, cpu]" in repr(layer)
    assert create_context_parallel_attention(D, HEADS, 4, devices).device_mesh == devices * 2
    for mesh in (devices * 3, []):
        few = f"device_mesh has {len(mesh)} devices; expected 1 to context_parallel_size, 4"
        with pytest.raises(ValueError, match=few):
            create_context_parallel_attention(D, HEADS, 4, mesh)
    absent = torch.device("cuda", torch.cuda.device_count())
    with pytest.raises(ValueError, match=f"device_mesh is {absent}; torch has"):
        create_context_parallel_attention(D, HEADS, 1, [absent])
    with pytest.raises(ValueError, match="device_mesh is 'gpu'; expected the name of a device"):
        create_context_parallel_attention(D, HEADS, 1, ["gpu"])
    with pytest.raises(ValueError, match=f"device is {absent}; torch has"):
        create_ring_attention(D, HEADS, device=absent)
    with pytest.raises(TypeError, match="device_mesh is 'cpu'"):
        create_context_parallel_attention(D, HEADS, 1, "cpu")
    with pytest.raises(NotImplementedError, match="cross attention"):
        layer(torch.zeros(1, 4, D), key=torch.zeros(1, 4, D))
    dropping = create_context_parallel_attention(D, HEADS, 2, devices, dropout=0.1)
    x = torch.randn(1, 8, D)
    with pytest.raises(NotImplementedError, match=r"dropout is 0\.1"):
        dropping(x)
    assert dropping.eval()(x).shape == x.shape


def test_ring_of_one_device():
    ring = create_ring_attention(D, HEADS, 10)
    assert sum(p.numel() for p in ring.parameters()) == 4 * D * D + 4 * D
    assert not list(ring.buffers())  # nothing grows with max_sequence_length
    with pytest.raises(ValueError, match="hidden_states have 11 tokens"):
        ring(torch.randn(1, 11, D))
    mask = torch.tensor([[1, 1, 0, 0, 0]])
    x = torch.randn(1, 5, D)
    torch.testing.assert_close(ring(x, mask)[:, :2], ring(x[:, :2]))


@pytest.mark.usefixtures("no_garbage")
def test_a_million_tokens(cuda):
    """Forward takes less than 12 times the input's bytes; rows equal fp32 softmax."""
    torch.manual_seed(0)
    ring = create_ring_attention(512, 8, device=cuda, dtype=torch.bfloat16)
    x = torch.randn(1, 1_000_000, 512, device=cuda, dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        out = ring(x)
        assert torch.cuda.max_memory_allocated() - before < 12 * x.numel() * 2
        q, k, v = ring._heads(x).float().split(8, -2)
        for row in (0, 123_456, 999_999):
            p = torch.einsum("hd,jhd->hj", q[0, row], k[0]).mul(64**-0.5).softmax(-1)
            expected = ring.out_proj(torch.einsum("hj,jhd->hd", p, v[0]).flatten().bfloat16())
            torch.testing.assert_close(out[0, row], expected, atol=2e-3, rtol=2e-2)


def test_devices_of_one_process(cuda):
    """A layer over two GPUs, or over one GPU listed twice, equals a layer on one device."""
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", i % count) for i in range(2)]
    torch.manual_seed(0)
    layer = create_context_parallel_attention(512, 8, 2, devices, device=cuda, dtype=torch.bfloat16)
    alone = FlashAttention3(512, 8, device=cuda, dtype=torch.bfloat16)
    alone.load_state_dict(layer.state_dict())
    x = torch.randn(1, 3000, 512, device=cuda, dtype=torch.bfloat16)
    for causal in (False, True):
        out, expected = layer(x, is_causal=causal), alone(x, is_causal=causal)
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=2e-2)
    layer(x).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
