"""The runs behind measured claims: stored ones that still count, and new ones for what is missing."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from fp8bench import __version__
from fp8bench.analysis.roofline import datasheet_of
from fp8bench.errors import StoreError
from fp8bench.features.claim.values import Claim, ClaimKind
from fp8bench.features.train.kind import KIND, load_training
from fp8bench.features.train.kind import load_head as load_training_head
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.run import resume as resume_training
from fp8bench.features.train.run import train
from fp8bench.features.train.values import KeptTraining, Training, TrainingObserver
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.environment import command_line
from fp8bench.measure.handle import ProcessWorker, claim_process
from fp8bench.model import DeviceFacts, Environment, Request, Run
from fp8bench.model.raw import Settings
from fp8bench.pipeline import execute, resume
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_head, load_run
from fp8bench.units import clock

_LONGEST_AGE = timedelta(days=7)
Question = Request | TrainingRequest
StoredRun = Run | KeptTraining
ORIGIN = "claim"


class NotHere(Exception):
    """This machine cannot answer; `remedy` names a command and a device that can."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


@dataclass
class RunSource:
    """Finds or makes the runs of claims, each once.

    `questions` has the request of each `run` text, `device` is the one that the user asked for, '' for none.
    """

    store: Path
    questions: Mapping[str, Question]
    device: str
    observer: JobObserver
    training_observer: Callable[[], AbstractContextManager[TrainingObserver]]
    runs_by_claim: dict[str, StoredRun] = field(default_factory=dict)
    _runs: dict[Question, StoredRun] = field(default_factory=dict)

    def __call__(self, claim: Claim) -> StoredRun:
        """Returns the run of a measured claim; measures it if none counts. Raises NotHere."""
        question = self._question(claim)
        if question not in self._runs:
            finished, unfinished = find_stored(question, self.store)
            self._runs[question] = finished or self._measure(question, unfinished)
        self.runs_by_claim[claim.id] = self._runs[question]
        return self._runs[question]

    def announce(self, claims: Iterable[Claim]) -> None:
        """Notes, before measuring, how many runs are reused and how many are missing, and how long these take."""
        missing: dict[Question, float] = {}
        reused: set[Question] = set()
        for claim in claims:
            with suppress(NotHere):
                question = self._question(claim)
                if find_stored(question, self.store)[0] is not None:
                    reused.add(question)
                else:
                    missing[question] = max(claim.seconds, missing.get(question, 0.0))
        if missing:
            seconds = clock(sum(missing.values()))
            duration = f"about {seconds} on an idle machine" if all(missing.values()) else "for an unknown time"
            runs = "1 run" if len(missing) == 1 else f"{len(missing)} runs"
            self.observer.note(
                f"measures {runs}, {duration}, and reuses {len(reused)} of the last 7 days. Ctrl-C keeps what is "
                "measured, and the same command continues."
            )

    def _question(self, claim: Claim) -> Question:
        device = self._device_for(claim)
        question = self.questions[claim.run]
        if isinstance(question, Request):
            return replace(question, devices=(device,))
        return replace(question, device=device)

    def _device_for(self, claim: Claim) -> str:
        if "any" in claim.device:
            return self.device or "cpu"
        if "cpu" in claim.device:
            return "cpu"
        cards = "a GPU" if "cuda" in claim.device else f"one of {', '.join(claim.device)}"
        remedy = f"`fp8bench claim {claim.id} --device cuda` on {cards}"
        if self.device == "cpu":
            raise NotHere(f"it has to be measured on {cards}, and only the CPU may be used", remedy)
        for facts in self._devices:
            if facts.accelerated and self.device in ("", facts.kind, facts.key) and fits_device(claim, facts.name):
                return facts.key
        names = ", ".join(facts.name for facts in self._devices)
        raise NotHere(f"it has to be measured on {cards}, and this machine has {names}", remedy)

    @cached_property
    def _devices(self) -> tuple[DeviceFacts, ...]:
        with claim_process(True), ProcessWorker(Settings(1)) as worker:
            return worker.probe()

    def _measure(self, question: Question, unfinished: Path | None) -> StoredRun:
        """Measures a run, or the rest of one. Raises KeyboardInterrupt where the user has ended it."""
        store, command = self.store, command_line()
        run: StoredRun
        if isinstance(question, Request):
            with self.observer.measuring() as observer:
                if unfinished is None:
                    run = execute(question, store, observer, command, origin=ORIGIN)
                else:
                    run = resume(unfinished, store, observer, command)[1]
        else:
            with self.training_observer() as training_observer:
                if unfinished is None:
                    run = train(question, store, training_observer, command)
                else:
                    run = resume_training(unfinished, store, training_observer)[1]
        if not run.finished:
            raise KeyboardInterrupt
        return run


def without_device(question: Question) -> Question:
    return replace(question, devices=()) if isinstance(question, Request) else replace(question, device=None)


def fits_device(claim: Claim, name: str) -> bool:
    """Whether a device's name is one of the claim's: `cuda` is any GPU, `H200` every card whose name has that word."""
    sheet = datasheet_of(name)
    words = set(f"{name} {sheet.name if sheet else ''}".lower().replace(",", " ").split())
    return "cuda" in claim.device or any({*card.lower().split()} <= words for card in claim.device)


def find_stored(question: Question, store: Path) -> tuple[StoredRun | None, Path | None]:
    """Returns the newest stored run of this question that still counts, or the newest unfinished one, to resume."""
    is_run = isinstance(question, Request)
    unfinished: Path | None = None
    for path in run_files(store) if is_run else KIND.files(store):
        with suppress(StoreError):
            head: Run | Training = load_head(path) if is_run else load_training_head(path)
            if head.request != question or not counts_still(head.environment, head.started):
                continue
            run: StoredRun = load_run(path) if is_run else load_training(path)
            if run.finished and not run.troubles:
                return run, None
            if not run.troubles:
                unfinished = unfinished or path
    return None, unfinished


def counts_still(environment: Environment, started: str) -> bool:
    """Whether a run is of this machine and these versions, and younger than a week."""
    current = {"machine": platform.node() or "unknown", "fp8bench": __version__, "torch": version("torch")}
    is_same = all(environment.get(name) == value for name, value in current.items())
    return is_same and datetime.now(UTC) - datetime.fromisoformat(started) < _LONGEST_AGE


def measured_parts(claims: Iterable[Claim], all_claims: Mapping[str, Claim]) -> Iterator[Claim]:
    """Yields the measured claims among these and among their parts."""
    for claim in claims:
        if claim.kind is ClaimKind.ALL_OF:
            yield from measured_parts((all_claims[part] for part in claim.parts), all_claims)
        elif claim.kind is ClaimKind.MEASURED:
            yield claim
