"""Questions of tasks: that each can be answered, and what cannot be asked."""

from __future__ import annotations

import random

import pytest

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.arms import check_training
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.tasks import ITEMS, documents_of, items_of, lengths_of, text_of
from tests.counts import for_each

PROSE = b" ".join(random.Random(1).choices([b"alpha", b"gamma", b"delta", b"theta", b"sigma", b"omega"], k=20_000))


@for_each("sequence", [16, 24, 65])
def test_a_question_has_its_answer_in_what_stands_before_it(sequence: int) -> None:
    ((_, copies),) = items_of("copy", sequence, b"")
    retrievals = dict(items_of("retrieval", sequence, b""))
    assert [int(name.partition("@")[2]) for name in retrievals] == list(lengths_of(sequence))
    for item in copies:
        before, _, after = item.texts[0].partition(b"=")
        assert before == after and len(item.texts[0]) <= sequence
        assert bytes(item.choices[right] for right in item.right) == bytes(item.texts[0][at] for at in item.places)
    for name, items in retrievals.items():
        assert len(items) == ITEMS and len({item.right for item in items}) == 10
        for item in items:
            text, answer = item.texts[0][:-1], item.choices[item.right[0]]
            assert len(item.texts[0]) == int(name.partition("@")[2]) and text.endswith(b"?")
            assert [byte for byte in text if byte in b"0123456789"] == [answer]


def test_a_cloze_offers_words_that_are_as_long_and_hides_the_true_one_anywhere() -> None:
    ((_, items),) = items_of("cloze", 48, PROSE)
    assert {item.right for item in items} == {(0,), (1,), (2,), (3,)}
    for item in items:
        assert len(set(item.texts)) == 4 and {len(text) for text in item.texts} == {48}
        assert item.texts[item.right[0]] in PROSE and not all(text in PROSE for text in item.texts)
    with pytest.raises(UsageError, match="it has 0 of the 128"):
        list(items_of("cloze", 48, b"a b c"))


def test_documents_are_as_long_as_a_window_and_what_is_held_out_is_others() -> None:
    name, train, held_out = text_of("task:copy,retrieval", 32)
    assert name == "copy+retrieval" and len(train) % 32 == len(held_out) % 32 == 0
    own, others = ({text[at : at + 32] for at in range(0, len(text), 64)} for text in (train, held_out))
    assert not own & others and train == text_of("task:copy,retrieval", 32)[1]
    document = documents_of(("retrieval",), 32, "x", 1)
    (digit,) = {byte for byte in document if byte in b"0123456789"}
    asked = [at for at, byte in enumerate(document) if byte == ord("?")]
    assert asked and all(document[at + 1] == digit for at in asked)


@for_each(
    ("settings", "words"),
    [
        ({"tasks": ("copies",)}, "copy"), ({"tasks": ("copy",), "sequence": 8}, "at least 16"),
        ({"metric": ("f",)}, "names no function"), ({"make": "pkg:make", "tasks": ("copy",)}, "Leave it out"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_said_before_anything_starts(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_training(TrainingRequest(settings=TrainerSettings(**settings)))  # type: ignore[arg-type]
    with pytest.raises(UnknownName):
        text_of("task:cloze", 32)
