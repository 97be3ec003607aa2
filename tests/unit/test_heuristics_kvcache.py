"""The choice among kernels over a key/value cache, from sizes alone."""

from __future__ import annotations

import pytest
from planned import plan


def picked(*sizes, **options):
    """Id of the kernel, on an H200 if nothing else is said."""
    found = plan("decode", *sizes, **({"gpu": "h200"} | options))
    return found and found.kernel.id


D128 = "fwd_sm90_bf16_plain_d128x128_"
DECODE128 = "decode_sm80_bf16_rich_d128x128_"
DECODE64 = "decode_sm80_bf16_rich_d64x64_"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # A token: one CTA an SM, or two that take turns where an SM gets many tiles.
        ((17, 32, 8, 1, 8192, 128), DECODE128 + "m16_n128_s3_w8_c1"),
        ((66, 32, 32, 1, 8192, 128), DECODE128 + "m16_n64_s3_w4_c2"),
        ((65, 32, 32, 1, 8192, 128), DECODE128 + "m16_n128_s3_w8_c1"),
        ((15, 32, 32, 1, 8192, 64), DECODE64 + "m16_n128_s3_w4_c2"),
        ((14, 32, 32, 1, 8192, 64), DECODE64 + "m16_n256_s3_w8_c1"),
        ((64, 32, 8, 1, 4096, 64), DECODE64 + "m16_n256_s3_w8_c1"),
        ((1, 32, 8, 1, 32768, 200), "decode_sm80_bf16_rich_d256x256_m16_n64_s3_w4_c1"),
        # Chunks of prompts: forward's kernels, for more rows than decoding's smaller tiles have, or
        # of 32 rows and 128 dims where products count.
        ((9, 32, 8, 4, 8192, 128), DECODE128 + "m16_n128_s3_w8_c1"),
        ((8, 32, 8, 5, 8192, 128), DECODE128 + "m32_n128_s3_w8_c1"),
        ((8, 32, 8, 8, 8192, 128), DECODE128 + "m32_n128_s3_w8_c1"),
        ((8, 32, 8, 9, 8192, 128), D128 + "m128_n128_s2_w8_c1_x1"),
        ((64, 32, 8, 8, 4096, 128), D128 + "m128_n128_s2_w8_c1_x1"),
        ((16, 32, 1, 1, 8192, 128), DECODE128 + "m32_n128_s3_w8_c1"),
        ((256, 32, 1, 1, 8192, 128), DECODE128 + "m32_n128_s3_w8_c1"),
        ((64, 32, 8, 8, 4096, 64), DECODE64 + "m32_n256_s3_w8_c1"),
        ((8, 32, 8, 9, 8192, 64), "fwd_sm90_bf16_plain_d64x64_m128_n128_s4_w8_c1_x1"),
        ((1, 32, 8, 1, 32768, 257), None),
    ],
)  # fmt: skip
def test_picks_over_a_cache(sizes, expected):
    assert picked(*sizes) == expected


def test_chunks_of_32_rows_in_pages_are_for_forward():
    picks = [picked(8, 32, 8, 8, 8192, dim, page_size=16) for dim in (128, 64)]
    assert picks == [D128 + "m128_n128_s2_w8_c1_x1", DECODE64 + "m32_n256_s3_w8_c1"]


H100, H200 = 3352, 4917  # GB/s of their memory


@pytest.mark.parametrize("memory_gb_s", [H100, H200])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_ctas_an_sm_over_a_cache_with_lengths(memory_gb_s, pages, head_dim):
    """From 1.9 tiles an SM on, in pages or not, as sequences may be short."""
    options = {"memory_gb_s": memory_gb_s, "lengths": True, "page_size": 16 * pages}
    for batch, ctas in ((31, "c1"), (32, "c2")):
        assert picked(batch, 32, 8, 1, 8192, head_dim, **options).endswith(ctas)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_ctas_an_sm_over_a_cache_that_is_known_to_be_long(head_dim):
    """From 3.5 tiles an SM on where memory gives an SM little, else from 16 on."""
    for memory_gb_s, first in ((H100, 58), (H200, 264)):
        for batch, ctas in ((first - 1, "c1"), (first, "c2")):
            id = picked(batch, 32, 8, 1, 8192, head_dim, memory_gb_s=memory_gb_s)
            assert id.endswith(ctas)


@pytest.mark.parametrize("memory_gb_s", [H100, H200])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 1024), (128, 512)])
def test_two_ctas_an_sm_over_a_short_cache(memory_gb_s, lengths, head_dim, keys):
    """As soon as there are more tiles than SMs; up to then each has a CTA, in Hopper's kernels."""
    options = {"memory_gb_s": memory_gb_s, "lengths": lengths}
    for batch, more, ctas in ((16, 0, "c1_x8"), (17, 0, "c2"), (17, 1, "c1")):
        id = picked(batch, 32, 8, 1, keys + more, head_dim, **options)
        assert id.endswith(ctas)


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
        # Long shares, and more tiles than SMs: keys are shared out evenly.
        ((1, 32, 8, 1, 10240, 128), 8),
        ((1, 32, 8, 1, 10241, 128), 0),
        ((4, 32, 8, 1, 7680, 64), 3),
        ((4, 32, 8, 1, 7681, 64), 0),
        ((1, 32, 8, 1, 6144, 256), 8),
        ((1, 32, 8, 1, 6145, 256), 0),
        ((17, 32, 8, 1, 512, 128), 0),
        # Where nearly all SMs have a CTA shares may be longer.
        ((8, 32, 8, 1, 16384, 128), 2),
        ((8, 32, 8, 1, 16385, 128), 0),
        ((16, 64, 8, 1, 8192, 128), 1),
        ((16, 64, 8, 1, 8193, 128), 0),
        ((15, 32, 8, 1, 8192, 128), 1),
        ((8, 32, 8, 4, 8192, 128), 2),
        ((14, 32, 8, 1, 8192, 128), 0),
        # A kv head's rows in more than one tile.
        ((1, 32, 8, 5, 2048, 128), 0),
    ],
)
def test_clusters_over_a_cache(sizes, ctas):
    found = plan("decode", *sizes, gpu="h200")
    assert (found.cluster if found.kernel.arch == 90 else 0) == ctas


@pytest.mark.parametrize(
    ("batch", "head_dim", "most_keys"),
    [
        # One sequence.
        (1, 128, 20480),
        (1, 64, 40960),
        (1, 256, 4096),
        (2, 128, 6144),
        (16, 128, 1024),
    ],
)
def test_clusters_over_a_cache_that_may_not_be_full(batch, head_dim, most_keys):
    for keys, family in ((most_keys, "decode_sm90"), (most_keys + 1, "decode_sm80")):
        kernel = picked(batch, 32, 8, 1, keys, head_dim, lengths=True)
        assert kernel.startswith(family)


def test_clusters_over_a_longer_cache_need_many_ctas():
    for heads_k, family in ((2, "decode_sm80"), (8, "decode_sm90")):
        kernel = picked(1, 16, heads_k, 1, 16384, 128, lengths=True)
        assert kernel.startswith(family)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_ctas_an_sm_over_a_cache_need_their_shared_memory(head_dim):
    """Where there is room for the kernel with one CTA alone, and where there is not even that."""
    options = {"memory_gb_s": 2039}
    sizes = (128, 32, 8, 1, 8192, head_dim)
    assert picked(*sizes, **options).endswith("c2")
    alone = plan("decode", 17, *sizes[1:], **options).kernel
    assert alone.ctas == 1
    assert picked(*sizes, **options, smem_optin=alone.smem_bytes).endswith("c1")
    assert picked(*sizes, gpu="a100").endswith("c2")
