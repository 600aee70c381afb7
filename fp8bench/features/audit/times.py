"""Checks how much work a call does and how long it takes, and lists all checks of an audit.

This is the main module of the judge's process, which computes the expected results and the verdicts. The judge starts
a second process for the audited kernel, and never imports the kernel itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, cast

import torch

from fp8bench import units
from fp8bench.errors import WorkerError, WorkerFault, WorkerHung, WorkerLost, to_original_error
from fp8bench.features.audit.auditor import NORMAL_DATA, AuditCheck, AuditInput, AuditSession, Shape, run_checks
from fp8bench.features.audit.host import KernelHost, unpack_results
from fp8bench.features.audit.operands import HALF_ZEROS_DATA, TIMED_DATA_KINDS
from fp8bench.features.audit.results import RESULT_CHECKS
from fp8bench.features.audit.values import AuditFinding, AuditReport, make_failure, make_remark
from fp8bench.measure.handle import START_SECONDS, ProcessWorker
from fp8bench.model import Ceilings, DeviceFacts, Limit
from fp8bench.model.promises import AuditedCallableKind, CallablePromise
from fp8bench.model.raw import Settings
from fp8bench.registry import precisions
from fp8bench.worker.bench import Bench
from fp8bench.worker.main import main
from fp8bench.worker.switches import restore_switches

_WARMUP_CALLS = 3


def _check_repeated_work(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Checks that a call with arguments from an earlier call does as much work as a call with new arguments. Only
    torch operators are counted, because work inside a kernel is invisible.
    """
    subject = auditor.subject
    auditor.current = AuditInput(NORMAL_DATA, auditor.round_up_shape(subject.timed_shape))
    arguments = subject.make_arguments(auditor.draw_matrices(auditor.current))
    # Warm up first, because one-time work for a new shape is not a cached result.
    auditor.send_arguments(arguments)
    subject.host.repeat_calls([0], _WARMUP_CALLS, _TIMING_SECONDS)
    work_of_repeated_input = subject.host.count_slot_operators(0)
    auditor.send_arguments(arguments, slot=1)
    work_of_new_input = subject.host.count_slot_operators(1)
    skipped_work_texts = [
        f"{name}: {work_of_repeated_input[name]} of {count}"
        for name, count in work_of_new_input.items()
        if work_of_repeated_input[name] < count
    ]
    if skipped_work_texts:
        yield make_failure(
            "remembered-work",
            f"with arguments of an earlier call it does less work than with new ones ({'; '.join(skipped_work_texts)})",
        )


_MAX_ROUNDS, _MIN_ROUNDS, _TIMING_SECONDS = 7, 2, 1.0
# A call is too fast if it is more than _CEILING_MARGIN times as fast as a measured ceiling; the label `above-ceiling`
# has the same margin. Without a ceiling, it is too fast if it is more than _TORCH_MARGIN times as fast as torch in this
# process. A narrower dtype and a rising clock can explain smaller factors.
_CEILING_MARGIN, _TORCH_MARGIN = 2.5, 8.0
# The same margin on a GPU, where the search for the ceiling may have missed the fastest shape by this factor.
_GPU_CEILING_MARGIN = 1.25


def measure_fastest(call: Callable[[], object], device: str) -> float:
    """Returns the shortest time of several torch calls in this process, in seconds."""
    call()
    call_seconds: list[float] = []
    end = time.perf_counter() + _TIMING_SECONDS
    while len(call_seconds) < _MAX_ROUNDS and (not call_seconds or time.perf_counter() < end):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        call_seconds.append(time.perf_counter() - start)
    return max(min(call_seconds), 1e-9)


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def iterate_shortest_times(
    ceilings: Ceilings, precision: str, shape: Shape, flops: int, moved_bytes: int, device: str
) -> Iterator[tuple[float, str]]:
    """Yields the shortest plausible seconds of a call, first by the bytes that it moves, then by its FLOPs, each with a
    description. The limits use the fastest known copy and product: torch's speed now, or the stored ceilings of this
    device (copies in any cache, products in this precision or a wider one).
    """
    # 1. Choose the ceilings: copies in any cache, and products in this precision or a higher one (of lower rank).
    rank = precisions.get(precision).rank
    rates = [rate for rate in ceilings.rates if rate.limit is Limit.PRODUCT]
    product_limits = [(Limit.PRODUCT, rate.precision) for rate in rates if precisions.get(rate.precision).rank <= rank]
    comparisons = (
        (moved_bytes, "copy", partial(_measure_copy, moved_bytes, device), [(Limit.CACHED, "")]),
        (flops, "product", partial(_measure_product, shape, device), product_limits),
    )
    for count, operation, measure_here, limits in comparisons:
        # 2. Use the fastest known rate. A measured ceiling needs a smaller margin than the present speed of torch.
        ceiling_rates = [rate for limit in limits if (rate := ceilings.best(*limit)) is not None]
        reference_speed_margin = (
            _TORCH_MARGIN if not ceiling_rates else _CEILING_MARGIN if device.startswith("cpu") else _GPU_CEILING_MARGIN
        )
        reference = (
            f"the fastest {operation} that was measured on this device"
            if ceiling_rates
            else f"torch's {operation} on this device"
        )
        yield (
            count / (reference_speed_margin * max([measure_here(), *ceiling_rates])),
            f"{reference_speed_margin:g} times the speed of {reference}",
        )


def _measure_product(shape: Shape, device: str) -> float:
    """Returns the FLOP/s of torch's matrix product, the faster of float32 and bfloat16."""
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(rows, shape.k).to(device, dtype) for rows in (shape.m, shape.n))
        seconds.append(measure_fastest(partial(torch.mm, a, b.t()), device))
    return 2 * shape.m * shape.n * shape.k / min(seconds)


def _measure_copy(size: int, device: str) -> float:
    """Returns the speed of torch's copy in bytes per second. Bytes count twice, once read and once written."""
    source = torch.empty(max(size // 2, 1), dtype=torch.uint8, device=device)
    return 2 * source.numel() / measure_fastest(partial(torch.clone, source), device)


# Shapes are doubled until a call takes _MIN_CALL_SECONDS or a side has the length _LARGEST_SIDE.
_MIN_CALL_SECONDS, _LARGEST_SIDE = 2e-3, 1024
# A call that does _WORK_FACTOR times the work must take at least _TIME_FACTOR times as long, even on a busy device.
_WORK_FACTOR, _TIME_FACTOR = 4, 1.3
# A suspicious time is a failure only if this many measurements in a row show it: on a busy machine, one may be wrong.
_SUSPICION_CONFIRMATIONS = 4
# A call fails if it is this many times faster on some data. An honest call on zeros may take 80% of the usual time
# (torch's scaled product on a CPU). A kernel that skips the product takes a twentieth.
_SHORTCUT_SPEEDUP = 4.0
# If half of each operand's rows are zeros, a kernel that skips blocks of zeros takes at most this share of the time.
_HALF_ZEROS_TIME_SHARE = 0.8

# The kernel's process reports how long each round took. The judge's process measures the same round. The report must be
# at least _REPORTED_SHARE of that measurement, less _ROUND_TRIP_SECONDS for communication. If no round satisfies this,
# the clock of the kernel's process is wrong.
_REPORTED_SHARE, _ROUND_TRIP_SECONDS = 0.6, 5e-3
# How many timed calls are judged for each kind of data.
_JUDGED_CALLS_PER_DATA_KIND = 2


@dataclass(frozen=True)
class TimedCalls:
    """The shortest time of a call for each kind of data, in `seconds` of the wall clock. On a CPU, `comparable_seconds`
    are seconds of the kernel's process, because other processes disturb the wall clock. `clock_fault_text` describes a
    clock that reports too little. `wrong` is the finding if a result was wrong, else None.
    """

    seconds: Mapping[str, float]
    comparable_seconds: Mapping[str, float]
    clock_fault_text: str
    wrong: AuditFinding | None


def _time_calls(
    auditor: AuditSession, shape: Shape, kinds: tuple[str, ...] = (NORMAL_DATA,), judged_calls: int = 1
) -> TimedCalls:
    """Times calls on each kind of data in turn. Every call has new numbers, and mostly new addresses. Afterwards,
    judges the results of some calls for each kind of data, chosen at random.
    """
    kernel_host = auditor.subject.host
    rng = Random(auditor.seed)
    # 1. Call the kernel on each kind of data in turn, with the rows in a new order each time.
    kernel_host.free_memory()
    matrices_by_data_kind = {kind: auditor.draw_matrices(AuditInput(kind, shape)) for kind in kinds}
    inputs = []
    rounds: list[tuple[list[tuple[float, float]], float]] = []
    end = time.perf_counter() + _TIMING_SECONDS * len(kinds)
    while len(rounds) <= _MAX_ROUNDS and (len(rounds) < _MIN_ROUNDS or time.perf_counter() < end):
        sent_arguments = []
        for slot, kind in enumerate(kinds):
            inputs.append(tuple(matrix.roll(len(rounds), -2) for matrix in matrices_by_data_kind[kind]))
            sent_arguments.append(
                auditor.send_arguments(
                    auditor.subject.make_arguments(inputs[-1]), slot, at_new_address=len(rounds) % 3 != 1
                )
            )
        start = time.perf_counter()
        reported_seconds = kernel_host.measure_calls(range(len(kinds)))
        rounds.append((reported_seconds, time.perf_counter() - start))
    # 2. Check whether calls changed their arguments.
    argument_digests = kernel_host.digest_arguments(range(len(kinds)))
    for kind, sent in zip(kinds, sent_arguments, strict=True):
        auditor.record_changed_arguments(AuditInput(kind, shape), sent, argument_digests[: len(sent)])
        argument_digests = argument_digests[len(sent) :]
    # 3. Take the fastest call on each kind of data. Skip the first round, which may prepare the shape.
    rounds_after_first = rounds[1:]
    wall_seconds = {}
    process_seconds = {}
    for call_index, kind in enumerate(kinds):
        calls = [reported_seconds[call_index] for reported_seconds, _ in rounds_after_first]
        fastest, fastest_of_process = map(min, zip(*calls, strict=True))
        wall_seconds[kind] = max(1e-9, fastest)
        process_seconds[kind] = max(1e-9, fastest_of_process)
    # 4. Check that the kernel's process does not report much less time than passed here.
    round_seconds = [
        (math.fsum(seconds for seconds, _ in reported_seconds), passed)
        for reported_seconds, passed in rounds_after_first
    ]
    clock_fault_text = ""
    if all(
        reported_seconds < _REPORTED_SHARE * passed - _ROUND_TRIP_SECONDS for reported_seconds, passed in round_seconds
    ):
        reported_least, waited = min(round_seconds, key=lambda pair: pair[1])
        clock_fault_text = f"its process reports {units.seconds(reported_least)}, but {units.seconds(waited)} passed"
    # 5. Judge the results of some timed calls.
    failure = None
    if auditor.has_right_numbers:
        for kind, call_index in _choose_judged_calls(kinds, len(rounds), judged_calls, rng):
            results = unpack_results(kernel_host.read_timed_results(call_index))
            if bad := auditor.find_failure(inputs[call_index], results, rng):
                reason = f"timed call {call_index // len(kinds) + 1}: {bad.why}"
                failure = auditor.add_input_to_finding(AuditInput(kind, shape), make_failure("timed-wrong", reason))
                break
    is_cpu = auditor.subject.device.startswith("cpu")
    return TimedCalls(wall_seconds, process_seconds if is_cpu else wall_seconds, clock_fault_text, failure)


def _choose_judged_calls(
    kinds: tuple[str, ...], rounds: int, judged_calls: int, rng: Random
) -> Iterator[tuple[str, int]]:
    """Yields which timed calls to judge: their kind of data and their index. The choice is random, so that the kernel
    cannot predict it.
    """
    for slot, kind in enumerate(kinds):
        for which in rng.sample(range(rounds), min(judged_calls, rounds)):
            yield kind, which * len(kinds) + slot


def _check_kernel_speed(auditor: AuditSession) -> list[AuditFinding]:
    """Checks the times of calls, with limits that tolerate a busy machine, and the results of the timed calls.
    Returns its findings together, because times mean nothing after a failed call."""
    findings = []
    if replaced_names := ", ".join(auditor.subject.host.list_replaced_functions()):
        reason = (
            f"it replaces {replaced_names} by functions of its own, which can falsify times. Remove the replacement."
        )
        findings = [make_failure("replaced", reason)]
    return findings + _check_times(auditor)


def _check_times(auditor: AuditSession) -> list[AuditFinding]:
    # 1. Find a shape whose call takes long enough to compare.
    shape = auditor.round_up_shape(auditor.subject.timed_shape)
    timed_calls = _time_calls(auditor, shape)
    while (
        timed_calls.wrong is None
        and timed_calls.seconds[NORMAL_DATA] < _MIN_CALL_SECONDS
        and max(shape) < _LARGEST_SIDE
    ):
        shape = Shape(*(2 * side for side in shape))
        timed_calls = _time_calls(auditor, shape)
    auditor.current = audit_input = AuditInput(NORMAL_DATA, shape)
    # 2. Stop at wrong results or a wrong clock, which make times meaningless.
    if timed_calls.wrong is not None:
        return [timed_calls.wrong]
    if reason := _confirm_by_repeating(
        lambda: _time_calls(auditor, shape, judged_calls=0).clock_fault_text, timed_calls.clock_fault_text
    ):
        return [make_failure("wrong-clock", reason)]
    # 3. Check whether the call is faster than the machine can be.
    explain_too_fast_call = partial(_explain_implausible_speed, auditor, shape)
    if reason := _confirm_by_repeating(
        lambda: explain_too_fast_call(_measure_kernel_seconds(auditor, shape)),
        explain_too_fast_call(timed_calls.seconds[NORMAL_DATA]),
    ):
        return [make_failure("too-fast", reason)]
    # 4. Check whether the call is faster on some data, or takes no longer for more work.
    findings = list(_compare_data_kinds(auditor, shape))
    for side in ("m", "k") if timed_calls.seconds[NORMAL_DATA] >= _MIN_CALL_SECONDS else ():
        larger_shape = shape._replace(**{side: _WORK_FACTOR * getattr(shape, side)})
        if finding := _check_growth(auditor, shape, larger_shape, side.upper()):
            findings.append(auditor.add_input_to_finding(audit_input._replace(shape=larger_shape), finding))
    return findings


def _check_growth(auditor: AuditSession, shape: Shape, larger_shape: Shape, side: str) -> AuditFinding | None:
    """Returns a failure if a call with more work gives wrong results, or if it takes no longer than a call with less
    work. Otherwise returns None.
    """
    reason = ""
    for _ in range(_SUSPICION_CONFIRMATIONS):
        larger_shape_calls = _time_calls(auditor, larger_shape)
        if larger_shape_calls.wrong is not None:
            return larger_shape_calls.wrong
        seconds = _measure_kernel_seconds(auditor, shape)
        larger_shape_seconds = larger_shape_calls.seconds[NORMAL_DATA]
        if larger_shape_seconds >= _TIME_FACTOR * seconds:
            return None
        reason = f"{units.seconds(larger_shape_seconds)}, compared with {units.seconds(seconds)}"
    return make_failure("flat-time", f"a call with {_WORK_FACTOR} times the {side} takes hardly longer: {reason}")


def _explain_implausible_speed(auditor: AuditSession, shape: Shape, seconds: float) -> str:
    subject = auditor.subject
    arguments = auditor.subject.make_arguments(auditor.draw_matrices(AuditInput(NORMAL_DATA, shape)))
    moved_tensors = (*arguments, *auditor.call_kernel(arguments).values())
    moved_tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in moved_tensors)
    # Attention has a batch size of 2, and two products.
    flops = (8 * shape.m if subject.kind is AuditedCallableKind.ATTENTION else 2) * math.prod(shape)
    # A call must both move its bytes and do its FLOPs, so the longer time applies.
    shortest, reference = max(
        iterate_shortest_times(
            auditor.ceilings, subject.signature.precision, shape, flops, moved_tensor_bytes, subject.device
        )
    )
    if seconds >= shortest:
        return ""
    return f"a call takes {units.seconds(seconds)}, but would take {units.seconds(shortest)} at {reference}"


def _compare_data_kinds(auditor: AuditSession, shape: Shape) -> Iterator[AuditFinding]:
    """Times calls on zeros, ones, integers, uniform and normal numbers in turn. Repeats the comparison if one kind of
    data is much faster."""
    shortest_seconds_by_kind: dict[str, float] = {}
    for _ in range(_SUSPICION_CONFIRMATIONS):
        timed_calls = _time_calls(auditor, shape, tuple(TIMED_DATA_KINDS), _JUDGED_CALLS_PER_DATA_KIND)
        if timed_calls.wrong is not None:
            yield timed_calls.wrong
            return
        # Keep the shortest time of all repetitions, because other processes may slow down a call.
        for name, seconds in timed_calls.comparable_seconds.items():
            shortest_seconds_by_kind[name] = min(seconds, shortest_seconds_by_kind.get(name, seconds))
        fastest_data_kind = min(shortest_seconds_by_kind, key=shortest_seconds_by_kind.__getitem__)
        if shortest_seconds_by_kind[fastest_data_kind] * _SHORTCUT_SPEEDUP >= shortest_seconds_by_kind[NORMAL_DATA]:
            return
    reason = (
        f"{units.seconds(shortest_seconds_by_kind[fastest_data_kind])} on {fastest_data_kind}, and "
        f"{units.seconds(shortest_seconds_by_kind[NORMAL_DATA])} on {NORMAL_DATA}"
    )
    if fastest_data_kind == "zeros" and _saves_time_on_zeros(auditor, shape):
        yield make_remark("skips-zeros", f"it skips blocks of zeros, which keeps results exact: {reason}")
    else:
        yield make_failure("data-shortcut", reason)


def _saves_time_on_zeros(auditor: AuditSession, shape: Shape) -> bool:
    """Returns whether the kernel is faster on data in which some blocks are all zeros."""
    seconds = _time_calls(auditor, shape, (HALF_ZEROS_DATA, NORMAL_DATA), judged_calls=0).comparable_seconds
    return seconds[HALF_ZEROS_DATA] < _HALF_ZEROS_TIME_SHARE * seconds[NORMAL_DATA]


def _measure_kernel_seconds(auditor: AuditSession, shape: Shape) -> float:
    return _time_calls(auditor, shape, judged_calls=0).seconds[NORMAL_DATA]


def _confirm_by_repeating(repeat_check: Callable[[], str], reason: str) -> str:
    """Repeats a check that failed for `reason`. Returns '' if a repetition passes, else the reason of the last one."""
    for _ in range(_SUSPICION_CONFIRMATIONS - 1):
        reason = reason and repeat_check()
    return reason


def _check_values_later(auditor: AuditSession) -> Iterator[AuditFinding]:
    auditor.current = auditor.first_input
    for name, verdict in auditor.judge_kernel_on_input(auditor.first_input).items():
        if verdict.has_failed:
            yield make_failure("late", f"after the timed calls, {name} is wrong: {verdict.why}")


# All checks, in the order in which they run.
AUDIT_CHECKS = (
    *RESULT_CHECKS,
    AuditCheck("work", _check_repeated_work),
    AuditCheck("speed", _check_kernel_speed),
    AuditCheck("values later", _check_values_later, needs_correct_numbers=True),
)


_HOST_MODULE = "fp8bench.features.audit.host"
# Time limits in seconds: for one request to the kernel's process, and for the audit of a model in that process.
_REQUEST_SECONDS, _MODEL_SECONDS = 300.0, 600.0


class RemoteKernel:
    """Forwards method calls to the KernelHost in the kernel's process. Every call raises after that process was lost,
    because a new process would not have the kernel."""

    def __init__(self, worker: ProcessWorker) -> None:
        self._worker = worker
        self._lost: WorkerError | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask_worker, name)

    def _ask_worker(self, name: str, *arguments: Any) -> Any:
        if self._lost is not None:
            raise self._lost
        try:
            return self._worker.ask(_REQUEST_SECONDS, "call_host", name, *arguments)
        except (WorkerHung, WorkerLost) as error:
            self._lost = error
            raise


class AuditBench(Bench):
    """Runs the checks in the judge's process, and starts the kernel's process, which may crash, hang, or modify
    anything.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._kernel = ProcessWorker(settings, module=_HOST_MODULE)

    def close(self) -> None:
        self._kernel.close()
        super().close()

    def read_signature(self, target: str) -> CallablePromise | None:
        try:
            return cast(CallablePromise | None, self._kernel.ask(START_SECONDS, "read_signature", target))
        except WorkerFault as fault:
            raise to_original_error(fault) from None

    def audit(
        self, target: str, signature: CallablePromise, facts: DeviceFacts, ceilings: Ceilings | None = None
    ) -> AuditReport:
        self._select_device(facts)
        if signature.kind is AuditedCallableKind.MODEL:
            return cast(AuditReport, self._kernel.ask(_MODEL_SECONDS, "audit_model", target, signature, facts))
        self._kernel.ask(START_SECONDS, "load_kernel", target, signature, facts)
        with restore_switches():
            kernel_host = cast(KernelHost, RemoteKernel(self._kernel))
            return run_checks(target, kernel_host, signature, facts, self._settings.seed, AUDIT_CHECKS, ceilings)


if __name__ == "__main__":
    main(AuditBench)
