"""Every 16-bit kernel against the oracle, also those that this GPU would not choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flash_cute import flash_attn_func, flash_attn_qkvpacked_func, kernels
from flash_cute.native import library
from flash_cute.testing.cases import Case, VarlenCase, make_inputs
from flash_cute.testing.kernels import parse
from flash_cute.testing.verify import verify

KERNELS = [  # those of sparse calls are in test_lists.py
    kernel
    for kernel in library.kernels()
    if parse(kernel).dtype.itemsize == 2
    and parse(kernel).op != "decode"
    and not parse(kernel).walks_lists
]
RICH = {"softcap": 20.0, "alibi": "batch", "dropout_p": 0.2}
ALIBI = {"alibi": "heads", "dropout_p": 0.2}  # without a softcap: products begin with it


def rules_of(kernel, rules):
    """Those of `rules` that the kernel has."""
    if kernel.tier == "plain":
        return {}
    return rules if kernel.has_dropout else {**rules, "dropout_p": 0.0}


def fitted(case, kernel):
    """The case with the kernel's sizes, and all rules that it has but a softcap."""
    sizes = {"dim": kernel.dim, "dim_v": kernel.dim_v, "dtype": kernel.dtype}
    if kernel.packs_tokens and case.heads_k in (None, case.heads):
        sizes["heads_k"] = case.heads // 4
    return replace(case, **sizes, **rules_of(kernel, ALIBI))


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(cuda, name):
    kernel = parse(name)
    rules = rules_of(kernel, RICH)
    case = Case(
        heads=4, heads_k=2, seqlen_q=200, seqlen_k=333, is_causal=True, dim=kernel.dim,
        dim_v=kernel.dim_v, dtype=kernel.dtype, **rules,
    )  # fmt: skip
    inputs = make_inputs(case, cuda)
    with library.only(name, f"{kernel.other_op}_"):
        for deterministic in (False, True):
            verify(inputs, deterministic=deterministic)


EDGES = {
    "half a pair of key tiles": Case(seqlen_q=100, seqlen_k=40),
    "queries that see nothing": Case(seqlen_q=333, seqlen_k=200, is_causal=True),
    "window": Case(seqlen_q=500, seqlen_k=700, window=(70, 33)),
    "one step": Case(heads=1, batch=1, seqlen_q=64, seqlen_k=128),
    "two steps": Case(heads=1, batch=1, seqlen_q=128, seqlen_k=128),
    "varlen": VarlenCase(lengths_q=(64, 0, 1, 333), lengths_k=(64, 17, 1, 200)),
    "groups": Case(batch=3, heads=16, heads_k=4, seqlen_q=700, seqlen_k=900, is_causal=True),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", [kernel for kernel in KERNELS if "bwd_sm90" in kernel])
def test_hopper_backward_at_edges(cuda, name, edge):
    inputs = make_inputs(fitted(EDGES[edge], parse(name)), cuda)
    with library.only(name, "fwd_"):
        for deterministic in (False, True):
            verify(inputs, deterministic=deterministic)


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("name", [kernel for kernel in KERNELS if "fwd_sm90" in kernel])
def test_more_tiles_than_ctas(cuda, name):
    case = Case(heads=50, heads_k=10, seqlen_q=1000, seqlen_k=1234, is_causal=True)
    with library.only(name, "bwd_"):
        verify(make_inputs(fitted(case, parse(name)), cuda))


UNEVEN = {
    "rows without keys": Case(batch=40, heads=8, seqlen_q=128, seqlen_k=64, is_causal=True),
    "few keys": Case(batch=40, heads=8, seqlen_q=150, seqlen_k=3),
    "no keys between": VarlenCase(
        heads=8, lengths_q=(128, 70) * 40, lengths_k=(0, 70, 0, 0, 150) * 16
    ),
}


@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("name", [kernel for kernel in KERNELS if "fwd_sm90" in kernel])
def test_warpgroups_with_uneven_work(cuda, name, uneven):
    """Many tiles of queries of which one warpgroup has nothing to do, or is done at once."""
    with library.only(name, "bwd_"):
        verify(make_inputs(fitted(UNEVEN[uneven], parse(name)), cuda))


@pytest.mark.parametrize("name", [kernel for kernel in KERNELS if "fwd_sm90" in kernel])
def test_tiles_of_keys_that_end_after_the_tensor(cuda, name):
    """Each tensor fills memory blocks of its own, so that the addresses after it are not mapped."""
    kernel = parse(name)
    dtype, heads = kernel.dtype, 2048 // kernel.dim
    with library.only(name):
        for _ in range(4):
            heads_q = 2 * heads if kernel.packs_tokens else heads
            q = torch.randn(4, 4096, heads_q, kernel.dim, device=cuda, dtype=dtype)
            k = q if heads_q == heads else q[:, :, ::2].contiguous()
            v = torch.randn(4, 4096, heads, kernel.dim_v, device=cuda, dtype=dtype)
            for causal in (False, True):
                assert torch.ops.flash_cute.fwd(q, k, v, is_causal=causal)[0].isfinite().all()


def test_ids_say_what_a_kernel_is():
    (name,) = (x.id for x in kernels.kernels() if x.id.startswith("bwd_sm80_tf32x3_rich_d256x"))
    kernel = parse(name)
    assert (kernel.op, kernel.arch, kernel.precision) == ("bwd", 80, "tf32x3")
    assert (kernel.tier, kernel.dim) == ("rich", 256) and f"_d256x{kernel.dim_v}_" in name
    assert kernel.has_dropout and kernel.vector == 1
    assert not parse("fwd_sm90_bf16_rich_d256x256_m128_n64_s2_w8_c1_x1").has_dropout
    assert not parse("fwd_sm90_bf16_rich_d128x128_m192_n80_s2_w12_c1_x1").has_dropout
    assert parse("fwd_sm90_bf16_rich_d128x128_m128_n128_s2_w8_c1_x1").has_dropout
    assert (kernel.dtype, kernel.other_op) == (torch.float32, "fwd")
    with pytest.raises(ValueError, match="no kernel's id"):
        parse("bwd_sm80_d64")


def test_no_kernel_of_that_name():
    with pytest.raises(ValueError, match="no kernel's id contains"), library.only("fwd_sm75"):
        pass


def test_other_kernels_refuse(cuda):
    q = torch.randn(1, 8, 1, 128, device=cuda, dtype=torch.bfloat16)
    with library.only("fp16"), pytest.raises(RuntimeError, match="that this thread is limited to"):
        torch.ops.flash_cute.fwd(q, q, q)
    torch.ops.flash_cute.fwd(q, q, q)


def test_hopper_kernels_refuse_what_they_lack(cuda):
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.skip("not a Hopper GPU")
    q = torch.randn(1, 8, 2, 104, device=cuda, dtype=torch.bfloat16)
    rng = torch.tensor([1, 2], device=cuda)
    with library.only("fwd_sm90"):
        torch.ops.flash_cute.fwd(q, q, q)
        torch.ops.flash_cute.fwd(q, q, q, dropout_p=0.5, rng=rng, window_size_left=7)
        with pytest.raises(RuntimeError, match="has no dropout"):
            torch.ops.flash_cute.fwd(q, q, q, dropout_p=0.5, rng=rng, window_size_left=6)
        odd = q[..., :100].contiguous()
        with pytest.raises(RuntimeError, match="16-byte boundaries"):
            torch.ops.flash_cute.fwd(odd, odd, odd)
        with pytest.raises(RuntimeError, match="needs head dims above 64 and 64 of v"):
            torch.ops.flash_cute.fwd(q, q, q[..., :64])
        repeated = q[:, :, :1].expand(-1, -1, 2, -1)
        with pytest.raises(RuntimeError, match="strides that are not 0"):
            torch.ops.flash_cute.fwd(q, repeated, repeated)


def test_backward_keeps_the_limit_of_its_forward(cuda):
    """Autograd runs it in a thread of its own, and later."""
    q = torch.randn(1, 64, 2, 64, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    qkv = torch.randn(1, 64, 3, 2, 64, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    with library.only("fwd_"):
        out = flash_attn_func(q, q, q)
        packed = flash_attn_qkvpacked_func(qkv)
    for x in (out, packed):
        with pytest.raises(RuntimeError, match="that this thread is limited to"):
            x.sum().backward()
    flash_attn_func(q, q, q).sum().backward()
