"""A training for programs: CSV, JSON, frames and boards say what its table says."""

from __future__ import annotations

import csv
import io
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fp8bench.features.train import words
from fp8bench.features.train.data import TrainingFrames, rows_of, send_training, series_of, value_of, write_training
from fp8bench.features.train.values import (
    BYTES_PER_PARAMETER,
    WATCHED_SECONDS,
    ArmCost,
    ArmRole,
    KeptTraining,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.summary import figures_of, summaries_of
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts, verdicts_of
from fp8bench.features.train.view import arm_cols, page_of
from fp8bench.model import MemoryUse
from fp8bench.report.data.plain import csv_text
from tests.learning_curves import OTHER_SEED, REPEAT, lines, training

GAPS = {
    "fp8": [0.02, 0.03, 0.025, 0.02, 0.03], OTHER_SEED.name: [0.01, -0.02, 0.03, 0.0, 0.01], REPEAT.name: [0.0],
}  # fmt: skip
STEPS = 40
ALARM = TrainingEvent("fp8", 2, 30, "alarm", "scales fall", "head", "input", (), "raise margin")
MORE: tuple[StreamLine, ...] = (
    ALARM, ALARM, TrainingEvent("", 0, 10, "resumed", "gone on with"),
    *(StepFigure("fp8", seed, 0, BYTES_PER_PARAMETER, size, of) for seed in (0, 1)
      for of, size in (("weights", 4.0), ("moments", 8.0))),
    StepFigure("fp8", 0, 10, WATCHED_SECONDS, 0.1), StepFigure("bf16", 0, 10, WATCHED_SECONDS, 0.2),
    StepFigure("fp8", 0, 10, "update_ratio", 1e-3, "head"), StepFigure("fp8", 0, 10, "noise_scale", math.inf),
    ArmCost("fp8", 0, 0, (("weights", 4000),), MemoryUse(9000, (("activations", 5000),))),
    LayerReading("fp8", 0, 10, "head", "input", 2.0, 0.0, 0.0, 1.0, 0.0),
    *(Validation(arm, seed, STEPS, "held-out", loss, 1000, 500)
      for arm, loss in (("bf16", 2.1), ("fp8", 2.15)) for seed in range(5)),
)  # fmt: skip


@pytest.fixture(scope="module")
def kept() -> KeptTraining:
    return KeptTraining(training(steps=STEPS), (*lines(GAPS, STEPS), *MORE), True, "x/steps.jsonl")


@pytest.fixture(scope="module")
def found(kept: KeptTraining) -> TrainingVerdicts:
    return verdicts_of(kept.training, kept.lines)


def test_numbers_are_those_of_the_verdict(kept: KeptTraining, found: TrainingVerdicts) -> None:
    """Point, 95% and 99% of the gap; bands stand with their arms; what means nothing is not known."""
    named = {one.arm.name: figures_of(one, found) for one in summaries_of(kept, found)}
    gap = found.arms[0].judged.gap
    assert gap is not None and gap.shown is not None and gap.decides is not None
    own = named["fp8"]
    assert (own["gap"], own["gap_low"], own["gap_high"]) == (gap.point, gap.shown.low, gap.shown.high)
    assert (own["gap_deciding_low"], own["gap_deciding_high"]) == (gap.decides.low, gap.decides.high)
    assert (own["gap_pairs"], own["bytes_per_parameter"], own["events"]) == (5, 12.0, 2)
    assert own["tokens_per_second"] is None and named["bf16"]["tokens_per_second"] == pytest.approx(19200)
    assert found.seed_band is not None and named[OTHER_SEED.name]["seed_band"] == found.seed_band.deviation
    assert named[REPEAT.name]["largest_difference"] == 0 and named[REPEAT.name]["first_difference"] is None
    assert named["bf16"]["gap"] is None and "seed_band" not in named["fp8"]


def test_rows_say_what_the_table_says(kept: KeptTraining, found: TrainingVerdicts) -> None:
    """To the word: verdicts, bands, notes; and the numbers that it rounds."""
    rows = list(csv.DictReader(io.StringIO(csv_text(*rows_of(kept, found)))))
    summary = {(row["arm"], row["figure"]): row["value"] for row in rows if row["line"] == "Summary"}
    for one in summaries_of(kept, found):
        cells = [col.field(one).text for col in arm_cols(found, summaries_of(kept, found))]
        assert cells[-1] == summary[one.arm.name, "words"]
        if (one.arm.name, "loss") in summary:
            assert f"{float(summary[one.arm.name, 'loss']):.4f}" == cells[2]
    assert summary["fp8", "verdict"] == "worse" and float(summary["fp8", "gap_low"]) > 0.01
    assert ("bf16", "gap") not in summary, "what is not known has no row"
    bands = [row["value"] for row in rows if row["figure"] == "band"]
    shown = [one.text for part in page_of(kept, found).parts if part.name == "bands" for one in part.elements]  # type: ignore[union-attr]
    assert bands == shown and len(bands) == 2
    assert any("emulated: numerics and no speed" in row["value"] for row in rows if row["figure"] == "note") == (
        found.arms[0].speed is not None
    )
    losses = [row["value"] for row in rows if (row["line"], row["figure"], row["arm"]) == ("StepRow", "loss", "fp8")]
    assert losses == [repr(row.loss) for row in kept.of(StepRow) if row.arm == "fp8"]


def test_the_document_has_the_same(kept: KeptTraining, found: TrainingVerdicts) -> None:
    document = value_of(kept, found)
    arms = document["arms"]
    assert arms["fp8"]["words"] == words.verdict(found.arms[0], found) == document["verdicts"]["fp8"]["words"]
    assert arms["fp8"]["verdict"] == "worse" and arms["bf16"]["verdict"] is None
    assert arms["bf16"]["words"] == "the reference" and len(document["bands"]) == 2
    assert len(document["lines"]) == len(kept.lines)


def test_frames_are_the_lines(kept: KeptTraining, found: TrainingVerdicts) -> None:
    """A frame a kind, a row a line; what repeats is a category; perplexities are there."""
    frames = TrainingFrames(kept)
    for frame, kind in (
        (frames.steps, StepRow), (frames.readings, LayerReading), (frames.figures, StepFigure),
        (frames.validations, Validation), (frames.events, TrainingEvent),
    ):  # fmt: skip
        own = [line for line in kept.lines if isinstance(line, kind)]
        assert len(frame) == len(own) > 0 and str(frame["arm"].dtype) == "category"
        assert list(frame["seed"]) == [line.seed for line in own]
    last = frames.validations.iloc[-1]
    assert last.perplexity == pytest.approx(math.exp(2.15)) and last.perplexity_by_byte == pytest.approx(math.exp(4.3))
    assert [tuple(row) for row in frames.costs.itertuples(index=False)] == [
        ("fp8", "kept weights", 4000), ("fp8", "peak_memory", 9000), ("fp8", "peak_memory activations", 5000),
    ]  # fmt: skip
    arms = frames.arms.set_index("arm")
    assert arms.loc["fp8", "verdict"] == "worse" and arms.loc["fp8", "words"] == words.verdict(found.arms[0], found)
    ends = frames.steps.query(f"step >= {STEPS - STEPS // 10}").groupby("arm", observed=True).loss.mean()
    assert ends["fp8"] == pytest.approx(arms.loc["fp8", "loss"])


def test_curves_go_along_steps(kept: KeptTraining) -> None:
    """Of each arm and seed; numbers that are none are left out, times of emulation too; events are counted."""
    series = series_of(kept)
    assert set(series) == {(line.arm, line.seed) for line in kept.lines if line.arm}
    own = series["fp8", 0]
    rows = {row.step: row for row in kept.of(StepRow) if (row.arm, row.seed) == ("fp8", 0)}
    assert {step: values["training/loss"] for step, values in own.items() if step < STEPS} == {
        step: row.loss for step, row in rows.items()
    }
    assert list(own) == sorted(own) and own[STEPS] == {"validation/held-out": 2.15}
    assert own[10]["update_ratio/head"] == 1e-3 and "training/noise_scale" not in own[10]
    readings = [line for line in kept.of(LayerReading) if (line.arm, line.seed) == ("fp8", 0)]
    for line in (line for line in readings if math.isfinite(line.amax)):
        assert own[line.step][f"amax/{line.layer}/{line.role}"] == line.amax
        assert own[line.step][f"scale/{line.layer}/{line.role}"] == line.scale
    assert readings
    assert not any("seconds" in tag for values in own.values() for tag in values)
    assert series["bf16", 0][10]["training/watched_seconds"] == 0.2
    assert series["bf16", 0][3]["training/tokens_per_second"] == pytest.approx(19200)
    assert series["fp8", 2][30]["events/alarm"] == 2.0


def test_tensorboard_reads_them_back(kept: KeptTraining, found: TrainingVerdicts, tmp_path: Path) -> None:
    """A folder an arm and seed, and one an arm for what it came to; written twice they are the same bytes."""
    board: ModuleType = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = write_training(kept, found, tmp_path)
    content = {file: file.read_bytes() for file in files}
    assert len(files) == len(set(files)) and {file: file.read_bytes() for file in write_training(
        kept, found, tmp_path)} == content  # fmt: skip
    assert {file.parents[1] for file in files if file.parent.name.startswith("seed-")} == {
        file.parent for file in files if not file.parent.name.startswith("seed-")
    }

    def scalars(folder: str, tag: str) -> list[tuple[int, float]]:
        reader = board.EventAccumulator(str(tmp_path / "t1" / folder), size_guidance={board.SCALARS: 0})
        reader.Reload()
        return [(one.step, one.value) for one in reader.Scalars(tag)]

    rows = [row for row in kept.of(StepRow) if (row.arm, row.seed) == ("fp8", 1)]
    assert scalars("fp8/seed-1", "training/loss") == [(row.step, pytest.approx(row.loss, rel=1e-6)) for row in rows]
    gap = found.arms[0].judged.gap
    assert gap is not None and scalars("fp8", "summary/gap") == [(STEPS, pytest.approx(gap.point, rel=1e-6))]


def test_wandb_gets_a_run_for_each_arm_and_seed(
    kept: KeptTraining, found: TrainingVerdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one group, in the order of steps, and one with the verdicts and the files."""
    told: list[tuple[dict[str, Any], list[tuple[dict[str, float], int | None]], list[str]]] = []

    def init(**options: Any) -> SimpleNamespace:
        logged: list[tuple[dict[str, float], int | None]] = []
        ends: list[str] = []
        told.append((options, logged, ends))
        return SimpleNamespace(
            log=lambda values, step=None: logged.append((values, step)),
            log_artifact=lambda artifact: ends.append(artifact.name),
            finish=lambda exit_code=0: ends.append(f"finished {exit_code}"),
        )

    def artifact(name: str, type: str) -> SimpleNamespace:  # noqa: A002 - as the package calls it
        return SimpleNamespace(name=f"{type} {name}", add_file=lambda path, name: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Artifact=artifact))
    send_training(kept, found, "mine", [Path("x/steps.jsonl")])
    assert {options["group"] for options, _, _ in told} == {"fp8bench t1"}
    assert all(ends[-1] == "finished 0" for _, _, ends in told)
    *arms, (verdict, figures, ends) = told
    assert [options["name"] for options, _, _ in arms] == [f"{arm} seed {seed}" for arm, seed in series_of(kept)]
    for (options, logged, _), values in zip(arms, series_of(kept).values(), strict=True):
        assert [(step, own) for own, step in logged] == list(values.items()), options["name"]
    assert verdict["config"]["verdicts"]["fp8"].startswith("worse by +2.5%") and verdict["job_type"] == "verdict"
    gap = found.arms[0].judged.gap
    assert gap is not None and figures[0][0]["fp8/gap"] == gap.point
    assert ends == ["fp8bench-training fp8bench-t1", "finished 0"]


def test_an_arm_that_was_not_trained_is_said_so(kept: KeptTraining) -> None:
    arms = tuple(replace(arm, skip="no units") if arm.role is ArmRole.CANDIDATE else arm for arm in kept.training.arms)
    own = KeptTraining(replace(kept.training, arms=arms), (), True, "x")
    said = verdicts_of(own.training, own.lines)
    assert "no units" in csv_text(*rows_of(own, said)) and value_of(own, said)["arms"]["fp8"]["verdict"] is None
    assert series_of(own) == {}
