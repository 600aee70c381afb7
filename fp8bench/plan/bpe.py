"""Byte pair encoding: learns merges from a text (always the same ones) and encodes text as tokens of 16 bits.

Tokens below 256 are bytes; token 256 + n joins the two tokens of merge n, so any bytes can be encoded and decoded.
A text is first cut into pieces (words, numbers, signs, white space), and merges never cross pieces.
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
# Cuts as GPT-2 does, on bytes: a space belongs to the word after it. The lengths bound the time of each piece.
_PIECES = re.compile(
    rb" ?[A-Za-z_]{1,32}| ?[0-9]{1,3}| ?[\x80-\xff]{1,32}| ?[^\sA-Za-z0-9_\x80-\xff]{1,32}|\s{1,32}(?!\S)|\s{1,32}"
)


def learnt_merges(text: bytes, most: int) -> Merges:
    """Returns at most `most` merges: the most frequent pair, then the most frequent once that is joined, and so on.

    Among equally frequent pairs the one with the lower tokens comes first. Stops when no pair occurs twice.
    """
    # 1. Count all pairs of neighbours, and remember the words that contain each.
    counted = sorted(Counter(_pieces(text)).items())
    words, counts = [list(word) for word, _ in counted], [count for _, count in counted]
    frequencies: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, word in enumerate(words):
        for pair in pairwise(word):
            frequencies[pair] += counts[number]
            places[pair].add(number)
    # 2. Join the most frequent pair in every word that has it, and update the counts of the pairs around it.
    heap = [(-count, pair) for pair, count in frequencies.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while heap and len(merges) < most:
        negative, best = heapq.heappop(heap)
        if -negative != frequencies[best]:
            continue  # the count is old; a newer entry of this pair is in the heap
        if -negative < 2:
            break
        changed: set[Pair] = set()
        for number in places.pop(best):
            previous, joined = words[number], _join(words[number], best, BYTES + len(merges))
            words[number] = joined
            for pair in pairwise(previous):
                frequencies[pair] -= counts[number]
                changed.add(pair)
            for pair in pairwise(joined):
                frequencies[pair] += counts[number]
                places[pair].add(number)
                changed.add(pair)
        merges.append(best)
        for pair in changed:
            heapq.heappush(heap, (-frequencies[pair], pair))
    return tuple(merges)


def encoded(text: bytes, merges: Sequence[Pair]) -> bytes:
    """Returns a text's tokens, 16 bits each in the machine's byte order."""
    if not merges:
        plain = bytearray(2 * len(text))
        plain[0 if sys.byteorder == "little" else 1 :: 2] = text
        return bytes(plain)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    by_piece: dict[bytes, list[int]] = {}
    tokens = array("H")
    for piece in _pieces(text):
        if piece not in by_piece:
            by_piece[piece] = _encode_piece(piece, ranks)
        tokens.extend(by_piece[piece])
    return tokens.tobytes()


def token_bytes(merges: Sequence[Pair]) -> list[bytes]:
    """Returns the bytes of each token."""
    decoded = [bytes([byte]) for byte in range(BYTES)]
    for first, second in merges:
        decoded.append(decoded[first] + decoded[second])
    return decoded


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yields the pieces block by block: all pieces of a long text would need many times its memory.

    A piece ends where its block does.
    """
    for start in range(0, len(text), _BLOCK):
        yield from _PIECES.findall(text[start : start + _BLOCK])


def _encode_piece(piece: bytes, ranks: dict[Pair, int]) -> list[int]:
    """Applies merges in the order in which they were learnt."""
    word = list(piece)
    while len(word) > 1:
        best = min(pairwise(word), key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        word = _join(word, best, BYTES + ranks[best])
    return word


def _join(word: list[int], pair: Pair, token: int) -> list[int]:
    """Replaces each occurrence of a pair by one token, from the left."""
    joined: list[int] = []
    for number in word:
        if joined and (joined[-1], number) == pair:
            joined[-1] = token
        else:
            joined.append(number)
    return joined
