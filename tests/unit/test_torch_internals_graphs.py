"""What must hold of torch's symbols that are not public and that graphs need."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from flash_cute import _torch_internals as internals


def test_assert_in_graph():
    def f(x):
        internals.assert_in_graph(x.sum() > 0, "not positive")
        return x + 1

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="not positive"):
        compiled(-torch.ones(2))


def test_constants_in_graphs():
    """torch's switch of TF32, which cannot be traced, is one; graphs are guarded by it."""

    def read() -> bool:
        return torch.backends.cuda.matmul.fp32_precision == "tf32"

    x, switch = torch.zeros(1), torch.backends.cuda.matmul
    with pytest.raises(Unsupported):
        torch.compile(lambda: x + read(), backend="eager", fullgraph=True)()
    read = internals.constant_in_graphs(read)
    compiled = torch.compile(lambda: x + read(), backend="eager", fullgraph=True)
    before = switch.fp32_precision
    try:
        for precision, expected in (("ieee", 0), ("tf32", 1), ("ieee", 0)):
            switch.fp32_precision = precision
            assert compiled() == expected
    finally:
        switch.fp32_precision = before


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_assume():
    """Numbers that only data will tell are right in the graph, which asks when it runs."""

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x, n):
        longest = n.item()
        assert internals.assume(longest >= 0) and not internals.assume(x.shape[0] > 8)
        return x + longest

    assert compiled(torch.zeros(2), torch.tensor(3)).tolist() == [3, 3]
    with pytest.raises(RuntimeError):
        compiled(torch.zeros(2), torch.tensor(-3))


def test_graphs_are_seen_by_fakes():
    library = torch.library.Library("flash_cute_test", "DEF")
    library.define("look(Tensor x) -> Tensor")
    library.impl("look", lambda x: x.clone(), "CPU")
    seen = []

    def fake(x):
        seen.append(internals.in_graph())
        return torch.empty_like(x)

    torch.library.register_fake("flash_cute_test::look", fake, lib=library)
    look = torch.ops.flash_cute_test.look.default
    try:
        with FakeTensorMode():
            look(torch.ones(2))
        assert seen == [False]
        torch.compile(look, backend="aot_eager", fullgraph=True)(torch.ones(2))
        assert len(seen) > 1 and all(seen[1:])
    finally:
        library._destroy()


def test_begins_by_sizes():
    """Numbers, and offsets of inputs, are told from those of views that a graph makes."""
    seen = {}

    def backend(graph, _):
        for node in graph.graph.nodes:
            x = node.meta.get("example_value")
            if isinstance(x, torch.Tensor):
                seen[node.name] = internals.begins_by_sizes(x)
        return graph

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def views(x, y):
        first, second, of_input, start = x[0], x[1], y[1], y[0]
        return first, second, of_input, start

    views(torch.ones(4, 5, 6), torch.ones(2, 3, 5, 7)[1])
    inputs = {name: by_sizes for name, by_sizes in seen.items() if name.startswith("l_")}
    assert len(inputs) == 2 and not any(inputs.values())
    assert [seen[x] for x in ("first", "second", "of_input", "start")] == [False, True, True, False]


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_is_decided():
    """By a graph's guards or what it was told; not what only data will tell."""

    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def compiled(x, n, p):
        number = n.sum().item()
        torch._check(number > 0)
        seen = [internals.is_decided(a) for a in (number > -1, number > 3, p > 0.5, len(x) > 8)]
        return x + torch.tensor(seen)

    assert compiled(torch.zeros(4), torch.tensor([2, 3]), 0.25).tolist() == [1, 0, 1, 1]
    assert internals.is_decided(True) and internals.is_decided(False)


@pytest.mark.parametrize("dynamic", [False, True])
def test_is_symbolic(dynamic):
    @torch.compile(backend="eager", fullgraph=True, dynamic=dynamic)
    def compiled(x, n, p):
        return x + torch.tensor([internals.is_symbolic(a) for a in (n, p, x.shape[0], 7)])

    assert compiled(torch.zeros(4), 5, 0.25).tolist() == [dynamic] * 3 + [0]
    assert not internals.is_symbolic(3) and not internals.is_symbolic(0.5)


def test_example():
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    x = torch.empty(5, 7)
    torch._dynamo.mark_dynamic(x, 0)
    size = mode.from_tensor(x).shape[0]
    assert isinstance(size, torch.SymInt) and internals.example(size * 2 + 1) == 11
    assert internals.example(environment.create_unbacked_symint()) is None
    assert internals.example(environment.create_unbacked_symfloat()) is None
    assert internals.example(x) is x and internals.example(None) is None
    assert not environment.guards


def test_inductor_is_seen_once_it_is_used():
    code = (
        "import torch; from flash_cute import _torch_internals as internals\n"
        "assert not internals.has_inductor()\n"
        "torch.compile(lambda x: x + 1)(torch.ones(2))\n"
        "assert internals.has_inductor()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
