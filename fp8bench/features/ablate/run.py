"""Measures all arms of an ablation as one group of a run: they are prepared together and timed in the same rounds."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench import __version__, units
from fp8bench.analysis.energy import energy_figures
from fp8bench.analysis.findings import find
from fp8bench.analysis.samples import list_step_samples
from fp8bench.analysis.tapes import sum_product_work
from fp8bench.analysis.verdicts import find_common_rounds
from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.ablate.values import FILE_NAME, AblatedArm, AblatedOption, Ablation, iterate_arms
from fp8bench.files import add_checksum, convert_write_errors, format_compact_json, write_whole
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.arm import QuantiserCompilation
from fp8bench.measure.environment import gather
from fp8bench.measure.group import GroupMeasurement, MeasurementMethod
from fp8bench.measure.handle import register_process_run
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.measure.sensors.meter import Meters
from fp8bench.measure.windows import make_window_rule
from fp8bench.model import DeviceFacts, Environment, Group, Plan, PlannedCase, Record, Request
from fp8bench.model.codec import encode
from fp8bench.model.file_names import format_start_time
from fp8bench.model.stopping import make_stopping_rule
from fp8bench.pipeline import examine, now, open_worker
from fp8bench.plan.checked_workload import list_checked_axes
from fp8bench.plan.make import choose_devices, make_plan
from fp8bench.plan.resolve import resolve_request
from fp8bench.protocols import Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads
from fp8bench.report.panels import median_value
from fp8bench.report.topics.memory import PEAK_MEMORY_METRIC

# For each named option: the axis that it sets, the axis value if it is on, and the value if it is off.
NAMED_OPTIONS = {
    "compile": ("compile", "yes", "no"),
    "checkpointing": ("checkpointing", "blocks", "no"),
    "cached-weights": ("weights", "cached", "recast"),
    "channels_last": ("layout", "channels_last", "contiguous"),
    "fused-optimizer": ("fused", "yes", "no"),
    "static-kv": ("static", "yes", "no"),
}
# If the useful FLOPs of the products of two steps differ by more than this share, the steps do different work.
_MAX_FLOPS_DIFFERENCE_SHARE = 0.05
_ERROR_METRICS = ("gradient_error", "output_error", "relative_error")


def _axis_accepts_value(axis: Axis, value: str) -> bool:
    """Returns whether the axis accepts this value. Different suites use the same name for different axes, such as
    `layout` for images and for matrices.
    """
    try:
        axis.values([value])
    except UsageError:
        return False
    return True


def parse_option(text: str, workload: Workload, facts: DeviceFacts) -> AblatedOption:
    """Parses a precision, a named option, or AXIS=VALUE. Raises UnknownName for other names, and UsageError for a
    wrong value."""
    axes = {axis.name: axis for axis in list_checked_axes(workload, facts)}
    name, equals, value = text.partition("=")
    # A named option is available only if the suite has its axis, and the axis has its value.
    available_options = {}
    for option_name, (axis, on_value, off_value) in NAMED_OPTIONS.items():
        if axis in axes and _axis_accepts_value(axes[axis], on_value):
            available_options[option_name] = AblatedOption(option_name, "", axis, on_value, off_value)
    if text in available_options:
        return available_options[text]
    if equals and name in axes:
        return AblatedOption(text, axis=name, on=value)
    if not equals and (text in precisions.names() or ":" in text):
        return AblatedOption(text, precision=precisions.find_canonical_name(text))
    known_names = [*available_options, *(f"{axis}=" for axis in axes), *precisions.names()]
    raise UnknownName(f"option of suite {workload.name}", text, known_names)


def parse_options(suite: str, texts: Sequence[str], facts: DeviceFacts) -> tuple[AblatedOption, ...]:
    workload = workloads.get(suite)
    options = tuple(parse_option(word, workload, facts) for word in texts)
    for option in options:  # Precisions have the axis '', so two precisions conflict like two values of one axis.
        options_of_axis = [candidate.name for candidate in options if candidate.axis == option.axis]
        if len(options_of_axis) > 1:
            conflict_text = f"values of {option.axis}" if option.axis else "precisions"
            raise UsageError(
                f"--options {','.join(options_of_axis)} are {conflict_text}, and a step has only one at a time. "
                "Keep one of them."
            )
    if len(options) < 2:
        raise UsageError("--options needs two or more; for a single one, run a suite. Give --options bf16,compile.")
    return options


def ablate(request: Request, option_texts: Sequence[str], store: Path, observer: JobObserver) -> Ablation:
    """Measures all arms of an ablation. `request` is the run without options, in one precision. Raises
    KeyboardInterrupt if it is interrupted, because incomplete arms prove nothing.
    """
    # 1. Require a single suite, because all arms are variants of one case.
    resolved_request = resolve_request(request, os.environ)
    suite, *other_suites = resolved_request.suites
    if other_suites:
        raise UsageError(
            f"{request.suite} is {len(resolved_request.suites)} suites, but an ablation measures one. Name "
            f"one, such as {suite.name}; "
            "--import FILE loads the suites of a file."
        )
    corpus, switches = resolved_request.corpus(store), resolved_request.switches
    with (
        register_process_run(request.isolation),
        open_worker(request, corpus) as worker,
        Meters(request.energy) as meters,
    ):
        # 2. Plan a case for each arm. An arm that the device refuses is dropped, with its reason.
        facts = worker.probe()
        (device,) = choose_devices(request, facts)
        options = parse_options(suite.name, option_texts, device)
        planned_by_arm = plan_arms(request, options, facts, corpus.identity if corpus else None)
        group = Group(tuple(planned_by_arm.values()), 0)
        examine(Plan((group,)), facts, worker, RequestTimeLimits(request.case_timeout))
        # 3. Measure all arms in one group. The machine's drift then affects all of them in the same rounds.
        environment = gather(worker.software(), __version__, request.threads, request.imports)
        method = MeasurementMethod(
            rule=make_stopping_rule(request.quick, request.rounds, request.budget),
            # Arms are compared only at the end, so no verdict ends their rounds early.
            judge=lambda *timings: False,
            seed=request.seed,
            limits=RequestTimeLimits(request.case_timeout),
            windows=make_window_rule(request, 1),
            quantisers=QuantiserCompilation(switches.why_eager),
            tapes=switches.tapes,
            tapes_apart=False,
        )
        with observer.measuring() as watch:
            records = GroupMeasurement(group, {device.key: device}, worker, watch, method, meters.of(device)).run()
    return _build_ablation(options, device, planned_by_arm, records, environment)


def plan_arms(
    request: Request, options: Sequence[AblatedOption], facts: Sequence[DeviceFacts], corpus: str | None
) -> dict[tuple[str, ...], PlannedCase]:
    """Plans one case for each arm. If an arm is refused, its case holds the reason."""
    planned_case_by_arm: dict[tuple[str, ...], PlannedCase] = {}
    option_by_name = {option.name: option for option in options}
    default_axis_values = {option.axis: (option.off,) for option in options if option.off}
    # Set the axis of each option that the arm leaves out, because the suite's default may turn that option on.
    for names in iterate_arms(list(option_by_name)):
        arm_options = [option_by_name[name] for name in names]
        chosen_axis_values = {option.axis: (option.on,) for option in arm_options if option.axis}
        precision = next((option.precision for option in arm_options if option.precision), "")
        axes = {**dict(request.axes), **default_axis_values, **chosen_axis_values}
        dtypes = (precision,) if precision else request.dtypes
        plan = make_plan(replace(request, dtypes=dtypes, axes=tuple(axes.items())), facts, corpus, False)
        # Several groups mean several cases, and an ablation compares only the arms of one case.
        if len(plan.groups) > 1:
            raise UsageError(
                f"suite {request.suite} has {len(plan.groups)} cases, but an ablation measures one. "
                f"Choose one, as in --set {_find_differing_parameter(plan)}."
            )
        planned_case_by_arm[names] = plan.groups[0].cases[0]
    return planned_case_by_arm


def _find_differing_parameter(plan: Plan) -> str:
    """Returns the first parameter that is not equal in all cases of a plan, as AXIS=VALUE of the first case."""
    first_case, *remaining = [group.cases[0].case for group in plan]
    for name, value in first_case.params:
        if any(case.param(name) != value for case in remaining):
            return f"{name}={value}"
    raise AssertionError("cases of one suite differ in some parameter")


def _build_ablation(
    options: tuple[AblatedOption, ...],
    device: DeviceFacts,
    planned_arms: Iterable[tuple[str, ...]],
    records: Sequence[Record],
    environment: Environment,
) -> Ablation:
    record_without_options = records[0]
    paired_records = [record for record in records if record.paired and record.paired_with is None]
    # Compare native arms in the same rounds. Emulated arms have only a few rounds, and no speed.
    native_timings = [record.timing for record in paired_records if record.timing and record.support.is_native]
    timings = [*native_timings, *([record_without_options.control] if record_without_options.control else [])]
    shared_rounds = frozenset(find_common_rounds(timings)) if timings else frozenset()
    error_metric = next((name for name in _ERROR_METRICS if record_without_options.measurement(name)), "")
    arms = []
    for names, record in zip(planned_arms, records, strict=True):
        # Arms may have different batch sizes, so scale their figures to equally many tokens.
        token_ratio = record_without_options.work.tokens / record.work.tokens if record.work.tokens else 1.0
        energy, paired = energy_figures(record), record in paired_records
        # `find` assumes that all of its records do the same work, so call it for one record at a time.
        (finding,) = find([record], {})
        reason = record.reason
        if not reason and not paired:
            reason = "memory has no room for it next to the other arms, so it could not share their rounds"
        reason = reason or describe_work_difference(record, record_without_options, token_ratio)
        reason = reason or ", ".join(label.value for label in finding.hard)
        arms.append(
            AblatedArm(
                names,
                record.case.id,
                record.support.level,
                reason,
                _list_scaled_step_seconds(record, shared_rounds, token_ratio) if paired else (),
                median_value(record.measurement(PEAK_MEMORY_METRIC)),
                median_value(record.measurement(error_metric)) if error_metric else None,
                None if energy is None else token_ratio * energy.gross_energy.middle,
                tuple(label.value for label in finding.labels),
            )
        )
    return Ablation(
        record_without_options.case.workload,
        record_without_options.case.params,
        device.key,
        device.name,
        record_without_options.case.precision,
        options,
        tuple(arms),
        error_metric,
        _list_scaled_step_seconds(
            replace(record_without_options, timing=record_without_options.control), shared_rounds, 1.0
        ),
        started=now(),
        environment=environment.facts,
    )


def describe_work_difference(record: Record, first: Record, token_ratio: float) -> str:
    """Returns a sentence if the matrix products of an arm do more or fewer FLOPs per token than those of the first arm
    (the one without options). Returns '' if the FLOPs agree or are unknown.
    """
    tape, first_tape = record.tape, first.tape
    if tape is None or first_tape is None or not (tape.complete and first_tape.complete):
        return ""
    first_tape_useful_flops: float = sum_product_work(first_tape).useful_flops
    arm_useful_flops: float = sum_product_work(tape, first_tape).useful_flops
    if token_ratio != 1:
        # If the arm has a different batch size, extra work may be padding or recomputation, so only less work counts.
        arm_useful_flops = min(first_tape_useful_flops, token_ratio * sum_product_work(tape).useful_flops)
    if abs(arm_useful_flops - first_tape_useful_flops) <= _MAX_FLOPS_DIFFERENCE_SHARE * max(
        arm_useful_flops, first_tape_useful_flops
    ):
        return ""
    arm_flops_text, first_flops = (units.count(flops, "FLOP") for flops in (arm_useful_flops, first_tape_useful_flops))
    return (
        f"different work: for the same tokens, its products do {arm_flops_text}, those of the first arm {first_flops}"
    )


def _list_scaled_step_seconds(record: Record, rounds: Collection[int], token_ratio: float) -> tuple[float, ...]:
    """Returns the seconds of complete steps in these rounds, multiplied by `token_ratio`. For an emulated arm, returns
    all of its few rounds.
    """
    if record.timing is None:
        return ()
    is_emulated = record.support.is_emulated
    samples = zip(record.timing.slots, list_step_samples(record.timing), strict=True)
    return tuple(token_ratio * seconds for slot, seconds in samples if is_emulated or slot.round in rounds)


def store_ablation(ablation: Ablation, store: Path) -> Ablation:
    """Writes the ablation into the store, and returns it with its path."""
    path = store / "ablations" / f"{format_start_time(ablation.started)}-{secrets.token_hex(4)}" / FILE_NAME
    with convert_write_errors(f"the ablation {path}", "Choose another --store DIR."):
        write_whole(path, format_compact_json(add_checksum(encode(replace(ablation, path="")))) + "\n")
    return replace(ablation, path=str(path))
