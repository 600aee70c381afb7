"""Trainings killed at any moment - parents, workers and ranks - resume to the same bits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fp8bench.features.train import run as job
from fp8bench.features.train.kind import KIND, load_training
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import PARALLEL, TrainerSettings
from fp8bench.features.train.run import train
from fp8bench.features.train.values import ArmCost, StepRow, StoredTraining, TrainingEvent
from fp8bench.features.train.view import list_training_facts
from fp8bench.measure.handle import LocalWorker
from fp8bench.nn.sizes import SIZES
from suites.kill import wait_until_gone
from tests.commands import Say
from tests.counts import counts, sampled
from tests.features.train.lab import plants as planted
from tests.features.train.lab.labs import TINY
from tests.forked_workers import started, workers
from tests.measure.ranks.test_worker import gone
from tests.own_suites import forgotten
from tests.trainings import NotedTraining, said, small, write_text, write_tokens

# Delayed scales, random rounding and dropout: state that a checkpoint could lose.
USUAL = ("train", "--data", "text", "--batch", "1", "--sequence", "16", "--dropout", "0.1", "--evaluate", "8")
SHORT = (*USUAL, "--dtypes", "bf16,fp8-delayed", "--steps", "6", "--seeds", "1", "--keep", "2")
LONG = (*USUAL, "--dtypes", "bf16,fp8-delayed,nvfp4", "--steps", "16", "--seeds", "2", "--keep", "6")
_PATIENCE = 300.0


def wait_for(process: subprocess.Popen[bytes], store: Path, more: int) -> None:
    """Waits until the stream has grown by `more` bytes since the start, or the process has ended."""
    begun = None
    end = time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < end:
        paths = KIND.files(store)
        size = paths[0].stat().st_size if paths else 0
        begun = size if begun is None or size < begun else begun
        if paths and size >= begun + more:
            return
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@counts(1, 20)
def test_killed_trainings_resume_to_the_same_losses(
    count: int, store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parent, worker or both, at random moments; every line exists once."""
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: LocalWorker(settings, Lab))
    write_tokens(Path("text"))
    begin = SHORT if count == 1 else LONG
    assert fp8bench(*begin, "--store", "whole")[0] == 0
    whole = load_training(KIND.files(Path("whole"))[0])
    chance = random.Random(20261122)
    kills = 0
    length = Path(whole.path).stat().st_size
    words = begin
    while kills < count:
        command = [*words, "--store", str(store)]
        with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_for(process, store, chance.randrange(length * 2 // 3))
            time.sleep(chance.uniform(0, 0.1))
            began = workers(process.pid)
            victims = chance.choice(([process.pid], [*began, process.pid], [*began]))
            for victim in victims if process.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):  # a worker that ended by itself
                    os.kill(victim, signal.SIGKILL)
                    kills += 1 if victim == victims[0] else 0
            process.wait(_PATIENCE)
        assert not wait_until_gone(began, 120.0)
        kept = load_training(KIND.files(store)[0])
        assert len(kept.troubles) <= 1 and "out" not in {event.kind for event in kept.select_lines(TrainingEvent)}
        if kept.finished:
            assert said(kept) == said(whole)
            words = begin
        else:
            words = ("train", "--resume", "last")
    if not kept.finished:
        # Not in this process, which has a timer and so would count as a different environment.
        with started([*words, "--store", str(store)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            assert process.wait(_PATIENCE) == 0, process.stderr and process.stderr.read()
        kept = load_training(KIND.files(store)[0])
    assert kept.finished and said(kept) == said(whole)
    rows = [(row.seed, row.arm, row.step) for row in kept.select_lines(StepRow)]
    assert len(rows) == len(set(rows)) == len(whole.select_lines(StepRow))


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANTED_RANKS", str(tmp_path))
    monkeypatch.setitem(SIZES, TINY, planted.SIZE)
    write_text()


def trained(store: Path, seed: int, parallel: str = "ddp") -> StoredTraining:
    request = small(
        dtypes=("fp32", "fp8-delayed"),
        settings=TrainerSettings(model=TINY, parallel=parallel),
        ranks=2,
        seeds=1,
        seed=seed,
        steps=12,
        keep=5,
        imports=(planted.FILE,),
        energy=True,
    )
    with forgotten(Path(planted.FILE).parent):
        return train(request, store, NotedTraining(), "fp8bench train")


def learnt(kept: StoredTraining) -> list[str]:
    """The lines without times; restarts and resumptions are included."""
    return sorted(map(repr, said(kept)))


def kinds(kept: StoredTraining) -> list[str]:
    return [event.kind for event in kept.select_lines(TrainingEvent)]


@pytest.mark.parametrize("parallel", sampled(["fsdp"], PARALLEL))
def test_a_rank_that_is_killed_costs_no_bit(parallel: str, tmp_path: Path) -> None:
    killed = trained(tmp_path / "killed", planted.KILLED, parallel)  # which leaves a message that it died
    whole = trained(tmp_path / "whole", planted.KILLED, parallel)
    (event,) = killed.select_lines(TrainingEvent)
    assert event.kind == "restarted" and "rank 1 of 2, in " in event.words and "was ended by SIGKILL" in event.words
    assert killed.finished and whole.finished and not kinds(whole) and learnt(killed) == learnt(whole) and gone()
    assert whole.training.device.ranks == 2 and dict(list_training_facts(whole.training))["ranks"].startswith(
        f"2 by {parallel}"
    )
    assert all("several ranks" in cost.energy.why for cost in whole.select_lines(ArmCost) if cost.energy)
    (cost,) = [cost for cost in whole.select_lines(ArmCost) if cost.arm == "fp32" and cost.memory]
    assert cost.memory is not None and len(cost.memory.ranks) == 2
    kept = dict(cost.kept)["weights"]
    weights = dict(cost.memory.roles)["weights"]
    count = whole.training.parameters
    if parallel == "zero":  # nobody has half of unsplit weights
        assert 0.4 < kept / (4 * count) < 0.6 and weights == kept + 4 * count
    elif parallel == "fsdp":  # at the peak the gathered weights exist in addition to the rank's shard
        assert (kept, weights) == (2 * count, 6 * count)
    else:
        assert kept == weights and (weights < 4 * count) == (parallel != "ddp")
