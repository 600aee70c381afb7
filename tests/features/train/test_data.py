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

from fp8bench.features.train.data import TrainingFrames, rows_of, send_training, series_of, value_of, write_training
from fp8bench.features.train.values import (
    BYTES_PER_PARAMETER,
    WATCHED_SECONDS,
    ArmRole,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.summary import figures_of, summaries_of
from fp8bench.features.train.view import arm_cols, page_of
from fp8bench.report.data.plain import csv_text
from tests.learning_curves import OTHER_SEED, REPEAT, judged, kept_of, lines, training

STEPS = 40
ALARM = TrainingEvent("fp8", 2, 30, "alarm", "scales fall", "head", "input", (), "raise margin")
MORE: tuple[StreamLine, ...] = (
    ALARM, ALARM, TrainingEvent("", 0, 10, "resumed", "gone on with"),
    *(StepFigure("fp8", seed, 0, BYTES_PER_PARAMETER, size, of) for seed in (0, 1)
      for of, size in (("weights", 4.0), ("moments", 8.0))),
    StepFigure("fp8", 0, 10, WATCHED_SECONDS, 0.1), StepFigure("bf16", 0, 10, WATCHED_SECONDS, 0.2),
    StepFigure("fp8", 0, 10, "update_ratio", 1e-3, "head"), StepFigure("fp8", 0, 10, "noise_scale", math.inf),
    LayerReading("fp8", 0, 10, "head", "input", 2.0, 0.0, 0.0, 1.0, 0.0),
    *(Validation(arm, seed, STEPS, "held-out", loss, 1000, 500)
      for arm, loss in (("bf16", 2.1), ("fp8", 2.15)) for seed in range(5)),
)  # fmt: skip
GAPS = {
    "fp8": [0.02, 0.03, 0.025, 0.02, 0.03], OTHER_SEED.name: [0.01, -0.02, 0.03, 0.0, 0.01], REPEAT.name: [0.0],
}  # fmt: skip
KEPT, VERDICTS = judged(kept_of((*lines(GAPS, STEPS), *MORE), training(steps=STEPS)))
GAP = VERDICTS.arms[0].judged.gap


def test_numbers_are_those_of_the_verdict() -> None:
    """Point, 95% and 99% of the gap; bands stand with their arms; what means nothing is not known."""
    named = {summary.arm.name: figures_of(summary, VERDICTS) for summary in summaries_of(KEPT, VERDICTS)}
    assert GAP is not None and GAP.shown is not None and GAP.decides is not None and VERDICTS.seed_band is not None
    own = named["fp8"]
    assert (own["gap"], own["gap_low"], own["gap_high"]) == (GAP.point, GAP.shown.low, GAP.shown.high)
    assert (own["gap_deciding_low"], own["gap_deciding_high"]) == (GAP.decides.low, GAP.decides.high)
    assert (own["gap_pairs"], own["bytes_per_parameter"], own["events"]) == (5, 12.0, 2)
    assert own["tokens_per_second"] is None and named["bf16"]["tokens_per_second"] == pytest.approx(19200)
    assert named[OTHER_SEED.name]["seed_band"] == VERDICTS.seed_band.deviation
    assert named[REPEAT.name]["largest_difference"] == 0 and named[REPEAT.name]["first_difference"] is None
    assert named["bf16"]["gap"] is None and "seed_band" not in named["fp8"]


def test_rows_document_and_frames_say_what_the_table_says() -> None:
    """To the word: verdicts, bands, notes; and the numbers that it rounds."""
    rows = list(csv.DictReader(io.StringIO(csv_text(*rows_of(KEPT, VERDICTS)))))
    told = {(row["arm"], row["figure"]): row["value"] for row in rows if row["line"] == "Summary"}
    document, frames = value_of(KEPT, VERDICTS)["arms"], TrainingFrames(KEPT)
    arms = frames.arms.set_index("arm")
    summaries = summaries_of(KEPT, VERDICTS)
    for summary in summaries:
        cells, name = [col.field(summary).text for col in arm_cols(VERDICTS, summaries)], summary.arm.name
        assert cells[-1] == told[name, "words"] == document[name]["words"] == arms.loc[name, "words"]
        if (name, "loss") in told:
            assert f"{float(told[name, 'loss']):.4f}" == cells[2]
    assert told["fp8", "verdict"] == "worse" and ("bf16", "gap") not in told, "what is not known has no row"
    bands = [row["value"] for row in rows if row["figure"] == "band"]
    shown = [getattr(own, "text", "") for part in page_of(KEPT, VERDICTS).parts if part.name == "bands"
             for own in part.elements]  # fmt: skip
    assert bands == shown and len(bands) == 2
    losses = [row["value"] for row in rows if (row["line"], row["figure"], row["arm"]) == ("StepRow", "loss", "fp8")]
    assert losses == [repr(row.loss) for row in KEPT.of(StepRow) if row.arm == "fp8"]
    ends = frames.steps.query(f"step >= {STEPS - STEPS // 10}").groupby("arm", observed=True).loss.mean()
    assert ends["fp8"] == pytest.approx(arms.loc["fp8", "loss"]) and str(frames.steps["arm"].dtype) == "category"
    last = frames.validations.iloc[-1]
    assert (last.perplexity, last.perplexity_by_byte) == (pytest.approx(math.exp(2.15)), pytest.approx(math.exp(4.3)))


def test_curves_go_along_steps() -> None:
    """Of each arm and seed; numbers that are none are left out, times of emulation too; events are counted."""
    series = series_of(KEPT)
    assert set(series) == {(line.arm, line.seed) for line in KEPT.lines if line.arm}
    own = series["fp8", 0]
    rows = {row.step: row.loss for row in KEPT.of(StepRow) if (row.arm, row.seed) == ("fp8", 0)}
    assert {step: values["training/loss"] for step, values in own.items() if step < STEPS} == rows
    assert list(own) == sorted(own) and own[STEPS] == {"validation/held-out": 2.15}
    assert own[10]["update_ratio/head"] == 1e-3 and "training/noise_scale" not in own[10]
    assert (own[10]["amax/head/input"], own[10]["scale/head/input"]) == (2.0, 1.0)
    assert not any("seconds" in tag for values in own.values() for tag in values)
    assert series["bf16", 0][10]["training/watched_seconds"] == 0.2
    assert series["bf16", 0][3]["training/tokens_per_second"] == pytest.approx(19200)
    assert series["fp8", 2][30]["events/alarm"] == 2.0


def test_tensorboard_reads_them_back(tmp_path: Path) -> None:
    """A folder an arm and seed, and one an arm for what it came to; written twice they are the same bytes."""
    board: ModuleType = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = write_training(KEPT, VERDICTS, tmp_path)
    content = [file.read_bytes() for file in files]
    assert [file.read_bytes() for file in write_training(KEPT, VERDICTS, tmp_path)] == content

    def scalars(folder: str, tag: str) -> list[tuple[int, float]]:
        reader = board.EventAccumulator(str(tmp_path / "t1" / folder), size_guidance={board.SCALARS: 0})
        reader.Reload()
        return [(event.step, event.value) for event in reader.Scalars(tag)]

    rows = [row for row in KEPT.of(StepRow) if (row.arm, row.seed) == ("fp8", 1)]
    assert scalars("fp8/seed-1", "training/loss") == [(row.step, pytest.approx(row.loss, rel=1e-6)) for row in rows]
    assert GAP is not None and scalars("fp8", "summary/gap") == [(STEPS, pytest.approx(GAP.point, rel=1e-6))]


def test_wandb_gets_a_run_for_each_arm_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
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
    send_training(KEPT, VERDICTS, "mine", [Path("x/steps.jsonl")])
    assert {options["group"] for options, _, _ in told} == {"fp8bench t1"}
    assert all(ends[-1] == "finished 0" for _, _, ends in told)
    *arms, (verdict, figures, ends) = told
    for (options, logged, _), ((arm, seed), curve) in zip(arms, series_of(KEPT).items(), strict=True):
        assert options["name"] == f"{arm} seed {seed}" and logged == [(own, step) for step, own in curve.items()]
    assert verdict["config"]["verdicts"]["fp8"].startswith("worse by +2.5%") and verdict["job_type"] == "verdict"
    assert GAP is not None and figures[0][0]["fp8/gap"] == GAP.point
    assert ends == ["fp8bench-training fp8bench-t1", "finished 0"]


def test_an_arm_that_was_not_trained_is_said_so() -> None:
    arms = tuple(replace(arm, skip="no units") if arm.role is ArmRole.CANDIDATE else arm for arm in KEPT.training.arms)
    kept, verdicts = judged(kept_of((), replace(KEPT.training, arms=arms)))
    assert "no units" in csv_text(*rows_of(kept, verdicts)) and series_of(kept) == {}
    assert value_of(kept, verdicts)["arms"]["fp8"]["verdict"] is None
