"""Checks of what calls do besides their results: the work that torch sees, and the time that they take.

This module holds the list of all checks, and runs as the program of the worker process that audits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from fp8bench import units
from fp8bench.features.audit.auditor import NORMAL, AuditCheck, AuditInput, Auditor, Shape, audited
from fp8bench.features.audit.model import audited_model, given_model
from fp8bench.features.audit.operands import HALF_ZEROS, TIMED
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.results import VALUE_CHECKS
from fp8bench.features.audit.values import CONTROL, Audit, AuditFinding, CallWork, fail, noise_of, remark, spread_of
from fp8bench.model import Ceilings, DeviceFacts, Limit
from fp8bench.model.promises import AuditKind, Signature
from fp8bench.registry import precisions
from fp8bench.tape.coverage import SHAPES
from fp8bench.tape.recorder import OperatorTape, name_of, tensors_in
from fp8bench.user_code.named import declared_of, named
from fp8bench.worker.bench import Bench
from fp8bench.worker.fusing import uncompiled
from fp8bench.worker.main import main
from fp8bench.worker.step_guards import aside
from fp8bench.worker.switches import unchanged

_COPIES = ("clone", "copy_", "_to_copy")


def work_of(call: Callable[[], object]) -> CallWork:
    """Counts memory that is taken, casts, copies and products, as far as they are operators of torch."""
    with uncompiled(), OperatorTape() as tape:
        call()
    seen: Counter[str] = Counter()
    for done in tape.calls:
        given, made = list(tensors_in((done.given, tuple(done.named.values())))), list(tensors_in(done.result))
        for tensor in made:
            if math.prod(tensor.shape) and tensor.storage not in {other.storage for other in given}:
                seen.update(allocations=1, bytes=math.prod(tensor.shape) * tensor.dtype.itemsize)
        name = name_of(done)
        seen["products"] += name in SHAPES
        if name in _COPIES and given and made:
            seen["copies" if given[-1].dtype == made[0].dtype else "casts"] += 1
    return CallWork(**seen)


_WARM = 3
_REMEMBERED = ("casts", "products", "copies", "allocations")


def _work(auditor: Auditor) -> Iterator[AuditFinding]:
    """A call with arguments that it has seen must do as much as one with fresh arguments. What a kernel does inside is
    not seen."""
    subject = auditor.subject
    auditor.given = AuditInput(NORMAL, auditor.fitting(subject.timed))
    matrices = auditor.matrices(auditor.given)
    known = subject.arguments(matrices)
    for _ in range(_WARM):
        subject.raw(known)
    again, mine = (work_of(partial(subject.raw, given)) for given in (known, subject.arguments(matrices)))
    auditor.work = mine
    counts = {name: (getattr(again, name), getattr(mine, name)) for name in _REMEMBERED}
    if lost := [f"{name}: {less} of {all_}" for name, (less, all_) in counts.items() if less < all_]:
        yield fail(
            "remembered-work", f"with arguments that it has seen it does less than with fresh ones ({'; '.join(lost)})"
        )


_TIMES, _SECONDS = 7, 1.0
# A call may be so many times faster than a measured ceiling (the label `above-ceiling` has the same factor); where
# none is known, than torch here and now: a narrower dtype and a rising clock may make that much of it.
_ABOVE, _MARGIN = 2.5, 8.0
# The factor on a GPU: the search may have missed its best shape by so much.
_CLOSE = 1.25


def fastest(
    calls: Mapping[str, Callable[[], object]], device: str, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + _SECONDS * len(calls)
    for _ in range(_TIMES):
        for name, call in calls.items():
            _wait(device)
            start = clock()
            call()
            _wait(device)
            taken[name].append(clock() - start)
        if time.perf_counter() > end:
            break
    return {name: max(min(times), 1e-9) for name, times in taken.items()}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def bounds(
    ceilings: Ceilings, precision: str, shape: Shape, flops: int, moved: int, device: str
) -> Iterator[tuple[float, str]]:
    """Yields the fewest seconds that are believed of so many FLOPs and bytes, and what says so: the best copy measured
    in any cache, the best product in this precision or a wider one, and torch's own now."""
    rank, rates = precisions.get(precision).rank, [rate for rate in ceilings.rates if rate.limit is Limit.PRODUCT]
    wide = [(Limit.PRODUCT, rate.precision) for rate in rates if precisions.get(rate.precision).rank <= rank]
    looks = (
        (moved, "copy", partial(_copy, moved, device), [(Limit.CACHED, "")]),
        (flops, "product", partial(_product, shape, device), wide),
    )
    for count, what, measured, names in looks:
        known = [value for name in names if (value := ceilings.best(*name)) is not None]
        margin = _MARGIN if not known else _ABOVE if device.startswith("cpu") else _CLOSE
        fastest_known = f"the fastest {what} that was measured here" if known else f"torch's own {what} is here"
        yield count / (margin * max([measured(), *known])), f"{margin:g} times as fast as {fastest_known}"


def _product(shape: Shape, device: str) -> float:
    """Returns FLOPs a second."""
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(rows, shape.k).to(device, dtype) for rows in (shape.m, shape.n))
        seconds.append(fastest({"": partial(torch.mm, a, b.t())}, device)[""])
    return 2 * shape.m * shape.n * shape.k / min(seconds)


def _copy(size: int, device: str) -> float:
    """Returns bytes a second."""
    source = torch.empty(max(size // 2, 1), dtype=torch.uint8, device=device)
    return 2 * source.numel() / fastest({"": partial(torch.clone, source)}, device)[""]


# Shapes are doubled until a call takes so many seconds, or a side is so long.
_LONG_ENOUGH, _LARGEST = 2e-3, 1024
# So many times more work has to take at least so many times longer, on a busy device too.
_MORE, _AT_LEAST = 4, 1.3
# A suspicion has to show so many times in a row: on a busy machine any single comparison may be wrong.
_AGAIN = 4
# A quarter of the time on some data fails, and a spread above 30% is a remark. Zeros may honestly take 80% of the time
# (torch's scaled product on a CPU); a kernel that skips their product takes a twentieth.
_SHORT, _SPREAD = 4.0, 0.3
# A kernel that skips blocks of zeros takes at most this share of the time if half of each operand's rows are zeros.
_SAVED = 0.8
# A spread says something only if it is so many times the difference between two times on the same data.
_CLEARLY = 3.0


def _speed(auditor: Auditor) -> list[AuditFinding]:
    """Checks times, with limits that leave room for a busy machine. Returns all findings or raises: times say nothing
    where a call failed on the way."""
    shape = auditor.fitting(auditor.subject.timed)
    while (seconds := _seconds(auditor, shape)) < _LONG_ENOUGH and max(shape) < _LARGEST:
        shape = Shape(*(2 * side for side in shape))
    auditor.given = given = AuditInput(NORMAL, shape)
    if why := _always(partial(_too_fast, auditor, shape)):
        return [fail("too-fast", why)]
    findings = list(_by_data(auditor, shape))
    if seconds < _LONG_ENOUGH:
        return [*findings, remark("overhead", f"{units.seconds(seconds)} a call: too short to see whether it grows")]

    def flat(larger: Shape) -> str:
        before, after = _seconds(auditor, shape), _seconds(auditor, larger)
        return "" if after >= _AT_LEAST * before else f"{units.seconds(after)}, and {units.seconds(before)} before"

    for side in ("m", "k"):
        larger = shape._replace(**{side: _MORE * getattr(shape, side)})
        if why := _always(partial(flat, larger)):
            finding = fail("flat-time", f"{_MORE} times the {side.upper()}: {why}")
            findings.append(auditor.about(given._replace(shape=larger), finding))
    return findings


def _too_fast(auditor: Auditor, shape: Shape) -> str:
    subject, arguments = auditor.subject, _arguments(auditor, NORMAL, shape)
    touched = (*arguments, *subject.raw(arguments).values())
    moved, own = sum(tensor.numel() * tensor.element_size() for tensor in touched), _seconds(auditor, shape)
    # Attention has a batch of two, and two products.
    flops = (8 * shape.m if subject.kind is AuditKind.ATTENTION else 2) * math.prod(shape)
    given = subject.signature.precision, shape, flops, moved, subject.device
    least, words = max(bounds(auditor.ceilings, *given))
    return "" if own >= least else f"{units.seconds(own)}; {units.seconds(least)} are {words}"


def _by_data(auditor: Auditor, shape: Shape) -> Iterator[AuditFinding]:
    """Times calls on zeros, ones, integers, uniform and normal numbers in turns, and again while they differ."""
    device = auditor.subject.device
    calls = {name: partial(auditor.subject.raw, _arguments(auditor, name, shape)) for name in TIMED}
    calls[CONTROL] = calls[NORMAL]
    # On a CPU the process's own time: other processes would disturb any comparison by the clock.
    clock = time.process_time if device.startswith("cpu") else time.perf_counter
    for _ in range(_AGAIN):
        times = fastest(calls, device, clock)
        auditor.times = {name: min(time_, auditor.times.get(name, time_)) for name, time_ in times.items()}
        if spread_of(auditor.times) <= _SPREAD:
            return
    kinds = (name for name in auditor.times if name != CONTROL)
    least, *_, most = sorted(kinds, key=lambda name: auditor.times[name])
    why = ", and ".join(f"{units.seconds(auditor.times[name])} on {name}" for name in (least, most))
    if auditor.times[least] * _SHORT < auditor.times[NORMAL]:
        if least == "zeros" and _skips_zeros(auditor, shape, clock):
            yield remark("skips-zeros", f"it is faster the more blocks are zeros, which is exact: {why}")
        else:
            yield fail("data-shortcut", why)
    elif (spread := spread_of(auditor.times)) > _CLEARLY * noise_of(auditor.times):
        yield remark("data-time", f"its time differs by {spread:.0%} with what its inputs hold: {why}")


def _skips_zeros(auditor: Auditor, shape: Shape, clock: Callable[[], float]) -> bool:
    """Whether blocks of zeros save time wherever they are, not only where all numbers are zeros."""
    calls = {name: partial(auditor.subject.raw, _arguments(auditor, name, shape)) for name in (HALF_ZEROS, NORMAL)}
    times = fastest(calls, auditor.subject.device, clock)
    return times[HALF_ZEROS] < _SAVED * times[NORMAL]


def _arguments(auditor: Auditor, data: str, shape: Shape) -> Matrices:
    return auditor.subject.arguments(auditor.matrices(AuditInput(data, shape)))


def _seconds(auditor: Auditor, shape: Shape) -> float:
    return fastest({"": partial(auditor.subject.raw, _arguments(auditor, NORMAL, shape))}, auditor.subject.device)[""]


def _always(look: Callable[[], str]) -> str:
    why = ""
    for _ in range(_AGAIN):
        if not (why := look()):
            return ""
    return why


def _values_later(auditor: Auditor) -> Iterator[AuditFinding]:
    auditor.given = auditor.first
    for name, verdict in auditor.problems(auditor.first).items():
        if verdict.failed:
            yield fail("late", f"after it was timed {name} is wrong: {verdict.why}")


# All checks, in the order in which they run.
CHECKS = (
    *VALUE_CHECKS,
    AuditCheck("work", _work),
    AuditCheck("speed", _speed),
    AuditCheck("values later", _values_later, needs_sound=True),
)


class AuditBench(Bench):
    """The worker's side of an audit. What is audited is imported here and nowhere else."""

    def declared(self, target: str) -> Signature | None:
        with aside():
            return declared_of(named(target))

    def audit(self, target: str, signature: Signature, facts: DeviceFacts, ceilings: Ceilings | None = None) -> Audit:
        self._selected(facts)
        with unchanged(), aside():
            if signature.kind is AuditKind.MODEL:
                model, batch = given_model(target, named(target)())
                return audited_model(target, model, batch, signature, facts)
            return audited(target, named(target), signature, facts, self._settings.seed, CHECKS, ceilings)


if __name__ == "__main__":
    main(AuditBench)
