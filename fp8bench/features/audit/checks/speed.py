"""Whether time grows with work, nothing is done faster than the machine can, and all data take the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from fp8bench import units
from fp8bench.features.audit.auditor import Auditor, Check, Given
from fp8bench.features.audit.data import TIMED
from fp8bench.features.audit.subjects import Bound, Shape, bytes_bound, fastest, flops_bound, work_of
from fp8bench.features.audit.values import CONTROL, AuditFinding, CallWork, noise_of, spread_of
from fp8bench.model.promises import AuditKind, Takes

# Calls that take this long are timed by themselves; the largest side that is tried for that.
_LONG_ENOUGH, _LARGEST = 2e-3, 1024
# So many times more work, and by how much more time at least a device that is busy takes for it.
_MORE, _AT_LEAST = 4, 1.3
# A machine that has much else to do makes any single comparison wrong.
_AGAIN = 4
# Zeros may honestly take less: 55 percent of the time in torchao's 8-bit AdamW, 80 in torch's scaled product, both on a
# processor. Whoever makes no product of them takes a twentieth.
_NORMAL, _SHORT, _SPREAD = "normal", 4.0, 0.3
# Times of the same data twice differ, too: what differs by less than so many times that says nothing of the data.
_CLEARLY = 3.0


class Speed(Check):
    """On a busy machine too: what is asked for leaves room."""

    name = "speed"

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        shape = auditor.fitting(auditor.subject.timed)
        seconds = self._seconds(auditor, shape)
        while seconds < _LONG_ENOUGH and max(shape) < _LARGEST:
            shape = Shape(*(2 * side for side in shape))
            seconds = self._seconds(auditor, shape)
        words = Given(_NORMAL, shape).words(auditor.subject.sides)
        if why := self._too_fast(auditor, shape):
            yield self.fail("too-fast", why, words)
            return
        yield from self._by_data(auditor, shape, words)
        if seconds < _LONG_ENOUGH:
            yield self.remark("overhead", f"{units.seconds(seconds)} a call: too short to see whether it grows", words)
            return
        for side in ("m", "k"):
            larger = shape._replace(**{side: _MORE * getattr(shape, side)})
            if why := self._flat(auditor, shape, larger):
                words = Given(_NORMAL, larger).words(auditor.subject.sides)
                yield self.fail("flat-time", f"{_MORE} times the {side.upper()}: {why}", words)

    def _too_fast(self, auditor: Auditor, shape: Shape) -> str:
        """What it does a second, where no look finds it below what the machine can; '' if one does."""
        subject = auditor.subject
        arguments = subject.arguments(auditor.matrices(Given(_NORMAL, shape)))
        moved = sum(one.numel() * one.element_size() for one in (*arguments, *subject.raw(arguments).values()))
        for count, unit in ((subject.flops(shape), "FLOP/s"), (moved, "B/s")):
            if count and (why := self._above(auditor, shape, count, unit)):
                return why
        return ""

    def _above(self, auditor: Auditor, shape: Shape, count: int, unit: str) -> str:
        why = ""
        for _ in range(_AGAIN):
            own, most = count / self._seconds(auditor, shape), self._bound(auditor, shape, count, unit)
            if own <= most.rate:
                return ""
            why = f"{units.count(own, unit)}; {units.count(most.rate, unit)} is {most.words}"
        return why

    def _bound(self, auditor: Auditor, shape: Shape, count: int, unit: str) -> Bound:
        device, precision = auditor.subject.device, auditor.subject.signature.precision
        if unit == "B/s":
            return bytes_bound(auditor.ceilings, count, device)
        return flops_bound(auditor.ceilings, precision, shape, device)

    def _by_data(self, auditor: Auditor, shape: Shape, words: str) -> Iterator[AuditFinding]:
        """On zeros, ones, integers, uniform and normal numbers, in turns; looked at again while they differ."""
        subject = auditor.subject
        given = {one: subject.arguments(auditor.matrices(Given(one, shape))) for one in TIMED}
        calls = {name: partial(subject.raw, one) for name, one in given.items()}
        calls[CONTROL] = calls[_NORMAL]
        # Of a processor what it works: others that work on it would make of every comparison what they like.
        clock = time.process_time if subject.device.startswith("cpu") else time.perf_counter
        for _ in range(_AGAIN):
            times = fastest(calls, subject.device, clock)
            auditor.times = {name: min(one, auditor.times.get(name, one)) for name, one in times.items()}
            if spread_of(auditor.times) <= _SPREAD:
                return
        least = min((name for name in auditor.times if name != CONTROL), key=lambda name: auditor.times[name])
        less, normal = (units.seconds(auditor.times[one]) for one in (least, _NORMAL))
        why = f"{less} on {least}, and {normal} on normal numbers"
        if auditor.times[least] * _SHORT < auditor.times[_NORMAL]:
            yield self.fail("data-shortcut", why, words)
        elif (spread := spread_of(auditor.times)) > _CLEARLY * noise_of(auditor.times):
            yield self.remark("data-time", f"its time differs by {spread:.0%} with what its inputs hold: {why}", words)

    def _flat(self, auditor: Auditor, shape: Shape, larger: Shape) -> str:
        """Both times if the larger one takes no longer, however often one looks; '' if it does."""
        why = ""
        for _ in range(_AGAIN):
            before, after = self._seconds(auditor, shape), self._seconds(auditor, larger)
            if after >= _AT_LEAST * before:
                return ""
            why = f"{units.seconds(after)}, and {units.seconds(before)} before"
        return why

    def _seconds(self, auditor: Auditor, shape: Shape) -> float:
        arguments: tuple[Tensor, ...] = auditor.subject.arguments(auditor.matrices(Given(_NORMAL, shape)))
        return fastest({"": partial(auditor.subject.raw, arguments)}, auditor.subject.device)[""]


_DATA, _WARM = "normal", 3
# Of these a baseline in the dtype of its operands is one operator.
_SINGLE = (AuditKind.PRODUCT, AuditKind.ATTENTION)


class Work(Check):
    """By operators of torch: what a kernel of somebody's own does inside nobody sees."""

    name = "work"

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        given = Given(_DATA, auditor.fitting(auditor.subject.timed))
        words = given.words(auditor.subject.sides)
        try:
            yield from self._remembered(auditor, given, words)
            if auditor.baseline is not None:
                yield from self._compared(auditor, given, words)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            yield self.unknown(error, words)

    def _remembered(self, auditor: Auditor, given: Given, words: str) -> Iterator[AuditFinding]:
        """A call with arguments that it knows must do what one with fresh arguments does."""
        subject, matrices = auditor.subject, auditor.matrices(given)
        known = subject.arguments(matrices)
        for _ in range(_WARM):
            subject.raw(known)
        again = work_of(partial(subject.raw, known))
        fresh = work_of(partial(subject.raw, subject.arguments(matrices)))
        auditor.work["kernel"] = fresh
        lost = [
            f"{one} {two} of {three}"
            for one, two, three in (
                ("casts:", again.casts, fresh.casts), ("products:", again.products, fresh.products),
                ("copies:", again.copies, fresh.copies), ("allocations:", again.allocations, fresh.allocations),
            ) if two < three
        ]  # fmt: skip
        if lost:
            why = f"with arguments that it has seen it does less than with fresh ones ({'; '.join(lost)})"
            yield self.fail("remembered-work", why, words)

    def _compared(self, auditor: Auditor, given: Given, words: str) -> Iterator[AuditFinding]:
        """What the baseline does more: copies of layouts, casts of what needs none, results in fresh memory."""
        baseline, subject = auditor.baseline, auditor.subject
        assert baseline is not None
        matrices = auditor.matrices(given)
        arguments, own = baseline.arguments(matrices), subject.arguments(matrices)
        baseline.raw(arguments)
        work, mine = work_of(partial(baseline.raw, arguments)), auditor.work["kernel"]
        auditor.work["baseline"] = work
        auditor.compared = fastest(
            {"kernel": partial(subject.raw, own), "baseline": partial(baseline.raw, arguments)}, subject.device
        )
        more = list(_more(work, mine)) if subject.kind in _SINGLE else []
        if more:
            yield self.fail("unfair-baseline", f"the baseline {' and '.join(more)}", words)
        if subject.signature.takes is Takes.CODES:
            why = "it is given codes and scales, and the baseline values: the time of casts is in neither"
            yield self.remark("casts-outside", why, words)


def _more(work: CallWork, mine: CallWork) -> Iterator[str]:
    if work.casts:
        yield f"casts {work.casts} times what is in its dtype already"
    if work.copies > mine.copies:
        yield f"makes {work.copies} copies in another layout, and the kernel {mine.copies}"
    if work.allocations and not mine.allocations:
        yield "takes memory for its result at each call, and the kernel none"
    if work.products > max(mine.products, 1):
        yield f"makes {work.products} products, and the kernel {mine.products}"
