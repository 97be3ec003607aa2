"""What stands around cp_attention: shards, labels, plans, DTensor, torch.compile, contexts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import flash_cute
from flash_cute.distributed import ContextParallel, Links, comm, cp_attention, measure_links
from flash_cute.distributed.costs import Sizes
from flash_cute.distributed.layouts import LAYOUTS
from flash_cute.distributed.plan import plan_of
from flash_cute.distributed.strategies import expected_times, fastest
from flash_cute.testing import distributed as cases


def shards(layout: str) -> bool:
    cp = cases.context("all_gather", layout, 1, "cpu")
    for options, dim in (({"seqlen": 27}, 1), ({"cu_seqlens": [0, 5, 5, 27]}, 0)):
        plan = cp.plan(**options, block=4)
        shape = (2, 27, 3) if dim else (27, 3)
        x = torch.arange(2 * 27 * 3 if dim else 27 * 3).view(shape).double().requires_grad_()
        mine = cp.shard(x, plan, dim)
        assert mine.shape[dim] == plan.rows(cp.rank)
        assert torch.equal(cp.unshard(mine, plan, dim), x.detach())
        mine.sum().backward()
        assert x.grad is not None
        total = x.grad.clone()
        dist.all_reduce(total)
        assert torch.equal(total, torch.ones_like(total))  # each token is on one rank
        positions = torch.arange(27) if dim else torch.tensor([*range(5), *range(22)])
        assert torch.equal(cp.position_ids(plan), cp.shard(positions, plan, 0))
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_and_unshard(four, layout):
    assert all(four.run(shards, layout))


def test_labels_are_shifted_inside_of_documents():
    cp = ContextParallel()
    plan = cp.plan(cu_seqlens=[0, 3, 3, 4, 8])
    labels = plan.shift_labels(torch.arange(8))
    assert labels.tolist() == [1, 2, -100, -100, 5, 6, 7, -100]
    two_rows = plan.shift_labels(torch.arange(16).view(2, 8).T, dim=0, fill=-1)
    assert two_rows[:, 1].tolist() == [9, 10, -1, -1, 13, 14, 15, -1]


def test_plans_are_values():
    cp = ContextParallel()
    plan = cp.plan(100, causal=True)
    assert plan == cp.plan(100, causal=True) and len({plan, cp.plan(100, causal=True)}) == 1
    assert plan != cp.plan(101, causal=True) and plan.digest != cp.plan(101, causal=True).digest
    assert plan_of(plan.key) == plan and plan_of(plan.key) is plan_of(plan.key)
    assert str(plan) == (
        "all_gather, zigzag: 100 tokens on 1 ranks, 100 to 100 each; the busiest rank has 1.000 "
        "of the mean work"
    )


@pytest.mark.parametrize("strategy_name", ["all_gather", "ring", "ulysses"])
def test_layouts_share_the_work_of_masks(strategy_name):
    """But where each rank has all tokens of its heads, and where all tokens have as much work."""
    cp = ContextParallel(strategy=strategy_name)
    layouts = [
        cp.plan(seqlen, cu_seqlens=offsets, causal=causal).layout
        for seqlen, offsets in ((100, None), (None, [0, 30, 100]))
        for causal in (False, True)
    ]
    if strategy_name == "ulysses":
        assert layouts == ["contiguous"] * 4
    else:
        assert layouts == ["contiguous", "zigzag", "contiguous", "balanced"]


def test_auto_takes_the_least_expected_time():
    causal = Sizes(131072, 131072**2 // 2, 32, 8, 128, torch.bfloat16)
    for ranks in (2, 4, 8):
        times = expected_times(causal, ranks, Links())
        chosen = fastest(causal, ranks, Links())
        assert times[chosen] <= 1.01 * min(times.values())
    assert "ulysses" not in expected_times(causal, 3, Links())  # 32 heads
    long = Sizes(2**24, 2**47, 32, 32, 128, torch.bfloat16)
    assert "all_gather" not in expected_times(long, 4, Links())
    slow = fastest(Sizes(8192, 8192**2, 32, 32, 128, torch.bfloat16), 8, Links(gb_s=5.0))
    assert slow == "ulysses"  # it sends least


def of_dtensors() -> tuple[float, bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cp = ContextParallel(mesh, layout="contiguous")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 21, 4, 8, dtype=torch.float64).unbind()
    plan = cp.plan(21, causal=True)
    shared = []
    for x in (q, k, v):
        part = x.chunk(cp.size, 1)[cp.rank].clone()
        shared.append(
            DTensor.from_local(
                part, mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride()
            ).requires_grad_()
        )
    out = cp_attention(*shared, plan)
    out.sum().backward()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = flash_cute.flash_attn_func(*leaves, causal=True)
    expected.sum().backward()
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(shared, leaves, strict=True))]
    errors = [(x.full_tensor() - y).abs().max().item() for x, y in pairs]
    refused = False
    try:
        cp_attention(*(DTensor.from_local(x, mesh, [Shard(2)]) for x in (q, k, v)), plan)
    except ValueError as error:
        refused = "Shard(1)" in str(error)
    return max(errors), refused and isinstance(out, DTensor)


def test_dtensors(three):
    for error, is_right in three.run(of_dtensors):
        assert error < 1e-12 and is_right


def compiled(strategy_name: str) -> float:
    cp = cases.context(strategy_name, "zigzag", 1, "cpu")
    plan = cp.plan(24, causal=True)
    torch.manual_seed(0)
    made = cases.inputs(
        cases.Case(strategy_name, "zigzag", (24,), (-1, 0), 4, "heads", 1.5, True, 0.0, 1, False,
                   True), 0
    )  # fmt: skip
    mine = {n: cp.shard(made[n], plan) for n in ("q", "k", "v", "dout")}
    torch._dynamo.reset()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        out, lse = cp_attention(
            q * 1.1, k, v, plan, softcap=1.5, alibi_slopes=made["alibi_slopes"], sink=sink,
            return_lse=True,
        )  # fmt: skip
        return (out * mine["dout"]).sum() + lse.sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (*list(mine.values())[:3], made["sink"])]
        value = function(*leaves)
        value.backward()
        results.append([value.detach(), *(x.grad for x in leaves)])
    return max((a - b).abs().max().item() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("strategy_name", ["all_gather", "ring", "ulysses", "two_dimensional"])
def test_fullgraph(four, strategy_name):
    assert max(four.run(compiled, strategy_name)) < 1e-9


def inside_of_torch_s_context() -> list[str]:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (torch.randn(1, 4, 16, 8) for _ in range(3))
    heads_last = [x.transpose(1, 2) for x in (q, k, v)]
    plan = ContextParallel(mesh).plan(8)
    said = []
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        for call in (
            lambda: flash_cute.flash_attn_func(*heads_last),
            lambda: cp_attention(*(x.transpose(1, 2) for x in (q, k, v)), plan),
        ):
            try:
                call()
            except NotImplementedError as error:
                said.append(str(error))
    flash_cute.flash_attn_func(*heads_last)  # and not afterwards
    return said


def test_torch_s_own_context_is_an_error(two):
    """Its calls would attend to the local shard alone."""
    for first, second in two.run(inside_of_torch_s_context):
        assert "context_parallel" in first and "flash_cute.distributed" in first
        assert "context_parallel" in second


def under_autocast() -> torch.dtype:
    cp = cases.context("ring", "zigzag", 1, "cpu")
    plan = cp.plan(16)
    q = torch.randn(1, 8, 4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cp_attention(q, q, q, plan).dtype


def test_autocast(two):
    assert two.run(under_autocast) == [torch.bfloat16] * 2


def checkpointed() -> float:
    from torch.utils.checkpoint import checkpoint

    cp = cases.context("all_gather", "zigzag", 2, "cpu")
    plan = cp.plan(16, causal=True)
    results = []
    for wrap in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False)):
        torch.manual_seed(cp.rank)
        q = torch.randn(1, 8, 4, 8, dtype=torch.float64, requires_grad=True)
        out = wrap(lambda x: cp_attention(x, x, x, plan), q)
        F.mse_loss(out, torch.zeros_like(out)).backward()
        results.append(q.grad)
    return (results[0] - results[1]).abs().max().item()


def test_activation_checkpointing(two):
    assert max(two.run(checkpointed)) < 1e-14


def by_default_on_meta() -> list[float]:
    """Differences of out and the gradient of q from those without a default device, of plans that
    move rows, and of dropout."""
    differences = []
    for name, layout, cu_seqlens, dropout_p in (
        ("all_gather", "zigzag", None, 0.0),
        ("ring", "per_document", [0, 7, 7, 16], 0.0),
        ("ulysses", "contiguous", None, 0.5),
    ):
        results = []
        for device in ("cpu", "meta"):
            torch.manual_seed(0)
            q = torch.randn(16, 4, 8, dtype=torch.float64)
            slopes, rng = torch.rand(4), torch.tensor([1, 2])
            torch.set_default_device(device)
            try:
                cp = cases.context(name, layout, 1, "cpu")
                packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
                plan = cp.plan(None if packed else 16, **packed, causal=True)
                mine = cp.shard(q, plan, 0)
                mine = (mine if packed else mine[None]).detach().requires_grad_()
                out = cp_attention(
                    mine, mine, mine, plan, alibi_slopes=slopes, dropout_p=dropout_p, rng=rng
                )
                out.sin().sum().backward()
                whole = cp.unshard(out.detach(), plan, 0 if packed else 1)
            finally:
                torch.set_default_device(None)
            results.append((whole, mine.grad))
        pairs = zip(*results, strict=True)
        differences += [(a - b).abs().max().item() for a, b in pairs]
    return differences


def test_the_default_device_changes_nothing(two):
    assert max(map(max, two.run(by_default_on_meta))) == 0


def counted() -> list[int]:
    from torch.utils.flop_counter import FlopCounterMode

    flops = []
    for name in ("all_gather", "ring", "ulysses", "two_dimensional"):
        cp = cases.context(name, "zigzag", 1, "cpu")
        plan = cp.plan(64)
        q = torch.randn(1, 16, 4, 8, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            cp_attention(q, q, q, plan).sum().backward()
        flops.append(counter.get_total_flops())
    return flops


def test_flops_are_this_rank_s_share(four):
    """Full attention: forward 2, backward 5 products of 64 x 64 x 8 a head; a quarter each."""
    for flops in four.run(counted):
        assert flops == [7 * 2 * 4 * 64 * 64 * 8 // 4] * 4


def measured() -> tuple[Links, Links, str]:
    links = measure_links(megabytes=1, rounds=2)
    cp = ContextParallel(links=links)
    plan = cp.plan(64, causal=True, heads=4, heads_k=4, head_dim=8)  # plans are compared
    return links, cp.links, plan.strategy


def test_measured_links_are_the_same_on_all_ranks(two):
    (first, used, _), (second, _, _) = two.run(measured)
    assert first == second == used != Links()
    assert 1e-3 < first.gb_s < 1e3 and 1e-5 < first.tflops < 10 and 1e-2 < first.memory_gb_s < 1e4


def measured_differently() -> None:
    measure_links(megabytes=1, rounds=1 + dist.get_rank())


def test_measured_links_of_one_process():
    with pytest.raises(ValueError, match="rounds 0"):
        measure_links(rounds=0)
    with pytest.raises(
        TypeError, match="group is str; expected a ProcessGroup of this process, or None"
    ):
        measure_links("all")
    assert measure_links(megabytes=1, rounds=1).gb_s == Links().gb_s


def test_all_ranks_measure_alike(two):
    for outcome in two.outcomes(measured_differently):
        assert outcome.kind == "ValueError" and "ranks differ" in outcome.message


def ranges(strategy_name: str) -> set[str]:
    """The steps that a profiler shows of forward and backward."""
    cp = cases.context(strategy_name, "zigzag", 1, "cpu")
    plan = cp.plan(24, causal=True)
    q = torch.randn(1, plan.rows(cp.rank), 4, 8, requires_grad=True)
    with torch.profiler.profile() as profile:
        cp_attention(q, q, q, plan).sum().backward()
    return {event.key for event in profile.key_averages() if event.key.startswith("cp: ")}


@pytest.mark.parametrize(
    "strategy_name, steps",
    [
        ("all_gather", {"all_gather", "reduce_scatter"}),
        ("ring", {"rotate", "merge"}),
        ("ulysses", {"all_to_all"}),
    ],
)
def test_steps_have_names(two, strategy_name, steps):
    computing = {"forward", "backward"} if strategy_name != "ulysses" else set()
    for names in two.run(ranges, strategy_name):
        assert {f"cp: {step}" for step in steps | computing} <= names


def test_steps_are_nvtx_ranges_on_gpus(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: told.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    comm.all_gather(torch.ones(1), None)
    assert told == ["cp: all_gather", "end"]
