"""One phase of a prepared case, done over and over by itself while somebody outside reads a counter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8bench.model import UNATTRIBUTED, Phase
from fp8bench.model.raw import RawReplay
from fp8bench.protocols import Device, Markers, TellingMarker, Workload

if TYPE_CHECKING:
    from fp8bench.tape.replay import Replay

# For so long a phase is done ahead of its window: clocks and power are its own then, and its time is known.
WARM_SECONDS = 0.3
# At a time.
_PIECE_SECONDS = 0.05
_NO_LOAD = "its data are loaded by code of its suite, which has no `load` that does nothing else"


@dataclass(frozen=True)
class HeldPhase:
    """A phase with what it was given in a step. Data are loaded by the workload itself."""

    workload: Workload
    state: Any
    device: Device
    index: int
    replay: Replay
    loads: bool

    def loop(self, times: int) -> float:
        """Do it so often, back to back, and wait for the device; the seconds of all."""
        with self.replay.random_kept():
            start = time.perf_counter()
            if self.loads:
                for _ in range(times):
                    self.workload.load(self.state)
                    self.replay.run()
            else:
                self.replay.run(times)
            self.device.synchronise(self.index)
            return time.perf_counter() - start

    def warmed_up(self) -> RawReplay:
        """Do it for a while, from what it was given; then all is as it was given again."""
        end, times, seconds = time.perf_counter() + WARM_SECONDS, 1, self.loop(1)
        while time.perf_counter() < end:
            times = max(1, round(times * _PIECE_SECONDS / max(seconds, 1e-7)))
            seconds = self.loop(times)
        self.replay.restore()
        return RawReplay(seconds / times, len(self.replay.calls), self.replay.bytes)


def held_phase(
    workload: Workload,
    state: Any,
    device: Device,
    index: int,
    phase: str,
    most_bytes: int,
) -> HeldPhase | RawReplay:
    """The phase as a step of the state does it, or why it cannot be done by itself.

    On a processor it gives the step's numbers bit for bit, or is not held. A GPU may add up in another order each time.
    """
    from fp8bench.tape.recording import Recording
    from fp8bench.tape.replay import CannotReplay

    loads = phase == Phase.DATA_LOAD
    if loads and not workload.loads:
        return RawReplay(why=_NO_LOAD)
    stack: list[str] = [UNATTRIBUTED]  # backward may run on another thread: phases share it
    recording = Recording(phase, stack, most_bytes, check=device.kind == "cpu")
    with recording:
        workload.step(state, Markers(lambda name: TellingMarker(name, stack, lambda told: None)))
    device.synchronise(index)
    try:
        replay = recording.replay()
    except CannotReplay as cannot:
        return RawReplay(why=str(cannot))
    if why := replay.differs():
        return RawReplay(why=why)
    return HeldPhase(workload, state, device, index, replay, loads)
