"""Finds stored runs for measured claims, and measures the missing ones."""

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
from fp8bench.analysis.roofline import find_datasheet
from fp8bench.errors import StoreError
from fp8bench.features.claim.values import CannotDecide, Claim, ClaimKind
from fp8bench.features.train.kind import KIND, load_training
from fp8bench.features.train.kind import load_training_header as load_training_head
from fp8bench.features.train.request import TrainingRequest
from fp8bench.features.train.run import resume as resume_training
from fp8bench.features.train.run import train
from fp8bench.features.train.values import StoredTraining, Training, TrainingObserver
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.environment import command_line
from fp8bench.measure.handle import ProcessWorker, register_process_run
from fp8bench.model import DeviceFacts, Environment, Request, Run
from fp8bench.model.raw import Settings
from fp8bench.model.stopping import BUDGET_SECONDS
from fp8bench.pipeline import execute, plan_only, resume
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_header, load_run
from fp8bench.units import clock

_MAX_RUN_AGE = timedelta(days=7)
# The workers of a run start within this time.
_WORKER_START_SECONDS = 10.0
RunRequest = Request | TrainingRequest
StoredRun = Run | StoredTraining
CLAIM_RUN_ORIGIN = "claim"


@dataclass
class ClaimRunSource:
    """Finds or measures the run of each claim. A run that several claims need is only measured once. `questions` maps
    the text of each claim's `run` key to its request. `device` is the device that the user chose, or ''.
    """

    store: Path
    questions: Mapping[str, RunRequest]
    device: str
    observer: JobObserver
    training_observer: Callable[[], AbstractContextManager[TrainingObserver]]
    runs_by_claim: dict[str, StoredRun] = field(default_factory=dict)
    _run_by_request: dict[RunRequest, StoredRun] = field(default_factory=dict)

    def __call__(self, claim: Claim) -> StoredRun:
        """Returns a run that decides a measured claim: a valid one from the store, or a new one. Raises
        CannotDecide.
        """
        request = self._make_run_request(claim)
        if request not in self._run_by_request:
            finished_run, unfinished_path = find_stored_run(request, self.store)
            self._run_by_request[request] = finished_run or self._measure_run(request, unfinished_path)
        self.runs_by_claim[claim.id] = self._run_by_request[request]
        return self._run_by_request[request]

    def announce_measurements(self, claims: Iterable[Claim]) -> None:
        """Prints how many stored runs are used, how many have to be measured, and about how long that takes."""
        # 1. Find the requests without a stored run. Several claims may have the same request.
        seconds_by_request: dict[RunRequest, float] = {}
        reused_runs = set()
        for claim in claims:
            # If a claim cannot be measured here, its answer explains this later.
            with suppress(CannotDecide):
                request = self._make_run_request(claim)
                if find_stored_run(request, self.store)[0] is not None:
                    reused_runs.add(request)
                else:
                    seconds_by_request[request] = max(claim.seconds, seconds_by_request.get(request, 0.0))
        # 2. Add the durations. For a claim without a duration, only an upper limit is known.
        if seconds_by_request:
            limit_seconds = [
                seconds or self._estimate_longest_seconds(request) for request, seconds in seconds_by_request.items()
            ]
            duration_qualifier = "about" if all(seconds_by_request.values()) else "up to"
            measuring_time_text = (
                f"{duration_qualifier} {clock(sum(limit_seconds))} on an idle machine"
                if all(limit_seconds)
                else "for an unknown time"
            )
            run_count = "1 run" if len(seconds_by_request) == 1 else f"{len(seconds_by_request)} runs"
            self.observer.note(
                f"measures {run_count}, {measuring_time_text}, and reuses {len(reused_runs)} of the last 7 days. "
                "Ctrl-C keeps "
                "finished runs, and the same command continues."
            )

    def _estimate_longest_seconds(self, request: RunRequest) -> float:
        """Returns the most seconds that a run takes, unless its steps are unusually long. Returns 0 for a training,
        which has no time limit."""
        if not isinstance(request, Request):
            return 0.0
        plan, _ = plan_only(request, self.store)
        return _WORKER_START_SECONDS + 2 * BUDGET_SECONDS * len(plan.groups)

    def _make_run_request(self, claim: Claim) -> RunRequest:
        device = self._choose_device(claim)
        request = self.questions[claim.run]
        if isinstance(request, Request):
            return replace(request, devices=(device,))
        return replace(request, device=device)

    def _choose_device(self, claim: Claim) -> str:
        if "any" in claim.device:
            # Emulation decides such a claim, so any device will do.
            return self.device or "cpu"
        if "cpu" in claim.device:
            return "cpu"
        device_text = "a GPU" if "cuda" in claim.device else f"one of {', '.join(claim.device)}"
        remedy = f"`fp8bench claim {claim.id} --device cuda` on {device_text}"
        if self.device == "cpu":
            raise CannotDecide(f"it must be measured on {device_text}, but only the CPU may be used", remedy)
        for facts in self._device_facts:
            if (
                facts.accelerated
                and self.device in ("", facts.kind, facts.key)
                and is_claim_for_device(claim, facts.name)
            ):
                return facts.key
        names = ", ".join(facts.name for facts in self._device_facts)
        raise CannotDecide(f"it must be measured on {device_text}, but this machine has {names}", remedy)

    @cached_property
    def _device_facts(self) -> tuple[DeviceFacts, ...]:
        with register_process_run(True), ProcessWorker(Settings(1)) as worker:
            return worker.probe()

    def _measure_run(self, request: RunRequest, unfinished: Path | None) -> StoredRun:
        """Measures a run, or resumes an unfinished one. Raises KeyboardInterrupt if the user interrupted it."""
        store = self.store
        command = command_line()
        run: StoredRun
        if isinstance(request, Request):
            with self.observer.measuring() as observer:
                if unfinished is None:
                    run = execute(request, store, observer, command, origin=CLAIM_RUN_ORIGIN)
                else:
                    run = resume(unfinished, store, observer, command)[1]
        else:
            with self.training_observer() as training_observer:
                if unfinished is None:
                    run = train(request, store, training_observer, command)
                else:
                    run = resume_training(unfinished, store, training_observer)[1]
        if not run.finished:
            raise KeyboardInterrupt
        return run


def get_run_id(run: StoredRun) -> str:
    return run.id if isinstance(run, Run) else run.training.id


def without_device(request: RunRequest) -> RunRequest:
    return replace(request, devices=()) if isinstance(request, Request) else replace(request, device=None)


def is_claim_for_device(claim: Claim, name: str) -> bool:
    """Returns whether a claim is about the device of this name. `cuda` fits every GPU, and `H200` every card whose
    name contains that word.
    """
    datasheet = find_datasheet(name)
    device_name_words = set(f"{name} {datasheet.name if datasheet else ''}".lower().replace(",", " ").split())
    return "cuda" in claim.device or any(
        {*card_name.lower().split()} <= device_name_words for card_name in claim.device
    )


def find_stored_run(request: RunRequest, store: Path) -> tuple[StoredRun | None, Path | None]:
    """Returns the newest valid run of a request in the store. Otherwise returns the path of the newest
    unfinished run, which can be resumed.
    """
    is_suite_run = isinstance(request, Request)
    unfinished_path: Path | None = None
    for path in run_files(store) if is_suite_run else KIND.files(store):
        with suppress(StoreError):
            run_header: Run | Training = load_header(path) if is_suite_run else load_training_head(path)
            if run_header.request != request or not is_run_reusable(run_header.environment, run_header.started):
                continue
            run: StoredRun = load_run(path) if is_suite_run else load_training(path)
            if run.finished and not run.troubles:
                return run, None
            if not run.troubles:
                unfinished_path = unfinished_path or path
    return None, unfinished_path


def is_run_reusable(environment: Environment, start_time: str) -> bool:
    """Returns whether a run was measured on this machine within the last week, with these versions of torch and
    fp8bench.
    """
    current_environment_facts = {
        "machine": platform.node() or "unknown",
        "fp8bench": __version__,
        "torch": version("torch"),
    }
    is_same_environment = all(environment.get(name) == value for name, value in current_environment_facts.items())
    return is_same_environment and datetime.now(UTC) - datetime.fromisoformat(start_time) < _MAX_RUN_AGE


def iterate_measured_claims(claims: Iterable[Claim], all_claims: Mapping[str, Claim]) -> Iterator[Claim]:
    """Yields the claims that need a measurement, among the given claims and their parts."""
    for claim in claims:
        if claim.kind is ClaimKind.ALL_OF:
            yield from iterate_measured_claims((all_claims[part] for part in claim.parts), all_claims)
        elif claim.kind is ClaimKind.MEASURED_FIGURE:
            yield claim
