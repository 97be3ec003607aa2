"""The random numbers of dropout: published answers, the mapping to elements, the keep rate."""

from __future__ import annotations

import pytest
import torch

from flash_cute.call.philox import dropout_keep, philox4x32

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(counter, key, expected):
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), key)) == expected


def keep_one(seed: int, offset: int, p: float, bh: int, i: int, j: int) -> bool:
    """One element's decision, written from the mapping with Python integers alone."""
    c = [j // 32 * 8 + j % 8, i // 32 * 8 + i % 8, bh & ONES, offset & ONES]
    k = [seed & ONES, (seed >> 32 & ONES) ^ (offset >> 32 & ONES)]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & ONES, a >> 32 ^ c[3] ^ k[1], a & ONES]
        k = [k[0] + 0x9E3779B9 & ONES, k[1] + 0xBB67AE85 & ONES]
    word, x = c[i // 8 % 4], j // 8 % 4
    high, low = word >> 8 * x & 0xFF, word >> 8 * ((x - 1) % 4) & 0xFF
    return 256 * high + low >= round(p * 65536)


@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (12345, 8), (2**63 - 1, 2**40 + 3), (-7, -(2**33))]
)
def test_mapping_matches_integers(seed, offset):
    bh, rows, cols = torch.tensor([0, 5, 2**33 + 1]), torch.arange(35), torch.arange(70)
    keep = dropout_keep(torch.tensor([seed, offset]), 0.4, bh, rows, cols)
    expected = [
        [[keep_one(seed, offset, 0.4, b, i, j) for j in range(70)] for i in range(35)]
        for b in bh.tolist()
    ]
    assert keep.tolist() == expected


def test_any_part_is_a_part_of_the_whole():
    rng, bh = torch.tensor([11, 22]), torch.arange(6)
    whole = dropout_keep(rng, 0.5, bh, torch.arange(100), torch.arange(130))
    part = dropout_keep(rng, 0.5, bh[2:4], torch.arange(13, 57), torch.arange(31, 98))
    assert torch.equal(part, whole[2:4, 13:57, 31:98])
    order = torch.tensor([40, 3, 99, 3])
    shuffled = dropout_keep(rng, 0.5, bh, order, torch.arange(130))
    assert torch.equal(shuffled, whole[:, order])


@pytest.mark.parametrize("p", [0.0, 0.17, 0.5, 0.999, 1.0])
def test_keep_rate_within_five_sigma(p):
    keep = dropout_keep(
        torch.tensor([3, 0]), p, torch.arange(4), torch.arange(256), torch.arange(256)
    )
    sigma = (p * (1 - p) / keep.numel()) ** 0.5
    assert abs(keep.double().mean().item() - (1 - p)) <= 5 * sigma + 2**-17


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.502])
def test_elements_that_share_a_byte_are_hardly_correlated(p):
    heads = torch.arange(16)
    keep = dropout_keep(torch.tensor([5, 0]), p, heads, torch.arange(512), torch.arange(512))
    x = keep.double() - (1 - round(p * 65536) / 65536)
    variance = p * (1 - p)
    for rows, cols in ((0, 8), (0, 24), (8, 0), (0, 1), (1, 0), (8, 8)):
        a, b = x[:, rows:, cols:], x[:, : 512 - rows, : 512 - cols]
        assert abs((a * b).mean().item()) / variance < 0.004 + 5 / a.numel() ** 0.5


def test_seed_offset_and_head_change_the_mask():
    def mask(seed: int, offset: int, bh: int) -> torch.Tensor:
        rng = torch.tensor([seed, offset])
        return dropout_keep(rng, 0.5, torch.tensor([bh]), torch.arange(64), torch.arange(64))

    base = mask(1, 0, 0)
    others = [mask(2, 0, 0), mask(1, 1, 0), mask(1, 0, 1), mask(1 + 2**32, 0, 0), mask(1, 2**32, 0)]
    for other in others:
        assert 0.4 < (base == other).double().mean() < 0.6


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_parts(shape):
    keep = dropout_keep(torch.tensor([1, 2]), 0.5, *(torch.arange(n) for n in shape))
    assert keep.shape == shape and keep.dtype == torch.bool


def test_rng_is_required():
    with pytest.raises(ValueError, match="rng"):
        dropout_keep(None, 0.5, torch.arange(1), torch.arange(1), torch.arange(1))
