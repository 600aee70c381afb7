"""Measures all arms of an ablation as one group of an ordinary run: prepared together, timed in the same rounds."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench import __version__, units
from fp8bench.analysis.energy import energy_figures
from fp8bench.analysis.findings import find
from fp8bench.analysis.samples import step_samples
from fp8bench.analysis.tapes import product_work
from fp8bench.analysis.verdicts import common_rounds
from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.ablate.values import KEPT, AblatedArm, AblatedOption, Ablation, arms_of
from fp8bench.files import compact, keeping, seal, write_whole
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.arm import Quantisers
from fp8bench.measure.environment import gather
from fp8bench.measure.group import GroupMeasurement, Method
from fp8bench.measure.handle import claim_process
from fp8bench.measure.limits import Limits
from fp8bench.measure.sensors.meter import Meters
from fp8bench.measure.windows import window_rule_for
from fp8bench.model import DeviceFacts, Environment, Group, Plan, PlannedCase, Record, Request
from fp8bench.model.codec import encode
from fp8bench.model.file_names import stamp
from fp8bench.model.stopping import rule_for
from fp8bench.pipeline import examine, now, worker_for
from fp8bench.plan.checked_workload import axes_of
from fp8bench.plan.make import choose_devices, make_plan
from fp8bench.plan.resolve import resolve
from fp8bench.protocols import Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads
from fp8bench.report.panels import value_of
from fp8bench.report.topics.memory import PEAK

# For each named option: the axis that it sets, and its values with the option and without.
NAMED = {
    "compile": ("compile", "yes", "no"),
    "checkpointing": ("checkpointing", "blocks", "no"),
    "cached-weights": ("weights", "cached", "recast"),
    "channels_last": ("layout", "channels_last", "contiguous"),
    "fused-optimizer": ("fused", "yes", "no"),
    "static-kv": ("static", "yes", "no"),
}
# If the useful FLOPs of two steps' products differ by more than this share, their work differs.
_SAME_WORK = 0.05
_ERRORS = ("gradient_error", "output_error", "relative_error")


def _takes(axis: Axis, value: str) -> bool:
    """Whether the axis has this value: suites use one name for different axes, like layouts of images and matrices."""
    try:
        axis.values([value])
    except UsageError:
        return False
    return True


def option_of(word: str, workload: Workload, facts: DeviceFacts) -> AblatedOption:
    """Parses a precision, a named option, or AXIS=VALUE. Raises UnknownName, or UsageError for a wrong value."""
    axes = {axis.name: axis for axis in axes_of(workload, facts)}
    name, equals, value = word.partition("=")
    # A named option counts only if the suite has its axis, with the option's value.
    named = {}
    for option_name, option in NAMED.items():
        axis, on, _ = option
        if axis in axes and _takes(axes[axis], on):
            named[option_name] = option
    if word in named:
        axis, on, off = named[word]
        return AblatedOption(word, axis=axis, on=on, off=off)
    if equals and name in axes:
        return AblatedOption(word, axis=name, on=value)
    if not equals and (word in precisions.names() or ":" in word):
        return AblatedOption(word, precision=precisions.canonical(word))
    words = [*named, *(f"{axis}=" for axis in axes), *precisions.names()]
    raise UnknownName(f"option of suite {workload.name}", word, words)


def options_of(suite: str, words: Sequence[str], facts: DeviceFacts) -> tuple[AblatedOption, ...]:
    workload = workloads.get(suite)
    options = tuple(option_of(word, workload, facts) for word in words)
    for option in options:  # a precision has no axis
        same_axis = [candidate.name for candidate in options if candidate.axis == option.axis]
        if len(same_axis) > 1:
            kind = f"values of {option.axis}" if option.axis else "precisions"
            raise UsageError(
                f"--options {','.join(same_axis)} are {kind}: a step has only one at a time. Leave out all but one."
            )
    if len(options) < 2:
        raise UsageError("--options needs two or more: for a single one run a suite. Give --options bf16,compile.")
    return options


def ablate(request: Request, words: Sequence[str], store: Path, observer: JobObserver) -> Ablation:
    """Measures all arms of options; `request` is the run of the arm without options, with one precision. After an
    interrupt raises KeyboardInterrupt, because incomplete arms prove nothing."""
    # 1. Require a single suite, because rounds interleave the arms of one case.
    resolved = resolve(request, os.environ)
    suite, *other_suites = resolved.suites
    if other_suites:
        raise UsageError(
            f"{request.suite} is {len(resolved.suites)} suites, and an ablation measures one. Name {suite.name}, say; "
            "--import FILE makes the suites of a file known."
        )
    corpus, switches = resolved.corpus(store), resolved.switches
    with claim_process(request.isolation), worker_for(request, corpus) as worker, Meters(request.energy) as meters:
        # 2. A case for each arm; those that the device refuses drop out with their reason.
        facts = worker.probe()
        (device,) = choose_devices(request, facts)
        options = options_of(suite.name, words, device)
        planned = planned_arms(request, options, facts, corpus.identity if corpus else None)
        group = Group(tuple(planned.values()), 0)
        examine(Plan((group,)), facts, worker, Limits(request.case_timeout))
        # 3. Measure all arms in one group, so that they share rounds and thus the machine's drift.
        environment = gather(worker.software(), __version__, request.threads, request.imports)
        method = Method(
            rule=rule_for(request.quick, request.rounds, request.budget),
            # Arms are compared with each other at the end: no verdict ends their rounds early.
            judge=lambda *timings: False,
            seed=request.seed,
            limits=Limits(request.case_timeout),
            windows=window_rule_for(request, 1),
            quantisers=Quantisers(switches.why_eager),
            tapes=switches.tapes,
            tapes_apart=False,
        )
        with observer.measuring() as watch:
            records = GroupMeasurement(group, {device.key: device}, worker, watch, method, meters.of(device)).run()
    return _ablation_of(options, device, planned, records, environment)


def planned_arms(
    request: Request, options: Sequence[AblatedOption], facts: Sequence[DeviceFacts], corpus: str | None
) -> dict[tuple[str, ...], PlannedCase]:
    """Plans a case for each arm; a refused case has the reason."""
    arms: dict[tuple[str, ...], PlannedCase] = {}
    by_name = {option.name: option for option in options}
    off = {option.axis: (option.off,) for option in options if option.off}
    # Options that are off are set, too: a suite's default may turn one on.
    for names in arms_of(list(by_name)):
        chosen = [by_name[name] for name in names]
        on = {option.axis: (option.on,) for option in chosen if option.axis}
        precision = next((option.precision for option in chosen if option.precision), "")
        axes = {**dict(request.axes), **off, **on}
        dtypes = (precision,) if precision else request.dtypes
        groups = make_plan(replace(request, dtypes=dtypes, axes=tuple(axes.items())), facts, corpus, False)
        # Two cases would be two unrelated ablations.
        if len(groups.groups) > 1:
            raise UsageError(
                f"suite {request.suite} has {len(groups.groups)} cases, and an ablation measures one. "
                f"Choose: --set {_first_difference(groups)}, say."
            )
        arms[names] = groups.groups[0].cases[0]
    return arms


def _first_difference(plan: Plan) -> str:
    """Returns the first parameter in which the cases of a plan differ, as AXIS=VALUE of the first case."""
    first, *remaining = [group.cases[0].case for group in plan]
    for name, value in first.params:
        if any(case.param(name) != value for case in remaining):
            return f"{name}={value}"
    raise AssertionError("cases of one suite differ in some parameter")


def _ablation_of(
    options: tuple[AblatedOption, ...],
    device: DeviceFacts,
    planned: Iterable[tuple[str, ...]],
    records: Sequence[Record],
    environment: Environment,
) -> Ablation:
    first = records[0]
    together = [record for record in records if record.paired and record.paired_with is None]
    native = [record.timing for record in together if record.timing and record.support.is_native]
    entries = [*native, *([first.control] if first.control else [])]
    rounds = frozenset(common_rounds(entries)) if entries else frozenset()
    error = next((name for name in _ERRORS if first.measurement(name)), "")
    arms = []
    for names, record in zip(planned, records, strict=True):
        share = first.work.tokens / record.work.tokens if record.work.tokens else 1.0
        energy, paired = energy_figures(record), record in together
        reason = record.reason or (
            "" if paired else "memory has no room for it next to the remaining arms, so it could not share their rounds"
        )
        reason = reason or other_work(record, first, share)
        # One record at a time, because findings of several records assume that all do the same work.
        (finding,) = find([record], {})
        reason = reason or ", ".join(label.value for label in finding.hard)
        arms.append(
            AblatedArm(
                names,
                record.case.id,
                record.support.level,
                reason,
                _rounds(record, rounds, share) if paired else (),
                value_of(record.measurement(PEAK)),
                value_of(record.measurement(error)) if error else None,
                None if energy is None else share * energy.gross.middle,
                tuple(label.value for label in finding.labels),
            )
        )
    return Ablation(
        first.case.workload,
        first.case.params,
        device.key,
        device.name,
        first.case.precision,
        options,
        tuple(arms),
        error,
        _rounds(replace(first, timing=first.control), rounds, 1.0),
        started=now(),
        environment=environment.facts,
    )


def other_work(record: Record, first: Record, share: float) -> str:
    """Describes how an arm's products differ from the first arm's for equally many tokens; '' if they agree or are
    unknown."""
    tape, base = record.tape, first.tape
    if tape is None or base is None or not (tape.complete and base.complete):
        return ""
    base_work = product_work(base).useful
    # With another batch size, extra work may be padding or recomputation; only less work is suspicious.
    useful = product_work(tape, base).useful if share == 1 else min(base_work, share * product_work(tape).useful)
    if abs(useful - base_work) <= _SAME_WORK * max(useful, base_work):
        return ""
    own_flops, first_flops = (units.count(flops, "FLOP") for flops in (useful, base_work))
    return f"other work: for as many tokens its products do {own_flops}, those of the first arm {first_flops}"


def _rounds(record: Record, rounds: Collection[int], share: float) -> tuple[float, ...]:
    """Returns seconds of whole steps times `share`, in these rounds; for an emulated arm, which has few, in all
    rounds."""
    if record.timing is None:
        return ()
    numbers = (slot.round for slot in record.timing.slots)
    emulated = record.support.is_emulated
    samples = zip(numbers, step_samples(record.timing), strict=True)
    return tuple(share * seconds for number, seconds in samples if emulated or number in rounds)


def keep(ablation: Ablation, store: Path) -> Ablation:
    """Writes the ablation into the store, and returns it with its path."""
    path = store / "ablations" / f"{stamp(ablation.started)}-{secrets.token_hex(4)}" / KEPT
    with keeping(f"the ablation {path}", "Choose another --store DIR."):
        write_whole(path, compact(seal(encode(replace(ablation, path="")))) + "\n")
    return replace(ablation, path=str(path))
