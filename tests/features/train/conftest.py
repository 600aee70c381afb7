"""Trainings with a fake lab, and labs in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8bench.features.train import run as job
from fp8bench.features.train.kind import KIND
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.values import StoredTraining
from fp8bench.measure.handle import LocalWorker
from tests.trainings import FakeLab, NotedTraining, write_text

Trained = Callable[..., tuple[StoredTraining, FakeLab, NotedTraining]]


@pytest.fixture
def trained(store: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Trains with a fake lab; without a request resumes the existing training."""
    write_text()

    def train(lab: FakeLab, request: TrainingRequest | None = None) -> tuple[StoredTraining, FakeLab, NotedTraining]:
        monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: lab)
        seen = NotedTraining()
        kept = (
            job.resume(KIND.files(store)[0], store, seen)[1]
            if request is None
            else job.train(request, store, seen, "fp8bench train")
        )
        assert lab.closed
        return kept, lab, seen

    return train


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opens labs in this process that validate on a sixteenth of the held-out text."""
    monkeypatch.setattr("fp8bench.features.train.lab.evaluate._VALIDATED_TOKENS", 256)
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: LocalWorker(settings, Lab))
