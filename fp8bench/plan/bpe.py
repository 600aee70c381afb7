"""Byte pair encoding: merges learnt from a text, the same for the same text, and a text as tokens of 16 bits.

Tokens below 256 are bytes, and token 256 + n is what merge n joins, so that every string of bytes has tokens and comes
back from them. Merges never cross the pieces that a text is cut into: words, numbers, signs and white space.
"""

from __future__ import annotations

import heapq
import re
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

Pair = tuple[int, int]
Merges = tuple[Pair, ...]

BYTES = 256
_BLOCK = 1 << 20
# As GPT-2 cuts, on bytes: a space belongs to the word that it precedes. Pieces are short, so that none takes long.
_PIECES = re.compile(
    rb" ?[A-Za-z_]{1,32}| ?[0-9]{1,3}| ?[\x80-\xff]{1,32}| ?[^\sA-Za-z0-9_\x80-\xff]{1,32}|\s{1,32}(?!\S)|\s{1,32}"
)


def learnt_merges(text: bytes, most: int) -> Merges:
    """The `most` merges of the most frequent pairs, each counted after those before it; fewer where no pair recurs.

    Of equally frequent pairs the one with the lower tokens comes first.
    """
    counted = sorted(Counter(_pieces(text)).items())
    words, counts = [list(word) for word, _ in counted], [count for _, count in counted]
    frequencies: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, word in enumerate(words):
        for pair in pairwise(word):
            frequencies[pair] += counts[number]
            places[pair].add(number)
    heap = [(-count, pair) for pair, count in frequencies.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while heap and len(merges) < most:
        negative, best = heapq.heappop(heap)
        if -negative != frequencies[best]:
            continue  # it was counted again since, and stands in the heap with that count, too
        if -negative < 2:
            break
        changed: set[Pair] = set()
        for number in places.pop(best):
            before, after = words[number], _merged(words[number], best, BYTES + len(merges))
            words[number] = after
            for pair in pairwise(before):
                frequencies[pair] -= counts[number]
                changed.add(pair)
            for pair in pairwise(after):
                frequencies[pair] += counts[number]
                places[pair].add(number)
                changed.add(pair)
        merges.append(best)
        for pair in changed:
            heapq.heappush(heap, (-frequencies[pair], pair))
    return tuple(merges)


def encoded(text: bytes, merges: Sequence[Pair]) -> bytes:
    """A text's tokens, 16 bits each in the machine's own order."""
    if not merges:
        plain = bytearray(2 * len(text))
        plain[0 if sys.byteorder == "little" else 1 :: 2] = text
        return bytes(plain)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    known: dict[bytes, list[int]] = {}
    tokens = array("H")
    for piece in _pieces(text):
        if piece not in known:
            known[piece] = _encoded_piece(piece, ranks)
        tokens.extend(known[piece])
    return tokens.tobytes()


def token_bytes(merges: Sequence[Pair]) -> list[bytes]:
    known = [bytes([byte]) for byte in range(BYTES)]
    for first, second in merges:
        known.append(known[first] + known[second])
    return known


def _pieces(text: bytes) -> Iterator[bytes]:
    """A block at a time, which ends a piece: all pieces of a long text at once would take many times its memory."""
    for start in range(0, len(text), _BLOCK):
        yield from _PIECES.findall(text[start : start + _BLOCK])


def _encoded_piece(piece: bytes, ranks: dict[Pair, int]) -> list[int]:
    """Merged as they were learnt: the earliest merge first."""
    word = list(piece)
    while len(word) > 1:
        best = min(pairwise(word), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        word = _merged(word, best, BYTES + ranks[best])
    return word


def _merged(word: list[int], pair: Pair, token: int) -> list[int]:
    """The word with every such pair joined, from the left."""
    merged: list[int] = []
    for number in word:
        if merged and (merged[-1], number) == pair:
            merged[-1] = token
        else:
            merged.append(number)
    return merged
