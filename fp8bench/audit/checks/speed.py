"""Whether time grows with work, and no work is done faster than the machine can."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from fp8bench import units
from fp8bench.audit.auditor import Auditor, Check, Given
from fp8bench.audit.subjects import Shape
from fp8bench.model.audit import AuditFinding, AuditKind

# Calls that take this long are timed by themselves; the largest side that is tried for that.
_LONG_ENOUGH, _LARGEST = 2e-3, 1024
_TIMES, _SECONDS = 7, 1.0
# So many times more work, and by how much more time at least a device that is busy takes for it.
_MORE, _AT_LEAST = 4, 1.3
# Of the best product of torch's here: what a narrower dtype, and a clock that rises, may make of it.
_MARGIN = 8.0
# A machine that has much else to do makes any single comparison wrong.
_AGAIN = 4


class Speed(Check):
    """On a busy machine too: what is asked for leaves room."""

    name = "speed"

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        shape = auditor.fitting(auditor.subject.timed)
        seconds = self._seconds(auditor, shape)
        while seconds < _LONG_ENOUGH and max(shape) < _LARGEST:
            shape = Shape(*(2 * side for side in shape))
            seconds = self._seconds(auditor, shape)
        words = Given("normal", shape).words(auditor.subject.sides)
        if auditor.subject.kind not in (AuditKind.CAST, AuditKind.OPTIMIZER):
            rates = [(auditor.subject.flops(shape) / seconds, self._bound(auditor, shape))]
            while rates[-1][0] > _MARGIN * rates[-1][1] and len(rates) < _AGAIN:
                rates.append(
                    (auditor.subject.flops(shape) / self._seconds(auditor, shape), self._bound(auditor, shape))
                )
            own, most = rates[-1]
            if own > _MARGIN * most:
                why = f"{units.count(own, 'FLOP/s')}, and torch's own product does {units.count(most, 'FLOP/s')}"
                yield self.fail("too-fast", why, words)
                return
        if seconds < _LONG_ENOUGH:
            yield self.remark("overhead", f"{units.seconds(seconds)} a call: too short to see whether it grows", words)
            return
        for side in ("m", "k"):
            larger = shape._replace(**{side: _MORE * getattr(shape, side)})
            if why := self._flat(auditor, shape, larger):
                words = Given("normal", larger).words(auditor.subject.sides)
                yield self.fail("flat-time", f"{_MORE} times the {side.upper()}: {why}", words)

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
        """The fastest of a few calls."""
        subject = auditor.subject
        arguments = subject.arguments(auditor.matrices(Given("normal", shape)))
        return _fastest(lambda: subject.raw(arguments), subject.device)

    def _bound(self, auditor: Auditor, shape: Shape) -> float:
        """FLOPs a second of torch's product in fp32 or bf16, whichever is faster, of the same shape."""
        device, found = auditor.subject.device, 0.0
        for dtype in (torch.float32, torch.bfloat16):
            a, b = (torch.randn(rows, shape.k).to(device, dtype) for rows in (shape.m, shape.n))
            seconds = _fastest(partial(torch.mm, a, b.t()), device)
            found = max(found, 2 * shape.m * shape.n * shape.k / seconds)
        return found


def _fastest(call: Callable[[], object], device: str) -> float:
    call()
    found: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(found) < _TIMES and (not found or time.perf_counter() < end):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        found.append(time.perf_counter() - start)
    return max(min(found), 1e-9)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
