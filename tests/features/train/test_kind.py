"""A training's folder: what is written is read back, whatever a kill or a disk does to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.errors import RunNotFound, StoreError
from fp8bench.features.train.kind import (
    KIND,
    ResumePoint,
    TrainingWriter,
    find_training,
    load_training,
    reopen_training,
    start_training,
)
from fp8bench.features.train.values import ArmCost, LayerReading, StepFigure, StreamLine, TrainingEvent, Validation
from fp8bench.jobs.kinds import find_results
from fp8bench.model import MemoryUse
from fp8bench.store.runs.run_file import start_run
from tests.older import as_older
from tests.runs import measured
from tests.trainings import row_of, training

LINES: tuple[StreamLine, ...] = (
    row_of("fp8", 0, 3),
    replace(row_of("fp8", 0, 4), loss=float("nan"), gradient_norm=float("inf"), skipped=True),
    LayerReading("fp8", 0, 4, "blocks.0.mlp.up", "input", 3.5, 1e-9, 0.1, 0.7, 0.25, lag=None, signal_to_noise=31.5),
    StepFigure("fp8", 0, 4, "noise_scale", 812.0),
    Validation("fp8", 0, 5, "held-out", 3.25, 4096),
    TrainingEvent("fp8", 0, 5, "not-finite", "the loss is nan", "head", "output", (("amax", 1e38),), "lower the rate"),
    ArmCost("fp8", 0, kept=(("weights", 4000),), memory=MemoryUse(9000, (("weights", 4000), ("other", 5000)))),
)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TrainingWriter]:
    begun = start_training(training(), tmp_path / "store")
    begun.store_point(0, 0, None, ())
    yield begun
    begun.close()


def test_every_kind_of_line_comes_back(writer: TrainingWriter) -> None:
    assert {type(line) for line in LINES} == set(StreamLine.__subclasses__())
    writer.append(LINES)
    unfinished = load_training(writer.path)
    writer.finish("finished")
    kept = load_training(writer.path)
    assert repr(kept.lines) == repr(LINES) and kept.training == training() and not kept.troubles
    assert kept.finished and not unfinished.finished and kept.select_lines(Validation) == (LINES[4],)


def test_broken_lines_are_left_out_and_named(writer: TrainingWriter) -> None:
    writer.append(LINES)
    writer.close()
    with as_older(writer.path).open("ab") as file:
        file.write(b'{"step": 3}\n[]\n{"later": {}}\n\xff\xfe\n{"event": {"arm": "fp8"}}\n{"step": {"arm": "fp')
    kept = load_training(writer.path)
    assert repr(kept.lines) == repr(LINES) and len(kept.troubles) == 6
    assert f"line {len(LINES) + 4} is of an unknown kind" in kept.troubles[2]
    writer.path.write_text(writer.path.read_text(errors="replace").replace('{"schema":1', '{"schema":999', 1))
    with pytest.raises(StoreError, match="written by a newer fp8bench"):
        load_training(writer.path)


def test_going_back_cuts_the_stream_and_keeps_events(writer: TrainingWriter) -> None:
    writer.append(LINES[:2])
    folder = writer.make_checkpoint_folder(0, 6)
    folder.mkdir()
    writer.store_point(0, 6, folder, (("mxfp8", "it crashed"),))
    resumed = TrainingEvent("", 0, 6, "resumed", "resumed from step 6")
    writer.append((*LINES[2:], resumed))
    writer.close()
    again = reopen_training(writer.path)
    assert again.points == writer.points and again.points[-1].out == (("mxfp8", "it crashed"),)
    again.truncate_at_resume_point(again.points[-1])
    again.append(LINES[3:4])
    assert repr(load_training(writer.path).lines) == repr((*LINES[:2], resumed, LINES[3]))
    again.truncate_at_resume_point(again.points[0])
    assert load_training(writer.path).lines == (resumed,) and again.points == writer.points[:1]
    again.close()
    third = reopen_training(writer.path)
    assert third.points == again.points and not list(folder.parent.iterdir()), "a place that was passed over is gone"
    third.close()


def test_places_that_cannot_be_read_are_not_guessed(writer: TrainingWriter) -> None:
    """A checkpoint without a place is removed, complete or not.

    Without a file of places nothing was stored; a broken one is an error.
    """
    folder = writer.make_checkpoint_folder(0, 6)
    kept = writer.path.with_name("places.json")
    folder.mkdir()
    writer.store_point(0, 6, folder, ())
    for name in ("0-12", ".0-12.0a1b.partial"):
        (folder.parent / name).mkdir()
    writer.close()
    reopen_training(writer.path).close()
    assert [path.name for path in folder.parent.iterdir()] == ["0-6"]
    kept.write_text("[{")
    with pytest.raises(StoreError, match=r"places\.json, which says where to resume, is broken"):
        reopen_training(writer.path)
    kept.unlink()
    again = reopen_training(writer.path)
    assert again.points == (ResumePoint(0, 0, len(writer.path.read_bytes().splitlines(keepends=True)[0])),)
    again.close()


def test_trainings_are_found_by_what_they_are_called(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for number in (1, 2, 0x10):
        start_training(training(number), store).close()
    newest, _, oldest = KIND.files(store)
    assert newest.parent.name == "20260105T120016.000Z-ffffffff-00000010"
    assert find_training("last", store) == newest and KIND.find("0000001", store) == newest
    words = ("00000001", oldest.parent.name, str(oldest), str(oldest.parent))
    assert {KIND.find(word, store) for word in words} == {oldest}
    assert not any(KIND.find(word, store) for word in ("000000", "ffff", "", "last", "x\0y"))
    with pytest.raises(RunNotFound, match=f"no training 'ffff' in .* The newest is {newest.parent.name}"):
        find_training("ffff", store)
    with pytest.raises(RunNotFound, match="The store has no trainings yet"):
        find_training("last", tmp_path / "nowhere")


def test_last_is_a_run_or_a_training_whichever_began_last(tmp_path: Path) -> None:
    store = tmp_path / "store"
    start_training(replace(training(1), started="2020-01-05T12:00:00Z"), store).close()
    assert find_results("last", store) == [(KIND, KIND.files(store)[0])]
    writer = start_run(measured()[0], store)
    writer.finish("finished")
    assert find_results("last", store) == []
    start_training(replace(training(2), started="2096-01-05T12:00:00Z"), store).close()
    assert find_results("last", store) == [(KIND, KIND.files(store)[0])]
