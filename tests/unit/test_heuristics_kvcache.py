"""The choice among kernels over a key/value cache, from sizes alone."""

from __future__ import annotations

import pytest
from planned import plan

from flash_cute import kernels


def picked(*sizes, **options):
    """Id of the kernel, on an H200 if nothing else is said."""
    found = plan("decode", *sizes, **({"gpu": "h200"} | options))
    return found and found.kernel.id


TOKENS = "fwd_sm90 m128_n128_tokens"
FORWARD = "fwd_sm90 m128_n128"
ONE, TWO = "decode_sm80 m16_n128_c1", "decode_sm80 m16_n64_c2"  # CTAs an SM
ONE_64, TWO_64 = "decode_sm80 m16_n256_c1", "decode_sm80 m16_n128_c2"
ROWS_32, ROWS_64 = "decode_sm80 m32_n128_c1", "decode_sm80 m64_n64_c2"
CLUSTERS, CLUSTERS_64 = "decode_sm90 m16_n128_c1", "decode_sm90 m16_n256_c1"


def short(kernel):
    """What tells a kernel from its alternatives."""
    tokens = "_tokens" if kernel.id.endswith("_tokens") else ""
    ctas = f"_c{kernel.ctas}" if kernel.op == "decode" else ""
    return f"{kernel.op}_sm{kernel.arch} m{kernel.block_m}_n{kernel.block_n}{ctas}{tokens}"


@pytest.mark.parametrize(
    ("sizes", "fast"),
    [
        # Kernels within 5 % of the fastest plan, as measured with lengths that the host knows.
        # One token.
        ((17, 32, 8, 1, 8192, 128), {TWO, ONE, ROWS_32}),
        ((30, 32, 32, 1, 8192, 128), {CLUSTERS, ONE, TWO, ROWS_32}),
        ((1, 32, 8, 1, 32768, 128), {CLUSTERS, ONE}),
        ((8, 32, 8, 1, 8192, 128), {CLUSTERS, TWO}),
        ((4, 32, 8, 1, 16384, 128), {TWO, ONE, ROWS_32}),
        ((1, 8, 1, 1, 32768, 128), {CLUSTERS}),
        ((1, 64, 8, 1, 8192, 128), {CLUSTERS}),
        ((2, 32, 8, 1, 4096, 128), {CLUSTERS}),
        ((32, 32, 8, 1, 1024, 128), {CLUSTERS, TWO, ONE, ROWS_32}),
        ((128, 32, 8, 1, 512, 128), {ONE, TWO, ROWS_32, CLUSTERS}),
        ((1, 128, 8, 1, 2048, 128), {CLUSTERS}),
        ((16, 32, 1, 1, 8192, 128), {ROWS_32}),
        ((14, 32, 32, 1, 8192, 64), {TWO_64, ONE_64, CLUSTERS_64, "decode_sm80 m32_n256_c1"}),
        ((64, 32, 8, 1, 4096, 64), {TWO_64, ONE_64, CLUSTERS_64, "decode_sm80 m32_n256_c1"}),
        ((1, 32, 8, 1, 32768, 200), {"decode_sm90 m16_n64_c1", "decode_sm80 m16_n64_c1"}),
        # Several tokens.
        ((9, 32, 8, 4, 8192, 128), {ONE, TWO, ROWS_32}),
        ((8, 32, 8, 5, 8192, 128), {ROWS_32}),
        ((8, 32, 8, 8, 8192, 128), {ROWS_32, TOKENS, FORWARD}),
        ((8, 32, 8, 9, 8192, 128), {TOKENS, FORWARD}),
        ((64, 32, 8, 8, 4096, 128), {TOKENS, FORWARD, ROWS_32}),
        ((64, 32, 8, 8, 4096, 64), {"decode_sm80 m32_n256_c1"}),
        ((1, 20, 4, 8, 21800, 128), {TOKENS, ROWS_64}),
        ((1, 8, 1, 2, 32768, 128), {CLUSTERS}),
        ((1, 8, 1, 4, 32768, 128), {CLUSTERS}),
        ((1, 16, 2, 4, 4096, 128), {CLUSTERS}),
        ((1, 24, 8, 4, 4096, 128), {CLUSTERS}),
        ((1, 48, 8, 4, 4096, 128), {CLUSTERS}),
        ((1, 32, 8, 4, 2048, 64), {CLUSTERS_64}),
    ],
)  # fmt: skip
def test_picks_over_a_cache_are_fast(sizes, fast):
    assert short(plan("decode", *sizes, gpu="h200").kernel) in fast


def test_head_dims_above_256_have_no_kernel():
    assert picked(1, 32, 8, 1, 32768, 257) is None


def test_chunks_of_32_rows_in_pages_are_for_forward():
    wide, narrow = (picked(8, 32, 8, 8, 8192, dim, page_size=16) for dim in (128, 64))
    assert wide.startswith("fwd_sm90") and narrow.startswith("decode_sm80")


H100, H200 = 3352, 4917  # GB/s of their memory


@pytest.mark.parametrize("memory_gb_s", [H100, H200])
@pytest.mark.parametrize("options", [{}, {"lengths": True}, {"lengths": True, "page_size": 16}])
def test_two_ctas_an_sm_take_turns_where_tiles_are_many(options, memory_gb_s):
    few, many = (
        plan("decode", batch, 32, 8, 1, 65536, 128, gpu="h200", memory_gb_s=memory_gb_s, **options)
        for batch in (1, 64)
    )
    assert (few.kernel.ctas, many.kernel.ctas) == (1, 2)


@pytest.mark.parametrize(
    ("sizes", "ctas"),
    [
        # As many CTAs for a tile of queries as run at once, and have fewer keys each.
        ((1, 32, 8, 1, 2048, 128), 8),
        ((1, 32, 8, 1, 300, 128), 3),
        ((1, 32, 8, 1, 100, 128), 1),
        ((2, 32, 8, 1, 2048, 128), 6),
        ((4, 32, 8, 1, 2048, 128), 3),
        ((8, 32, 8, 1, 1024, 128), 2),
        ((16, 32, 8, 1, 512, 128), 1),
        ((1, 32, 8, 1, 8192, 64), 8),
        ((1, 64, 8, 2, 2048, 128), 8),
        # A kv head's rows in two tiles; more tiles than SMs.
        ((1, 32, 8, 5, 2048, 128), 6),
        ((17, 32, 8, 1, 512, 128), 1),
        # Few work tiles of long caches: several clusters each, most of two CTAs.
        ((1, 32, 8, 1, 32768, 128), 2),
        ((1, 32, 8, 1, 65536, 256), 2),
        ((1, 8, 1, 1, 32768, 128), 8),
        # Many of them: keys are shared out evenly.
        ((16, 64, 8, 1, 8192, 128), 0),
    ],
)
def test_clusters_over_a_cache(sizes, ctas):
    found = plan("decode", *sizes, gpu="h200")
    assert (found.cluster if found.kernel.arch == 90 else 0) == ctas


@pytest.mark.parametrize(
    ("batch", "head_dim", "keys"),
    [(1, 128, 20480), (1, 64, 40960), (1, 256, 16384), (2, 128, 12288)],
)
def test_clusters_over_a_cache_that_may_not_be_full(batch, head_dim, keys):
    for capacity in (keys, 2 * keys):
        kernel = picked(batch, 32, 8, 1, capacity, head_dim, lengths=True)
        assert kernel.startswith("decode_sm90")


@pytest.mark.parametrize(("heads_k", "splits"), [(1, 16), (2, 11), (8, 8)])
def test_clusters_of_a_longer_cache_are_as_many_as_run_at_once(heads_k, splits):
    found = plan("decode", 1, 16, heads_k, 1, 16384, 128, gpu="h200", lengths=True)
    assert found.kernel.id.startswith("decode_sm90")
    assert found.num_splits == splits
    assert found.ctas == heads_k * splits * found.cluster <= 132
    assert found.launches[-1] == "combine_splits"


@pytest.mark.parametrize(("head_dim", "alone"), [(64, ONE_64), (128, ONE)])
def test_two_ctas_an_sm_over_a_cache_need_their_shared_memory(head_dim, alone):
    """Where there is room for the kernel with one CTA alone it is that one."""
    sizes = (128, 32, 8, 1, 8192, head_dim)
    (one,) = (
        kernel for kernel in kernels.kernels()
        if short(kernel) == alone and kernel.head_dim == head_dim and kernel.dtype == "bf16"
    )  # fmt: skip
    for smem_optin, ctas in ((2 * one.smem_bytes, 2), (one.smem_bytes, 1)):
        found = plan("decode", *sizes, gpu="a100", smem_optin=smem_optin).kernel
        assert found.ctas == ctas
