"""All arms of an ablation as one group of an ordinary run: prepared together, timed in the same rounds."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench import __version__, units
from fp8bench.analysis.energy import energy_figures
from fp8bench.analysis.findings import find
from fp8bench.analysis.samples import step_samples
from fp8bench.analysis.tapes import product_work
from fp8bench.analysis.verdicts import common_rounds
from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.ablate.values import KEPT, MOST_BY_SHAPLEY, AblatedArm, AblatedOption, Ablation, arms_of
from fp8bench.files import compact, keeping, sealed, stamp, write_whole
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.arm import Quantisers
from fp8bench.measure.environment import gather
from fp8bench.measure.group import GroupMeasurement, Method
from fp8bench.measure.handle import claimed
from fp8bench.measure.limits import Limits
from fp8bench.measure.sensors.meter import Meters
from fp8bench.measure.windows import window_rule_for
from fp8bench.model import DeviceFacts, Environment, Group, Level, Plan, PlannedCase, Record, Request
from fp8bench.model.codec import encode
from fp8bench.model.stopping import rule_for
from fp8bench.pipeline import examine, now, worker_for
from fp8bench.plan.checked_workload import sound_axes
from fp8bench.plan.make import devices_asked, make_plan
from fp8bench.plan.resolve import resolve
from fp8bench.protocols import Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads
from fp8bench.report.panels import value_of
from fp8bench.report.topics.memory import PEAK

# Options that have a name of their own: an axis, its value with the option, and without.
NAMED = {
    "compile": ("compile", "yes", "no"),
    "checkpointing": ("checkpointing", "blocks", "no"),
    "cached-weights": ("weights", "cached", "recast"),
    "channels_last": ("layout", "channels_last", "contiguous"),
    "fused-optimizer": ("fused", "yes", "no"),
    "static-kv": ("static", "yes", "no"),
}
# Steps whose useful FLOPs of products differ by so much are not the same work.
_OTHER = 0.05
_ERRORS = ("gradient_error", "output_error", "relative_error")


@dataclass(frozen=True)
class AblationQuestion:
    """`request` is the run of the arm without options: its one precision, and its axes."""

    request: Request
    options: tuple[str, ...]
    shapley: bool = False


def _takes(axis: Axis, value: str) -> bool:
    """Several suites call an axis alike: a layout is one of images in some, of matrices in others."""
    try:
        axis.values([value])
    except UsageError:
        return False
    return True


def option_of(word: str, workload: Workload, facts: DeviceFacts) -> AblatedOption:
    """A precision, a named option, or AXIS=VALUE. Raises UnknownName, or UsageError for a value that is none."""
    axes = {axis.name: axis for axis in sound_axes(workload, facts)}
    name, given, value = word.partition("=")
    named = {own: option for own, option in NAMED.items() if option[0] in axes and _takes(axes[option[0]], option[1])}
    if word in named:
        axis, on, off = named[word]
        return AblatedOption(word, axis=axis, on=on, off=off)
    if given and name in axes:
        return AblatedOption(word, axis=name, on=value)
    if not given and word in precisions.names():
        return AblatedOption(word, precision=precisions.canonical(word))
    if not given and ":" in word:
        return AblatedOption(word, precision=precisions.canonical(word))
    known = [*named, *(f"{axis}=" for axis in axes), *precisions.names()]
    raise UnknownName(f"option of suite {workload.name}", word, known)


def options_of(question: AblationQuestion, facts: DeviceFacts) -> tuple[AblatedOption, ...]:
    workload = workloads.get(question.request.suite)
    options = tuple(option_of(word, workload, facts) for word in question.options)
    for kind in ("precision", "axis"):
        given = [option for option in options if getattr(option, kind)]
        for option in given:
            alike = [other.name for other in given if kind == "precision" or other.axis == option.axis]
            if len(alike) > 1:
                what = "precisions" if kind == "precision" else f"values of {option.axis}"
                raise UsageError(
                    f"--options {','.join(alike)} are {what}: a step has only one at a time. Leave out all but one."
                )
    if len(options) < 2:
        raise UsageError("--options needs two or more: of one alone a suite says it all. Give bf16,compile, say.")
    if question.shapley and len(options) > MOST_BY_SHAPLEY:
        raise UsageError(
            f"--shapley measures all subsets, and of {len(options)} options there are {2 ** len(options)}. Give "
            f"{MOST_BY_SHAPLEY} options at most."
        )
    return options


def ablated(question: AblationQuestion, store: Path, observer: JobObserver) -> Ablation:
    """Measure all arms. An interrupt raises KeyboardInterrupt: of arms cut off halfway nothing can be said."""
    request = question.request
    resolved = resolve(request, os.environ)
    corpus, switches = resolved.corpus(store), resolved.switches
    with claimed(request.isolation), worker_for(request, corpus) as worker, Meters(request.energy) as meters:
        facts = worker.probe()
        (device,) = devices_asked(request, facts)
        options = options_of(question, device)
        planned = planned_arms(question, options, facts, corpus.identity if corpus else None)
        group = Group(tuple(planned.values()), 0)
        examine(Plan((group,)), facts, worker, Limits(request.case_timeout))
        environment = gather(worker.software(), __version__, request.threads, request.imports)
        method = Method(
            rule=rule_for(request.quick, request.rounds, request.budget), judge=lambda *timings: False,
            seed=request.seed, limits=Limits(request.case_timeout), windows=window_rule_for(request),
            quantisers=Quantisers(switches.why_eager), tapes=switches.tapes,
            tapes_apart=False,
        )  # fmt: skip
        with observer.measuring() as watch:
            records = GroupMeasurement(group, {device.key: device}, worker, watch, method, meters.of(device)).run()
    return _told(question, options, device, planned, records, environment)


def planned_arms(
    question: AblationQuestion, options: Sequence[AblatedOption], facts: Sequence[DeviceFacts], corpus: str | None
) -> dict[tuple[str, ...], PlannedCase]:
    """A case for each arm. What an arm's device refuses is in it, with the reason."""
    arms: dict[tuple[str, ...], PlannedCase] = {}
    named = {option.name: option for option in options}
    off = {option.axis: (option.off,) for option in options if option.off}
    for names in arms_of(list(named), question.shapley):
        on = {named[name].axis: (named[name].on,) for name in names if named[name].axis}
        precision = next((named[name].precision for name in names if named[name].precision), "")
        axes = {**dict(question.request.axes), **off, **on}
        dtypes = (precision,) if precision else question.request.dtypes
        groups = make_plan(replace(question.request, dtypes=dtypes, axes=tuple(axes.items())), facts, corpus, False)
        if len(groups.groups) > 1:
            axis = next(name for name, _ in groups.groups[0].cases[0].case.params
                        if len({group.cases[0].case.param(name) for group in groups}) > 1)  # fmt: skip
            raise UsageError(
                f"suite {question.request.suite} has {len(groups.groups)} cases by itself, and an ablation is of one. "
                f"Choose: --set {axis}={groups.groups[0].cases[0].case.param(axis)}, say."
            )
        arms[names] = groups.groups[0].cases[0]
    return arms


def _told(
    question: AblationQuestion, options: tuple[AblatedOption, ...], device: DeviceFacts,
    planned: Iterable[tuple[str, ...]], records: Sequence[Record], environment: Environment,
) -> Ablation:  # fmt: skip
    first = records[0]
    together = [record for record in records if record.paired and record.paired_with is None]
    native = [record.timing for record in together if record.timing and record.support.level is Level.NATIVE]
    entries = [*native, *([first.control] if first.control else [])]
    rounds = frozenset(common_rounds(entries)) if entries else frozenset()
    error = next((name for name in _ERRORS if first.measurement(name)), "")
    arms = []
    for names, record in zip(planned, records, strict=True):
        share = first.work.tokens / record.work.tokens if record.work.tokens else 1.0
        energy, paired = energy_figures(record), record in together
        why = record.reason or ("" if paired else "memory has no room for it beside the others: no common rounds")
        why = why or other_work(record, first, share)
        # Alone: the first arm's inputs and work may be others', which is asked here as what this arm is.
        (finding,) = find([record], {})
        why = why or ", ".join(label.value for label in finding.hard)
        arms.append(
            AblatedArm(
                names, record.case.id, record.support.level, why,
                _rounds(record, rounds, share) if paired else (), value_of(record.measurement(PEAK)),
                value_of(record.measurement(error)) if error else None,
                None if energy is None else share * energy.gross.middle,
                tuple(label.value for label in finding.labels),
            )
        )  # fmt: skip
    return Ablation(
        first.case.workload, first.case.params, device.key, device.name, first.case.precision, options, tuple(arms),
        error, _rounds(replace(first, timing=first.control), rounds, 1.0), question.shapley, started=now(),
        environment=environment.facts,
    )  # fmt: skip


def other_work(record: Record, first: Record, share: float) -> str:
    """What says that an arm's products are not those of the first one, for as many tokens; '' where nobody can tell."""
    own, base = record.tape, first.tape
    if own is None or base is None or any(tape.unknown or tape.unwritten for tape in (own, base)):
        return ""
    wanted = product_work(base).useful
    # Of another batch nobody knows what is padding and what is computed again: more is no doubt, less is.
    useful = product_work(own, base).useful if share == 1 else min(wanted, share * product_work(own).useful)
    if abs(useful - wanted) <= _OTHER * max(useful, wanted):
        return ""
    did, others = (units.count(flops, "FLOP") for flops in (useful, wanted))
    return f"other work: for as many tokens its products do {did}, those of the first arm {others}"


def _rounds(record: Record, rounds: Collection[int], share: float) -> tuple[float, ...]:
    """Seconds of whole steps in the rounds that all arms were in, as if steps had as many tokens as the first one's.

    Of emulated ones, which have few rounds, all of them.
    """
    if record.timing is None:
        return ()
    numbers = (slot.round for slot in record.timing.slots)
    emulated = record.support.level is Level.EMULATED
    samples = zip(numbers, step_samples(record.timing), strict=True)
    return tuple(share * seconds for number, seconds in samples if emulated or number in rounds)


def kept(ablation: Ablation, store: Path) -> Ablation:
    path = store / "ablations" / f"{stamp(ablation.started)}-{secrets.token_hex(4)}" / KEPT
    with keeping(f"the ablation {path}", "Choose another --store DIR."):
        write_whole(path, compact(sealed(encode(replace(ablation, path="")))) + "\n")
    return replace(ablation, path=str(path))
