"""Tasks on which a trained model is scored. Their questions are generated, so nothing is downloaded.

Every answer is one of a few choices, so that a model that has learned nothing scores at chance.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8bench.errors import UnknownName, UsageError

# The prefix of --data for a text made of tasks: `--data task:copy,retrieval`.
TASK_TEXT_PREFIX = "task:"
# The names of scores on tasks begin with this prefix.
TASK_PREFIX = "task:"
# The names of results of users' metrics begin with this prefix.
METRIC_PREFIX = "metric:"
LETTERS = b"abcdefghijklmnopqrstuvwxyz"
DIGITS = b"0123456789"
# The number of questions per task, or per question length if the task has several lengths.
QUESTION_COUNT = 128
# The smallest --sequence, in tokens, that has room for a question of a task.
MIN_SEQUENCE = 16
_CLOZE_CHOICE_COUNT = 4
# The largest length of a cloze question in bytes, including the hidden word.
_MAX_CLOZE_BYTES = 48
CHANCE_SCORES: Mapping[str, float] = {
    "cloze": 1 / _CLOZE_CHOICE_COUNT,
    "copy": 1 / len(LETTERS),
    "retrieval": 1 / len(DIGITS),
}
_WORD_PATTERN = re.compile(rb"[A-Za-z]{4,12}")
# The length of a training text made of tasks, in bytes.
_TASK_TEXT_BYTES = 1 << 20
# The smallest number of documents in a training text made of tasks.
_MIN_DOCUMENTS = 256


@dataclass(frozen=True)
class TaskItem:
    """A question of a task, in one of two forms. With several `texts`, the model should find the correct one the most
    likely, and `right` holds its index. With one text, the model should predict the bytes at `positions`, and `right`
    holds the index in `choices` of each correct byte.
    """

    texts: tuple[bytes, ...]
    right: tuple[int, ...]
    positions: tuple[int, ...] = ()
    choices: bytes = b""


def _make_copy_task_text(generator: random.Random, length: int) -> bytes:
    """Returns random letters, '=', and the same letters again: 'qwrtz=qwrtz'."""
    letters = bytes(generator.choices(LETTERS, k=(length - 1) // 2))
    return letters + b"=" + letters


def _make_retrieval_text(generator: random.Random, length: int) -> bytes:
    """Returns letters with one digit among them, a question mark and the digit: 'qwr7tzuiop?7'."""
    letters = bytearray(generator.choices(LETTERS, k=length - 2))
    digit = generator.choice(DIGITS)
    letters[generator.randrange(len(letters))] = digit
    return bytes((*letters, ord("?"), digit))


def list_retrieval_lengths(sequence: int) -> tuple[int, ...]:
    """Returns the lengths of retrieval questions, from an eighth of the window `sequence` to a full window."""
    # In a short window several lengths become 8. List it once.
    return tuple(dict.fromkeys(max(8, sequence // part) for part in (8, 4, 2, 1)))


def _make_repeated_retrieval_text(generator: random.Random, length: int) -> bytes:
    """Returns random letters with one digit in the first half, and after it several pairs of a question mark and this
    digit.
    """
    letters = bytearray(generator.choices(LETTERS, k=length))
    digit = generator.choice(DIGITS)
    position = generator.randrange(length // 2)
    letters[position] = digit
    while (position := position + 1 + generator.randrange(1, 8)) + 1 < length:
        letters[position : position + 2] = ord("?"), digit
    return bytes(letters)


def make_documents(tasks: Sequence[str], sequence: int, seed: str, count: int) -> bytes:
    """Returns `count` documents, each as long as a window, from the tasks in turn. Every second retrieval document has
    a single question, like the scored texts. The others have several questions.
    """
    generator = random.Random(f"{seed}/{sequence}")
    documents = []
    for document_number in range(count):
        round_number, task = divmod(document_number, len(tasks))
        if tasks[task] == "copy":
            document = _make_copy_task_text(generator, sequence)
        elif round_number % 2:
            document = _make_retrieval_text(generator, generator.choice(list_retrieval_lengths(sequence)))
        else:
            document = _make_repeated_retrieval_text(generator, sequence)
        # Texts may be shorter than a window: those of copy tasks have an odd length.
        documents.append(document.ljust(sequence, b"\n"))
    return b"".join(documents)


def make_task_text(data_word: str, sequence: int) -> tuple[str, bytes, bytes]:
    task_names = tuple(data_word.removeprefix(TASK_TEXT_PREFIX).split(","))
    for task in task_names:
        if task not in ("copy", "retrieval"):
            raise UnknownName("task of --data", task, ("copy", "retrieval"), "copy and retrieval have texts")
    check_sequence(f"--data {data_word}", sequence)
    document_count = max(_MIN_DOCUMENTS, _TASK_TEXT_BYTES // sequence)
    texts = [
        make_documents(task_names, sequence, part, size)
        # A tenth of all documents is held out.
        for part, size in (("train", document_count), ("held-out", document_count // 9))
    ]
    return "+".join(task_names), texts[0], texts[1]


def check_sequence(option: str, sequence: int) -> None:
    if sequence < MIN_SEQUENCE:
        raise UsageError(
            f"{option} has longer questions than {sequence} tokens. Give a --sequence of at least {MIN_SEQUENCE}."
        )


def make_task_items(task: str, sequence: int, held_out: bytes) -> Iterator[tuple[str, list[TaskItem]]]:
    """Yields the questions of a task for each of its scores, with the score's name, such as 'retrieval@64'. All arms
    and seeds get the same questions.
    """
    generator = random.Random(f"items/{task}/{sequence}")
    if task == "retrieval":
        for length in list_retrieval_lengths(sequence):
            texts = [_make_retrieval_text(generator, length) for _ in range(QUESTION_COUNT)]
            yield (
                f"retrieval@{length}",
                [_make_task_item(text, (length - 1,), DIGITS) for text in texts],
            )
    elif task == "copy":
        question_letter_count = (sequence - 1) // 2
        texts = [_make_copy_task_text(generator, sequence) for _ in range(QUESTION_COUNT)]
        yield (
            "copy",
            [
                _make_task_item(text, tuple(range(question_letter_count + 1, 2 * question_letter_count + 1)), LETTERS)
                for text in texts
            ],
        )
    else:
        yield "cloze", list(_make_cloze_items(generator, sequence, held_out))


def _make_task_item(text: bytes, places: tuple[int, ...], choices: bytes) -> TaskItem:
    return TaskItem((text,), tuple(choices.index(text[place]) for place in places), places, choices)


def _make_cloze_items(generator: random.Random, sequence: int, text: bytes) -> Iterator[TaskItem]:
    """Yields questions whose text ends in a hidden word, which has to be chosen among four words of equal length.
    Raises UsageError for a text with too few words.
    """
    # Choices are as long as the hidden word, so that the length does not show the answer.
    question_bytes = min(sequence, _MAX_CLOZE_BYTES)
    # A question must not begin before the text does.
    word_matches = [match for match in _WORD_PATTERN.finditer(text) if match.end() > question_bytes]
    words_by_length = defaultdict(list)
    for match in word_matches:
        words_by_length[len(match[0])].append(match[0])
    lengths = {length for length, words in words_by_length.items() if len(set(words)) >= _CLOZE_CHOICE_COUNT}
    # Hide only words for which the text has at least three alternatives of the same length.
    suitable_matches = [match for match in word_matches if len(match[0]) in lengths]
    if len(suitable_matches) < QUESTION_COUNT:
        raise UsageError(
            f"--tasks cloze hides {QUESTION_COUNT} words, and the held-out text has {len(suitable_matches)}. Give a "
            "longer text."
        )
    for match in generator.sample(suitable_matches, QUESTION_COUNT):
        choice_words = {match[0]}
        correct_word = match[0]
        while len(choice_words) < _CLOZE_CHOICE_COUNT:
            choice_words.add(generator.choice(words_by_length[len(correct_word)]))
        # Sort the set: its order differs from process to process.
        candidates = generator.sample(sorted(choice_words), _CLOZE_CHOICE_COUNT)
        cloze_passage = text[match.end() - question_bytes : match.start()]
        yield TaskItem(tuple(cloze_passage + word for word in candidates), (candidates.index(correct_word),))
