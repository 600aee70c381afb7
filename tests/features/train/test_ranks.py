"""Trainings by real ranks, from the request to the stream: a rank is killed, the parent is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.features.train.kind import load_training, training_files
from fp8bench.features.train.request import PARALLEL, TrainerSettings
from fp8bench.features.train.run import resume, train
from fp8bench.features.train.values import (
    REWOUND,
    ArmCost,
    KeptTraining,
    LayerReading,
    StepRow,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.view import facts_of
from fp8bench.nn.sizes import SIZES
from tests.counts import sampled
from tests.features.train.lab import plants as planted
from tests.features.train.lab.labs import TINY
from tests.measure.ranks.test_worker import gone
from tests.own_suites import forgotten
from tests.trainings import NotedTraining, small

pytestmark = pytest.mark.slow
SETTINGS = TrainerSettings(model=TINY, parallel="ddp")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> KeptTraining:
    """A training in which nothing happened."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        _prepared(folder, patch)
        Path(f"died-{planted.KILLED}").touch()
        return trained(folder / "store", planted.KILLED)


@pytest.fixture(autouse=True)
def _text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _prepared(tmp_path, monkeypatch)


def _prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PLANTED_RANKS", str(folder))
    monkeypatch.setitem(SIZES, TINY, planted.SIZE)
    Path("text.txt").write_text("every token is a byte of this text. " * 4000)


def trained(store: Path, seed: int, parallel: str = "ddp", on_nan: str = "stop") -> KeptTraining:
    settings = replace(SETTINGS, parallel=parallel, on_nan=on_nan)
    request = small(
        dtypes=("fp32", "fp8-delayed"), settings=settings, ranks=2, seeds=1, seed=seed,
        steps=12, keep=5, imports=(planted.FILE,), energy=True, sweep=(("amax-group", ("own", "parallel")),),
    )  # fmt: skip
    with forgotten(Path(planted.FILE).parent):
        return train(request, store, NotedTraining(), "fp8bench train")


def told(kept: KeptTraining) -> list[object]:
    """What was learnt, without times."""
    lines = kept.of(StepRow) + kept.of(LayerReading) + kept.of(Validation)
    return sorted(repr(replace(one, seconds=0.0) if isinstance(one, StepRow) else one) for one in lines)


def test_a_rank_that_is_killed_costs_no_bit_and_once_more_its_arm(whole: KeptTraining, tmp_path: Path) -> None:
    """The first time fresh ranks go on from the checkpoint, to the same losses; then the arm is out."""
    assert whole.finished and not whole.of(TrainingEvent) and whole.training.device.ranks == 2
    assert {cost.energy.why for cost in whole.of(ArmCost) if cost.energy} == {
        "several ranks train together, and energy is measured of one process"
    }
    assert dict(facts_of(whole.training))["ranks"].startswith("2 by ddp; ")
    killed = trained(tmp_path / "killed", planted.KILLED)
    (event,) = killed.of(TrainingEvent)
    assert event.kind == "restarted" and "rank 1 of 2, in " in event.words and "was ended by SIGKILL" in event.words
    assert killed.finished and told(killed) == told(whole)

    out = trained(tmp_path / "out", planted.KILLED_TWICE)
    assert out.finished and [one.kind for one in out.of(TrainingEvent)] == ["restarted", "out"] * 2
    steps = {
        arm: {row.step for row in out.of(StepRow) if row.arm == arm} for arm in ("fp32", "fp8-delayed amax-group=own")
    }
    assert steps["fp32"] == set(range(12)) and 11 not in steps["fp8-delayed amax-group=own"]
    assert gone()


@pytest.mark.parametrize("parallel", sampled(["fsdp"], [one for one in PARALLEL if one != "ddp"]))
def test_a_rank_that_keeps_its_own_part_goes_on_to_the_same_bits(parallel: str, tmp_path: Path) -> None:
    killed = trained(tmp_path / "killed", planted.KILLED, parallel)  # which leaves a word that it died
    whole = trained(tmp_path / "whole", planted.KILLED, parallel)
    assert [one.kind for one in killed.of(TrainingEvent)] == ["restarted"] and not whole.of(TrainingEvent)
    assert killed.finished and whole.finished and told(killed) == told(whole)
    assert dict(facts_of(whole.training))["ranks"].startswith(f"2 by {parallel}; ")
    (cost,) = [one for one in whole.of(ArmCost) if one.arm == "fp32" and one.memory]
    assert cost.memory is not None and len(cost.memory.ranks) == 2
    kept, weights = dict(cost.kept)["weights"], dict(cost.memory.roles)["weights"]
    if parallel == "zero":  # of whole weights nobody has half
        assert 0.4 < kept / (4 * whole.training.parameters) < 0.6 and weights == kept + 4 * whole.training.parameters
    elif parallel == "fsdp":  # whole weights are there at the highest point, beside a rank's own
        assert (kept, weights) == (2 * whole.training.parameters, 6 * whole.training.parameters)
    else:
        assert kept == weights < 4 * whole.training.parameters


def command(seed: int, *more: str) -> list[str]:
    """What `trained` asks for, as another process of one's own."""
    return [
        sys.executable, "-m", "fp8bench", "train", "--dtypes", "fp32,fp8-delayed", "--model", TINY, "--ranks", "2",
        "--parallel", "ddp", "--seeds", "1", "--seed", str(seed), "--steps", "12", "--keep", "5",
        "--evaluate", "10", "--data", "text.txt", "--import", planted.FILE, "--sweep", "amax-group=own,parallel",
        "--store", "killed", "--bands", "repeat,other-seed", *more,
    ]  # fmt: skip


def test_what_is_killed_with_its_parent_goes_on_to_the_same_bits(whole: KeptTraining) -> None:
    Path(f"died-{planted.KILLED}").touch()
    words = command(planted.KILLED)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 600
    while not list(Path("killed").glob("trainings/*/checkpoints/0-5/rank-1/checkpoint.json")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()
    assert gone()
    (path,) = training_files(Path("killed"))
    assert not load_training(path).finished
    with forgotten(Path(planted.FILE).parent):
        _, kept = resume(path, Path("killed"), NotedTraining())
    assert kept.finished and told(kept) == told(whole)


def test_ranks_rewind_to_the_same_bits_whenever_they_are_killed(tmp_path: Path) -> None:
    """Rank 1 alone meets a NaN. The parent, and with it the ranks, is killed at three random moments: before, within
    or after what is done again."""
    whole = trained(tmp_path / "whole", planted.NAN_IN_OUTPUT, on_nan="rewind")
    rewound = [(event.arm, event.step, dict(event.values)["to"]) for event in events(whole) if event.kind == REWOUND]
    assert sorted(rewound) == [(f"fp8-delayed amax-group={group}", 7, 5) for group in ("own", "parallel")]
    chance, store = random.Random(20261127), Path("killed")
    moments = sorted(chance.uniform(0.1, 0.8) * Path(whole.path).stat().st_size for _ in range(3))
    words = command(planted.NAN_IN_OUTPUT, "--on-nan", "rewind")
    for moment in moments:
        process, end = subprocess.Popen(words, stdout=subprocess.DEVNULL), time.monotonic() + 600
        while sum(path.stat().st_size for path in training_files(store)) < moment:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert gone()
        words = [sys.executable, "-m", "fp8bench", "train", "--resume", "last", "--store", "killed"]
    (path,) = training_files(store)
    assert not load_training(path).finished
    with forgotten(Path(planted.FILE).parent):
        _, kept = resume(path, store, NotedTraining())
    assert kept.finished and told(kept) == told(whole) and events(kept) == events(whole)


def events(kept: KeptTraining) -> list[TrainingEvent]:
    """But for what says that it was gone on with."""
    return sorted((event for event in kept.of(TrainingEvent) if event.kind != "resumed"), key=repr)
