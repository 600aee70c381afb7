"""Request and device facts in, plan out: a pure function, so that plans for any device are tested on any machine.

What a device cannot do becomes a case with a reason, never a missing row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Case, DeviceFacts, Group, Level, Params, Plan, PlannedCase, Request, Scalar, Support
from fp8bench.protocols import Precision, Workload
from fp8bench.registry import devices, precisions, workloads

DEFAULT_DTYPES = ("fp32", "bf16", "fp8")
MOST_CASES = 20_000


def make_plan(request: Request, facts: Sequence[DeviceFacts], corpus: str | None = None) -> Plan:
    """All groups of a request, in order of device and parameters. Raises UsageError for what cannot be meant."""
    workload = workloads.get(request.suite)
    modes = _modes(request)
    reference = _reference(request, modes)
    layers = _precision_map(request, workload, modes, reference)
    notes = []
    groups = [
        _group(workload, params, device, modes, reference, layers, request.reference is not None)
        for device in _devices(request, facts)
        for params in _parameters(request, workload, device, corpus)
    ]
    if request.data is not None and not workload.uses_corpus:
        notes.append(f"--data has no effect: suite {request.suite} reads no text")
    return Plan(tuple(groups), tuple(notes))


def check_names(request: Request) -> None:
    """Raise for unknown names at once, before anything slow is started."""
    workload = workloads.get(request.suite)
    modes = _modes(request)
    _precision_map(request, workload, modes, _reference(request, modes))
    for word in request.devices:
        devices.canonical(word.partition(":")[0])
    # Names and parsers of axes are the same on every device, only their defaults differ.
    _axes(request, workload, DeviceFacts("cpu", 0, "", 0, ""))


def _modes(request: Request) -> tuple[str, ...]:
    """The precisions of the run, the reference first, the others as asked for."""
    names = [precisions.canonical(word) for word in (request.dtypes or DEFAULT_DTYPES)]
    if request.reference is not None:
        names.append(precisions.canonical(request.reference))
    lead = _reference(request, names)
    return (lead, *(name for name in dict.fromkeys(names) if name != lead))


def _reference(request: Request, modes: Sequence[str]) -> str:
    """The one asked for, else the highest precision of the run."""
    if request.reference is not None:
        return precisions.canonical(request.reference)
    return min(modes, key=lambda name: precisions.get(name).rank)


def _precision_map(
    request: Request, workload: Workload, modes: Sequence[str], reference: str
) -> tuple[tuple[str, str], ...]:
    """Layer kinds and their precisions. Cases other than the reference take it; the reference stays pure."""
    layers = []
    for kind, word in request.precision_map:
        if kind not in workload.layer_kinds:
            raise UnknownName(f"layer kind of suite {request.suite}", kind, workload.layer_kinds)
        layers.append((kind, precisions.canonical(word)))
    if layers and all(name == reference for name in modes):
        raise UsageError(
            f"--precision-map would change nothing: {reference} is the reference, which stays pure. Add another "
            "dtype to --dtypes, or another --reference."
        )
    for mode in (name for name in modes if name != reference):
        for _, other in layers:
            if precisions.get(mode).float32_products != precisions.get(other).float32_products:
                raise UsageError(
                    f"--precision-map cannot mix {other} into {mode}: TF32 is one switch for a whole process. Leave "
                    f"{other} out of the map, or {mode} out of --dtypes."
                )
    return tuple(layers)


def _devices(request: Request, facts: Sequence[DeviceFacts]) -> list[DeviceFacts]:
    """The devices asked for; by default the first GPU, else the processor. 'cuda' is every GPU's first."""
    known = {one.key: one for one in facts}
    if not request.devices:
        return [next((one for one in facts if one.accelerated), facts[0])]
    chosen = []
    for word in request.devices:
        key = f"{word}:0" if word != "cpu" and ":" not in word else word
        if key not in known:
            raise UnknownName("device on this machine", word, known)
        chosen.append(known[key])
    return list(dict.fromkeys(chosen))


def _parameters(request: Request, workload: Workload, facts: DeviceFacts, corpus: str | None) -> Iterable[Params]:
    axes = _axes(request, workload, facts)
    combinations = math.prod(len(one) for one in axes.values())
    if combinations > MOST_CASES:
        raise UsageError(f"--set asks for {combinations} combinations; the most is {MOST_CASES}. Choose fewer values.")
    seen: dict[Params, None] = {}
    for combination in itertools.product(*axes.values()):
        for params in workload.expand(dict(zip(axes, combination, strict=True))):
            seen[(*params, ("data", corpus)) if corpus and workload.uses_corpus else params] = None
    return seen


def _axes(request: Request, workload: Workload, facts: DeviceFacts) -> dict[str, list[Scalar]]:
    """The values of every axis: those given, else the device's defaults."""
    axes = {axis.name: axis for axis in workload.axes(facts)}
    given = dict(request.axes)
    for name in given:
        if name not in axes:
            raise UnknownName(f"axis of suite {request.suite}", name, axes)
    return {name: axis.values(given.get(name, axis.default)) for name, axis in axes.items()}


def _group(
    workload: Workload,
    params: Params,
    facts: DeviceFacts,
    modes: Sequence[str],
    reference: str,
    layers: tuple[tuple[str, str], ...],
    firm: bool,
) -> Group:
    pure = [_case(workload, params, facts, name, ()) for name in modes]
    lead = _lead(pure, modes.index(reference), firm)
    cases = tuple(
        one if index == lead or not layers else _case(workload, params, facts, modes[index], layers)
        for index, one in enumerate(pure)
    )
    return Group(cases, lead)


def _case(
    workload: Workload, params: Params, facts: DeviceFacts, name: str, layers: tuple[tuple[str, str], ...]
) -> PlannedCase:
    case = Case(workload.name, params, name, facts.key, layers, workload.version)
    used = [precisions.get(word) for word in (name, *(other for _, other in layers))]
    supports = [precision.support(facts) for precision in used]
    support = _worst(supports)
    named = dict(params)
    misfits = [
        workload.misfit(named, precision)
        for precision, level in zip(used, supports, strict=True)
        if level.level is Level.NATIVE
    ]
    skip = support.reason if support.level is Level.REFUSED else next(filter(None, misfits), "")
    return PlannedCase(case, support, workload.work(named), skip)


def _worst(supports: Sequence[Support]) -> Support:
    """A case is as native as the least native of its layers."""
    order = (Level.NATIVE, Level.EMULATED, Level.REFUSED)
    return max(supports, key=lambda support: order.index(support.level))


def _lead(cases: Sequence[PlannedCase], wanted: int, firm: bool) -> int:
    """The reference's place: the one wanted, or the highest native precision that can run.

    An emulated reference has no speed to compare with, so it takes the user's word (`firm`) to have one beside native
    cases.
    """
    if cases[wanted].runs and (firm or cases[wanted].support.level is Level.NATIVE):
        return wanted
    able = [index for index, planned in enumerate(cases) if planned.runs]
    native = [index for index in able if cases[index].support.level is Level.NATIVE]
    pool = native or able
    return min(pool, key=lambda index: _rank(cases[index])) if pool else wanted


def _rank(planned: PlannedCase) -> int:
    precision: Precision = precisions.get(planned.case.precision)
    return precision.rank
