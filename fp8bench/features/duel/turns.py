"""Sides while they are measured: workers in interpreters that are not this one, or with code that is not this one's.

A worker is handed this fp8bench (or another one) and the user's code by name. Nothing else of this interpreter's path
goes along: its packages would shadow those of the other.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from fp8bench.errors import UsageError, WorkerError, WorkerFault, WorkerLost
from fp8bench.features.duel.allocators import AllocatorSettings
from fp8bench.features.duel.values import AFTER, BEFORE, Session
from fp8bench.measure.arm import ArmFailed, MeasuredArm, Quantisers, guarding
from fp8bench.measure.handle import START_SECONDS, ProcessWorker, Worker
from fp8bench.measure.interrupts import ignored
from fp8bench.measure.limits import HANG_SECONDS
from fp8bench.measure.process import WorkerProcess
from fp8bench.measure.rounds import WARMED_BELOW_SECONDS, Orders
from fp8bench.model import DeviceFacts, PlannedCase, Request, Scalar
from fp8bench.model.raw import PROTOCOL, Settings
from fp8bench.model.stopping import StoppingRule
from fp8bench.plan.make import make_plan

# A process is fast or slow for its own reasons: with two a side and session, a few sessions tell by how much.
PROCESSES = 2


@dataclass
class SideWorkers:
    """`workers` are alike, and the first one makes the passes that look at numbers and memory."""

    start: Start
    workers: Sequence[PartnerWorker]
    quantisers: Quantisers
    devices: tuple[DeviceFacts, ...] = ()
    cases: dict[str, PlannedCase] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.start.name

    @property
    def facts(self) -> dict[str, DeviceFacts]:
        return {device.key: device for device in self.devices}

    def meet(self, request: Request, suites: Sequence[str], corpus: str | None) -> None:
        self.devices = self.workers[0].probe()
        self.versions = self.workers[0].within(HANG_SECONDS).versions(tuple(suites))
        try:
            plan = make_plan(request, self.devices, corpus, compares=False)
        except UsageError as error:
            raise UsageError(f"side {self.name} ({self.start.python}): {error}") from None
        self.cases = {planned.case.id: planned for group in plan for planned in group.cases}

    def close(self) -> None:
        with ignored():
            for worker in self.workers:
                worker.close()


def refresh(pair: Sequence[SideWorkers], seed: int, number: int) -> None:
    """Fresh processes for a session, started in random order: a process is as it is until it ends.

    The first session takes those that there are.
    """
    workers = [worker for side_workers in pair for worker in side_workers.workers]
    if number:
        for worker in workers:
            worker.restart()
    random.Random(f"{seed}:{number}:start").shuffle(workers)
    for worker in workers:
        worker.start()


@dataclass
class DuelEntry:
    """An arm and the worker it lives in, which holds no other arm."""

    side: str
    worker: Worker
    arm: MeasuredArm
    quantisers: Quantisers


@dataclass
class DuelTurns:
    """The entries of both sides, as many of each. Their order is drawn from the seed, so that no side is the first."""

    entries: Sequence[DuelEntry]
    seed: int

    def measure(self, rule: StoppingRule, tell: Callable[[str], None]) -> Session:
        """Prepare all, run rounds, check what the steps have left; `tell` is told what is being done."""
        order, begun = random.Random(self.seed), time.monotonic()
        self._prepare(order, tell)
        tell("measuring")
        stopped = self._run(Orders(order), rule, begun if rule.whole else time.monotonic())
        for entry in self.entries:
            with guarding(entry.arm):
                entry.arm.check(entry.worker)
        before, after = (
            tuple(entry.arm.timing() for entry in self.entries if entry.side == side) for side in (BEFORE, AFTER)
        )
        return Session(before, after, stopped)

    def entry_of(self, arm: MeasuredArm) -> DuelEntry:
        return next(entry for entry in self.entries if entry.arm is arm)

    def release(self) -> ArmFailed | None:
        """Give all states back; the first arm that leaves threads running has failed."""
        culprit = None
        for entry in self.entries:
            try:
                failed = entry.arm.release(entry.worker)
            except WorkerError:
                entry.worker.restart()
                continue
            culprit = culprit or failed
        return culprit

    def _prepare(self, order: random.Random, tell: Callable[[str], None]) -> None:
        turn = [*self.entries]
        order.shuffle(turn)
        for entry in turn:
            tell(f"preparing side {entry.side} of")
            with guarding(entry.arm):
                entry.arm.prepare(entry.worker, entry.quantisers, lambda arm, doing: tell(doing))
        arms = [entry.arm for entry in self.entries]
        for arm in arms[1:]:
            arm.cut_like(arms[0])
        for arm in arms:
            # A minimum over more calls is lower for that alone.
            arm.calls = min(measured_arm.calls for measured_arm in arms)
            # Another process has run before each slot, so that caches are cold and the processor may be another.
            arm.discard = 1 if arm.step_seconds < WARMED_BELOW_SECONDS else 0

    def _run(self, orders: Orders[DuelEntry], rule: StoppingRule, start: float) -> str:
        rounds, why = 0, ""
        while not why:
            for place, entry in enumerate(orders.next(self.entries)):
                with guarding(entry.arm):
                    entry.arm.run(entry.worker, rounds, place)
            rounds += 1
            why = rule.ended(rounds, time.monotonic() - start)
        return why


Handshake = dict[str, Scalar | None]
# They say where the running interpreter has its library, which another one must not believe.
_ABOUT_THIS_PYTHON = ("PYTHONHOME", "__PYVENV_LAUNCHER__")
# glibc gives memory back to the system as luck has it, and a process that does so in every step may take half as long
# again. These have it keep what it has, on both sides alike; a person's own settings stay.
_CALM = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


@dataclass(frozen=True)
class Start:
    """How a side is started: its interpreter, and the folders that come before its own packages.

    `title` is what a person calls it, `imports` is the user's code. `tree` is the working tree that its code must come
    from, if it matters. `settings` are of allocators; a `calm` one of glibc's keeps its memory.
    """

    name: str
    python: str
    paths: tuple[str, ...]
    title: str = ""
    imports: tuple[str, ...] = ()
    commit: str = ""
    tree: Path | None = None
    settings: AllocatorSettings = ()
    calm: bool = True

    @property
    def side(self) -> str:
        return f"side {self.name} ({self.python})"


class PartnerWorker(ProcessWorker):
    """A worker that greets first; raises UsageError where it cannot be understood, or has no torch."""

    def __init__(self, settings: Settings, start: Start) -> None:
        super().__init__(settings, start.python)
        self._start = start
        self.handshake: Handshake = {}

    def start(self) -> None:
        """Start the process, if none runs, and let it import all it needs."""
        self.ask(START_SECONDS, "quantisers")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in super()._environment().items() if name not in _ABOUT_THIS_PYTHON}
        calm = _CALM if self._start.calm else {}
        return {**calm, **kept, **dict(self._start.settings), "PYTHONPATH": os.pathsep.join(self._start.paths)}

    def _begin(self, process: WorkerProcess) -> None:
        side = self._start.side
        try:
            self.handshake = cast(Handshake, self._exchange(process, START_SECONDS, "greet"))
            why = refusal(self.handshake, self._start)
        except WorkerFault:
            why = (
                f"{side} has a worker that does not greet: its fp8bench is older than duels. This one speaks protocol "
                f"{PROTOCOL}. Choose a newer revision, or upgrade it."
            )
        except WorkerLost as lost:
            raise WorkerLost(f"{side}: {lost}") from None
        if not why:
            try:
                super()._begin(process)
            except WorkerFault as fault:  # the user's modules are imported there, and need not import everywhere
                why = f"{side}: {str(fault).removeprefix('ImportFailed: ')}"
        if why:
            self.close()
            raise UsageError(why)


def refusal(handshake: Handshake, start: Start) -> str:
    """Why a partner cannot be measured with; '' if it can."""
    side = start.side
    if handshake.get("protocol") != PROTOCOL:
        return (
            f"{side} speaks protocol {handshake.get('protocol')} of fp8bench {handshake.get('fp8bench')}, and this one "
            f"speaks protocol {PROTOCOL}: they would misunderstand each other. Use the same version on both sides."
        )
    if handshake.get("torch") is None:
        return (
            f"{side} cannot import torch ({handshake.get('torch_missing')}). It needs torch of its own: give another "
            f"--python-{start.name.lower()}, or install torch there."
        )
    return ""
