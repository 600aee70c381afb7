"""Questions of tasks, and what is said of scores whose truth was planted."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.arms import check_training
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.tasks import (
    ITEMS,
    documents_of,
    items_of,
    lengths_of,
    text_of,
)
from fp8bench.features.train.values import KeptTraining, StepFigure, StreamLine, Validation
from fp8bench.features.train.verdicts.curves import Learned
from fp8bench.features.train.verdicts.summary import ScoreVerdict, score_parts, verdicts_of_scores
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.report.elements import Page
from fp8bench.report.terminal.layout import render
from tests.counts import for_each
from tests.learning_curves import lines, training

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
    (document,) = [documents_of(("retrieval",), 32, "x", 1)]
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


def scored(name: str, reference: Sequence[float], own: Sequence[float]) -> Iterator[StreamLine]:
    for arm, values in (("bf16", reference), ("fp8", own)):
        yield from (StepFigure(arm, seed, 100, name, value) for seed, value in enumerate(values))


def said(told: Iterator[StreamLine], **settings: object) -> tuple[ScoreVerdict, ...]:
    of = training()
    of = replace(of, request=replace(of.request, settings=TrainerSettings(**settings)))  # type: ignore[arg-type]
    every = (*lines({"fp8": [0.0] * 5}), *told)
    return verdicts_of_scores(KeptTraining(of, every, True, ""), verdicts_of(of, every))


def answered(chance: random.Random, share: float, seeds: int = 5) -> list[float]:
    return [sum(chance.random() < share for _ in range(ITEMS)) / ITEMS for _ in range(seeds)]


def test_the_verdict_finds_what_was_planted_and_seldom_what_was_not() -> None:
    """Of 500 trainings whose arms answer alike at most so many are told apart as a level of 99% lets; where an arm
    loses ten points nearly all are."""
    chance, wrong, missed = random.Random(7), 0, 0
    for _ in range(500):
        (same,) = said(scored("task:copy", answered(chance, 0.8), answered(chance, 0.8)))
        (lost,) = said(scored("task:copy", [0.95] * 5, answered(chance, 0.85)))
        wrong += same.learned in (Learned.WORSE, Learned.BETTER)
        missed += lost.learned is not Learned.WORSE
    assert wrong <= 12 and missed <= 50


def test_scores_at_chance_say_nothing_of_precisions() -> None:
    chance = random.Random(3)
    (neither,) = said(scored("task:retrieval@8", answered(chance, 0.1), answered(chance, 0.1)))
    assert neither.word.startswith("at chance") and neither.learned is None
    (one,) = said(scored("task:retrieval@8", answered(chance, 0.1), answered(chance, 0.9)))
    assert one.learned is Learned.BETTER
    (few,) = said(scored("task:copy", [1.0] * 3, [1.0] * 3))
    assert few.word == "open: 3 seeds of 5 that are needed"


def test_answers_that_are_all_alike_are_known_as_well_as_so_many_questions_tell() -> None:
    """And not exactly: of 640 questions the interval reaches 0.7 points, by the rule of -ln(0.01) of them."""
    (found,) = said(scored("task:cloze", [0.5] * 5, [0.5] * 5))
    assert found.worse and found.worse.decides and found.learned is Learned.WITHIN_NOISE
    assert found.worse.decides.high == pytest.approx(-math.log(0.01) / 640)


@for_each(("metric", "name", "learned"), [
    ("pkg:f", "metric:pkg:f", Learned.WORSE), ("pkg:f=lower", "metric:pkg:f", Learned.BETTER),
    ("pkg:f=lower", "metric:pkg:f.bits", Learned.BETTER), ("pkg:f=lower", "metric:pkg:fine", Learned.WORSE),
])  # fmt: skip
def test_a_metric_says_which_way_is_better(metric: str, name: str, learned: Learned) -> None:
    (found,) = said(scored(name, [2.0] * 5, [1.8, 1.81, 1.82, 1.8, 1.81]), metric=(metric,))
    assert found.learned is learned
    (found,) = said(scored(name, [0.0] * 5, [1.0] * 5), metric=(metric,))
    assert "not above 0" in found.word


def test_quantising_is_held_against_the_reference_and_the_references_own_against_bf16() -> None:
    looks = (
        Validation(arm, seed, 100, f"quantised:{mode}", loss * (1 + 1e-3 * (seed - 2)), 1000, 1000)
        for arm, of_nvfp4 in (("bf16", 2.1), ("fp8", 2.2))
        for mode, loss in (("bf16", 2.0), ("nvfp4", of_nvfp4))
        for seed in range(5)
    )
    found = {(one.arm, one.figure): one for one in said(looks)}
    assert found.keys() == {("bf16", "quantised:nvfp4"), ("fp8", "quantised:nvfp4"), ("fp8", "quantised:bf16")}
    own, other = found["bf16", "quantised:nvfp4"], found["fp8", "quantised:nvfp4"]
    assert own.worse and own.worse.point == pytest.approx(0.05) and own.against == "itself in bf16"
    assert own.learned is other.learned is Learned.WORSE and other.worse
    assert other.worse.point == pytest.approx(2.2 / 2.1 - 1) and other.against == "bf16"
    assert found["fp8", "quantised:bf16"].learned is Learned.WITHIN_NOISE


def test_a_look_without_one_in_bf16_is_held_against_the_reference_alone() -> None:
    looks = [Validation(arm, seed, 100, "quantised:fp8", 2.0, 9, 9) for arm in ("bf16", "fp8") for seed in range(5)]
    assert [one.against for one in said(iter(looks))] == ["bf16"]


def test_the_table_says_what_chance_is_and_a_training_without_scores_has_none() -> None:
    of, every = training(), (*lines({"fp8": [0.0] * 5}), *scored("task:copy", [1.0] * 5, [0.9] * 5))
    text = render(Page("", "", tuple(score_parts(KeptTraining(of, every, True, ""), verdicts_of(of, every)))))
    assert "+10 [+9.3, +11] points" in text and "copy 3.85%" in text and "worse" in text
    bare = lines({"fp8": [0.0] * 5})
    assert not list(score_parts(KeptTraining(of, bare, True, ""), verdicts_of(of, bare)))
