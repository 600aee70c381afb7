"""Random numbers by place: against numpy's unsigned integers, in every stretch of a huge tensor, bit by bit even."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fp8bench.formats.random_bits import RANDOM_BITS, drawn_bits, key_of, random_bits

Words = npt.NDArray[np.uint32]
SEEDS = [0, 1, -1, 12345678901234567, 1 << 32, -(1 << 63)]


def mixed(word: Words) -> Words:
    """The bijection as its author writes it: Wellons' lowbias32, on unsigned numbers."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    return word ^ (word >> np.uint32(16))


def witness(index: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.int32]:
    """The number of each place, in unsigned arithmetic."""
    low, high = (index & np.uint64(0xFFFFFFFF)).astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    unsigned = seed % (1 << 64)
    golden = np.uint32(0x9E3779B9)
    with np.errstate(over="ignore"):
        key = mixed(mixed(high * golden + np.uint32(unsigned >> 32)) + np.uint32(unsigned & 0xFFFFFFFF))
        return (mixed(mixed(low + key) + key * golden) >> np.uint32(32 - RANDOM_BITS)).astype(np.int32)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_place_has_the_number_of_unsigned_arithmetic(seed: int) -> None:
    found = random_bits((300, 257), torch.tensor([seed]))
    assert found.dtype == torch.int32 and found.shape == (300, 257)
    assert np.array_equal(found.numpy().ravel(), witness(np.arange(300 * 257, dtype=np.uint64), seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_beyond_32_bits_of_index_numbers_go_on_by_another_key(seed: int) -> None:
    """No tensor of that size is made: the places of one, on both sides of each border."""
    places = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (3 << 32) + 5])
    keys = key_of(torch.tensor([seed]), places >> 32)
    found = drawn_bits(places.to(torch.int32), keys)
    assert np.array_equal(found.numpy(), witness(places.numpy().astype(np.uint64), seed))
    assert keys[-1] != keys[0] != keys[5] == keys[6]
    assert torch.equal(keys[0], key_of(torch.tensor(seed)))


def test_places_count_and_nothing_else() -> None:
    seed = torch.tensor(5)
    flat = random_bits((6 * 35,), seed)
    assert torch.equal(random_bits((6, 35), seed).flatten(), flat)
    assert torch.equal(random_bits((2, 3, 5, 7), seed).flatten(), flat)
    assert torch.equal(random_bits((3 * 35,), seed), flat[: 3 * 35])
    assert random_bits((0, 4), seed).shape == (0, 4) and random_bits((), seed).shape == ()


def test_bits_are_set_every_second_time_and_alone() -> None:
    """Within 5 standard errors: each of the 24, and each of them where the same one of the neighbour is set."""
    count = 1 << 20
    numbers = random_bits((count,), torch.tensor(3)).numpy()
    assert numbers.min() >= 0 and numbers.max() < 1 << RANDOM_BITS
    bits = (numbers[:, None] >> np.arange(RANDOM_BITS)) & 1
    neighbours = bits[1:] ^ bits[:-1]
    for set_bits in (bits, neighbours):
        assert np.abs(set_bits.mean(0) - 0.5).max() < 5 * 0.5 / count**0.5


def test_seeds_side_by_side_have_nothing_in_common() -> None:
    count = 1 << 18
    rows = torch.stack([random_bits((count,), torch.tensor(seed)) for seed in range(8)]).double()
    correlation = torch.corrcoef(rows) - torch.eye(8)
    assert correlation.abs().max() < 5 / count**0.5


@pytest.mark.parametrize("seed", [3, torch.tensor(3, dtype=torch.int32), torch.tensor([1, 2]), torch.tensor(1.0)])
def test_what_is_no_seed_is_refused(seed: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="a seed is an int64 tensor of one element"):
        random_bits((4,), seed)
