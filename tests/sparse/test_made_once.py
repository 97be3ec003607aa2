"""What sizes decide is made once, and never where it could not be used again; few calls remain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from threading import Thread

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute.sparse import estimate, made_once
from flash_cute.sparse.choose import BlockChoice, choose_blocks, choose_without_content
from flash_cute.sparse.gate import LearnedGate
from flash_cute.sparse.grid import BlockGrid, grid_of
from flash_cute.sparse.patterns import FOLLOW_CONTENT, SparsePattern

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept():
    made_once._kept.clear()


class Calls(TorchDispatchMode):
    """Calls of ops that compute something: on a GPU each launches a kernel or more."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aliases = (x.alias_info for x in func._schema.returns)
        is_view = any(x is not None and not x.is_write for x in aliases)
        if not is_view and func.name() not in ("aten::empty.memory_format", "aten::_unsafe_view"):
            self.made[func.name()] += 1
        return func(*args, **(kwargs or {}))


def calls_of_choice(pattern: SparsePattern, seqlen: int, **more) -> Calls:
    """Those of the second choice of a size."""
    gate = LearnedGate(2, 2, 16)
    for _ in range(2):
        q, k = torch.randn(2, 1, seqlen, 2, 16).unbind()
        with Calls() as calls:
            choose_blocks(q, k, pattern, 0.9, gate=gate, **more).value()
    return calls


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [4096, 4100])
@pytest.mark.parametrize("pattern", SparsePattern)
def test_a_choice_takes_few_calls(monkeypatch, pattern, seqlen, causal):
    """A launch takes as long as most of the kernels: 117 and 102 of them took longer than all of
    attention."""
    monkeypatch.setattr(estimate, "_SCORES_AT_ONCE", 2**40)  # a slice, as on a GPU
    most = {SparsePattern.DYNAMIC_THRESHOLD: 27, SparsePattern.LEARNED: 17}.get(pattern, 0)
    if most:
        most += 9 * causal + 11 * (seqlen % 128 > 0)  # masks, and rows that are not whole
    calls = calls_of_choice(pattern, seqlen, causal=causal)
    assert calls.made.total() <= most, calls.made


@pytest.mark.parametrize("pattern", SparsePattern)
def test_sparsity_is_few_calls_too(pattern):
    for _ in range(2):
        q, k = torch.randn(2, 1, 2048, 2, 16).unbind()
        choice = choose_blocks(q, k, pattern, 0.9, gate=LearnedGate(2, 2, 16))
        with Calls() as calls:
            choice.sparsity()
    assert calls.made.total() <= (5 if pattern in FOLLOW_CONTENT else 0)


def strided(seqlen: int = 3000, device: torch.device = CPU) -> BlockChoice:
    return choose_without_content(SparsePattern.STRIDED, grid_of(seqlen, False), 0.8, device=device)


def test_a_choice_without_content_is_the_same_tensors():
    first, second = strided(), strided()
    assert first.kept is second.kept and first.sparsity() is second.sparsity()
    assert first.value().tile_lists is second.value().tile_lists
    assert strided(3001).kept is not first.kept


def test_a_choice_with_other_blocks_has_a_value_of_its_own():
    choice = strided()
    below = replace(choice, kept=choice.kept.tril())
    alone = BlockChoice(choice.kept.tril(), choice.grid)
    assert below.value().density == alone.value().density < choice.value().density
    assert below.sparsity() == alone.sparsity() > choice.sparsity()


def test_a_device_by_its_name():
    assert torch.equal(BlockGrid(300, 64).visible("cpu"), BlockGrid(300, 64).visible(CPU))


def test_a_result_that_was_changed_is_made_anew():
    first = strided()
    expected = first.kept.clone()
    first.kept.fill_(True)
    assert torch.equal(strided().kept, expected)
    lists = strided().value().tile_lists
    right = lists.clone()
    lists.zero_()
    assert torch.equal(strided().value().tile_lists, right)


def test_of_inference_mode_it_serves_calls_with_gradients():
    with torch.inference_mode():
        kept = strided().kept
    assert not kept.is_inference() and strided().kept is kept


def test_fake_tensors_are_not_kept_and_not_mixed_with_real_ones():
    with FakeTensorMode():
        fake = strided().kept
    assert type(fake) is not Tensor and not made_once._kept
    real = strided().kept
    with FakeTensorMode():
        assert type(strided().kept) is not Tensor
    assert strided().kept is real


def test_transforms_and_graphs_keep_nothing():
    def used(x: Tensor) -> Tensor:
        return x.sum() * strided().kept.sum() + strided().sparsity()

    x = torch.ones(3)
    found = [
        torch.func.vmap(used)(x[None])[0],
        torch.func.grad_and_value(used)(x)[1],
        torch.compile(used, fullgraph=True, backend="aot_eager")(x),
    ]
    torch.compiler.reset()
    assert not made_once._kept
    for value in found:
        torch.testing.assert_close(value, used(x))


def test_modes_see_the_same_calls_whether_it_is_kept_or_not():
    """Selective checkpointing compares those of a forward and of its recomputation."""
    q, k = torch.randn(2, 1, 2048, 2, 16).unbind()
    seen = []
    for _ in range(2):
        with Calls() as calls:
            choose_blocks(q, k, "dynamic_threshold", 0.8, causal=True)
        seen.append(calls.made)
    assert seen[0] == seen[1]


def test_what_is_kept_is_bounded(monkeypatch):
    for seqlen in range(1000, 1100):
        grid_of(seqlen, False).visible(CPU)
    assert len(made_once._kept) == made_once._RESULTS
    monkeypatch.setattr(made_once, "_BYTES", 2**20)
    for blocks in (100, 200, 1100):  # pairs of 80 KB, of 320 KB, and more than may be kept
        assert BlockGrid(64 * blocks, 64).pairs(CPU).shape[-1] == blocks
        kept = [made_once._bytes(result) for result, _ in made_once._kept.values()]
        assert sum(kept) <= 2**20 and (8 * blocks**2 in kept) == (blocks < 1100)


def test_threads_share_it():
    found: list[Tensor] = []
    threads = [Thread(target=lambda: found.append(strided(2500).kept)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(torch.equal(x, found[0]) for x in found)


def test_a_cuda_graph_owns_what_it_reads_and_streams_have_their_own(cuda):
    device = torch.device(cuda)

    def kept() -> Tensor:
        return strided(5000, device).kept

    expected = kept()
    with torch.cuda.stream(torch.cuda.Stream()):
        other = kept()
        assert other is not expected and kept() is other
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kept()
    made_once._kept.clear()
    graph.replay()
    assert captured is not expected and torch.equal(captured, expected)
