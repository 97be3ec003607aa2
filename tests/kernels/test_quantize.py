"""CUDA's kernels of quantize_e4m3: the bits of torch's operators on the CPU, but for means, which
are sums in another order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flash_cute.ops.typed import OPS
from flash_cute.testing.quantize import DTYPES, SCALINGS, Call, bits, drawn
from flash_cute.testing.quantize import check_bits as check


@pytest.mark.parametrize("part", range(16))
def test_random_calls(cuda, part):
    for seed in range(40 * part, 40 * (part + 1)):
        check(drawn(seed))


@pytest.mark.parametrize("subtract_mean", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_many_rows(cuda, scaling, hadamard, subtract_mean):
    x = torch.randn(2, 1030, 8, 128, dtype=torch.bfloat16) + 1
    heads_k = None if scaling == "channel" else 2
    check(Call(x, None, scaling, heads_k, hadamard=hadamard, subtract_mean=subtract_mean))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("dim", "hadamard"), [(1032, False), (3001, False), (4096, True), (32768, True)]
)
def test_heads_that_exceed_a_warp(cuda, dim, hadamard, scaling):
    """The last of these exceeds shared memory."""
    cu = torch.tensor([1, 4, 4, 9], dtype=torch.int32)
    check(Call(torch.randn(11, 2, dim), cu, scaling, hadamard=hadamard, subtract_mean=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_16_bits(cuda, dtype):
    """Each of them in a row with a largest one: quotients of all sizes, halves and signs."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x.to(dtype).view(1, 64, 8, 128)
    for scaling in SCALINGS:
        for power_of_two in (False, True):
            check(Call(x, None, scaling, power_of_two=power_of_two))


def test_quotients_between_two_numbers(cuda):
    """Products of descales and what lies between two numbers of e4m3, and next to these."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (grid[1:] + grid[:-1]) / 2
    halves = torch.cat((halves, -halves, grid[-1:], -halves[:3]))
    descale = torch.rand(4096, 1) + 1
    x = halves * descale
    for _ in range(2):
        x = torch.cat(
            (
                x,
                x[-4096:].nextafter(x.new_tensor(math.inf)),
                x[:4096].nextafter(x.new_tensor(-math.inf)),
            )
        )
        check(Call(x.view(1, -1, 1, len(halves)), None, "row"))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_without_rows(cuda, is_packed, scaling):
    for batch in (0, 2):
        x = torch.zeros((0, 2, 16) if is_packed else (batch, 0, 2, 16))
        cu = torch.zeros(batch + 1, dtype=torch.int32) if is_packed else None
        check(Call(x, cu, scaling, subtract_mean=True))
        check(Call(x, cu, scaling))


def test_sequences_are_alike_in_any_batch(cuda):
    """Means too, whatever lies before; and in every call."""
    lengths = (70, 0, 333, 1, 1000)
    x = torch.randn(sum(lengths), 4, 64, dtype=torch.bfloat16, device="cuda") + 2
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    together = OPS.quantize_e4m3(x, offsets, subtract_mean=True, hadamard=True)
    for _ in range(20):
        again = OPS.quantize_e4m3(x, offsets, subtract_mean=True, hadamard=True)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(again, together, strict=True))
    for i, alone in enumerate(x.split(lengths)):
        dense = OPS.quantize_e4m3(alone[None], subtract_mean=True, hadamard=True)
        first = int(offsets[i])
        assert torch.equal(bits(dense[0][0]), bits(together[0][first : first + len(alone)]))
        for found, expected in zip(dense[1:], together[1:], strict=True):
            assert found is not None and expected is not None
            assert torch.equal(bits(found[0]), bits(expected[i]))


def test_nothing_waits_and_graphs_replay(cuda):
    x = torch.randn(2, 200, 4, 64, device="cuda")
    arguments: list[dict[str, Any]] = [
        {"scaling": scaling, "subtract_mean": mean, "hadamard": mean}
        for scaling in SCALINGS
        for mean in (False, True)
    ]
    expected = [OPS.quantize_e4m3(x, **some) for some in arguments]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [OPS.quantize_e4m3(x, **some) for some in arguments]
    for _ in range(3):
        graph.replay()
    for some, others in zip(found, expected, strict=True):
        for a, b in zip(some, others, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(bits(a), bits(b)))


def test_inference_mode_and_its_errors(cuda):
    """There is no autograd, which checks elsewhere."""
    with torch.inference_mode():
        x = torch.randn(1, 9, 2, 12, device="cuda")
        check(Call(x.cpu(), subtract_mean=True))
        bad: list[tuple[dict[str, Any], str]] = [
            ({"x": x.double()}, "x's dtype"),
            ({"x": x[0]}, "x has 3 dimensions"),
            (
                {"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="cuda")},
                "x has 4 dimensions",
            ),
            ({"scaling": "block"}, "scaling is 'block'; supported: head"),
            ({"heads_k": 3}, "heads_k is 3, and x has 2"),
            ({"heads_k": 1, "scaling": "channel"}, "heads_k is 1"),
            ({"hadamard": True}, "head dim is 12"),
            ({"x": x[..., :0]}, "head dim of 0"),
        ]
        for change, words in bad:
            with pytest.raises(RuntimeError, match=words):
                OPS.quantize_e4m3(**({"x": x} | change))
