"""A training as text: what watching took, and ways of delayed scaling as `show ID --histories ARM` prints them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.features.train.kind import start_training
from fp8bench.features.train.page import page_of as report_of
from fp8bench.features.train.values import (
    WATCHED_SECONDS,
    WIRE_BYTES,
    Arm,
    KeptTraining,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
)
from fp8bench.features.train.verdicts.summary import figures_of, summaries_of
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.features.train.view import page_of
from fp8bench.report.elements import Table, Text
from tests.commands import Say, unfolded
from tests.learning_curves import training


def test_what_watching_took_is_said() -> None:
    """The slower part of it: a watched step of 15 ms where others take 10, every tenth, is 5% of each."""
    lines: list[StreamLine] = []
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


def test_what_a_rank_sends_is_told_beside_what_the_reference_sends() -> None:
    """The whole of a step's operations, of the first step that was watched; in no table of one process."""
    asked, lines = training(steps=30, seeds=1), list[StreamLine]()
    wires = {"bf16": {"reduce bfloat16": 3000.0, "all_reduce float32": 96.0}, "fp8": {"all_to_all uint8": 1548.0}}
    for arm, wire in wires.items():
        lines.append(StepRow(arm, 0, 0, 2.0, 1e-3, 1.0, 0.0, 8.0, 1e-3, 1.0, 32, 0.0))
        lines += [StepFigure(arm, 0, step, WIRE_BYTES, size, of) for step in (0, 10) for of, size in wire.items()]
    kept, found = KeptTraining(asked, tuple(lines), True, "steps.jsonl"), verdicts_of(asked, lines)
    for page in (page_of(kept, found), report_of(kept, found)):
        (told,) = (one for part in page.parts for one in part.elements if isinstance(one, Table) and one.name == "wire")
        rows = [[field.text for field in row] for row in told.rows]
        each = [f"{size / asked.parameters:.4g}" for size in (3096, 1548)]
        assert rows == [
            ["bf16", "3.02 KiB", each[0], "100.0%", "reduce bfloat16 2.93 KiB, all_reduce float32 96 B"],
            ["fp8", "1.51 KiB", each[1], "50.0%", "all_to_all uint8 1.51 KiB"],
        ]
    figures = [figures_of(one, found)["wire_bytes"] for one in summaries_of(kept, found)]
    assert [one for one in figures if one] == [3096.0, 1548.0]
    bare = replace(kept, lines=tuple(one for one in lines if isinstance(one, StepRow)))
    assert not any(getattr(one, "name", "") == "wire" for part in page_of(bare, found).parts for one in part.elements)


ARM = Arm("fp8-delayed", "fp8-delayed:formats=e4m3", native=False)


@pytest.fixture
def kept(store: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A training whose gradients grow by an octave at the fifth of eight steps."""
    writer = start_training(replace(training(ARM), id="0000beef"), store)
    for role in ("input", "weight", "gradient"):
        writer.append(
            [
                LayerReading(ARM.name, 0, step, "head", role, 2.0 if step > 3 and role == "gradient" else 1.0, 1e-4,
                             0.0, 1.0, 0.0)
                for step in range(8)
            ]
        )  # fmt: skip
    writer.close()
    return "0000beef"


def test_every_way_has_a_row(kept: str, fp8bench: Say) -> None:
    code, out, err = fp8bench("show", kept, "--histories", ARM.name)
    assert (code, err) == (0, "") and "replayed over 24 casts" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in ([str(one)] for one in (1, 4, 1024))]
    cells = {tuple(row[:3]): row[3:] for row in rows}
    # Input, weight, gradient: overflow; octaves at worst; the same for underflow; idle.
    assert cells["1", "0", "1"][:4] == ["-", "-", "12.5%", "1.0"]
    assert cells["1", "1", "1"][:4] == ["-", "-", "-", "-"]
    assert "least left idle, by history 1, margin 1, interval 1" in out
    assert cells["1024", "0", "16"][:4] == ["-", "-", "-", "-"], "no scale was ever renewed"


def test_the_same_for_programs(kept: str, fp8bench: Say) -> None:
    _, out, _ = fp8bench("show", kept, "--histories", ARM.name, "--json")
    found = [one for one in json.loads(out) if one["delayed"] == json.loads(out)[0]["delayed"]]
    assert [(one["role"], one["casts"], one["overflow"]) for one in found] == [
        ("input", 8, 0.0), ("weight", 8, 0.0), ("gradient", 8, 0.125),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--histories", "fp8-delayd"), "unknown arm 'fp8-delayd'. Did you mean 'fp8-delayed'?"),
        (("--histories", "bf16"), "nothing was watched of bf16, so that there are no amaxes"),
        (("--histories", ARM.name, "--csv", "-"), "is a table, which --csv does not go with"),
    ],
)
def test_what_cannot_be_meant(words: tuple[str, ...], sentence: str, kept: str, fp8bench: Say) -> None:
    code, out, err = fp8bench("show", kept, *words)
    assert (code, out) == (2, "") and sentence in unfolded(err)
