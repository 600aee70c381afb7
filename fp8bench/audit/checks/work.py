"""Whether a call that is timed does all of its work, and what it is compared with does no more than it has to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fp8bench.audit.auditor import Auditor, Check, Given
from fp8bench.audit.call_work import work_of
from fp8bench.audit.timing import fastest
from fp8bench.model.audit import AuditFinding, AuditKind, CallWork, Takes

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
