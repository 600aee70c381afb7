"""Checks of calls beyond their results: the work that torch sees, and their times.

This module holds the list of all checks, and runs as the program of the judge: a process that has torch, starts the
kernel's process, and never imports the kernel.
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
from fp8bench.errors import WorkerError, WorkerFault, WorkerHung, WorkerLost, as_usage
from fp8bench.features.audit.auditor import NORMAL, AuditCheck, AuditInput, Auditor, Shape, run_checks
from fp8bench.features.audit.host import KernelHost, PackedTensor, unpack_results
from fp8bench.features.audit.operands import HALF_ZEROS, TIMED
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.results import VALUE_CHECKS
from fp8bench.features.audit.values import Audit, AuditFinding, fail, remark
from fp8bench.measure.handle import START_SECONDS, ProcessWorker
from fp8bench.model import Ceilings, DeviceFacts, Limit
from fp8bench.model.promises import AuditKind, Signature
from fp8bench.model.raw import Settings
from fp8bench.registry import precisions
from fp8bench.worker.bench import Bench
from fp8bench.worker.main import main
from fp8bench.worker.switches import restore_switches

_WARM = 3
_REMEMBERED = ("casts", "products", "copies", "allocations")


def _work(auditor: Auditor) -> Iterator[AuditFinding]:
    """Checks that a call with known arguments does as much work as one with fresh arguments. Work inside a kernel is
    invisible."""
    subject = auditor.subject
    auditor.current = AuditInput(NORMAL, auditor.fitting(subject.timed))
    arguments = subject.arguments(auditor.matrices(auditor.current))
    # Warm up first: one-time work per shape is not a cached result.
    auditor.place(arguments)
    subject.host.repeat([0], _WARM, _SECONDS)
    repeated = subject.host.work(0)
    auditor.place(arguments, slot=1)
    fresh = subject.host.work(1)
    counts = [(name, getattr(repeated, name), getattr(fresh, name)) for name in _REMEMBERED]
    if lost := [f"{name}: {again} of {first}" for name, again, first in counts if again < first]:
        yield fail(
            "remembered-work", f"with arguments that it has seen it does less than with fresh ones ({'; '.join(lost)})"
        )


_TIMES, _FEWEST, _SECONDS = 7, 2, 1.0
# How many times faster than a measured ceiling a call may be (the label `above-ceiling` has the same factor) or, if
# none is known, than torch in this process, where a narrower dtype and a rising clock may explain this much.
_ABOVE, _MARGIN = 2.5, 8.0
# The factor on a GPU, where the search for the peak may have missed its best shape by this much.
_CLOSE = 1.25


def fastest(call: Callable[[], object], device: str) -> float:
    """Returns the shortest time of a torch call in this process, in seconds."""
    call()
    taken: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(taken) < _TIMES and (not taken or time.perf_counter() < end):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return max(min(taken), 1e-9)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def bounds(
    ceilings: Ceilings, precision: str, shape: Shape, flops: int, moved: int, device: str
) -> Iterator[tuple[float, str]]:
    """Yields the shortest plausible times for these FLOPs and bytes, with their sources: the best measured copy in any
    cache, the best product in this precision or a wider one, and torch's own now."""
    rank, rates = precisions.get(precision).rank, [rate for rate in ceilings.rates if rate.limit is Limit.PRODUCT]
    wide = [(Limit.PRODUCT, rate.precision) for rate in rates if precisions.get(rate.precision).rank <= rank]
    looks = (
        (moved, "copy", partial(_copy, moved, device), [(Limit.CACHED, "")]),
        (flops, "product", partial(_product, shape, device), wide),
    )
    for count, operation, measure_here, limits in looks:
        measured_rates = [rate for limit in limits if (rate := ceilings.best(*limit)) is not None]
        margin = _MARGIN if not measured_rates else _ABOVE if device.startswith("cpu") else _CLOSE
        fastest_known = (
            f"the fastest {operation} that was measured here" if measured_rates else f"torch's own {operation} is here"
        )
        yield count / (margin * max([measure_here(), *measured_rates])), f"{margin:g} times as fast as {fastest_known}"


def _product(shape: Shape, device: str) -> float:
    """Returns FLOPs per second of torch's product."""
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(rows, shape.k).to(device, dtype) for rows in (shape.m, shape.n))
        seconds.append(fastest(partial(torch.mm, a, b.t()), device))
    return 2 * shape.m * shape.n * shape.k / min(seconds)


def _copy(size: int, device: str) -> float:
    """Returns bytes per second of torch's copy."""
    source = torch.empty(max(size // 2, 1), dtype=torch.uint8, device=device)
    return 2 * source.numel() / fastest(partial(torch.clone, source), device)


# Shapes are doubled until a call takes this many seconds, or a side is this long.
_LONG_ENOUGH, _LARGEST = 2e-3, 1024
# This many times more work must take at least this many times longer, even on a busy device.
_MORE, _AT_LEAST = 4, 1.3
# A suspicion must be confirmed this many times in a row: on a busy machine any single comparison may be wrong.
_AGAIN = 4
# Being this many times faster on some data fails. Zeros may honestly take 80% of the time (torch's scaled product on a
# CPU); a kernel that skips their product takes a twentieth.
_SHORT = 4.0
# A kernel that skips blocks of zeros takes at most this share of the time if half of each operand's rows are zeros.
_SAVED = 0.8

# The kernel's process may report this much less time than passed here, as a share and in seconds, for the
# communication. If it reports less in every round, its clock is wrong.
_CLAIMED, _ROUND_TRIP = 0.6, 5e-3
# The number of timed calls judged for each kind of data.
_JUDGED = 2


@dataclass(frozen=True)
class TimedCalls:
    """For each kind of data, the fewest `seconds` of a call by the kernel's clock and of its process, and those that
    `passed` here."""

    seconds: Mapping[str, float]
    of_process: Mapping[str, float]
    wrong_clock: str
    wrong: AuditFinding | None


def _time_calls(auditor: Auditor, shape: Shape, kinds: tuple[str, ...] = (NORMAL,), judged: int = 1) -> TimedCalls:
    """Times calls on each kind of data in turns, each on unseen numbers, at new addresses or the same ones. Then judges
    a sample of the results of `judged` calls on each kind."""
    host, chance = auditor.subject.host, Random(auditor.seed)
    # 1. Call the kernel on each kind of data in turn, with rows in a new order each time.
    host.forget()
    base = {kind: auditor.matrices(AuditInput(kind, shape)) for kind in kinds}
    inputs: list[Matrices] = []
    rounds: list[tuple[list[tuple[float, float]], float]] = []
    end = time.perf_counter() + _SECONDS * len(kinds)
    while len(rounds) <= _TIMES and (len(rounds) < _FEWEST or time.perf_counter() < end):
        placed: list[tuple[PackedTensor, ...]] = []
        for slot, kind in enumerate(kinds):
            inputs.append(tuple(matrix.roll(len(rounds), -2) for matrix in base[kind]))
            placed.append(auditor.place(auditor.subject.arguments(inputs[-1]), slot, moved=len(rounds) % 3 != 1))
        start = time.perf_counter()
        claimed = host.measure_calls(range(len(kinds)))
        rounds.append((claimed, time.perf_counter() - start))
    # 2. Check whether calls have changed their arguments.
    digests = host.digests(range(len(kinds)))
    for kind, sent in zip(kinds, placed, strict=True):
        auditor.note_changes(AuditInput(kind, shape), sent, digests[: len(sent)])
        digests = digests[len(sent) :]
    # 3. Take the fastest call on each kind of data. The first round is skipped, because it may prepare the shape.
    timed = rounds[1:]
    by_clock: dict[str, float] = {}
    of_process: dict[str, float] = {}
    for place, kind in enumerate(kinds):
        calls = [claimed[place] for claimed, _ in timed]
        by_clock[kind] = max(1e-9, min(seconds for seconds, _ in calls))
        of_process[kind] = max(1e-9, min(seconds for _, seconds in calls))
    # 4. Check that the kernel's process does not report much less time than passed here.
    claims = [(math.fsum(seconds for seconds, _ in claimed), passed) for claimed, passed in timed]
    wrong_clock = ""
    if all(claimed < _CLAIMED * passed - _ROUND_TRIP for claimed, passed in claims):
        least, waited = min(claims, key=lambda pair: pair[1])
        wrong_clock = f"its process says {units.seconds(least)} where {units.seconds(waited)} passed"
    # 5. Judge results of the timed calls.
    wrong = None
    if auditor.sound:
        for kind, place in _choose_calls(kinds, len(rounds), judged, chance):
            results = unpack_results(host.timed_results(place))
            if bad := auditor.wrong_sample(inputs[place], results, chance):
                reason = f"of call {place // len(kinds) + 1} that was timed, {bad.why}"
                wrong = auditor.about(AuditInput(kind, shape), fail("timed-wrong", reason))
                break
    return TimedCalls(by_clock, of_process, wrong_clock, wrong)


def _choose_calls(kinds: tuple[str, ...], rounds: int, judged: int, chance: Random) -> Iterator[tuple[str, int]]:
    """Yields a kind of data and the index of a timed call on it, for the calls to judge. The kernel cannot predict the
    choice."""
    for slot, kind in enumerate(kinds):
        for which in chance.sample(range(rounds), min(judged, rounds)):
            yield kind, which * len(kinds) + slot


def _speed(auditor: Auditor) -> list[AuditFinding]:
    """Checks times, with limits that tolerate a busy machine, and the results of the timed calls. Returns all findings
    or raises: times mean nothing after a failed call."""
    findings = []
    if replaced := ", ".join(auditor.subject.host.find_replaced()):
        findings = [fail("replaced", f"it puts functions of its own in the place of {replaced}: leave them alone")]
    return findings + _check_speeds(auditor)


def _check_speeds(auditor: Auditor) -> list[AuditFinding]:
    # 1. Find a shape whose call is long enough to compare.
    shape = auditor.fitting(auditor.subject.timed)
    timing = _time_calls(auditor, shape)
    while timing.wrong is None and timing.seconds[NORMAL] < _LONG_ENOUGH and max(shape) < _LARGEST:
        shape = Shape(*(2 * side for side in shape))
        timing = _time_calls(auditor, shape)
    auditor.current = tried = AuditInput(NORMAL, shape)
    # 2. Stop at wrong results or a wrong clock, which make times meaningless.
    if timing.wrong is not None:
        return [timing.wrong]
    if reason := _confirm(lambda: _time_calls(auditor, shape, judged=0).wrong_clock, timing.wrong_clock):
        return [fail("wrong-clock", reason)]
    # 3. Check whether it is faster than the machine can be.
    too_fast = partial(_too_fast, auditor, shape)
    if reason := _confirm(lambda: too_fast(_seconds(auditor, shape)), too_fast(timing.seconds[NORMAL])):
        return [fail("too-fast", reason)]
    # 4. Check whether it is faster on some data, or no slower with more work.
    findings = list(_compare_data(auditor, shape))
    for side in ("m", "k") if timing.seconds[NORMAL] >= _LONG_ENOUGH else ():
        larger = shape._replace(**{side: _MORE * getattr(shape, side)})
        if finding := _check_growth(auditor, shape, larger, side.upper()):
            findings.append(auditor.about(tried._replace(shape=larger), finding))
    return findings


def _check_growth(auditor: Auditor, shape: Shape, larger: Shape, side: str) -> AuditFinding | None:
    """Returns the fault of a call on more work: wrong results, or the same duration."""
    reason = ""
    for _ in range(_AGAIN):
        larger_timing = _time_calls(auditor, larger)
        if larger_timing.wrong is not None:
            return larger_timing.wrong
        seconds, larger_seconds = _seconds(auditor, shape), larger_timing.seconds[NORMAL]
        if larger_seconds >= _AT_LEAST * seconds:
            return None
        reason = f"{units.seconds(larger_seconds)}, and {units.seconds(seconds)} before"
    return fail("flat-time", f"{_MORE} times the {side}: {reason}")


def _too_fast(auditor: Auditor, shape: Shape, seconds: float) -> str:
    subject, arguments = auditor.subject, auditor.subject.arguments(auditor.matrices(AuditInput(NORMAL, shape)))
    touched = (*arguments, *auditor.call(arguments).values())
    moved = sum(tensor.numel() * tensor.element_size() for tensor in touched)
    # Attention has a batch of two, and two products.
    flops = (8 * shape.m if subject.kind is AuditKind.ATTENTION else 2) * math.prod(shape)
    least, words = max(bounds(auditor.ceilings, subject.signature.precision, shape, flops, moved, subject.device))
    return "" if seconds >= least else f"{units.seconds(seconds)}; {units.seconds(least)} are {words}"


def _compare_data(auditor: Auditor, shape: Shape) -> Iterator[AuditFinding]:
    """Times calls on zeros, ones, integers, uniform and normal numbers in turns, repeating if they differ."""
    times: dict[str, float] = {}
    for _ in range(_AGAIN):
        timed = _time_calls(auditor, shape, tuple(TIMED), _JUDGED)
        if timed.wrong is not None:
            yield timed.wrong
            return
        # Keep the shortest time of all repetitions: a slow call is not the kernel's fault.
        for name, seconds in _comparable(auditor, timed).items():
            times[name] = min(seconds, times.get(name, seconds))
        least = min(times, key=times.__getitem__)
        if times[least] * _SHORT >= times[NORMAL]:
            return
    reason = f"{units.seconds(times[least])} on {least}, and {units.seconds(times[NORMAL])} on {NORMAL}"
    if least == "zeros" and _skips_zeros(auditor, shape):
        yield remark("skips-zeros", f"it is faster the more blocks are zeros, which is exact: {reason}")
    else:
        yield fail("data-shortcut", reason)


def _skips_zeros(auditor: Auditor, shape: Shape) -> bool:
    """Whether blocks of zeros save time anywhere, not only if all numbers are zeros."""
    times = _comparable(auditor, _time_calls(auditor, shape, (HALF_ZEROS, NORMAL), judged=0))
    return times[HALF_ZEROS] < _SAVED * times[NORMAL]


def _comparable(auditor: Auditor, timed: TimedCalls) -> Mapping[str, float]:
    """Returns comparable times: on a CPU the process time, because other processes would disturb the clock."""
    return timed.of_process if auditor.subject.device.startswith("cpu") else timed.seconds


def _seconds(auditor: Auditor, shape: Shape) -> float:
    return _time_calls(auditor, shape, judged=0).seconds[NORMAL]


def _confirm(look: Callable[[], str], reason: str) -> str:
    """Returns the reason for a suspicion if it is confirmed several times in a row, starting with `reason`."""
    for _ in range(_AGAIN - 1):
        reason = reason and look()
    return reason


def _check_values_later(auditor: Auditor) -> Iterator[AuditFinding]:
    auditor.current = auditor.first
    for name, verdict in auditor.problems(auditor.first).items():
        if verdict.failed:
            yield fail("late", f"after it was timed {name} is wrong: {verdict.why}")


# All checks, in the order in which they run.
CHECKS = (
    *VALUE_CHECKS,
    AuditCheck("work", _work),
    AuditCheck("speed", _speed),
    AuditCheck("values later", _check_values_later, needs_sound=True),
)


_HOST = "fp8bench.features.audit.host"
# Seconds for one request to the kernel's process, and for the audit of a model in it.
_LIMIT, _MODEL_LIMIT = 300.0, 600.0


class RemoteKernel:
    """Passes requests to the KernelHost of the kernel's process. After that process is lost, every request raises: a
    fresh process would not have the kernel."""

    def __init__(self, worker: ProcessWorker) -> None:
        self._worker = worker
        self._lost: WorkerError | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, name)

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self._lost is not None:
            raise self._lost
        try:
            return self._worker.ask(_LIMIT, "kernel", name, *arguments)
        except (WorkerHung, WorkerLost) as error:
            self._lost = error
            raise


class AuditBench(Bench):
    """The judge. Its process has torch and the checks, and starts the kernel's process, which may crash, hang, or
    modify anything."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._kernel = ProcessWorker(settings, module=_HOST)

    def close(self) -> None:
        self._kernel.close()
        super().close()

    def read_signature(self, target: str) -> Signature | None:
        try:
            return cast(Signature | None, self._kernel.ask(START_SECONDS, "read_signature", target))
        except WorkerFault as fault:
            raise as_usage(fault) from None

    def audit(self, target: str, signature: Signature, facts: DeviceFacts, ceilings: Ceilings | None = None) -> Audit:
        self._select_device(facts)
        if signature.kind is AuditKind.MODEL:
            return cast(Audit, self._kernel.ask(_MODEL_LIMIT, "audit_model", target, signature, facts))
        self._kernel.ask(START_SECONDS, "load", target, signature, facts)
        with restore_switches():
            host = cast(KernelHost, RemoteKernel(self._kernel))
            return run_checks(target, host, signature, facts, self._settings.seed, CHECKS, ceilings)


if __name__ == "__main__":
    main(AuditBench)
