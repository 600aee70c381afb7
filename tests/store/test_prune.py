"""`fp8bench store prune` lists and removes only unneeded files; an error names those kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.features.train.kind import reopen_training, start_training
from fp8bench.files import LineWriter
from tests.commands import Say, unfolded
from tests.histories import history, tree
from tests.trainings import training


def cut_off(store: Path) -> Path:
    writer = start_training(training(), store)
    folder = writer.make_checkpoint_folder(0, 50)
    folder.mkdir(parents=True)
    (folder / "state").write_bytes(bytes(1 << 20))
    writer.store_point(0, 50, folder, ())
    writer.close()
    return writer.path


def test_unneeded_files_are_removed(tmp_path: Path, fp8bench: Say) -> None:
    history(tmp_path, 1.0)
    path = cut_off(tmp_path)
    writer = reopen_training(path)  # a file in use is locked
    before = tree(tmp_path)
    assert "nothing to remove" in unfolded(fp8bench("store", "prune", "--store", str(tmp_path), "--yes")[1])
    assert tree(tmp_path) == before
    writer.close()
    code, out, _ = fp8bench("store", "prune", "--store", str(tmp_path))
    assert (
        code == 0
        and "1.00 MiB can be removed" in unfolded(out)
        and "remove these files with --yes" in out
        and tree(tmp_path) == before
    )
    assert "cut off" in unfolded(out)
    assert fp8bench("store", "prune", "--store", str(tmp_path), "--yes")[0] == 0
    left = {name for name in tree(tmp_path) if not name.startswith("runs")}
    assert left == {str(path.relative_to(tmp_path))}
    assert "nothing to remove" in unfolded(fp8bench("store", "prune", "--store", str(tmp_path))[1])
    writer = reopen_training(path)
    assert [(place.number, place.step) for place in writer.points] == [(0, 0)]
    writer.close()


def test_a_failed_write_names_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    writer = LineWriter.start(tmp_path / "there", {"schema": 1})

    def said(act: Callable[[], object]) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr("fp8bench.files.append", full)
            with pytest.raises(StoreError) as told:
                act()
        return "Finished results are in it" in str(told.value)

    assert not said(lambda: writer.note("more"))
    writer.note("kept")
    assert said(lambda: writer.note("more"))
    writer.path.unlink()
    assert not said(lambda: writer.note("more"))
    writer.close()
    assert not said(lambda: LineWriter.start(tmp_path / "new", {"schema": 1})) and not (tmp_path / "new").exists()
