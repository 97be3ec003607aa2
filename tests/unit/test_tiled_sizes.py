"""Which tile is best, which kernel is nearest to one, and what a call needs of memory."""

from __future__ import annotations

import pytest
import torch
from tiled_oracle import assert_close, inputs, reference

import flash_cute
from flash_cute import kernels
from flash_cute.tiled import kernel_of
from flash_cute.tiled.sizes import check_shared_memory


@pytest.mark.parametrize("use_half", [False, True])
def test_optimal_block_sizes(use_half):
    areas = []
    for dim in (8, 16, 32, 64, 80, 96, 128, 192, 256, 300):
        bc, br = flash_cute.get_optimal_block_sizes(1024, dim, use_half)
        dtype = torch.float16 if use_half else torch.float32
        problem = kernels.Problem(dtype=dtype, heads=128, seqlen_q=1024, head_dim=min(dim, 256))
        planned = kernels.plan(problem).kernel
        assert (planned.block_n, planned.block_m) == (bc, br)
        areas.append(bc * br)
        q, k, v = inputs("cpu", (1, 2, 130, dim))
        out = flash_cute.flash_attention_forward(q, k, v, bc, br)
        assert_close(out, reference(q, k, v)[0], torch.float32)
    assert areas == sorted(areas, reverse=True) and len(set(areas)) > 2


def test_the_optimal_pair_runs_the_planned_kernel():
    """As long as the call fills the GPU, in both dtypes and on every GPU."""
    for gpu in kernels.GPUS:
        for dtype in (torch.float16, torch.float32):
            for dim in (32, 64, 96, 128, 192, 256):
                problem = kernels.Problem(dtype=dtype, heads=128, seqlen_q=2048, head_dim=dim)
                planned = kernels.plan(problem, gpu).kernel
                near = kernels.nearest(problem, planned.block_m, planned.block_n, gpu)
                assert near == planned.id
                bytes_of_pair = dim * dtype.itemsize * (planned.block_m + 2 * planned.block_n)
                assert bytes_of_pair <= kernels.GPUS[gpu].smem_optin


def test_optimal_sizes_follow_the_length():
    """No more rows or columns than there are, and the planned kernel of that length."""
    for use_half in (False, True):
        dtype = torch.float16 if use_half else torch.float32
        for length in (1, 7, 16, 33, 64, 100, 128, 4096):
            bc, br = flash_cute.get_optimal_block_sizes(length, 128, use_half)
            problem = kernels.Problem(dtype=dtype, heads=128, seqlen_q=length, head_dim=128)
            planned = kernels.plan(problem).kernel
            whole = (bc, br) == (planned.block_n, planned.block_m)
            assert whole or kernels.nearest(problem, br, bc) == planned.id
            if not use_half:
                assert (bc, br) == (min(planned.block_n, length), min(planned.block_m, length))
    with pytest.raises(ValueError, match="sequence_length is 2147483648; at most"):
        flash_cute.get_optimal_block_sizes(2**31, 128)
    for i, name in enumerate(("batch_size", "num_heads", "seq_len")):
        sizes = [1, 1, 1, 64]
        sizes[i] = 2**31
        with pytest.raises(ValueError, match=f"{name} is 2147483648"):
            flash_cute.estimate_memory_usage(*sizes)


@pytest.mark.parametrize(
    ("tile", "dtype", "dim", "gpu", "begins"),
    [
        ((32, 32), torch.float16, 64, "h100", "fwd_sm80_fp16_plain_d64x64_m128_n64"),
        ((192, 128), torch.float16, 64, "h100", "fwd_sm90_fp16_plain_d64x64_m192_n128"),
        ((128, 128), torch.float16, 64, "h100", "fwd_sm90_fp16_plain_d64x64_m128_n128"),
        ((190, 90), torch.float16, 64, "h100", "fwd_sm90_fp16_rich_d64x64_m192_n96"),
        ((32, 32), torch.float16, 64, "a100", "fwd_sm80_fp16_plain_d64x64_m128_n64"),
        ((32, 32), torch.float16, 32, "a100", "fwd_sm80_fp16_rich_d32x32_m64_n64"),
        ((128, 32), torch.float32, 64, "h100", "fwd_sm80_tf32x3_rich_d64x64_m128_n32"),
        ((1, 1), torch.float32, 256, "h100", "fwd_sm80_tf32x3_rich_d256x256_m64_n16"),
    ],
)
def test_the_nearest_tile(tile, dtype, dim, gpu, begins):
    problem = kernels.Problem(dtype=dtype, batch=2, heads=64, seqlen_q=4096, head_dim=dim)
    assert kernels.nearest(problem, *tile, gpu).startswith(begins)


def test_kernel_of_names_the_tile():
    if torch.cuda.is_available():
        pytest.skip("an H100's without a GPU")
    q = torch.randn(2, 64, 4096, 64, dtype=torch.float16)
    assert "_m192_n128_" in kernel_of(q, Bc=128, Br=192)
    assert "_m128_n128_" in kernel_of(q, Bc=128, Br=128)
    assert kernel_of(q, op="bwd").startswith("bwd_sm")
    with kernels.only("fwd_sm80_fp16_plain_d64x64_m128_n64_s2_w4_c2"):
        assert kernel_of(q, Bc=128, Br=192).startswith("fwd_sm80")


@pytest.mark.parametrize("use_half", [False, True])
def test_the_estimate_of_memory(use_half):
    estimate = flash_cute.estimate_memory_usage(8, 16, 2048, 64, use_half)
    assert list(estimate) == ["input_memory", "internal_memory", "output_memory", "total_memory",
                              "total_memory_mb"]  # fmt: skip
    tensor = 8 * 16 * 2048 * 64 * (2 if use_half else 4)
    assert (estimate["input_memory"], estimate["output_memory"]) == (3 * tensor, tensor)
    assert estimate["internal_memory"] >= 8 * 16 * 2048 * 4
    assert estimate["total_memory"] == 4 * tensor + estimate["internal_memory"]
    assert estimate["total_memory_mb"] == estimate["total_memory"] / 2**20
    whole = flash_cute.estimate_memory_usage(8, 16, 2048, 64)["total_memory"]
    assert not use_half or 0.45 < estimate["total_memory"] / whole < 0.56


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("use_half", [False, True])
@pytest.mark.parametrize("sizes", [(8, 16, 1024, 64), (1, 4, 8192, 128), (2, 8, 2048, 256)])
def test_the_estimate_is_what_is_allocated(cuda, sizes, use_half):
    dtype = torch.float16 if use_half else torch.float32
    torch.ones(1, device=cuda)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    q, k, v = (torch.randn(sizes, device=cuda, dtype=dtype) for _ in range(3))
    flash_cute.flash_attention_forward(q, k, v, use_half=use_half)
    peak = torch.cuda.max_memory_allocated() - before
    total = flash_cute.estimate_memory_usage(*sizes, use_half)["total_memory"]
    assert abs(total - peak) <= 0.05 * peak


def test_what_shared_memory_holds():
    for there in (101_376, 166_912, 232_448):
        for dim in (16, 64, 256):
            for bc in (1, 32, 100, 3000, 10**6):
                for br in (1, 32, 5000):
                    needed = dim * 4 * (br + 2 * bc)
                    if needed <= there:
                        check_shared_memory(bc, br, dim, 4, there)
                        continue
                    with pytest.raises(ValueError, match=f"needs {needed} bytes") as error:
                        check_shared_memory(bc, br, dim, 4, there)
                    assert f"the GPU has {there}" in str(error.value)
                    pair = str(error.value).rsplit("is Bc=")[-1].split(", Br=")
                    largest_bc, largest_br = map(int, pair)
                    assert 1 <= largest_bc <= bc and 1 <= largest_br <= br
                    check_shared_memory(largest_bc, largest_br, dim, 4, there)
                    more = dim * 4 * (largest_br + 1 + 2 * (largest_bc + 1))
                    assert more > there
