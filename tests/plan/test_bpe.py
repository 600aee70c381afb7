"""Byte pair encoding against a trainer that counts everything anew, and its way back."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.plan import bpe
from fp8bench.plan.bpe import Merges, encoded, learnt_merges, token_bytes

TEXT = b"low lower lowest, new newer newest; wide wider widest\n\taaaa aaa 2024 2025\xc3\xa9\xc3\xa9 " * 3
TEXTS = st.binary(max_size=60) | st.text(alphabet="ab \n", max_size=60).map(str.encode)


def learnt_naively(text: bytes, most: int) -> Merges:
    """Every pair of every piece is counted again for every merge."""
    words = [list(piece) for piece in bpe._PIECES.findall(text)]
    merges: list[tuple[int, int]] = []
    while len(merges) < most:
        counts = Counter(pair for word in words for pair in pairwise(word))
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        for word in words:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == best:
                    word[place : place + 2] = [256 + len(merges)]
                place += 1
        merges.append(best)
    return tuple(merges)


def decoded(tokens: bytes, merges: Merges) -> bytes:
    known = token_bytes(merges)
    return b"".join(known[token] for token in array("H", tokens))


def test_merges_are_those_that_counting_anew_finds() -> None:
    """All of them, in their order, until no pair recurs."""
    merges = learnt_merges(TEXT, 1000)
    assert merges == learnt_naively(TEXT, 1000)
    assert 20 < len(merges) < 1000
    assert learnt_merges(TEXT, 7) == merges[:7]


@given(TEXTS)
def test_any_text_has_the_same_merges(text: bytes) -> None:
    """Runs of one letter, too, where pairs overlap."""
    assert learnt_merges(text * 2, 30) == learnt_naively(text * 2, 30)


@given(TEXTS, TEXTS)
def test_every_string_of_bytes_comes_back(learnt: bytes, text: bytes) -> None:
    """From the merges of whatever other text."""
    merges = learnt_merges(learnt * 2, 20)
    assert decoded(encoded(text, merges), merges) == text


def test_a_text_is_encoded_by_the_earliest_merge_first() -> None:
    """As the trainer joined it, so that a text that was learnt from gets the tokens it ended with."""
    merges = ((ord("b"), ord("c")), (ord("a"), ord("b")), (256, ord("d")))
    assert array("H", encoded(b"abcd abx", merges)).tolist() == [ord("a"), 258, ord(" "), 257, ord("x")]


def test_a_text_of_many_blocks_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's end ends a piece, wherever it falls: the same in learning and in encoding."""
    monkeypatch.setattr(bpe, "_BLOCK", 7)
    merges = learnt_merges(TEXT, 50)
    assert merges and decoded(encoded(TEXT, merges), merges) == TEXT
    assert b"".join(bpe._pieces(TEXT)) == TEXT and max(map(len, bpe._pieces(TEXT))) <= 7


def test_long_pieces_are_cut() -> None:
    """A line of a thousand signs would take a thousand squared."""
    assert max(map(len, bpe._PIECES.findall(b"=" * 1000 + b"a" * 1000 + b" " * 1000))) <= 33
