"""Whether time grows with work, nothing is done faster than the machine can, and all data take the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from fp8bench import units
from fp8bench.audit.auditor import Auditor, Check, Given
from fp8bench.audit.data import TIMED
from fp8bench.audit.subjects import Shape
from fp8bench.audit.timing import Bound, bytes_bound, fastest, flops_bound
from fp8bench.model.audit import CONTROL, AuditFinding, noise_of, spread_of

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
