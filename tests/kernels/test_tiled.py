"""Attention with a tile of the caller's: flash_attention_forward and what goes with it."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch
from tiled_oracle import LIMITS, assert_close, inputs, reference

import flash_cute
from flash_cute import kernels
from flash_cute._torch_internals import DispatchMode
from flash_cute.cpu import streaming
from flash_cute.cpu.streaming import Tile
from flash_cute.tiled import kernel_of
from flash_cute.tiled import sizes as tiled_sizes

PAIRS = [(32, 32), (1, 1), (64, 32), (17, 5), (5, 90), (70, 70), (71, 200), (4096, 1), (1, 4096)]


def gradients(q, k, v, dout):
    leaves = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(reference(*leaves)[0], leaves, dout.double().cpu())


def fits(pair, device, dim, dtype):
    return device == "cpu" or (pair[1] + 2 * pair[0]) * dim * dtype.itemsize <= 100_000


def test_signatures_are_the_documents():
    def of(function):
        return {p.name: p.default for p in inspect.signature(function).parameters.values()}

    tile = {"Bc": 32, "Br": 32, "use_half": False}
    no = inspect.Parameter.empty
    forward = list(of(flash_cute.flash_attention_forward).items())
    assert forward[:6] == list(({"Q": no, "K": no, "V": no} | tile).items())
    assert forward[6:] == [("return_stats", False)]
    names = dict.fromkeys(("Q", "K", "V", "O", "dO", "l", "m"), no)
    assert list(of(flash_cute.flash_attention_backward).items()) == list((names | tile).items())
    module = {"bc": 32, "br": 32, "use_half": False}
    assert list(of(flash_cute.FlashAttention).items()) == list(module.items())
    method = flash_cute.FlashAttention().backward
    assert list(of(method)) == list(names)
    assert list(of(flash_cute.get_optimal_block_sizes))[:2] == ["sequence_length", "head_dim"]
    sizes = ["batch_size", "num_heads", "seq_len", "head_dim", "use_half"]
    assert list(of(flash_cute.estimate_memory_usage)) == sizes


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("pair", PAIRS)
def test_any_pair_gives_the_right_result(device, pair, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("CUDA has no float64: test_what_cuda_lacks")
    q, k, v = inputs(device, dtype=dtype)
    if not fits(pair, device, 24, dtype):
        pytest.skip("exceeds shared memory: test_a_tile_beyond_shared_memory")
    out, sums, maxima = flash_cute.flash_attention_forward(q, k, v, *pair, return_stats=True)
    expected = reference(q, k, v)
    assert (out.dtype, sums.dtype) == (dtype, torch.promote_types(dtype, torch.float32))
    exact = torch.float32 if dtype.itemsize < 4 else dtype
    for got, right, kind in zip((out, sums, maxima), expected, (dtype, exact, exact), strict=True):
        assert got.shape == right.shape
        assert_close(got, right, kind)
    assert torch.equal(flash_cute.flash_attention_forward(q, k, v, *pair), out)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("pair", PAIRS[:6])
def test_backward_from_row_sums_and_maxima(device, pair, dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("CUDA has no float64")
    q, k, v, dout = inputs(device, dtype=dtype, count=4)
    out, sums, maxima = flash_cute.flash_attention_forward(q, k, v, *pair, return_stats=True)
    got = flash_cute.flash_attention_backward(q, k, v, out, dout, sums, maxima, *pair)
    module = flash_cute.FlashAttention(*pair)
    of_module = module.backward(q, k, v, out, dout, sums, maxima)
    for x, right, again in zip(got, gradients(q, k, v, dout), of_module, strict=True):
        assert x.dtype == dtype
        assert_close(x, right, dtype, times=4)
        assert_close(again, x.double().cpu(), dtype)


def test_only_the_log_sum_exp_counts_for_backward(device):
    q, k, v, dout = inputs(device, count=4)
    out, sums, maxima = flash_cute.flash_attention_forward(q, k, v, return_stats=True)
    lse = maxima + sums.log()
    for l, m in ((torch.ones_like(lse), lse), (sums * math.e, maxima - 1)):
        got = flash_cute.flash_attention_backward(q, k, v, out, dout, l, m)
        for x, right in zip(got, gradients(q, k, v, dout), strict=True):
            assert_close(x, right, torch.float32, times=4)


def test_wrong_statistics_give_other_gradients():
    q, k, v, dout = inputs("cpu", count=4)
    out, sums, maxima = flash_cute.flash_attention_forward(q, k, v, return_stats=True)
    right = flash_cute.flash_attention_backward(q, k, v, out, dout, sums, maxima)
    wrong = flash_cute.flash_attention_backward(q, k, v, out, dout, sums, maxima + 1)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(right, wrong, strict=True))


@pytest.mark.parametrize("use_half", [False, True])
def test_autograd_is_the_backward(device, use_half):
    leaves = [x.requires_grad_() for x in inputs(device)]
    module = flash_cute.FlashAttention(16, 48, use_half)
    (dout,) = inputs(device, count=1)
    module(*leaves).backward(dout)
    dtype = torch.float16 if use_half else torch.float32
    for leaf, right in zip(leaves, gradients(*leaves, dout), strict=True):
        assert leaf.grad.dtype == torch.float32
        assert_close(leaf.grad, right, dtype, times=4)


def test_gradcheck():
    leaves = [x.requires_grad_() for x in inputs("cpu", (1, 2, 5, 3), torch.float64)]
    assert torch.autograd.gradcheck(
        lambda *x: flash_cute.flash_attention_forward(*x, Bc=2, Br=3), leaves
    )


def test_gradients_of_sums_and_of_no_rows(device):
    """The gradient of a sum has strides of 0."""
    leaves = [x.requires_grad_() for x in inputs(device)]
    flash_cute.flash_attention_forward(*leaves).sum().backward()
    right = gradients(*leaves, torch.ones(leaves[0].shape))
    for leaf, expected in zip(leaves, right, strict=True):
        assert_close(leaf.grad, expected, torch.float32, times=4)
    empty = torch.zeros(2, 3, 0, 24, device=device)
    assert flash_cute.flash_attention_forward(empty, empty, empty).shape == empty.shape


def test_use_half_reaches_the_computation(device):
    q, k, v = inputs(device, (2, 2, 300, 64))
    right = reference(q, k, v)[0]
    error = (flash_cute.flash_attention_forward(q, k, v, use_half=True).cpu() - right).abs().max()
    assert 2e-5 < error < 2e-3
    exact = (flash_cute.flash_attention_forward(q, k, v).cpu() - right).abs().max()
    assert exact < 2e-5


def test_the_tile_takes_part():
    """Tiles of other sizes round in another order."""
    q, k, v = inputs("cpu", (1, 2, 500, 32))
    results = {
        pair: flash_cute.flash_attention_forward(q, k, v, *pair) for pair in ((1, 32), (512, 32))
    }
    assert not torch.equal(*results.values())


class Counted(DispatchMode):
    """Counts matrix products, and remembers over how many maxima a running one was taken."""

    def __init__(self):
        super().__init__()
        self.products, self.maxima = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.bmm.default
        if func is torch.ops.aten.cummax.default:
            self.maxima.add(args[0].shape[-1] - 1)  # the first one is that of the step before
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("pair", "tiles"), [((1, 1), {512, 88}), ((32, 32), {16, 2, 1}), ((600, 8), {1})]
)
def test_each_tile_has_its_maxima_and_small_ones_share_steps(pair, tiles):
    q, k, v = inputs("cpu", (1, 1, 600, 8))
    with Counted() as counted:
        streaming.forward(q[0], k[0], v[0], 1.0, Tile(rows=pair[1], keys=pair[0]))
    assert counted.maxima == tiles
    assert counted.products <= 2 * 5 * 3


def test_rows_of_no_weight():
    q, k, v = inputs("cpu", (1, 1, 4, 8))
    q, k = q.abs(), torch.full_like(k, -torch.inf)
    for x in (q.requires_grad_(), v.requires_grad_()):
        x.retain_grad()
    out, sums, maxima = flash_cute.flash_attention_forward(q, k, v, 2, 2, return_stats=True)
    assert out.abs().max() == 0 and sums.abs().max() == 0 and (maxima == -torch.inf).all()
    out.sum().backward()
    assert v.grad.abs().max() == 0


PEAK = """
import resource, sys, torch, flash_cute
torch.set_num_threads(1)
def peak(n):
    x = torch.randn(1, 1, n, 64)
    flash_cute.flash_attention_forward(x, x, x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
small = peak(256)
print(peak(16384) - small)
"""


def test_memory_is_linear():
    """Scores of 16384 rows would be 1024 MiB."""
    run = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 300


def test_saved_tensors_are_linear():
    def saved(rows):
        count = 0

        def pack(x):
            nonlocal count
            count += x.numel()
            return x

        leaves = [x.requires_grad_() for x in inputs("cpu", (1, 2, rows, 16))]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            flash_cute.flash_attention_forward(*leaves)
        return count

    assert saved(400) <= 4.5 * saved(100)


def test_a_tile_beyond_shared_memory(cuda):
    q = torch.randn(1, 2, 64, 64, device=cuda)
    for run in (flash_cute.flash_attention_forward, flash_cute.FlashAttention(4096, 4096)):
        pair = () if isinstance(run, flash_cute.FlashAttention) else (4096, 4096)
        with pytest.raises(ValueError, match="bytes of shared memory"):
            run(q, q, q, *pair)
    assert_close(flash_cute.flash_attention_forward(q, q, q), reference(q, q, q)[0], torch.float32)


def test_two_pairs_run_two_kernels(cuda):
    q = torch.randn(2, 16, 2048, 64, device=cuda, dtype=torch.float16)
    x = q.transpose(1, 2)
    made = {}
    for bc in (32, 64, 128):
        for br in (32, 64, 128, 192):
            made.setdefault(kernel_of(q, bc, br), (bc, br))
    if torch.cuda.get_device_capability(cuda) == (9, 0):
        assert len(made) >= 2
    for id, pair in made.items():
        with kernels.only(id):
            alone = torch.ops.flash_cute.fwd(x, x, x)[0]
        got = flash_cute.flash_attention_forward(q, q, q, *pair)
        assert torch.equal(got, alone.transpose(1, 2))


def test_what_cuda_lacks(cuda):
    q = torch.randn(1, 1, 8, 8, device=cuda, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float64"):
        flash_cute.flash_attention_forward(q, q, q)
    q = torch.randn(1, 1, 8, 300, device=cuda)
    with pytest.raises(NotImplementedError, match="head dim 300"):
        flash_cute.flash_attention_forward(q, q, q)


Q = torch.randn(1, 2, 6, 8)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"Q": Q[0]}, ValueError, r"Q has shape \(2, 6, 8\); expected \(B, H, N, D\)"),
        ({"K": Q[:, :1]}, ValueError, "shapes differ"),
        ({"V": Q[..., :4]}, ValueError, "shapes differ"),
        ({"V": Q.half()}, TypeError, "dtypes differ"),
        ({"Q": Q.int(), "K": Q.int(), "V": Q.int()}, TypeError, "Q has dtype torch.int32"),
        ({"K": [1]}, TypeError, "K is list; expected a torch.Tensor"),
        ({"K": Q.to("meta")}, ValueError, "devices differ"),
        ({"Bc": 0}, ValueError, "Bc is 0"),
        ({"Br": -3}, ValueError, "Br is -3"),
        ({"Br": 2.0}, TypeError, "Br is float"),
        ({"Bc": True}, TypeError, "Bc is bool"),
        ({"use_half": "yes"}, TypeError, "use_half is str"),
        ({"return_stats": None}, TypeError, "return_stats is NoneType"),
        ({"Q": Q[..., :0], "K": Q[..., :0], "V": Q[..., :0]}, ValueError, "head dim D is 0"),
    ],
)
def test_bad_calls_of_forward(change, error, words):
    with pytest.raises(error, match=words) as raised:
        flash_cute.flash_attention_forward(**({"Q": Q, "K": Q, "V": Q} | change))
    assert len(str(raised.value)) > 15


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"l": Q[..., :1]}, ValueError, "l is torch.float32 of shape"),
        ({"m": Q[..., 0].int()}, ValueError, "m is torch.int32"),
        ({"m": None}, TypeError, "m is NoneType"),
        ({"dO": Q[:, :1]}, ValueError, "shapes differ"),
        ({"O": Q.half()}, TypeError, "dtypes differ"),
        ({"l": Q[..., 0].to("meta")}, ValueError, "l is on meta"),
    ],
)
def test_bad_calls_of_backward(change, error, words):
    right = {"Q": Q, "K": Q, "V": Q, "O": Q, "dO": Q, "l": Q[..., 0], "m": Q[..., 0]}
    with pytest.raises(error, match=words):
        flash_cute.flash_attention_backward(**(right | change))


def test_bad_sizes():
    with pytest.raises(ValueError, match="bc is 0"):
        flash_cute.FlashAttention(bc=0)
    with pytest.raises(ValueError, match="head_dim is 0"):
        flash_cute.get_optimal_block_sizes(16, 0)
    with pytest.raises(TypeError, match="seq_len is float"):
        flash_cute.estimate_memory_usage(1, 1, 1.5, 8)
    with pytest.raises(TypeError, match="use_half"):
        flash_cute.estimate_memory_usage(1, 1, 1, 8, use_half="x")


def test_three_dimensions_are_one_head(device):
    q, k, v = inputs(device, (2, 10, 24))
    out = flash_cute.FlashAttention()(q, k, v)
    right = reference(*(x[:, None] for x in (q, k, v)))[0]
    assert_close(out, right[:, 0], torch.float32)
    with pytest.raises(ValueError, match=r"K has shape \(2, 10, 24\)"):
        flash_cute.FlashAttention()(q[:, None], k, v)


def test_autocast_computes_in_its_dtype(device):
    q, k, v = inputs(device)
    with torch.autocast(device, torch.bfloat16):
        assert flash_cute.flash_attention_forward(q, k, v).dtype == torch.bfloat16


def test_the_default_tile_is_one_number():
    assert tiled_sizes.DEFAULT_BLOCK == 32
    assert Tile(rows=1, keys=2) == (1, 2)
    assert repr(flash_cute.FlashAttention(4, 5)) == "FlashAttention(bc=4, br=5, use_half=False)"
