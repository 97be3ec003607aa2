"""Equal bits from run to run: repeats under load, other streams, graph replays, other batches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import flash_cute
from flash_cute import ops
from flash_cute.native import library
from flash_cute.ops.typed import BwdCall
from flash_cute.testing import bounds
from flash_cute.testing.cases import Case, Inputs, VarlenCase, make_inputs
from flash_cute.testing.kernels import parse

BF16 = torch.bfloat16
HOPPER = [  # those of sparse calls are in test_lists.py
    id for id in library.kernels() if "_sm90_bf16" in id and not parse(id).walks_lists
]
CASES = {
    "full": Case(heads=4, seqlen_q=257, seqlen_k=300, dtype=BF16),
    "causal": Case(heads=4, seqlen_q=300, seqlen_k=300, is_causal=True, dim=128, dtype=BF16),
    "window": Case(heads=4, seqlen_q=260, seqlen_k=200, window=(70, 5), dim=80, dtype=BF16),
    "grouped": Case(heads=8, heads_k=2, seqlen_q=300, seqlen_k=257, sink=True, dtype=BF16),
    "dropout": Case(heads=4, seqlen_q=300, seqlen_k=260, dropout_p=0.2, alibi="heads", dtype=BF16),
    "wide": Case(heads=6, heads_k=2, seqlen_q=200, seqlen_k=257, dim=256, softcap=9.0, dtype=BF16),
    "varlen": VarlenCase(
        lengths_q=(257, 0, 64, 1), lengths_k=(130, 70, 65, 257), is_causal=True, dtype=BF16
    ),
    "varlen_rich": VarlenCase(
        lengths_q=(257, 0, 64, 1), lengths_k=(130, 70, 65, 257), heads=4, heads_k=2, sink=True,
        dropout_p=0.3, rows_before=3, dim=192, dim_v=128, dtype=BF16,
    ),
}  # fmt: skip


def repeatable(inputs: Inputs, deterministic: bool = False) -> dict[str, torch.Tensor]:
    """Everything that promises equal bits: all with `deterministic`, else on CUDA not dq, dsink."""
    out, lse, _, _ = inputs.forward()
    grads = inputs.backward(out, lse, deterministic=deterministic)
    if out.is_cuda and not deterministic:
        grads = {name: grads[name] for name in "kv"}
    return {"out": out, "softmax_lse": lse, **grads}


def check_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, x in expected.items():
        bounds.check_same_bits(name, got[name], x)


@pytest.mark.parametrize("name", CASES)
def test_cpu_repeats(name):
    inputs = make_inputs(CASES[name], "cpu")
    expected = repeatable(inputs)
    for _ in range(3):
        check_same(repeatable(inputs), expected)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_cpu_repeats_with_a_number_of_threads(count):
    """ATen's matrix products may sum in another order when the number of threads changes; with one
    number they never do, and with any number the error bounds hold."""
    inputs = make_inputs(CASES["causal"], "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        got = repeatable(inputs)
        check_same(repeatable(inputs), got)
        bounds.check_forward(got["out"], got["softmax_lse"], bounds.forward_oracle(inputs))
    finally:
        torch.set_num_threads(threads)


def test_cpu_deterministic_flag_changes_no_bit():
    inputs = make_inputs(CASES["full"], "cpu")
    out, lse, _, _ = inputs.forward(deterministic=True)
    check_same(inputs.backward(out, lse, deterministic=True), inputs.backward(out, lse))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_cuda_repeats_under_load(cuda, name, deterministic):
    """200 runs while another stream multiplies matrices; compared on the device, without a sync."""
    inputs = make_inputs(CASES[name], cuda)
    expected = repeatable(inputs, deterministic)
    differences = {key: torch.zeros((), dtype=torch.int64, device=cuda) for key in expected}
    load = torch.cuda.Stream()
    matrix = torch.randn(2048, 2048, dtype=BF16, device=cuda)
    for _ in range(200):
        with torch.cuda.stream(load):
            matrix @ matrix
        for key, x in repeatable(inputs, deterministic).items():
            integers = torch.int16 if x.element_size() == 2 else torch.int32
            differences[key] += (x.view(integers) != expected[key].view(integers)).sum()
    assert {key: int(count) for key, count in differences.items()} == dict.fromkeys(expected, 0)


@pytest.mark.parametrize(
    "kernel",
    [id for id in HOPPER if id.startswith("fwd")],
)
def test_cuda_forward_repeats_a_thousand_times(cuda, kernel):
    """While other streams fill the memory's queues, and outputs take memory that held others."""
    dim, dim_v = parse(kernel).dim, parse(kernel).dim_v
    heads_k = 4 if parse(kernel).packs_tokens else 20
    q = torch.randn(2, 1000, 20, dim, device=cuda, dtype=BF16)
    k = torch.randn(2, 1000, heads_k, dim, device=cuda, dtype=BF16)
    v = torch.randn(2, 1000, heads_k, dim_v, device=cuda, dtype=BF16)
    traffic = torch.empty(2**27, device=cuda)
    side = torch.cuda.Stream()
    with library.only(kernel):
        out, lse = torch.ops.flash_cute.fwd(q, k, v, is_causal=True)[:2]
        different = torch.zeros((), dtype=torch.int64, device=cuda)
        for number in range(1000):
            if number % 20 == 0:
                with torch.cuda.stream(side):
                    traffic.add_(1.0)
            again, lse_again = torch.ops.flash_cute.fwd(q, k, v, is_causal=True)[:2]
            different += (again != out).sum() + (lse_again != lse).sum()
    assert different.item() == 0


@pytest.mark.parametrize(
    "kernel",
    [id for id in HOPPER if id.startswith("bwd")],
)
def test_cuda_backward_repeats_a_thousand_times(cuda, kernel):
    """Beside products, whose CTAs take SMs away, and traffic that fills the memory's queues."""
    dim, dim_v = parse(kernel).dim, parse(kernel).dim_v
    q = torch.randn(2, 1000, 12, dim, device=cuda, dtype=BF16)
    k = torch.randn(2, 1000, 4, dim, device=cuda, dtype=BF16)
    v = torch.randn(2, 1000, 4, dim_v, device=cuda, dtype=BF16)
    matrix = torch.randn(2048, 2048, dtype=BF16, device=cuda)
    traffic = torch.empty(2**27, device=cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    out, lse = torch.ops.flash_cute.fwd(q, k, v, is_causal=True)[:2]
    dout = torch.randn_like(out)

    def gradients() -> tuple[torch.Tensor, ...]:
        options = {"is_causal": True, "deterministic": True}
        return torch.ops.flash_cute.bwd(dout, q, k, v, out, lse, **options)[:3]

    with library.only(kernel):
        expected = gradients()
        different = torch.zeros((), dtype=torch.int64, device=cuda)
        for number in range(1000):
            with torch.cuda.stream(side):
                matrix @ matrix
                if number % 20 == 0:
                    traffic.add_(1.0)
            for again, x in zip(gradients(), expected, strict=True):
                different += (again != x).sum()
        torch.cuda.current_stream().wait_stream(side)
    assert different.item() == 0


@pytest.mark.parametrize("name", CASES)
def test_deterministic_gradients_are_right(device, name):
    inputs = make_inputs(CASES[name], device)
    out, lse, _, _ = inputs.forward()
    bounds.check_gradients(inputs.backward(out, lse, deterministic=True), inputs, out)


@pytest.mark.parametrize("name", CASES)
def test_torch_switch_asks_for_determinism(device, name):
    """Autograd under torch.use_deterministic_algorithms gives the bits of deterministic=True."""
    inputs = make_inputs(CASES[name], device)
    leaves = {x: getattr(inputs, x).detach().requires_grad_() for x in "qkv"}
    torch.use_deterministic_algorithms(True)
    try:
        out, lse, _, _ = dataclasses.replace(inputs, **leaves).forward()
        grads = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = inputs.backward(out.detach(), lse.detach(), deterministic=True)
    check_same(dict(zip("qkv", grads, strict=True)), {x: expected[x] for x in "qkv"})


def test_compiled_backward_follows_torchs_switch(device):
    """A graph has the switch's value at tracing as a constant; another value makes a new graph."""
    asked = []

    def record(graph, _):
        calls = [node for node in graph.graph.nodes if node.target is ops.bwd]
        asked.extend(BwdCall(*x.args, **x.kwargs).deterministic for x in calls)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(flash_cute.flash_attn_func, fullgraph=True, backend=backend)
    x = torch.randn(1, 8, 2, 16, device=device, dtype=BF16, requires_grad=True)
    try:
        for switch in (False, True, False):
            torch.use_deterministic_algorithms(switch)
            compiled(x, x, x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


@pytest.mark.usefixtures("no_garbage")
def test_deterministic_backward_takes_linear_memory(cuda):
    """Twice the lengths take at most 2.2 times the memory, whatever a tile is."""
    peaks = []
    for seqlen in (4096, 8192):
        case = Case(batch=1, heads=4, seqlen_q=seqlen, seqlen_k=seqlen, dtype=BF16)
        inputs = make_inputs(case, cuda)
        out, lse, _, _ = inputs.forward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inputs.backward(out, lse, deterministic=True)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert 0 < peaks[1] <= 2.2 * peaks[0]


def test_sequence_alone_or_in_a_batch(device):
    """A sequence's results do not depend on its neighbours."""
    inputs = make_inputs(Case(batch=5, seqlen_q=130, seqlen_k=200, dtype=BF16), device)
    together = repeatable(inputs)
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout")}
    alone = {name: x[3:4] for name, x in tensors.items()}
    results = repeatable(dataclasses.replace(inputs, **alone))
    if device == "cuda":
        check_same(results, {name: x[3:4] for name, x in together.items()})
    for name, x in results.items():
        # Sums in fp32 in another order: a rounding more or less in bf16.
        torch.testing.assert_close(x, together[name][3:4], rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_other_stream(cuda, name):
    """On a side stream the ops wait for that stream's work, and use its memory."""
    inputs = make_inputs(CASES[name], cuda)
    expected = repeatable(inputs)
    late = dataclasses.replace(inputs, q=torch.full_like(inputs.q, float("nan")))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.q.copy_(inputs.q)
        results = repeatable(late)
    side.synchronize()
    check_same(results, expected)


@pytest.mark.parametrize("name", CASES)
def test_graph_replay(cuda, name):
    """A captured forward and backward follows the tensors' new contents, and lengths, at replay."""
    inputs = make_inputs(CASES[name], cuda)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        repeatable(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = repeatable(inputs)
    for seed in (1, 2, 3):
        fresh = make_inputs(CASES[name], cuda, seed)
        for tensor in ("q", "k", "v", "dout"):
            getattr(inputs, tensor).copy_(getattr(fresh, tensor))
        if inputs.lengths:
            offsets = torch.tensor([0, 10 * seed, 257, 300, 322], dtype=torch.int32, device=cuda)
            inputs.lengths["cu_seqlens_q"].copy_(offsets)
        graph.replay()
        check_same(captured, repeatable(inputs))
