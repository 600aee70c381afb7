"""A run as figures with names, in TensorBoard and in Weights & Biases."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8bench.errors import StoreError, UsageError
from fp8bench.model import Environment, Interval, Measurement, Run, Scalar, Status
from fp8bench.report.data.boards import (
    check_tensorboard,
    check_wandb,
    figures,
    moment,
    send_to_wandb,
    write_tensorboard,
)
from tests.counts import for_each
from tests.runs import gemm, memory, transformer

PLACE = "layers=4,width=256,heads=4,context=256,batch=4@cpu"


def named(run: Run, findings: object) -> dict[tuple[str, str], float]:
    return {(figure.mode, figure.tag): figure.value for figure in figures(run, findings)}  # type: ignore[arg-type]


def kind_of(tag: str) -> str:
    return tag.partition("/")[2].partition(" ")[0]


def test_what_an_emulation_costs_shares_no_chart_with_a_speed() -> None:
    told = named(*transformer())
    kinds = {kind_of(tag) for mode, tag in told if mode == "fp8"}
    assert {"emulation_best_seconds", "emulation_phase_cast_seconds", "gradient_error"} <= kinds
    assert not {"best_seconds", "median_seconds", "phase_cast_seconds", "ratio"} & kinds


def test_a_later_version_of_a_workload_has_charts_of_its_own() -> None:
    run, findings = transformer()
    case = replace(run.records[0].case, version="2")
    run = replace(run, records=(replace(run.records[0], case=case),))
    assert {tag.split("/")[0] for _, tag in named(run, findings)} == {"transformer v2"}


def test_what_is_no_number_and_what_was_not_measured_is_left_out() -> None:
    run, findings = transformer()
    odd = (Measurement("loss_error", "ratio", (math.nan,)), Measurement("none", "ratio", ()), memory(1))
    failed = replace(run.records[2], status=Status.FAILED)
    run = replace(run, records=(replace(run.records[0], measurements=odd), failed))
    finding = replace(findings[run.records[0].case.id], ratio=Interval(1.0, 0.9, math.inf, 0.99), best_seconds=math.inf)
    kinds = {kind_of(tag) for _, tag in named(run, {finding.case.id: finding})}
    assert "ratio_low" in kinds and "peak_memory_bytes" in kinds
    assert not kinds & {"best_seconds", "ratio_high", "loss_error", "none"}
    assert {mode for mode, _ in named(run, {})} == {"bf16"}


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
    """Unless its files differed, or no commit is known: then at its start."""
    run = replace(transformer()[0], environment=Environment(facts))
    assert moment(run) == at
    assert moment(replace(run, started="then")) == (at if at == 1700000000 else 0)


@pytest.fixture
def board() -> Any:
    return pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(board: Any, folder: Path) -> Any:
    accumulator = board.EventAccumulator(str(folder), size_guidance={board.SCALARS: 0})
    accumulator.Reload()
    return accumulator


def test_every_figure_is_read_back(board: Any, tmp_path: Path) -> None:
    run, findings = gemm()
    files = write_tensorboard(run, findings, tmp_path)
    assert [file.parent.name for file in files] == ["fp32", "bf16", "fp8", "nvfp4"][: len(files)]
    expected = {(figure.mode, figure.tag): figure.value for figure in figures(run, findings)}
    values = {}
    for file in files:
        reader = read(board, file.parent)
        for tag in reader.Tags()["scalars"]:
            (point,) = reader.Scalars(tag)
            assert (point.step, point.wall_time) == (1767614400, 1767614400.0)
            values[file.parent.name, tag] = point.value
    assert values == pytest.approx(expected, rel=1e-6) and expected


def test_runs_form_a_curve_in_whatever_order_they_are_written(board: Any, tmp_path: Path) -> None:
    """File names sort in the order of the curve; a rewritten file replaces itself."""
    run, findings = transformer()
    for begun, id_ in (("2026-01-07T12:00:00Z", "b"), ("2026-01-05T12:00:00Z", "a"), ("2026-01-07T12:00:00Z", "b")):
        write_tensorboard(replace(run, started=begun, id=id_), findings, tmp_path)
    assert len(list((tmp_path / "bf16").iterdir())) == 2
    points = read(board, tmp_path / "bf16").Scalars(f"transformer/best_seconds {PLACE}")
    assert [point.step for point in points] == [1767614400, 1767787200]


def test_a_mode_of_whatever_letters_is_one_folder(board: Any, tmp_path: Path) -> None:
    run, findings = transformer()
    case = replace(run.records[0].case, precision_map=(("mlp", "../x"),))
    run = replace(run, records=(replace(run.records[0], case=case),))
    (file,) = write_tensorboard(run, findings, tmp_path)
    assert file.parent.parent == tmp_path and file.parent.name.startswith("bf16_mlp=.._x_-")


def test_a_file_that_cannot_be_written_is_told(board: Any, tmp_path: Path) -> None:
    (tmp_path / "bf16").touch()
    with pytest.raises(StoreError, match=r"bf16/events.* cannot be written \("):
        write_tensorboard(*transformer(), tmp_path)
    with pytest.raises(UsageError, match=r"--tensorboard .* cannot be written"):
        check_tensorboard(tmp_path / "bf16" / "below")


def test_without_the_package_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["wandb", *(name for name in sys.modules if name.split(".")[0] == "tensorboard")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"--tensorboard needs the package tensorboard, .*fp8bench\[tb\]"):
        check_tensorboard(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="--wandb needs the package wandb, which does not import"):
        check_wandb()


def test_torch_is_not_needed_for_it(board: Any, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from fp8bench.report.data.boards import check_tensorboard, write_tensorboard\n"
        "from tests.runs import transformer\n"
        "check_tensorboard(Path(sys.argv[1]))\n"
        "print(len(write_tensorboard(*transformer(), Path(sys.argv[1]))), 'torch' in sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, capture_output=True, check=True)
    assert done.stdout.split() == [b"3", b"False"]


class Board:
    """Stands in for wandb, and records its calls."""

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
    board = Board()
    monkeypatch.setitem(sys.modules, "wandb", board)
    run, findings = transformer()
    check_wandb()
    send_to_wandb(run, findings, "mine", [Path("a/run.jsonl"), Path("b/report.html")])
    (_, options), (_, values), *files, artifact, finish = board.told
    assert options["project"] == "mine" and options["name"] == "x 20260105-120000"
    assert options["config"]["command"] == run.command and options["config"]["moment"] == 1767614400
    assert set(options) == {"project", "name", "config"}
    assert values == {f"{figure.mode}/{figure.tag}": figure.value for figure in figures(run, findings)} and values
    assert files == [("file", ("a/run.jsonl", "run.jsonl")), ("file", ("b/report.html", "report.html"))]
    assert artifact[0] == "artifact" and finish == ("finish", 0)


def test_what_goes_wrong_is_told_to_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(ConnectionError("no network"))
    monkeypatch.setitem(sys.modules, "wandb", board)
    with pytest.raises(ConnectionError, match="no network"):
        send_to_wandb(*transformer(), "mine", [])
    assert board.told[-1] == ("finish", 1)


def test_the_package_itself_takes_it_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="`pip install 'fp8bench[wandb]'` to run this")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run.jsonl").write_text("{}\n")
    send_to_wandb(*transformer(), "fp8bench", [tmp_path / "run.jsonl"])
    assert list(tmp_path.rglob("*.wandb"))
