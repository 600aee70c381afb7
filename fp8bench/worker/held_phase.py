"""Repeats one phase of a step alone, with stored inputs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8bench.model import UNATTRIBUTED, Phase
from fp8bench.model.raw import RawReplay
from fp8bench.protocols import Device, Markers, ReportingMarker, Workload

if TYPE_CHECKING:
    from fp8bench.tape.replay import PhaseReplay

# Before a phase is measured, it is repeated for this many seconds, in several loops. In this time clocks and power
# settle, and the loops show how long one repetition takes.
WARM_SECONDS = 0.3
_WARM_UP_LOOP_SECONDS = 0.05
_NO_LOAD_REASON = "its suite loads data within its step, and has no `load` that only loads data"


@dataclass(frozen=True)
class HeldPhase:
    """A phase of a step, with stored inputs, that can be repeated without the rest of the step. If the phase loads
    data, each repetition calls the workload's `load`.
    """

    workload: Workload
    state: Any
    device: Device
    index: int
    replay: PhaseReplay
    loads_data: bool

    def loop(self, repetitions: int) -> float:
        """Repeats the phase back to back, waits for the device, and returns the seconds of all repetitions."""
        with self.replay.keep_random_states():
            start = time.perf_counter()
            if self.loads_data:
                for _ in range(repetitions):
                    self.workload.load(self.state)
                    self.replay.run()
            else:
                self.replay.run(repetitions)
            self.device.synchronise(self.index)
            return time.perf_counter() - start

    def warm_up(self) -> RawReplay:
        """Repeats the phase for a while, then restores its inputs. Returns the seconds of one repetition, and the size
        of the stored memory.
        """
        deadline = time.perf_counter() + WARM_SECONDS
        phase_repetitions = 1
        seconds = self.loop(1)
        while time.perf_counter() < deadline:
            phase_repetitions = max(1, round(phase_repetitions * _WARM_UP_LOOP_SECONDS / max(seconds, 1e-7)))
            seconds = self.loop(phase_repetitions)
        self.replay.restore()
        return RawReplay(seconds / phase_repetitions, len(self.replay.calls), self.replay.bytes)


def store_phase_inputs(
    workload: Workload,
    state: Any,
    device: Device,
    index: int,
    phase: str,
    most_bytes: int,
) -> HeldPhase | RawReplay:
    """Takes a step, and stores the inputs of one of its phases. Returns the phase, or the reason why the phase cannot
    be repeated without the rest of the step.

    On a CPU, the repeated phase must give bitwise the same results as in the step. On a GPU this is not required,
    because sums may be in a different order each time.
    """
    from fp8bench.tape.replay import CannotReplay, Recording

    loads_data = phase == Phase.DATA_LOAD
    if loads_data and not workload.loads:
        return RawReplay(why=_NO_LOAD_REASON)
    # backward may run on a different thread, so all threads use the same list of open phases
    open_phases: list[str] = [UNATTRIBUTED]
    phase_recording = Recording(phase, open_phases, most_bytes, check=device.kind == "cpu")
    with phase_recording:
        workload.step(state, Markers(lambda name: ReportingMarker(name, open_phases, lambda told: None)))
    device.synchronise(index)
    try:
        phase_replay = phase_recording.replay()
    except CannotReplay as cannot:
        return RawReplay(why=str(cannot))
    if why := phase_replay.find_replay_difference():
        return RawReplay(why=why)
    return HeldPhase(workload, state, device, index, phase_replay, loads_data)
