"""Tasks on which a trained model is scored, generated without a download.

Every answer is a choice among a few, so that a model that has learnt nothing scores at chance.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8bench.errors import UnknownName, UsageError

# Prefix of --data for a text of tasks: `--data task:copy,retrieval`.
TASK_TEXT = "task:"
# Prefixes of the names of figures: scores on tasks, and users' metrics.
TASK, METRIC = "task:", "metric:"
LETTERS, DIGITS = b"abcdefghijklmnopqrstuvwxyz", b"0123456789"
# Questions of a task, or of each length of it; and the shortest window that has room for one.
ITEMS, LEAST_SEQUENCE = 128, 16
_CANDIDATES = 4
# A hidden word comes after at most this many bytes.
_PASSAGE = 48
CHANCES: Mapping[str, float] = {
    "cloze": 1 / _CANDIDATES,
    "copy": 1 / len(LETTERS),
    "retrieval": 1 / len(DIGITS),
}
_WORDS = re.compile(rb"[A-Za-z]{4,12}")
# The length of a text of tasks to train on, in bytes, and its least number of documents.
_TEXT_BYTES, _LEAST_DOCUMENTS = 1 << 20, 256


@dataclass(frozen=True)
class TaskItem:
    """A question: either several `texts`, of which the right one should be the likeliest; or one text whose bytes at
    `places` are answers, each among `choices`. `right` is the index of the true text, or of each true byte in
    `choices`."""

    texts: tuple[bytes, ...]
    right: tuple[int, ...]
    places: tuple[int, ...] = ()
    choices: bytes = b""


def _copy_text(drawn: random.Random, length: int) -> bytes:
    """Returns random letters twice: 'qwrtz=qwrtz'."""
    letters = bytes(drawn.choices(LETTERS, k=(length - 1) // 2))
    return letters + b"=" + letters


def _retrieval_text(drawn: random.Random, length: int) -> bytes:
    """Returns a digit among letters, repeated after the question mark: 'qwr7tzuiop?7'."""
    letters = bytearray(drawn.choices(LETTERS, k=length - 2))
    digit = drawn.choice(DIGITS)
    letters[drawn.randrange(len(letters))] = digit
    return bytes((*letters, ord("?"), digit))


def lengths_of(sequence: int) -> tuple[int, ...]:
    """Returns the lengths of contexts to retrieve from: an eighth of a window to all of it."""
    return tuple(dict.fromkeys(max(8, sequence // part) for part in (8, 4, 2, 1)))


def _repeated_retrieval_text(drawn: random.Random, length: int) -> bytes:
    """Returns a text with one digit, which is asked for at several places after it."""
    letters, digit = bytearray(drawn.choices(LETTERS, k=length)), drawn.choice(DIGITS)
    place = drawn.randrange(length // 2)
    letters[place] = digit
    while (place := place + 1 + drawn.randrange(1, 8)) + 1 < length:
        letters[place : place + 2] = ord("?"), digit
    return bytes(letters)


def documents_of(tasks: Sequence[str], sequence: int, seed: str, count: int) -> bytes:
    """Returns documents as long as a window, task after task; every other one of retrieval asks once, as the items
    do."""
    drawn, documents = random.Random(f"{seed}/{sequence}"), []
    for number in range(count):
        turn, task = divmod(number, len(tasks))
        if tasks[task] == "copy":
            document = _copy_text(drawn, sequence)
        elif turn % 2:
            document = _retrieval_text(drawn, drawn.choice(lengths_of(sequence)))
        else:
            document = _repeated_retrieval_text(drawn, sequence)
        documents.append(document.ljust(sequence, b"\n"))
    return b"".join(documents)


def text_of(word: str, sequence: int) -> tuple[str, bytes, bytes]:
    tasks = tuple(word.removeprefix(TASK_TEXT).split(","))
    for task in tasks:
        if task not in ("copy", "retrieval"):
            raise UnknownName("task of --data", task, ("copy", "retrieval"), "copy and retrieval have texts")
    check_sequence(f"--data {word}", sequence)
    count = max(_LEAST_DOCUMENTS, _TEXT_BYTES // sequence)
    parts = [documents_of(tasks, sequence, part, size) for part, size in (("train", count), ("held-out", count // 9))]
    return "+".join(tasks), parts[0], parts[1]


def check_sequence(option: str, sequence: int) -> None:
    if sequence < LEAST_SEQUENCE:
        raise UsageError(
            f"{option} has longer questions than {sequence} tokens. Give a --sequence of at least {LEAST_SEQUENCE}."
        )


def items_of(task: str, sequence: int, held_out: bytes) -> Iterator[tuple[str, list[TaskItem]]]:
    """Yields the questions of a task by the names of their figures; the same for every arm and seed."""
    drawn = random.Random(f"items/{task}/{sequence}")
    if task == "retrieval":
        for length in lengths_of(sequence):
            texts = [_retrieval_text(drawn, length) for _ in range(ITEMS)]
            yield f"retrieval@{length}", [_make_item(text, (length - 1,), DIGITS) for text in texts]
    elif task == "copy":
        half = (sequence - 1) // 2
        texts = [_copy_text(drawn, sequence) for _ in range(ITEMS)]
        yield "copy", [_make_item(text, tuple(range(half + 1, 2 * half + 1)), LETTERS) for text in texts]
    else:
        yield "cloze", list(_clozes(drawn, sequence, held_out))


def _make_item(text: bytes, places: tuple[int, ...], choices: bytes) -> TaskItem:
    return TaskItem((text,), tuple(choices.index(text[place]) for place in places), places, choices)


def _clozes(drawn: random.Random, sequence: int, text: bytes) -> Iterator[TaskItem]:
    """Yields items to choose the last word of a passage among others of its length. Raises UsageError for a text with
    too few."""
    # Candidates have the hidden word's length, so that the length does not reveal the answer.
    length = min(sequence, _PASSAGE)
    places = [match for match in _WORDS.finditer(text) if match.end() > length]
    by_length = defaultdict(list)
    for match in places:
        by_length[len(match[0])].append(match[0])
    lengths = {length for length, words in by_length.items() if len(set(words)) >= _CANDIDATES}
    # A word without three others of its length would be identified by its length.
    suitable = [match for match in places if len(match[0]) in lengths]
    if len(suitable) < ITEMS:
        raise UsageError(
            f"--tasks cloze hides {ITEMS} words, and the held-out text has {len(suitable)}. Give a longer text."
        )
    for match in drawn.sample(suitable, ITEMS):
        words, true = {match[0]}, match[0]
        while len(words) < _CANDIDATES:
            words.add(drawn.choice(by_length[len(true)]))
        candidates = drawn.sample(sorted(words), _CANDIDATES)
        passage = text[match.end() - length : match.start()]
        yield TaskItem(tuple(passage + word for word in candidates), (candidates.index(true),))
