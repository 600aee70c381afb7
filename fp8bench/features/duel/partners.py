"""Starts the workers of the two sides of a duel, which may have a different interpreter or different code.

A worker gets only the path of fp8bench's package (this copy or another one) and of the user's code. Other paths of
this interpreter are removed, because the packages there would hide those of the worker.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from fp8bench.errors import UsageError, WorkerFault, WorkerLost
from fp8bench.measure.arm import QuantiserCompilation
from fp8bench.measure.handle import START_SECONDS, ProcessWorker
from fp8bench.measure.interrupts import ignore_interrupts
from fp8bench.measure.limits import HANG_SECONDS
from fp8bench.measure.process import WorkerProcess
from fp8bench.model import DeviceFacts, PlannedCase, Request, Scalar
from fp8bench.model.raw import PROTOCOL, Settings
from fp8bench.plan.make import make_plan

HandshakeFacts = dict[str, Scalar | None]
# These variables point to the library of the current interpreter. A different interpreter must not get them.
_PYTHON_ENV_VARIABLES = ("PYTHONHOME", "__PYVENV_LAUNCHER__")
# glibc returns memory to the system at random times, and a process that does so in every step may take 50% longer. With
# these settings, both sides keep their memory. Settings of the user take precedence.
_STEADY_MALLOC_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


@dataclass(frozen=True)
class WorkerStart:
    """How to start the workers of a side: its interpreter, and the folders that precede its own packages. `imports` is
    the user's code. `working_tree` is the working tree that the side's code must come from; None if that does not
    matter.
    """

    name: str
    python: str
    paths: tuple[str, ...]
    title: str = ""
    imports: tuple[str, ...] = ()
    commit: str = ""
    working_tree: Path | None = None

    @property
    def side(self) -> str:
        return f"side {self.name} ({self.python})"


class HandshakeWorker(ProcessWorker):
    """A worker that starts with a handshake. Raises UsageError if it uses another protocol or has no torch."""

    def __init__(self, settings: Settings, start: WorkerStart) -> None:
        super().__init__(settings, start.python)
        self._start = start
        self.handshake: HandshakeFacts = {}

    def start(self) -> None:
        self.ask(START_SECONDS, "quantisers")

    def _environment(self) -> dict[str, str]:
        variables = {name: value for name, value in super()._environment().items() if name not in _PYTHON_ENV_VARIABLES}
        return {**_STEADY_MALLOC_VARIABLES, **variables, "PYTHONPATH": os.pathsep.join(self._start.paths)}

    def _open_bench(self, process: WorkerProcess) -> None:
        side = self._start.side
        try:
            self.handshake = cast(HandshakeFacts, self._exchange_request(process, START_SECONDS, "greet"))
            reason = explain_handshake_refusal(self.handshake, self._start)
        except WorkerFault:
            reason = (
                f"{side} has a worker without a handshake: its fp8bench is too old for duels. This one uses protocol "
                f"{PROTOCOL}. Choose a newer revision, or upgrade it."
            )
        except WorkerLost as lost:
            raise WorkerLost(f"{side}: {lost}") from None
        if not reason:
            try:
                super()._open_bench(process)
            except WorkerFault as fault:  # the worker may be unable to import the user's modules
                reason = f"{side}: {str(fault).removeprefix('ImportFailed: ')}"
        if reason:
            self.close()
            raise UsageError(reason)


def explain_handshake_refusal(handshake: HandshakeFacts, start: WorkerStart) -> str:
    side = start.side
    if handshake.get("protocol") != PROTOCOL:
        return (
            f"{side} uses protocol {handshake.get('protocol')} of fp8bench {handshake.get('fp8bench')}, but this one "
            f"uses protocol {PROTOCOL}. Use the same version on both sides."
        )
    if handshake.get("torch") is None:
        return (
            f"{side} cannot import torch ({handshake.get('torch_missing')}). Install torch there, or give another "
            f"--python-{start.name.lower()}."
        )
    return ""


# The number of processes per side. Even equal processes differ in speed, for example by where their memory is. With two
# per side, a few sessions show by how much.
PROCESSES_PER_SIDE = 2


@dataclass
class DuelSideWorkers:
    """The workers of one side. All of them measure times, but only the first one measures errors and memory."""

    start: WorkerStart
    workers: Sequence[HandshakeWorker]
    quantisers: QuantiserCompilation
    devices: tuple[DeviceFacts, ...] = ()
    cases: dict[str, PlannedCase] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.start.name

    @property
    def facts(self) -> dict[str, DeviceFacts]:
        return {device.key: device for device in self.devices}

    def plan_cases(self, request: Request, suites: Sequence[str], corpus: str | None) -> None:
        self.devices = self.workers[0].probe()
        self.versions = self.workers[0].with_time_limit(HANG_SECONDS).versions(tuple(suites))
        try:
            plan = make_plan(request, self.devices, corpus, compares=False)
        except UsageError as error:
            raise UsageError(f"side {self.name} ({self.start.python}): {error}") from None
        for group in plan:
            self.cases |= {planned.case.id: planned for planned in group.cases}

    def close(self) -> None:
        with ignore_interrupts():
            for worker in self.workers:
                worker.close()


def restart_workers(pair: Sequence[DuelSideWorkers], seed: int, number: int) -> None:
    """Starts new processes for a session, in random order. A process stays fast or slow until it ends, so each
    session needs new ones. The first session uses the processes that are already running.
    """
    workers = [*pair[0].workers, *pair[1].workers]
    if number:
        for worker in workers:
            worker.restart()
    random.Random(f"{seed}:{number}:start").shuffle(workers)
    for worker in workers:
        worker.start()
