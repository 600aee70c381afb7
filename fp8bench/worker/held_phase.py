"""A phase of a step that is kept, so that it can be repeated by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8bench.model import UNATTRIBUTED, Phase
from fp8bench.model.raw import RawReplay
from fp8bench.protocols import Device, Markers, TellingMarker, Workload

if TYPE_CHECKING:
    from fp8bench.tape.replay import Replay

# A phase is repeated for this many seconds, in pieces, before its window, so that clocks and power settle and its time
# is known.
WARM_SECONDS = 0.3
_PIECE_SECONDS = 0.05
_NO_LOAD = "its data are loaded by code of its suite, which has no `load` that does nothing else"


@dataclass(frozen=True)
class HeldPhase:
    """A phase of a step, with the inputs it had in that step. The workload loads data itself."""

    workload: Workload
    state: Any
    device: Device
    index: int
    replay: Replay
    loads: bool

    def loop(self, times: int) -> float:
        """Repeats the phase back to back and waits for the device; returns the seconds of all."""
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
        """Repeats the phase for a while from its inputs, which are then restored; returns its time and size."""
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
    """Returns the phase as a step of the state does it, or why it cannot run alone. On a CPU the repetition must give
    the step's numbers bit for bit. A GPU may sum in a different order each time."""
    from fp8bench.tape.replay import CannotReplay, Recording

    loads = phase == Phase.DATA_LOAD
    if loads and not workload.loads:
        return RawReplay(why=_NO_LOAD)
    stack: list[str] = [UNATTRIBUTED]  # backward may run on another thread, so threads share the phase
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
