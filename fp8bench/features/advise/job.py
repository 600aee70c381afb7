"""Collects the evidence for advice on a stored run."""

from __future__ import annotations

from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import UsageError
from fp8bench.features.advise.basis import Basis
from fp8bench.features.infer.values import kept_answers
from fp8bench.features.sensitivity.job import studies_of
from fp8bench.features.train.kind import find_training, load_training
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model.run import BENCH
from fp8bench.store.runs.listing import load_stored_run, store_of


def basis_of(word: str, store: Path, training: str | None, least: float) -> tuple[Basis, list[str]]:
    """Returns the named run with everything the store knows about it, and a list of unreadable files."""
    run = load_stored_run(word, store)
    if run.request.suite == BENCH:
        raise UsageError(f"the run {run.id} compares callables, but advice is about precisions. Give a suite's run.")
    home = store_of(Path(run.path)) or store
    studies, troubles = studies_of(home)
    trained = None
    if training is not None:
        judged_training = load_training(find_training(training, store))
        trained = JudgedTraining(judged_training)
        troubles += judged_training.troubles
    answers, broken = kept_answers(home).lines()
    served = tuple(dict.fromkeys(answer for answer in answers if run.id in answer.runs))
    return Basis(run, findings(run), studies, trained, least, served), troubles + broken
