"""Collects the evidence for advice on a stored run."""

from __future__ import annotations

from pathlib import Path

from fp8bench.analysis.findings import findings
from fp8bench.errors import UsageError
from fp8bench.features.advise.basis import AdviceBasis
from fp8bench.features.infer.values import open_serving_answer_log
from fp8bench.features.sensitivity.job import read_sensitivity_studies
from fp8bench.features.train.kind import find_training, load_training
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model.run import BENCH
from fp8bench.store.runs.listing import find_store_of_run, load_stored_run


def collect_advice_basis(
    run_name: str, store: Path, training: str | None, min_gain: float
) -> tuple[AdviceBasis, list[str]]:
    """Returns what the store has for advice on the named run, and a sentence on each unreadable file."""
    run = load_stored_run(run_name, store)
    if run.request.suite == BENCH:
        raise UsageError(f"the run {run.id} compares callables, but advice is about precisions. Give a suite's run.")
    # A run that is named by its path may come from a different store than --store. Use the studies of its store.
    run_store = find_store_of_run(Path(run.path)) or store
    studies, troubles = read_sensitivity_studies(run_store)
    trained = None
    if training is not None:
        stored_training = load_training(find_training(training, store))
        trained = JudgedTraining(stored_training)
        troubles += stored_training.troubles
    logged_answers, broken_answers = open_serving_answer_log(run_store).lines()
    serving_answers = tuple(dict.fromkeys(answer for answer in logged_answers if run.id in answer.runs))
    return AdviceBasis(run, findings(run), studies, trained, min_gain, serving_answers), troubles + broken_answers
