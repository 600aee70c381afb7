"""Kinds of work from a trace of torch's profiler: events in, shares of a step out.

What runs under an operator belongs to the operator; a compiled kernel's name tells what was fused into it; and a kernel
of a device belongs to the call that launched it. An event is one of a Chrome trace: `ts` and `dur` in microseconds,
`tid` its thread, `cat` its kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from fp8bench.model import PHASES
from fp8bench.model.step import Share, ShareKind
from fp8bench.tape.formulas import Where, kind_of, kind_of_place, multiplies
from fp8bench.tape.recorder import Route, route_of
from fp8bench.tape.timed_calls import RANGE

Event = Mapping[str, Any]
Kind = tuple[ShareKind, str]
_HOST = ("cpu_op", "user_annotation")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_PHASE = "fp8bench."
_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "Optimizer.step#"
_OPERATOR = re.compile(r"(\w+)::(\w+)$")
# 'cpp_fused_add_mul_3', 'graph_0_cpp_fused_mm_1', 'triton_poi_fused_add_0'.
_FUSED = re.compile(r"(?:graph_\d+_)?(?:cpp|triton_[a-z]+)_fused_(\w+?)(?:_\d+)?$")
# Words in names of libraries' own operators and kernels.
_BY_WORD = (
    (re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE), ShareKind.ATTENTION),
    (re.compile(r"gemm|matmul|cutlass|nvjet|linear|conv|(?<![a-z])mm(?![a-z])", re.IGNORECASE), ShareKind.GEMM),
    (re.compile(r"memcpy|memset", re.IGNORECASE), ShareKind.COPY),
)
# A kernel that computes a product itself.
_TEMPLATE = re.compile(r"triton_tem_")
_CASTING = re.compile(r"_to_copy|amax|aminmax|convert_element_type")
_WITH = "fused with "


@dataclass(frozen=True)
class ProfiledParts:
    """Parts of a step that torch's profiler recorded, and how many kernels have casts fused with other work."""

    parts: tuple[Share, ...]
    fused: int


def profiled(events: Iterable[Event], steps: int = 1) -> ProfiledParts:
    """Returns what each of `steps` steps consists of. If a device has run kernels, only these count."""
    sums: dict[tuple[Kind, bool], tuple[float, int]] = {}
    fused: set[str] = set()
    for kind, backward, seconds, name in _rows(list(events)):
        before = sums.get((kind, backward), (0.0, 0))
        sums[kind, backward] = before[0] + seconds, before[1] + 1
        if kind[1].startswith(_WITH) and ShareKind.CAST in kind[1]:
            fused.add(name)
    parts = [
        Share(kind, "", backward, seconds / steps, max(1, round(calls / steps)), what)
        for ((kind, what), backward), (seconds, calls) in sums.items()
    ]
    return ProfiledParts(tuple(sorted(parts, key=lambda part: -part.seconds)), len(fused))


def seconds_by_operator(events: Iterable[Event]) -> tuple[dict[int, float], dict[str, float]]:
    """Returns seconds of a device's kernels by the number of the operator that launched them; others by name."""
    timed = list(events)
    inside: dict[int, float] = defaultdict(float)
    outside: dict[str, float] = defaultdict(float)
    for kernel, launch in _launched(timed):
        if launch is not None and launch.operator is not None:
            inside[launch.operator] += _seconds(kernel)
        else:
            outside[str(kernel.get("name"))] += _seconds(kernel)
    return dict(inside), dict(outside)


def _rows(events: Sequence[Event]) -> Iterator[tuple[Kind, bool, float, str]]:
    if any(_is(event, _ON_DEVICE) for event in events):
        for kernel, launch in _launched(events):
            name = str(kernel.get("name"))
            known = launch.kind if launch is not None and not _FUSED.match(name) else None
            yield known or _by_name(name), launch is not None and launch.backward, _seconds(kernel), name
        return
    for thread in _by_thread(events, _HOST).values():
        for event in _nested(thread):
            if event.kind is not None:
                yield event.kind, event.backward, event.own * 1e-6, event.name


@dataclass(slots=True)
class _Event:
    """What an event is, by itself and by those around it. `own` are the microseconds that no event within it has."""

    name: str
    end: float
    own: float
    where: Where
    backward: bool
    operator: int | None
    kind: Kind | None
    correlation: object


def _launched(events: Sequence[Event]) -> Iterator[tuple[Event, _Event | None]]:
    """Yields each kernel of a device with the call that launched it, None if unknown."""
    launches = {
        event.correlation: event
        for thread in _by_thread(events, (*_HOST, *_LAUNCHES)).values()
        for event in _nested(thread)
        if event.correlation is not None
    }
    for kernel in events:
        if _is(kernel, _ON_DEVICE):
            yield kernel, launches.get(_correlation(kernel))


def _by_thread(events: Iterable[Event], kinds: Sequence[str]) -> dict[object, list[Event]]:
    threads: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        if _is(event, kinds):
            threads[event.get("tid")].append(event)
    return threads


def _is(event: Event, kinds: Sequence[str]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in kinds


def _seconds(event: Event) -> float:
    return float(event["dur"]) * 1e-6


def _correlation(event: Event) -> object:
    return (event.get("args") or {}).get("correlation")


_TOP = _Event("", float("inf"), 0.0, Where(), False, None, None, None)


def _nested(thread: list[Event]) -> Iterator[_Event]:
    """Yields the events of one thread when they end. The kind of the outermost that has one holds for all within it."""
    stack = [replace(_TOP)]
    for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
        while stack[-1].end <= event["ts"]:
            yield stack.pop()
        stack[-1].own -= min(event["dur"], max(0.0, stack[-1].end - event["ts"]))
        stack.append(_within(event, stack[-1]))
    yield from reversed(stack[1:])


def _within(event: Event, outer: _Event) -> _Event:
    name = str(event.get("name"))
    where, backward, operator = outer.where, outer.backward, outer.operator
    if name.startswith(RANGE):
        operator = int(name.removeprefix(RANGE))
    elif name.startswith(_PHASE) and name.removeprefix(_PHASE) in PHASES:
        where = replace(where, phase=name.removeprefix(_PHASE))
    elif name.startswith(_NODE):
        where, backward = replace(where, node=name.removeprefix(_NODE)), True
    elif name.startswith(_OPTIMIZER):
        where = replace(where, optimizing=True)
    kind = outer.kind or _kind_of_event(name, where)
    correlation = _correlation(event) if event.get("cat") in _LAUNCHES else None
    return _Event(name, event["ts"] + event["dur"], event["dur"], where, backward, operator, kind, correlation)


def _kind_of_event(name: str, where: Where) -> Kind | None:
    """Returns the kind of an operator or a compiled kernel; None for other events, and for composite operators."""
    placed = kind_of_place(where)
    if _FUSED.match(name):
        return _by_name(name) if placed is None else (placed, "")
    operator = _OPERATOR.match(name)
    if operator is None or operator[1] in ("autograd", "profiler"):
        return None
    packet = getattr(getattr(torch.ops, operator[1]), operator[2], None)
    if packet is None:
        return _by_name(name) if placed is None else (placed, "")
    overload = getattr(packet, packet.overloads()[0])
    if route_of(overload) is Route.COMPOSITE:
        return None
    kind, what = kind_of(overload, where)
    return _by_name(name) if kind is ShareKind.UNKNOWN else (kind, what)


@cache
def _by_name(name: str) -> Kind:
    """Returns the kind that a kernel's name tells. A kernel with several kinds of work is never split: it counts as
    what multiplies, else as elementwise, and names the other kinds."""
    fused = _FUSED.match(name)
    if fused is None:
        known = next((kind for pattern, kind in _BY_WORD if pattern.search(name)), None)
        return (ShareKind.UNKNOWN, name) if known is None else (known, "")
    # A library computes products: a generated kernel with one in its name only prepares operands or results.
    parts = [part for part in _parts(fused[1]) if _TEMPLATE.match(name) or not _is_product(part)]
    kinds = {_kind_within(part) for part in parts} - {ShareKind.VIEW}
    if len(kinds) < 2:
        return (kinds.pop() if kinds else ShareKind.VIEW if parts else ShareKind.COPY), ""
    strong = next((kind for kind in (ShareKind.GEMM, ShareKind.ATTENTION) if kind in kinds), ShareKind.ELEMENTWISE)
    others = [kind for kind in ShareKind if kind in kinds - {strong}]
    return strong, f"{_WITH}{', '.join(others)}" if others else ""


def _is_product(part: str) -> bool:
    packet = getattr(torch.ops.aten, part, None)
    return packet is not None and bool(multiplies(getattr(packet, packet.overloads()[0])))


def _kind_within(part: str) -> ShareKind:
    if _CASTING.fullmatch(part):
        return ShareKind.CAST
    packet = getattr(torch.ops.aten, part, None)
    if packet is None:
        return ShareKind.ELEMENTWISE
    kind, _ = kind_of(getattr(packet, packet.overloads()[0]), Where())
    return ShareKind.ELEMENTWISE if kind is ShareKind.UNKNOWN else kind


def _parts(words: str) -> Iterator[str]:
    """Splits a kernel's name into the names of operators, from left to right, always the longest that fits."""
    known, rest = _operators(), words
    while rest:
        ends = [place for place, letter in enumerate(rest) if letter == "_" and place] + [len(rest)]
        whole = next((end for end in reversed(ends) if rest[:end] in known), None)
        if whole is not None:
            yield rest[:whole]
        rest = rest[(ends[0] if whole is None else whole) + 1 :]


@cache
def _operators() -> frozenset[str]:
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in names if name.startswith("aten::"))
