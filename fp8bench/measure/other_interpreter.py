"""A worker in an interpreter that is not this one, or with code that is not this one's.

It is handed this fp8bench (or another one) and the user's code by name. Nothing else of this interpreter's path goes
along: its packages would shadow those of the other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import cast

from fp8bench.errors import UsageError, WorkerFault, WorkerLost
from fp8bench.measure.handle import START_SECONDS, ProcessWorker
from fp8bench.measure.process import WorkerProcess
from fp8bench.model import Scalar
from fp8bench.model.raw import PROTOCOL, Settings

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
    """How a partner is started: its interpreter, and the folders that come before its own packages."""

    name: str
    python: str
    paths: tuple[str, ...]

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
        return {**_CALM, **kept, "PYTHONPATH": os.pathsep.join(self._start.paths)}

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
