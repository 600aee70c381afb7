"""Batches of a token file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8bench.nn.batches import TokenLoader
from fp8bench.plan.corpus import prepare_corpus
from tests.counts import for_each


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A thousand tokens that count up."""
    file = tmp_path / "tokens"
    np.arange(1000, dtype=np.uint16).tofile(file)
    return str(file)


def test_targets_are_the_tokens_that_follow(path: str) -> None:
    tokens, targets = TokenLoader(path, 4, 16, "cpu", 0, 256).next()
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, (tokens + 1) % 256)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert tokens.is_contiguous() and targets.is_contiguous()


def test_the_same_seed_gives_the_same_batches(path: str) -> None:
    one, same, other = (TokenLoader(path, 2, 8, "cpu", seed, 256) for seed in (7, 7, 8))
    last = other.next()
    for _ in range(3):
        first, second = one.next(), same.next()
        assert not torch.equal(first[0], last[0])
        last = first
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(one.next()[0], other.next()[0])


def test_batches_loaded_ahead_are_those_that_would_come(path: str) -> None:
    """Each time to the same place, from which they are taken in turn, again and again until others are loaded."""
    plain, ahead = (TokenLoader(path, 2, 8, "cpu", 7, 256) for _ in range(2))
    places = set()
    for _ in range(3):
        ahead.load_ahead(2)
        places.add(tuple(one.data_ptr() for one in ahead._ahead))
        wanted = [plain.next() for _ in range(2)]
        for _ in range(2):
            assert all(
                torch.equal(one, same) for batch in wanted for one, same in zip(batch, ahead.next(), strict=True)
            )
    assert len(places) == 1


def test_every_window_can_come_up(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    np.arange(10, dtype=np.uint16).tofile(file)
    loader = TokenLoader(str(file), 100, 7, "cpu", 0, 256)
    assert set(loader.next()[0][:, 0].tolist()) == {0, 1, 2}


@for_each("length", [1000, 1001, 5000])
def test_a_file_that_is_too_short_is_refused(path: str, length: int) -> None:
    with pytest.raises(ValueError, match=f"1000 tokens; a sequence of {length} needs more"):
        TokenLoader(path, 1, length, "cpu", 0, 256)


def test_a_vocabulary_of_bytes_reads_the_bytes_as_they_are(path: str) -> None:
    """Bit by bit what it always was: windows at the places that the seed draws."""
    file, random = np.memmap(path, dtype=np.uint16, mode="r"), np.random.default_rng(5)
    loader = TokenLoader(path, 4, 16, "cpu", 5, 256)
    for _ in range(3):
        tokens, targets = loader.next()
        for row, start in enumerate(random.integers(0, 1000 - 16, 4)):
            wanted = torch.from_numpy(file[start : start + 17].astype(np.int64) % 256)
            assert torch.equal(tokens[row], wanted[:-1]) and torch.equal(targets[row], wanted[1:])


@for_each("vocabulary", [257, 50304, 128256])
def test_larger_vocabularies_have_an_id_for_two_bytes(tmp_path: Path, vocabulary: int) -> None:
    """By hand: the byte at a place times 256 plus the next, within the vocabulary; targets follow by one place."""
    text = b"import torch\xff\xfe"
    file = tmp_path / "text"
    np.frombuffer(text, dtype=np.uint8).astype(np.uint16).tofile(file)
    tokens, targets = TokenLoader(str(file), 1, len(text) - 2, "cpu", 0, vocabulary).next()
    pairs = [(one * 256 + other) % vocabulary for one, other in pairwise(text)]
    assert tokens.tolist() == [pairs[:-1]] and targets.tolist() == [pairs[1:]]
    assert tokens.dtype == torch.int64 and tokens.is_contiguous()
    with pytest.raises(ValueError, match=f"{len(text)} tokens; a sequence of {len(text) - 1} needs more"):
        TokenLoader(str(file), 1, len(text) - 1, "cpu", 0, vocabulary)


def test_a_large_vocabulary_is_used_by_the_thousand(tmp_path: Path) -> None:
    """Of real text; bytes alone are less than a hundred and fifty, and most gradients of an embedding zero."""
    path = prepare_corpus(None, tmp_path).path
    found = {size: len(TokenLoader(path, 64, 1024, "cpu", 0, size).next()[0].unique()) for size in (256, 50304)}
    assert found[256] < 150 and found[50304] > 1500
