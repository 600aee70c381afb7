"""Scalars of a run, and the two sinks that take scalars."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.model import Environment, Finding, Run, Scalar
from fp8bench.report.data.loggers import (
    TENSORBOARD,
    WANDB,
    LogSource,
    LogTarget,
    ScalarLogger,
    check_log_target,
    curve_position,
    iterate_run_scalars,
    run_log_source,
)
from tests.counts import for_each
from tests.runs import transformer

PLACE = "layers=4,width=256,heads=4,context=256,batch=4@cpu"


SOURCE = LogSource("t1", "training t1", 1700000000, {"command": "c"}, folder="t1")


def named(run: Run, findings: Mapping[str, Finding]) -> dict[tuple[str, str], float]:
    parts = ((scalar.name.partition("/"), scalar.value) for scalar in iterate_run_scalars(run, findings))
    return {(mode, tag): value for (mode, _, tag), value in parts}


def log_all(run: Run, findings: Mapping[str, Finding], target: LogTarget) -> list[str]:
    said: list[str] = []
    logger = ScalarLogger([target], run_log_source(run), said.append, "the run is kept")
    for scalar in iterate_run_scalars(run, findings):
        logger.log(*scalar)
    logger.close()
    return said


def kind_of(tag: str) -> str:
    return tag.partition("/")[2].partition(" ")[0]


def test_what_an_emulation_costs_shares_no_chart_with_a_speed() -> None:
    told = named(*transformer())
    kinds = {kind_of(tag) for mode, tag in told if mode == "fp8"}
    assert {"emulation_best_seconds", "emulation_phase_cast_seconds", "gradient_error"} <= kinds
    assert not {"best_seconds", "median_seconds", "phase_cast_seconds", "ratio"} & kinds


@for_each(
    ("facts", "at"),
    [
        ({"commit_date": 1700000000123, "dirty": False}, 1700000000),
        ({"commit_date": 1700000000123, "dirty": True}, 1767614400),
        ({"commit_date": None, "dirty": None}, 1767614400),
        ({"commit_date": True, "dirty": False}, 1767614400),
        ({}, 1767614400),
    ],
)
def test_a_run_stands_at_its_commit(facts: dict[str, Scalar | None], at: int) -> None:
    """Unless its files differed or the commit is unknown: then at its start."""
    run = replace(transformer()[0], environment=Environment(facts))
    assert curve_position(run) == at
    assert curve_position(replace(run, started="then")) == (at if at == 1700000000 else 0)


@pytest.fixture
def board() -> Any:
    return pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(board: Any, folder: Path) -> Any:
    accumulator = board.EventAccumulator(str(folder), size_guidance={board.SCALARS: 0})
    accumulator.Reload()
    return accumulator


def test_runs_form_a_curve_in_whatever_order_they_are_written(board: Any, tmp_path: Path) -> None:
    """File names sort in the order of the curve; logging again replaces."""
    run, findings = transformer()
    for begun, id_ in (("2026-01-07T12:00:00Z", "b"), ("2026-01-05T12:00:00Z", "a"), ("2026-01-07T12:00:00Z", "b")):
        log_all(replace(run, started=begun, id=id_), findings, LogTarget(TENSORBOARD, str(tmp_path)))
    assert len(list((tmp_path / "bf16").iterdir())) == 2
    points = read(board, tmp_path / "bf16").Scalars(f"transformer/best_seconds {PLACE}")
    assert [point.step for point in points] == [1767614400, 1767787200]


def test_a_training_that_goes_on_continues_its_curve(board: Any, tmp_path: Path) -> None:
    """In a separate folder; non-finite values are left out."""
    for steps in ((0, 1, 2), (2, 3)):
        logger = ScalarLogger([LogTarget(TENSORBOARD, str(tmp_path))], SOURCE, lambda _: None, "")
        for step in steps:
            logger.log("fp8 seed 0/training/loss", step, 4.0 - step)
            logger.log("fp8 seed 0/training/odd", step, math.nan)
        logger.close()
    reader = read(board, tmp_path / "t1" / "fp8 seed 0")
    assert reader.Tags()["scalars"] == ["training/loss"]
    assert {point.step: point.value for point in reader.Scalars("training/loss")} == {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}


def test_a_sink_that_fails_is_reported_once_and_the_other_goes_on(
    board: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Wandb(ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    targets = [LogTarget(WANDB, "mine"), LogTarget(TENSORBOARD, str(tmp_path))]
    said: list[str] = []
    logger = ScalarLogger(targets, SOURCE, said.append, "the training goes on")
    for step in range(4):
        logger.log("fp8/loss", step, 1.0)
    logger.close()
    assert said == [
        "not logged to wandb:mine (ConnectionError: no network); the training goes on",
        f"logged to tensorboard:{tmp_path}",
    ]
    assert len(read(board, tmp_path / "t1" / "fp8").Scalars("loss")) == 4


def test_without_the_package_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["wandb", "tensorboard", *(name for name in sys.modules if name.split(".")[0] == "tensorboard")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"--log tensorboard:.* needs the package tensorboard, .*fp8bench\[tb\]"):
        check_log_target(LogTarget(TENSORBOARD, str(tmp_path / "new")))
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="--log wandb:x needs the package wandb, which does not import"):
        check_log_target(LogTarget(WANDB, "x"))


class Wandb:
    """Stands in for wandb, and records its calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._error = error

    def init(self, **options: Any) -> Wandb:
        self.calls.append(("init", options))
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.calls.append(("define", (name, step_metric)))

    def log(self, values: dict[str, float]) -> None:
        if self._error is not None:
            raise self._error
        self.calls.append(("log", values))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_wandb_gets_a_row_for_each_step_of_a_run_that_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    check_log_target(LogTarget(WANDB, "mine"))
    logger = ScalarLogger([LogTarget(WANDB, "mine")], SOURCE, lambda _: None, "")
    for name, step in (("a/loss", 0), ("b/loss", 0), ("a/loss", 1)):
        logger.log(name, step, 2.0)
    logger.close()
    options = {
        "project": "mine",
        "name": "training t1",
        "id": "fp8bench-t1",
        "resume": "allow",
        "config": {"command": "c"},
    }
    assert wandb.calls == [
        ("init", options),
        ("define", ("*", "step")),
        ("log", {"step": 0, "a/loss": 2.0, "b/loss": 2.0}),
        ("log", {"step": 1, "a/loss": 2.0}),
        ("finish", None),
    ]


def test_the_package_itself_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="`pip install 'fp8bench[wandb]'` to run this")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert log_all(*transformer(), LogTarget(WANDB, "fp8bench")) == ["logged to wandb:fp8bench"]
    assert list(tmp_path.rglob("*.wandb"))
