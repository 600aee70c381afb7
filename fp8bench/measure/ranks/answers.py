"""Merges the answers of several ranks, and finds the rank that caused a failure."""

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

# The software whose version must be equal on all ranks.
_RANK_VERSION_KEYS = ("torch", "torch_git", "cudnn", "cublaslt")
_COMMUNICATION_PHASE_CODE = CELL_PHASES.index(Phase.COMMUNICATION)


MergeFunctionByRequest = Mapping[str, Callable[[Sequence[Any]], Any]]


def merge_answers(name: str, answers: Sequence[Any], more_merges: MergeFunctionByRequest = MappingProxyType({})) -> Any:
    """Merges the answers of all ranks to one request. The answers are in the order of ranks. Raises RanksDisagree if
    they contradict each other.

    `more_merges` has the merge functions of requests that only a special bench answers.
    """
    merge_functions = {**_MERGE_FUNCTIONS, **more_merges}
    return merge_functions[name](answers) if name in merge_functions else answers[0]


def merge_slots(slots: Sequence[RawSlot]) -> RawSlot:
    """Merges the slots of all ranks call by call. A step ends when its slowest rank ends, so each call gets the phase
    times of the rank that was slowest in this call.

    All times of a call come from one rank, so that its phases still add up. The system's counters are those of the rank
    that was slowest over all calls.
    """
    steps_of_ranks = [slot.steps for slot in slots]
    calls = tuple(max(steps, key=_sum_step_ns) for steps in zip(*steps_of_ranks, strict=True))
    slowest_rank_slot = max(slots, key=lambda slot: sum(step.seconds for step in slot.steps))
    calls_by_rank = tuple(
        RankCalls(rank, tuple(map(_sum_step_ns, slot.steps)), tuple(map(_sum_communication_ns, slot.steps)))
        for rank, slot in enumerate(slots)
    )
    memory_retry_counts = [slot.memory_retries for slot in slots if slot.memory_retries is not None]
    wall_seconds = max(slot.wall_seconds for slot in slots)
    return replace(
        slowest_rank_slot,
        steps=calls,
        wall_seconds=wall_seconds,
        ranks=calls_by_rank,
        memory_retries=sum(memory_retry_counts) if memory_retry_counts else None,
    )


def _sum_step_ns(step: RawStep) -> int:
    return sum(step.intervals_ns)


def _sum_communication_ns(step: RawStep) -> int:
    return sum(ns for code, ns in zip(step.codes, step.intervals_ns, strict=True) if code == _COMMUNICATION_PHASE_CODE)


def _merge_devices(answers: Sequence[Sequence[DeviceFacts]]) -> tuple[DeviceFacts, ...]:
    # A case with ranks can use only a device that every rank has.
    common_device_keys = {device.key for device in answers[0]}
    for devices in answers:
        common_device_keys &= {device.key for device in devices}
    return tuple(device for device in answers[0] if device.key in common_device_keys)


def _merge_equal_numbers(answers: Sequence[Mapping[str, float] | str]) -> Mapping[str, float] | str:
    """Returns the numerical errors on rank 0, or the reason why they are missing. Raises RanksDisagree if another rank
    has different errors, because a sum over all ranks must be equal on each of them.
    """
    first_rank_answer = answers[0]
    for rank, numbers in enumerate(answers):
        if numbers == first_rank_answer or isinstance(first_rank_answer, str) or isinstance(numbers, str):
            continue
        for name, value in first_rank_answer.items():
            if numbers.get(name) != value and not (math.isnan(value) and math.isnan(numbers.get(name, 0.0))):
                raise RanksDisagree(f"{name} is {value!r} on rank 0 and {numbers.get(name)!r} on rank {rank}")
    return first_rank_answer


def merge_memory_of_ranks(answers: Sequence[MemoryUse | str]) -> MemoryUse | str:
    memory_uses = [answer for answer in answers if isinstance(answer, MemoryUse)]
    if len(memory_uses) < len(answers):
        return next(answer for answer in answers if isinstance(answer, str))
    rank_memory = tuple(RankMemory(rank, use.peak, use.roles) for rank, use in enumerate(memory_uses))
    return replace(max(memory_uses, key=lambda use: use.peak), ranks=rank_memory)


def _merge_state_checks(answers: Sequence[StateCheck]) -> StateCheck:
    for rank, answer in enumerate(answers):
        if answer.wrong:
            return replace(answer, wrong=f"rank {rank} of {len(answers)}: {answer.wrong}")
    return max(answers, key=lambda answer: answer.not_finite)


def _merge_software(answers: Sequence[Mapping[str, Scalar | None]]) -> dict[str, Scalar | None]:
    """Returns rank 0's versions and the settings of each rank. Raises RanksDisagree if a rank has different
    versions.
    """
    for rank, answer in enumerate(answers):
        # Ranks with different builds would run different programs.
        for name in _RANK_VERSION_KEYS:
            first_version, rank_version = answers[0].get(name), answer.get(name)
            if rank_version != first_version:
                raise RanksDisagree(
                    f"{name} is {first_version} on rank 0 and {rank_version} on rank {rank}: install the same on both"
                )
    rank_settings = {
        f"rank {rank} {name.removeprefix('env ')}": value
        for rank, answer in enumerate(answers)
        for name, value in answer.items()
        if name.startswith("env ")
    }
    return {**{name: value for name, value in answers[0].items() if not name.startswith("env ")}, **rank_settings}


def _merge_texts(answers: Sequence[str]) -> str:
    return next(filter(None, answers), "")


StepPartsAnswer = tuple[tuple[Sent, ...], Mapping[str, Sequence[float]]]


def _merge_step_part_answers(
    answers: Sequence[StepPartsAnswer | str | None],
) -> tuple[tuple[Sent, ...], Overlap, RankScaling | None] | None:
    """Merges the bytes that all ranks sent in a step, and the times of the step's parts. In each round, the time of a
    part is that of the slowest rank.
    """
    # 1. If a rank has no times, return its reason; None if the case has no parts to time.
    measured_answers = [answer for answer in answers if answer is not None and not isinstance(answer, str)]
    if len(measured_answers) < len(answers):
        return next((((), Overlap(why=answer), None) for answer in answers if isinstance(answer, str)), None)
    # 2. Take the time of the slowest rank in each round, part by part.
    messages, ranks = zip(*measured_answers, strict=True)
    sent_messages = tuple(chain.from_iterable(messages))
    part_seconds = {}
    for name in ranks[0]:
        rank_seconds = [rank[name] for rank in ranks]
        part_seconds[name] = tuple(map(max, zip(*rank_seconds, strict=True)))
    # 3. Only some cases also time one rank alone, for their scaling.
    scaling = (
        RankScaling(part_seconds["whole"], part_seconds["share"], part_seconds["both"])
        if "whole" in part_seconds
        else None
    )
    step_overlap = Overlap(
        part_seconds["compute"], part_seconds["communication"], part_seconds["both"], part_seconds["in_turn"]
    )
    return sent_messages, step_overlap, scaling


_MERGE_FUNCTIONS: MergeFunctionByRequest = {
    "slot": merge_slots,
    "replay": merge_slots,
    "loop": max,  # seconds of the slowest rank
    "loop_phase": max,
    "probe": _merge_devices,
    "error": _merge_equal_numbers,
    "memory": merge_memory_of_ranks,
    "step_parts": _merge_step_part_answers,
    "check": _merge_state_checks,
    "release": lambda answers: tuple(f"rank {rank}: {name}" for rank, names in enumerate(answers) for name in names),
    "software": _merge_software,
    "trial": _merge_texts,
    "capture": _merge_texts,
    # The largest peak of any rank, in bytes. None if the batch did not fit on some rank.
    "try_batch": lambda answers: None if None in answers else max(answers),
}


# The exit statuses of ranks that are not to blame: they waited for other ranks in vain, or were ended because others
# failed.
_INNOCENT_EXIT_STATUSES = (-signal.SIGABRT, -signal.SIGTERM)
# Errors that gloo and NCCL raise in a rank because another rank failed. A suite may raise such errors as well.
_ERRORS_OF_OTHER_RANKS = re.compile(r"(RuntimeError|Dist\w*Error|Timeout\w*|Connection\w*|BrokenPipeError|EOFError)\b")


@dataclass(frozen=True)
class RankState:
    """The state of a rank at a failure: its last heartbeat, whether it answered, and how its process ended.

    `fault` is its exception in words, with the traceback. `ended` describes the end of its process, '' while it runs.
    `status` is the exit status, if the launcher reported one.
    """

    heartbeat: Heartbeat
    has_answered: bool = False
    fault: tuple[str, str] = ("", "")
    ended: str = ""
    status: int | None = None

    @property
    def rank(self) -> int:
        return self.heartbeat.rank

    @property
    def has_finished_request(self) -> bool:
        return self.has_answered and not self.fault[0]

    @property
    def raised_first_error(self) -> bool:
        return bool(self.fault[0]) and _ERRORS_OF_OTHER_RANKS.match(self.fault[0]) is None


def find_rank_furthest_behind(states: Sequence[RankState]) -> RankState:
    """Returns the rank that is furthest behind: the one whose heartbeat has the lowest number. If several have it,
    ranks without an answer come first, then ranks that still run, then the earliest heartbeat. A rank that finished
    the request is returned only if all ranks finished it.
    """
    states = [state for state in states if not state.has_finished_request] or states
    return min(
        states,
        key=lambda state: (state.heartbeat.sequence, state.has_answered, bool(state.ended), state.heartbeat.seconds),
    )


def find_culprit(states: Sequence[RankState]) -> RankState:
    """Returns the rank that caused the failure: one whose process ended although no other rank made it end, or else one
    that raised an error that other ranks cannot cause. Otherwise returns the rank that is furthest behind.
    """
    rank_furthest_behind = find_rank_furthest_behind(states)
    ended_rank_states = [state for state in states if state.ended]
    failed_processes = [state for state in ended_rank_states if state.status not in _INNOCENT_EXIT_STATUSES]
    if failed_processes:
        return failed_processes[0]
    if failed_ranks := [state for state in states if state.raised_first_error]:
        return find_rank_furthest_behind(failed_ranks)
    # If no rank is behind the ended ones, blame one of these, rather one that the launcher did not end (SIGTERM).
    if ended_rank_states and rank_furthest_behind.heartbeat.sequence >= min(
        state.heartbeat.sequence for state in ended_rank_states
    ):
        return next((state for state in ended_rank_states if state.status != -signal.SIGTERM), ended_rank_states[0])
    return rank_furthest_behind


def find_suspect_ranks(states: Sequence[RankState]) -> tuple[RankState, ...]:
    """Returns the rank that failed. If this is unclear, returns all ranks with the same phase and heartbeat as the most
    likely one: each of them may have waited for the others, even if it raised the first error.
    """
    likeliest_culprit_rank = find_culprit(states)
    if likeliest_culprit_rank.ended or likeliest_culprit_rank.raised_first_error:
        return (likeliest_culprit_rank,)
    suspect_progress = likeliest_culprit_rank.heartbeat.sequence, likeliest_culprit_rank.heartbeat.phase
    waiting_ranks = [state for state in states if not state.has_finished_request] or states
    equal_progress_ranks = [
        state for state in waiting_ranks if (state.heartbeat.sequence, state.heartbeat.phase) == suspect_progress
    ]
    return tuple(sorted(equal_progress_ranks, key=lambda state: state.rank))


def make_failed_rank(beat: Heartbeat, ranks: int, now: float) -> FailedRank:
    return FailedRank(beat.rank, ranks, beat.request, beat.phase, beat.sequence, max(0.0, now - beat.seconds))


def describe_failure(states: Sequence[RankState], now: float) -> str:
    suspect_ranks = find_suspect_ranks(states)
    return _describe_suspect_ranks(suspect_ranks, len(states), now) + "".join(
        f"; rank {state.rank} said: {_shorten_fault_text(state.fault[0])}"
        for state in states
        if state.fault[0] and (len(suspect_ranks) > 1 or state is not suspect_ranks[0])
    )


def describe_delay(states: Sequence[RankState], now: float) -> str:
    return f": {_describe_suspect_ranks(find_suspect_ranks(states), len(states), now)}"


def _describe_suspect_ranks(named_ranks: Sequence[RankState], ranks: int, now: float) -> str:
    first_rank = named_ranks[0]
    if len(named_ranks) == 1:
        return (
            f"rank {first_rank.rank} of {ranks}, in {first_rank.heartbeat.doing}, {_describe_problem(first_rank, now)}"
        )
    rank_list_text = f"{', '.join(str(state.rank) for state in named_ranks[:-1])} and {named_ranks[-1].rank} of {ranks}"
    oldest_heartbeat_seconds = now - min(state.heartbeat.seconds for state in named_ranks)
    return (
        f"it is unclear which of ranks {rank_list_text} failed: all are in {first_rank.heartbeat.doing}, at heartbeat "
        f"number {first_rank.heartbeat.sequence}, {oldest_heartbeat_seconds:.1f} s old"
    )


def _describe_problem(state: RankState, now: float) -> str:
    if state.ended:
        return state.ended
    if state.fault[0]:
        return f"failed: {state.fault[0]}"
    return f"hangs: its last heartbeat, number {state.heartbeat.sequence}, is {now - state.heartbeat.seconds:.1f} s old"


def _shorten_fault_text(text: str, max_length: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= max_length else f"{line[:max_length]}..."
