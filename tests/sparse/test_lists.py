"""Lists of tiles: made of codes, read back, transposed."""

from __future__ import annotations

import pytest
import torch
import vmap_calls
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute.sparse import bits
from flash_cute.sparse.lists import codes_of, tile_lists, transposed


def random_codes(*shape: int, density: float = 0.4) -> torch.Tensor:
    codes = torch.randint(1, 2**31 - 1, shape, dtype=torch.int32)
    return codes * (torch.rand(shape) < density)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 40, 33), (2, 1, 3, 0)])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_lists_hold_what_is_not_empty_in_ascending_order(shape, density):
    codes = random_codes(*shape, density=density)
    lists = tile_lists(codes)
    assert lists.shape == (*shape[:3], 1 + shape[3], 2) and lists.dtype == torch.int32
    for row, listed in zip(codes.flatten(0, 2).tolist(), lists.flatten(0, 2).tolist(), strict=True):
        expected = [[column, code] for column, code in enumerate(row) if code]
        assert listed[0] == [len(expected), 0]
        assert listed[1 : 1 + len(expected)] == expected
        assert all(entry == [0, 0] for entry in listed[1 + len(expected) :])


def test_the_first_entry_tells_whether_all_tiles_are_whole():
    codes = (torch.rand(2, 3, 40, 17) < 0.3).int() * 15
    codes[:, :, 1::4, 3] = 7
    codes[:, :, 2::4, 5] = 15 + 16 * 2
    codes[:, :, 3::4] = 0
    for x in (codes, codes.transpose(-1, -2).contiguous()):
        is_whole = ((x == 0) | (x == 15)).all(-1) & (x != 0).any(-1)
        assert torch.equal(tile_lists(x)[..., 0, 1], is_whole * 15)
        assert is_whole.any() and not is_whole.all()


def test_capacity_bounds_the_entries():
    codes = random_codes(2, 2, 9, 30, density=0.2)
    longest = int((codes != 0).sum(-1).max())
    lists = tile_lists(codes, capacity=longest)
    assert lists.shape[3] == 1 + longest
    assert torch.equal(codes_of(lists, 30), codes)
    assert tile_lists(codes, capacity=99).shape[3] == 31


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 7), (1, 2, 40, 33)])
def test_codes_are_read_back_whatever_lies_behind_the_entries(shape):
    codes = random_codes(*shape)
    lists = tile_lists(codes)
    behind = torch.arange(shape[3]) >= lists[..., :1, 0]
    lists[..., 1:, :][behind] = torch.randint(-9, 99, (int(behind.sum()), 2), dtype=torch.int32)
    assert torch.equal(codes_of(lists, shape[3]), codes)


def test_columns_that_do_not_exist_are_ignored():
    codes = random_codes(1, 1, 4, 20, density=1.0)
    assert torch.equal(codes_of(tile_lists(codes), 12), codes[..., :12])


def test_transposed_lists_are_those_of_the_transposed_codes():
    codes = random_codes(2, 3, 11, 17)
    lists = transposed(tile_lists(codes), 17)
    assert lists.shape == (2, 3, 17, 12, 2) and lists.is_contiguous()
    assert torch.equal(codes_of(lists, 11), codes.transpose(-1, -2))
    assert torch.equal(transposed(lists, 11), tile_lists(codes))


class Waits(TorchDispatchMode):
    """Refuses operations that would make the host wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waiting = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "item")
        assert not any(name in str(function) for name in waiting), function
        return function(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    codes = random_codes(1, 2, 9, 8)
    with Waits():
        lists = tile_lists(codes)
        of_columns = transposed(lists, 8)
        found = codes_of(lists, 8)
    assert torch.equal(found, codes)
    assert torch.equal(of_columns, tile_lists(codes.mT.contiguous()))


def test_masks_are_packed_bit_by_bit():
    pairs = torch.rand(3, 128, 128) < 0.5
    pairs[0] = True
    words = bits.packed(pairs)
    assert words.shape == (3, 128, 4) and words.dtype == torch.int32
    for m, r, c in torch.randint(0, 128, (200, 3)).tolist():
        m %= 3
        assert bool(int(words[m, r, c // 32]) >> c % 32 & 1) == bool(pairs[m, r, c])
    assert torch.equal(bits.unpacked(words), pairs)


@pytest.mark.parametrize("dim", [0, 2, -1])
def test_samples_of_vmap_are_one_call(device, dim):
    codes = random_codes(vmap_calls.SAMPLES, 2, 3, 5, 7).to(device)
    ops = torch.ops.flash_cute
    lists = ops.tile_lists(codes.flatten(0, 1), 7).unflatten(0, (-1, 2))
    for op, name, given in (
        (lambda codes: (ops.tile_lists(codes, 7),), "codes", codes),
        (lambda lists: ops.transposed_tile_lists(lists, 7), "lists", lists),
    ):
        moved = given.movedim(0, dim)
        vmap_calls.check(op, {name: moved}, {name: dim})


def test_vmap_of_no_samples(device):
    codes = torch.zeros(0, 1, 2, 3, 4, dtype=torch.int32, device=device)
    lists, ranks = torch.vmap(
        lambda x: torch.ops.flash_cute.transposed_tile_lists(
            torch.ops.flash_cute.tile_lists(x, 4), 4
        )
    )(codes)
    assert lists.shape == (0, 1, 2, 4, 4, 2) and ranks.shape == (0, 1, 2, 4, 4)
