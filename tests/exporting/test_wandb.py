"""A run for Weights & Biases: what its package is called with, and the package itself where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.exporting import wandb as ours
from fp8bench.exporting.scalars import figures
from tests.runs import transformer


class Board:
    """Stands in for the package, and keeps what it is called with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.told: list[tuple[str, Any]] = []
        self._error = error

    def init(self, **options: Any) -> Board:
        self.told.append(("init", options))
        return self

    def log(self, values: dict[str, float]) -> None:
        if self._error is not None:
            raise self._error
        self.told.append(("log", values))

    def Artifact(self, name: str, type: str) -> SimpleNamespace:  # noqa: A002, N802 - as the package calls them
        return SimpleNamespace(add_file=lambda path, name: self.told.append(("file", (path, name))))

    def log_artifact(self, artifact: SimpleNamespace) -> None:
        self.told.append(("artifact", artifact))

    def finish(self, exit_code: int = 0) -> None:
        self.told.append(("finish", exit_code))


def test_figures_and_files_are_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the run's own name, with what tells it from others; whether over a network is not ours to say."""
    board = Board()
    monkeypatch.setitem(sys.modules, "wandb", board)
    run, findings = transformer()
    ours.check()
    ours.send(run, findings, "mine", [Path("a/run.jsonl"), Path("b/report.html")])
    (_, options), (_, values), *files, artifact, finish = board.told
    assert options["project"] == "mine" and options["name"] == "x 20260105-120000"
    assert options["config"]["command"] == run.command and options["config"]["moment"] == 1767614400
    assert set(options) == {"project", "name", "config"}
    assert values == {f"{one.mode}/{one.tag}": one.value for one in figures(run, findings)} and values
    assert files == [("file", ("a/run.jsonl", "run.jsonl")), ("file", ("b/report.html", "report.html"))]
    assert artifact[0] == "artifact" and finish == ("finish", 0)


def test_what_goes_wrong_is_told_to_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, "wandb", board)
    with pytest.raises(ConnectionError, match="no network"):
        ours.send(*transformer(), "mine", [])
    assert board.told[-1] == ("finish", 1)


def test_without_the_package_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="--wandb needs the package wandb, which does not import"):
        ours.check()


def test_the_package_itself_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves the machine."""
    pytest.importorskip("wandb", reason="wandb is in no extra; `pip install wandb` to run this")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run.jsonl").write_text("{}\n")
    ours.send(*transformer(), "fp8bench", [tmp_path / "run.jsonl"])
    assert list(tmp_path.rglob("*.wandb"))
