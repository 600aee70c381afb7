"""A training that is killed, whenever, goes on to the very losses that it would have come to."""

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
from fp8bench.features.train.kind import load_training, training_files
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.values import StepRow, TrainingEvent
from fp8bench.measure.handle import LocalWorker
from suites.kill import wait_until_gone
from tests.commands import Say
from tests.counts import counts
from tests.forked_workers import started, workers
from tests.trainings import said, write_tokens

# Amaxes that are remembered, rounding at random, and dropout: what a checkpoint could forget.
USUAL = ("train", "--data", "text", "--batch", "1", "--sequence", "16", "--dropout", "0.1", "--evaluate", "8")
SHORT = (*USUAL, "--dtypes", "bf16,fp8-delayed", "--steps", "6", "--seeds", "1", "--keep", "2")
LONG = (*USUAL, "--dtypes", "bf16,fp8-delayed,nvfp4", "--steps", "16", "--seeds", "2", "--keep", "6")
_PATIENCE = 300.0


def wait_for(process: subprocess.Popen[bytes], store: Path, more: int) -> None:
    """Until the stream has so many bytes more than the resumption left, or it is over: no matter how fast that is."""
    begun, end = None, time.monotonic() + _PATIENCE
    while process.poll() is None and time.monotonic() < end:
        paths = training_files(store)
        size = paths[0].stat().st_size if paths else 0
        begun = size if begun is None or size < begun else begun
        if paths and size >= begun + more:
            return
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@counts(1, 20)
def test_killed_and_gone_on_with_it_comes_to_the_same_losses(
    count: int, store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parent, worker or both, at random moments; every line is there once, and every bit is as without a kill."""
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: LocalWorker(settings, Lab))
    write_tokens(Path("text"))
    begin = SHORT if count == 1 else LONG
    assert fp8bench(*begin, "--store", "whole")[0] == 0
    whole = load_training(training_files(Path("whole"))[0])
    chance = random.Random(20261122)
    kills, length = 0, Path(whole.path).stat().st_size
    words = begin
    while kills < count:
        command = [*words, "--store", str(store)]
        with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_for(process, store, chance.randrange(length * 2 // 3))
            time.sleep(chance.uniform(0, 0.1))
            began = workers(process.pid)
            victims = chance.choice(([process.pid], [*began, process.pid], [*began]))
            for victim in victims if process.poll() is None else ():
                with contextlib.suppress(ProcessLookupError):  # a worker that has come to its end by itself
                    os.kill(victim, signal.SIGKILL)
                    kills += 1 if victim == victims[0] else 0
            process.wait(_PATIENCE)
        assert not wait_until_gone(began, 10.0)
        kept = load_training(training_files(store)[0])
        assert len(kept.troubles) <= 1 and "out" not in {event.kind for event in kept.of(TrainingEvent)}
        if kept.finished:
            assert said(kept) == said(whole)
            words = begin
        else:
            words = ("train", "--resume", "last")
    if not kept.finished:
        # Not in this process, which has a timer: it would be another one than the training began in.
        with started([*words, "--store", str(store)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            assert process.wait(_PATIENCE) == 0, process.stderr and process.stderr.read()
        kept = load_training(training_files(store)[0])
    assert kept.finished and said(kept) == said(whole)
    rows = [(row.seed, row.arm, row.step) for row in kept.of(StepRow)]
    assert len(rows) == len(set(rows)) == len(whole.of(StepRow))
