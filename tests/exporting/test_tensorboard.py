"""Scalars for TensorBoard, read back by its own reader."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp8bench.errors import StoreError, UsageError
from fp8bench.exporting.scalars import figures
from fp8bench.exporting.tensorboard import check, write
from fp8bench.model import Run
from tests.runs import gemm, transformer

TAG = "transformer/best_seconds layers=4,width=256,heads=4,context=256,batch=4@cpu"


@pytest.fixture
def board() -> ModuleType:
    """TensorBoard's reader, where it is installed."""
    found: ModuleType = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return found


def read(board: ModuleType, folder: Path) -> Any:
    found = board.EventAccumulator(str(folder), size_guidance={board.SCALARS: 0})
    found.Reload()
    return found


def at(run: Run, moment: str, id: str) -> Run:  # noqa: A002 - as the field is called
    return replace(run, started=moment, id=id)


def test_every_figure_is_read_back(board: ModuleType, tmp_path: Path) -> None:
    """A folder a precision, at the run's place on the curve."""
    run, findings = gemm()
    files = write(run, findings, tmp_path)
    assert [file.parent.name for file in files] == ["fp32", "bf16", "fp8", "nvfp4"][: len(files)]
    expected = {(one.mode, one.tag): one.value for one in figures(run, findings)}
    found = {}
    for file in files:
        reader = read(board, file.parent)
        for tag in reader.Tags()["scalars"]:
            (point,) = reader.Scalars(tag)
            assert (point.step, point.wall_time) == (1767614400, 1767614400.0)
            found[file.parent.name, tag] = point.value
    assert found == pytest.approx(expected, rel=1e-6) and expected


def test_runs_form_a_curve_in_whatever_order_they_are_written(board: ModuleType, tmp_path: Path) -> None:
    """By their names the files lie in its order; one that is written again replaces itself."""
    run, findings = transformer()
    for moment, id_ in (("2026-01-07T12:00:00Z", "b"), ("2026-01-05T12:00:00Z", "a"), ("2026-01-07T12:00:00Z", "b")):
        write(at(run, moment, id_), findings, tmp_path)
    assert len(list((tmp_path / "bf16").iterdir())) == 2
    assert [one.step for one in read(board, tmp_path / "bf16").Scalars(TAG)] == [1767614400, 1767787200]


def test_a_mode_of_whatever_letters_is_one_folder(board: ModuleType, tmp_path: Path) -> None:
    run, findings = transformer()
    case = replace(run.records[0].case, precision_map=(("mlp", "../x"),))
    run = replace(run, records=(replace(run.records[0], case=case),))
    (file,) = write(run, findings, tmp_path)
    assert file.parent.parent == tmp_path and file.parent.name.startswith("bf16_mlp=.._x_-")


def test_a_file_that_cannot_be_written_is_told(board: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bf16").touch()
    with pytest.raises(StoreError, match=r"bf16/events.* cannot be written \("):
        write(*transformer(), tmp_path)


def test_without_the_package_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a folder is made."""
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UsageError, match=r"--tensorboard needs the package tensorboard, .*fp8bench\[tb\]"):
        check(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_refused(board: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--tensorboard .* cannot be written"):
        check(tmp_path / "file" / "below")


def test_torch_is_not_needed_for_it(board: ModuleType, tmp_path: Path) -> None:
    """The parent process never imports it."""
    program = (
        "import sys; from pathlib import Path\n"
        "from fp8bench.exporting.tensorboard import check, write\n"
        "from tests.runs import transformer\n"
        f"check(Path({str(tmp_path)!r})); print(len(write(*transformer(), Path({str(tmp_path)!r}))))\n"
        "print([name for name in ('torch', 'tensorflow') if name in sys.modules])\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert (done.stdout.split("\n", 1), done.returncode) == (["3", "[]\n"], 0), done.stderr
