"""Batches of a token file, compressed and decoded records, and how batches reach a device."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench.formats.codes import encode_with_torch
from fp8bench.formats.grids import E4M3
from fp8bench.formats.recipes import TENSOR
from fp8bench.formats.scaled import factor
from fp8bench.nn.batches import (
    ByteArray,
    CompressedDataRecords,
    DecodedRecords,
    DeviceBuffers,
    StoredRecords,
    TokenLoader,
    draw_text_records,
    normalise_bytes,
)
from fp8bench.protocols import Operand
from tests.counts import for_each


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "tokens"
    np.arange(1000, dtype=np.uint16).tofile(file)
    return str(file)


def test_targets_are_the_tokens_that_follow(path: str) -> None:
    tokens, targets = TokenLoader(path, 4, 16, "cpu", 0, 256).next()
    assert tokens.shape == (4, 16) and tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (tokens + 1) % 256) and torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.is_contiguous() and targets.is_contiguous()


def test_the_same_seed_gives_the_same_batches(path: str) -> None:
    one, same, other = (TokenLoader(path, 2, 8, "cpu", seed, 256) for seed in (7, 7, 8))
    last = other.next()
    for _ in range(3):
        first, second = one.next(), same.next()
        assert not torch.equal(first[0], last[0])
        last = first
        assert all(map(torch.equal, first, second))
    assert not torch.equal(one.next()[0], other.next()[0])


def test_batches_loaded_ahead_are_those_that_would_come(path: str) -> None:
    plain, ahead = (TokenLoader(path, 2, 8, "cpu", 7, 256) for _ in range(2))
    places = set()
    for _ in range(3):
        ahead.preload_batches(2)
        places.add(tuple(item.data_ptr() for item in ahead._loaded))
        expected = [plain.next() for _ in range(2)]
        for batch in 2 * expected:  # they come round again
            assert all(map(torch.equal, ahead.next(), batch))
    assert len(places) == 1


def written(text: bytes, folder: Path) -> str:
    file = folder / "text"
    np.frombuffer(text, dtype=np.uint8).astype(np.uint16).tofile(file)
    return str(file)


@for_each("vocabulary", [257, 50304, 128256])
def test_larger_vocabularies_have_an_id_for_two_bytes(tmp_path: Path, vocabulary: int) -> None:
    """An id is a byte times 256 plus the next, modulo the vocabulary; targets are shifted by one."""
    text = b"import torch\xff\xfe"
    file = written(text, tmp_path)
    tokens, targets = TokenLoader(file, 1, len(text) - 2, "cpu", 0, vocabulary).next()
    pairs = [(ours * 256 + theirs) % vocabulary for ours, theirs in pairwise(text)]
    assert tokens.tolist() == [pairs[:-1]] and targets.tolist() == [pairs[1:]]
    assert tokens.dtype == torch.int64 and tokens.is_contiguous()
    with pytest.raises(ValueError, match=f"{len(text)} tokens; a sequence of {len(text) - 1} needs more"):
        TokenLoader(file, 1, len(text) - 1, "cpu", 0, vocabulary)


TEXT = bytes(range(32, 127)) * 40


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return written(TEXT, tmp_path)


def records(tokens: str, seed: int = 0, size: int = 300) -> ByteArray:
    return draw_text_records(tokens, 20, size, np.random.default_rng(seed))


def test_records_are_windows_of_the_text(tokens: str) -> None:
    result = records(tokens)
    assert result.shape == (20, 300) and result.dtype == np.uint8
    assert all(record.tobytes() in TEXT for record in result) and len({record.tobytes() for record in result}) > 10
    assert np.array_equal(result, records(tokens)) and not np.array_equal(result, records(tokens, seed=1))
    assert np.array_equal(records(tokens, size=len(TEXT))[0], np.frombuffer(TEXT, dtype=np.uint8))


@pytest.mark.parametrize("kind", [CompressedDataRecords, DecodedRecords])
def test_a_batch_is_the_records_of_its_indices(tokens: str, kind: type[StoredRecords]) -> None:
    text = records(tokens)
    indices = np.array([7, 0, 19, 7])
    batch = kind(text).read_batch(indices)  # type: ignore[call-arg]
    assert batch.dtype == torch.float32 and batch.shape == (4, 300)
    assert torch.equal(batch, torch.from_numpy(normalise_bytes(text[indices])))


def test_codes_travel_with_their_scale() -> None:
    x = torch.randn(4, 8)
    scale, inverse = factor(x, E4M3, TENSOR)
    operand = Operand(encode_with_torch(x, E4M3, scale), inverse)
    there = DeviceBuffers(operand, "cpu")
    there.copy_operand(operand)
    data, scale = there.buffers
    assert data.element_size() == 1 and torch.equal(data.float(), operand.data.float())
    assert operand.scale is not None and torch.equal(scale, operand.scale)
