"""The answers of several ranks as one: of times the slowest rank's, of anything else what all of them can stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fp8bench.errors import RanksDisagree
from fp8bench.model import CELL_PHASES, DeviceFacts, MemoryUse, Phase, Scalar
from fp8bench.model.ranks import Overlap, RankCalls, RankMemory, RankScaling, Sent
from fp8bench.model.raw import RawSlot, RawStep, StateCheck
from fp8bench.model.run import OperationBits

# What makes a build of torch.
_BUILD = ("torch", "torch_git", "cudnn", "cublaslt")
_COMMUNICATION = CELL_PHASES.index(Phase.COMMUNICATION)


Merges = Mapping[str, Callable[[Sequence[Any]], Any]]


def merged(name: str, answers: Sequence[Any], more: Merges = MappingProxyType({})) -> Any:
    """One answer to a request that all ranks have answered, in the order of ranks. Raises RanksDisagree.

    `more` says it for the requests of a bench that is not the worker's own.
    """
    merges = {**_MERGED, **more}
    return merges[name](answers) if name in merges else answers[0]


def slowest(slots: Sequence[RawSlot]) -> RawSlot:
    """A step is over when its slowest rank is: call by call that rank's marks, whole, so that phases still add up.

    What the system counted is that of the rank that was slowest over all calls.
    """
    calls = tuple(
        max(steps, key=lambda step: sum(step.intervals_ns))
        for steps in zip(*(slot.steps for slot in slots), strict=True)
    )
    last = max(slots, key=lambda slot: sum(step.seconds for step in slot.steps))
    took = tuple(
        RankCalls(rank, tuple(sum(step.intervals_ns) for step in slot.steps), tuple(map(_communication, slot.steps)))
        for rank, slot in enumerate(slots)
    )
    retries = [slot.memory_retries for slot in slots if slot.memory_retries is not None]
    wall = max(slot.wall_seconds for slot in slots)
    return replace(last, steps=calls, wall_seconds=wall, ranks=took, memory_retries=sum(retries) if retries else None)


def _communication(step: RawStep) -> int:
    return sum(ns for code, ns in zip(step.codes, step.intervals_ns, strict=True) if code == _COMMUNICATION)


def _devices(answers: Sequence[Sequence[DeviceFacts]]) -> tuple[DeviceFacts, ...]:
    keys = set.intersection(*({device.key for device in devices} for devices in answers))
    return tuple(device for device in answers[0] if device.key in keys)


def _agreed(answers: Sequence[Mapping[str, float] | str]) -> Mapping[str, float] | str:
    """Numbers that must be the same on all ranks: a sum that differs from rank to rank is wrong on some of them."""
    first = answers[0]
    for rank, other in enumerate(answers):
        if other == first or isinstance(first, str) or isinstance(other, str):
            continue
        for name, value in first.items():
            if other.get(name) != value and not (math.isnan(value) and math.isnan(other.get(name, 0.0))):
                raise RanksDisagree(f"{name} is {value!r} on rank 0 and {other.get(name)!r} on rank {rank}")
    return first


def most_memory(answers: Sequence[MemoryUse | str]) -> MemoryUse | str:
    told = [answer for answer in answers if isinstance(answer, MemoryUse)]
    if len(told) < len(answers):
        return next(answer for answer in answers if isinstance(answer, str))
    each = tuple(RankMemory(rank, use.peak, use.roles) for rank, use in enumerate(told))
    return replace(max(told, key=lambda most: most.peak), ranks=each)


def _checked(answers: Sequence[StateCheck]) -> StateCheck:
    for rank, answer in enumerate(answers):
        if answer.wrong:
            return replace(answer, wrong=f"rank {rank} of {len(answers)}: {answer.wrong}")
    return max(answers, key=lambda answer: answer.not_finite)


def _software(answers: Sequence[Mapping[str, Scalar | None]]) -> dict[str, Scalar | None]:
    """Rank 0's, and the settings of each rank. Ranks of different builds would compare nothing."""
    for rank, answer in enumerate(answers):
        for name in _BUILD:
            first, other = answers[0].get(name), answer.get(name)
            if other != first:
                raise RanksDisagree(f"{name} is {first} on rank 0 and {other} on rank {rank}: install the same on both")
    settings = {
        f"rank {rank} {name.removeprefix('env ')}": value
        for rank, answer in enumerate(answers)
        for name, value in answer.items()
        if name.startswith("env ")
    }
    return {**{name: value for name, value in answers[0].items() if not name.startswith("env ")}, **settings}


def _said(answers: Sequence[str]) -> str:
    return next(filter(None, answers), "")


def _bits(answers: Sequence[Sequence[OperationBits]]) -> tuple[OperationBits, ...]:
    """Each rank's own, and once what all of them come to: with several digests where they come to different things."""
    told: dict[OperationBits, dict[str, None]] = {}
    for bits in (bits for own in answers for bits in own):
        told.setdefault(replace(bits, digests=()), {}).update(dict.fromkeys(bits.digests))
    return tuple(replace(bits, digests=tuple(digests)) for bits, digests in told.items())


StepAnswer = tuple[tuple[Sent, ...], Mapping[str, Sequence[float]]]


def _step_parts(
    answers: Sequence[StepAnswer | str | None],
) -> tuple[tuple[Sent, ...], Overlap, RankScaling | None] | None:
    """What every rank sends. Each round of each part ends with its slowest rank."""
    told = [answer for answer in answers if answer is not None and not isinstance(answer, str)]
    if len(told) < len(answers):
        return next((((), Overlap(why=answer), None) for answer in answers if isinstance(answer, str)), None)
    sent, ranks = tuple(message for own, _ in told for message in own), [rounds for _, rounds in told]
    seconds = {name: tuple(map(max, zip(*(rank[name] for rank in ranks), strict=True))) for name in ranks[0]}
    scaling = RankScaling(seconds["whole"], seconds["share"], seconds["both"]) if "whole" in seconds else None
    overlap = Overlap(seconds["compute"], seconds["communication"], seconds["both"], seconds["in_turn"])
    return sent, overlap, scaling


_MERGED: Merges = {
    "slot": slowest,
    "replay": slowest,
    "loop": max,
    "loop_phase": max,
    "bits": _bits,
    "probe": _devices,
    "error": _agreed,
    "memory": most_memory,
    "step_parts": _step_parts,
    "check": _checked,
    "release": lambda answers: tuple(f"rank {rank}: {name}" for rank, names in enumerate(answers) for name in names),
    "software": _software,
    "trial": _said,
    "capture": _said,
    # Bytes at the highest point of any rank, where all of them had room.
    "try_batch": lambda answers: None if None in answers else max(answers),
}
