"""`fp8bench sensitivity`: which layers suffer most in low precision, and a precision map that keeps the loss."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fp8bench import __version__
from fp8bench.corpus import prepare_corpus
from fp8bench.environment import gather
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, StoreError, UsageError
from fp8bench.interrupts import ignored
from fp8bench.measure.handle import LocalWorker, ProcessWorker, Worker
from fp8bench.measure.raw import Settings
from fp8bench.outputs import check_outputs, in_color
from fp8bench.report.live_line import LiveLine
from fp8bench.sensitivity.opening import Question, check, opened
from fp8bench.sensitivity.rows import as_csv, as_json
from fp8bench.sensitivity.runs import run
from fp8bench.sensitivity.study import By, Study
from fp8bench.sensitivity.text import render
from fp8bench.streams import complain, say
from fp8bench.units import clock

_LEAST_SECONDS = 5.0


def sensitivity(arguments: argparse.Namespace) -> int:
    """Train, keep, tell. An interrupt ends it early: what was run is told all the same."""
    check_outputs(arguments)
    question = Question(
        arguments.dtype, arguments.reference, By(arguments.by), arguments.size, arguments.steps,
        arguments.tolerance / 100, arguments.seed, arguments.threads, arguments.device, arguments.data,
        tuple(arguments.imports), arguments.isolation, arguments.case_timeout,
    )  # fmt: skip
    check(question)
    corpus = prepare_corpus(question.data, arguments.store / "data", write=True)
    with _worker(question, corpus.path) as worker:
        study = _studied(question, worker, corpus.identity)
    try:
        study = replace(study, path=_kept(study, arguments.store))
    finally:  # what the store does not take is told at least
        _tell(study, arguments)
    if not study.finished and not study.baseline.failure:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if study.baseline.failure else EXIT_OK


@contextmanager
def _worker(question: Question, corpus: str) -> Iterator[Worker]:
    settings = Settings(question.threads, question.seed, question.imports, corpus)
    worker = ProcessWorker(settings) if question.isolation else LocalWorker(settings)
    try:
        yield worker
    finally:
        with ignored():
            worker.close()


def _studied(question: Question, worker: Worker, corpus: str) -> Study:
    """The study as far as it came."""
    study, bed = opened(question, worker.probe(), corpus)
    environment = gather(worker.software(), __version__, question.threads, question.imports)
    study = replace(study, started=datetime.now(UTC).isoformat(timespec="milliseconds"), environment=environment)
    line, start = LiveLine(sys.stderr, os.environ), time.monotonic()

    def tell(words: str, done: int, total: int) -> None:
        spent = time.monotonic() - start
        left = f", about {clock(spent / done * (total - done))} left" if done and spent > _LEAST_SECONDS else ""
        line.show(f"{done}/{total} trainings{left}, training with {words}")

    try:
        for further in run(study, bed, worker, tell):
            study = further
    except KeyboardInterrupt:
        complain("interrupted; what was trained is told")
        return study
    finally:
        line.close()
    return replace(study, finished=not study.baseline.failure)


def _kept(study: Study, store: Path) -> str:
    """Write the study into the store; returns its file."""
    stamp = study.started.replace("-", "").replace(":", "").replace("+0000", "Z")
    path = store / "sensitivity" / f"{stamp}-{secrets.token_hex(4)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(study), encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"the study cannot be kept in {path} ({error.strerror}). Choose another --store DIR."
        ) from None
    return str(path)


def _tell(study: Study, arguments: argparse.Namespace) -> None:
    if arguments.csv == "-":
        say(as_csv(study))
    else:
        say(as_json(study) if arguments.json else render(study, in_color()) + "\n")
    if arguments.csv not in (None, "-"):
        try:
            Path(arguments.csv).write_text(as_csv(study), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--csv {arguments.csv} could not be written ({error.strerror}).") from None
