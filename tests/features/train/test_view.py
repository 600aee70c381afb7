"""A training as text: what watching took."""

from __future__ import annotations

from fp8bench.features.train.values import WATCHED_SECONDS, KeptTraining, Line, StepFigure, StepRow
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.features.train.view import page_of
from fp8bench.report.elements import Text
from tests.learning_curves import training


def test_what_watching_took_is_said() -> None:
    """The slower part of it: a watched step of 15 ms where others take 10, every tenth, is 5% of each."""
    lines: list[Line] = []
    for arm, watched in (("bf16", 0.015), ("fp8", 0.012)):
        for step in range(30):
            seconds = 0.0 if step % 10 == 0 else 0.01
            lines.append(StepRow(arm, 0, step, 2.0, 1e-3, 1.0, 0.0, 8.0, 1e-3, 1.0, 32, seconds))
            if not seconds:
                lines.append(StepFigure(arm, 0, step, WATCHED_SECONDS, watched))
    asked = training(steps=30, seeds=1)
    page = page_of(KeptTraining(asked, tuple(lines), True, "steps.jsonl"), verdicts_of(asked, lines))
    (ending,) = (part for part in page.parts if part.name == "ending")
    said = [one.text for one in ending.elements if isinstance(one, Text)]
    assert "watched: every 10 steps, which took 5.0% of a step's time at most (bf16)" in said
    bare = [one for one in lines if isinstance(one, StepRow)]
    page = page_of(KeptTraining(asked, tuple(bare), True, "steps.jsonl"), verdicts_of(asked, bare))
    assert not any("watched" in str(part) for part in page.parts)
