"""Several ranks' answers made one, and which rank is to blame where that fails."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from fp8bench.errors import RanksDisagree
from fp8bench.model import CELL_PHASES, DeviceFacts, MemoryUse, Phase, Scalar
from fp8bench.model.ranks import FailedRank, Heartbeat, Overlap, RankCalls, RankMemory, RankScaling, Sent
from fp8bench.model.raw import RawSlot, RawStep, StateCheck

# Versions in which ranks must agree.
_BUILD = ("torch", "torch_git", "cudnn", "cublaslt")
_COMMUNICATION = CELL_PHASES.index(Phase.COMMUNICATION)


Merges = Mapping[str, Callable[[Sequence[Any]], Any]]


def merge_answers(name: str, answers: Sequence[Any], more_merges: Merges = MappingProxyType({})) -> Any:
    """One answer to a request that all ranks have answered, in the order of ranks. Raises RanksDisagree.

    `more_merges` adds merges for requests of a bench other than the worker's.
    """
    merges = {**_MERGED, **more_merges}
    return merges[name](answers) if name in merges else answers[0]


def slowest(slots: Sequence[RawSlot]) -> RawSlot:
    """A step is over when its slowest rank is: call by call that rank's marks as a whole, so that phases still add up.

    The system's counts are those of the rank that was slowest over all calls.
    """
    steps_of_ranks = [slot.steps for slot in slots]
    calls = tuple(max(steps, key=_step_ns) for steps in zip(*steps_of_ranks, strict=True))
    last = max(slots, key=lambda slot: sum(step.seconds for step in slot.steps))
    took = tuple(
        RankCalls(rank, tuple(map(_step_ns, slot.steps)), tuple(map(_communication, slot.steps)))
        for rank, slot in enumerate(slots)
    )
    retries = [slot.memory_retries for slot in slots if slot.memory_retries is not None]
    wall = max(slot.wall_seconds for slot in slots)
    return replace(last, steps=calls, wall_seconds=wall, ranks=took, memory_retries=sum(retries) if retries else None)


def _step_ns(step: RawStep) -> int:
    return sum(step.intervals_ns)


def _communication(step: RawStep) -> int:
    return sum(ns for code, ns in zip(step.codes, step.intervals_ns, strict=True) if code == _COMMUNICATION)


def _devices(answers: Sequence[Sequence[DeviceFacts]]) -> tuple[DeviceFacts, ...]:
    keys = {device.key for device in answers[0]}
    for devices in answers:
        keys &= {device.key for device in devices}
    return tuple(device for device in answers[0] if device.key in keys)


def _merge_equal_numbers(answers: Sequence[Mapping[str, float] | str]) -> Mapping[str, float] | str:
    """Numbers that must be the same on all ranks: a sum that differs from rank to rank is wrong on some of them."""
    first = answers[0]
    for rank, numbers in enumerate(answers):
        if numbers == first or isinstance(first, str) or isinstance(numbers, str):
            continue
        for name, value in first.items():
            if numbers.get(name) != value and not (math.isnan(value) and math.isnan(numbers.get(name, 0.0))):
                raise RanksDisagree(f"{name} is {value!r} on rank 0 and {numbers.get(name)!r} on rank {rank}")
    return first


def most_memory(answers: Sequence[MemoryUse | str]) -> MemoryUse | str:
    uses = [answer for answer in answers if isinstance(answer, MemoryUse)]
    if len(uses) < len(answers):
        return next(answer for answer in answers if isinstance(answer, str))
    by_rank = tuple(RankMemory(rank, use.peak, use.roles) for rank, use in enumerate(uses))
    return replace(max(uses, key=lambda use: use.peak), ranks=by_rank)


def _merge_checks(answers: Sequence[StateCheck]) -> StateCheck:
    for rank, answer in enumerate(answers):
        if answer.wrong:
            return replace(answer, wrong=f"rank {rank} of {len(answers)}: {answer.wrong}")
    return max(answers, key=lambda answer: answer.not_finite)


def _software(answers: Sequence[Mapping[str, Scalar | None]]) -> dict[str, Scalar | None]:
    """Rank 0's versions, which all ranks must share, and the settings of each rank."""
    for rank, answer in enumerate(answers):
        # Ranks with different builds would time different programs.
        for name in _BUILD:
            expected, version = answers[0].get(name), answer.get(name)
            if version != expected:
                raise RanksDisagree(
                    f"{name} is {expected} on rank 0 and {version} on rank {rank}: install the same on both"
                )
    settings = {
        f"rank {rank} {name.removeprefix('env ')}": value
        for rank, answer in enumerate(answers)
        for name, value in answer.items()
        if name.startswith("env ")
    }
    return {**{name: value for name, value in answers[0].items() if not name.startswith("env ")}, **settings}


def _first_text(answers: Sequence[str]) -> str:
    return next(filter(None, answers), "")


StepAnswer = tuple[tuple[Sent, ...], Mapping[str, Sequence[float]]]


def _step_parts(
    answers: Sequence[StepAnswer | str | None],
) -> tuple[tuple[Sent, ...], Overlap, RankScaling | None] | None:
    """Merges what every rank sends. Each round of each part ends with its slowest rank."""
    parts = [answer for answer in answers if answer is not None and not isinstance(answer, str)]
    if len(parts) < len(answers):
        return next((((), Overlap(why=answer), None) for answer in answers if isinstance(answer, str)), None)
    messages, ranks = zip(*parts, strict=True)
    sent = tuple(chain.from_iterable(messages))
    seconds = {}
    for name in ranks[0]:
        of_ranks = [rank[name] for rank in ranks]
        seconds[name] = tuple(map(max, zip(*of_ranks, strict=True)))
    scaling = RankScaling(seconds["whole"], seconds["share"], seconds["both"]) if "whole" in seconds else None
    overlap = Overlap(seconds["compute"], seconds["communication"], seconds["both"], seconds["in_turn"])
    return sent, overlap, scaling


_MERGED: Merges = {
    "slot": slowest,
    "replay": slowest,
    "loop": max,
    "loop_phase": max,
    "probe": _devices,
    "error": _merge_equal_numbers,
    "memory": most_memory,
    "step_parts": _step_parts,
    "check": _merge_checks,
    "release": lambda answers: tuple(f"rank {rank}: {name}" for rank, names in enumerate(answers) for name in names),
    "software": _software,
    "trial": _first_text,
    "capture": _first_text,
    # Bytes at the highest point of any rank; None where one had no room.
    "try_batch": lambda answers: None if None in answers else max(answers),
}


# How a process ends that has waited for its neighbours in vain, or was ended because they failed.
_VICTIMS = (-signal.SIGABRT, -signal.SIGTERM)
# Errors that gloo and NCCL raise in a rank because of its neighbours; a suite may raise them itself.
_MAY_COMPLAIN = re.compile(r"(RuntimeError|Dist\w*Error|Timeout\w*|Connection\w*|BrokenPipeError|EOFError)\b")


@dataclass(frozen=True)
class RankState:
    """A rank when something went wrong: its last heartbeat, its answer and how it ended, if it did.

    `fault` is its exception in words, with the traceback. `ended` is how its process ended, '' while it lives; `status`
    is the exit status if the launcher reported one.
    """

    beat: Heartbeat
    answered: bool = False
    fault: tuple[str, str] = ("", "")
    ended: str = ""
    status: int | None = None

    @property
    def rank(self) -> int:
        return self.beat.rank

    @property
    def well(self) -> bool:
        return self.answered and not self.fault[0]

    @property
    def failed_itself(self) -> bool:
        return bool(self.fault[0]) and _MAY_COMPLAIN.match(self.fault[0]) is None


def behind(states: Sequence[RankState]) -> RankState:
    """The rank with the oldest heartbeat: the one that has done least, then longest ago.

    Of ranks that have come equally far, one that does not answer is named before one that complains of it. A rank that
    has done what it was asked is named only if all have.
    """
    states = [state for state in states if not state.well] or states
    return min(states, key=lambda state: (state.beat.sequence, state.answered, bool(state.ended), state.beat.seconds))


def culprit(states: Sequence[RankState]) -> RankState:
    """A rank that ended of itself, or raised what neighbours do not cause; else the one that is behind."""
    last = behind(states)
    ended = [state for state in states if state.ended]
    of_itself = [state for state in ended if state.status not in _VICTIMS]
    if of_itself:
        return of_itself[0]
    if failed := [state for state in states if state.failed_itself]:
        return behind(failed)
    if ended and last.beat.sequence >= min(state.beat.sequence for state in ended):
        return next((state for state in ended if state.status != -signal.SIGTERM), ended[0])
    return last


def suspects(states: Sequence[RankState]) -> tuple[RankState, ...]:
    """The culprit; several ranks where it is unclear: they have come equally far, to the same phase, and each may have
    waited for the other, whoever complained first."""
    guilty = culprit(states)
    if guilty.ended or guilty.failed_itself:
        # Ranks that wait in the same place are all suspects; those that are done with their work are not.
        return (guilty,)
    place = guilty.beat.sequence, guilty.beat.phase
    waiting = [state for state in states if not state.well] or states
    equally_far = [state for state in waiting if (state.beat.sequence, state.beat.phase) == place]
    return tuple(sorted(equally_far, key=lambda state: state.rank))


def failed_rank(beat: Heartbeat, ranks: int, now: float) -> FailedRank:
    return FailedRank(beat.rank, ranks, beat.request, beat.phase, beat.sequence, max(0.0, now - beat.seconds))


def failure_in_words(states: Sequence[RankState], now: float) -> str:
    named = suspects(states)
    return _describe_suspects(named, len(states), now) + "".join(
        f"; rank {state.rank} said: {_short(state.fault[0])}"
        for state in states
        if state.fault[0] and (len(named) > 1 or state is not named[0])
    )


def delay_in_words(states: Sequence[RankState], now: float) -> str:
    return f": {_describe_suspects(suspects(states), len(states), now)}"


def _describe_suspects(named: Sequence[RankState], ranks: int, now: float) -> str:
    first = named[0]
    if len(named) == 1:
        return f"rank {first.rank} of {ranks}, in {first.beat.doing}, {_what(first, now)}"
    which = f"{', '.join(str(state.rank) for state in named[:-1])} and {named[-1].rank} of {ranks}"
    oldest = now - min(state.beat.seconds for state in named)
    return (
        f"nobody can tell which of ranks {which} failed: all are in {first.beat.doing}, at heartbeat number "
        f"{first.beat.sequence}, {oldest:.1f} s old"
    )


def _what(state: RankState, now: float) -> str:
    if state.ended:
        return state.ended
    if state.fault[0]:
        return f"failed: {state.fault[0]}"
    return f"does not go on: its last heartbeat, number {state.beat.sequence}, is {now - state.beat.seconds:.1f} s old"


def _short(text: str, most: int = 200) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else f"{words[:most]}..."
