"""Runs the checks of an audit over one callable, and the two checks on which the others rest: whether its results are
those of the promised precision, and whether they still are after many steps."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fp8bench.features.audit.promises import CERTAIN, FIGURES, Matrices, PromiseVerdict
from fp8bench.features.audit.subjects import SUBJECTS, OptimizerSubject, Shape, Subject
from fp8bench.features.audit.values import Audit, AuditFinding, AuditOutcome, CallWork
from fp8bench.model import Ceilings, DeviceFacts
from fp8bench.model.promises import AuditKind, Signature, Takes
from fp8bench.user_code import own_words

# Tried in this order to find the smallest input that shows a failure.
_SMALLER = (Shape(1, 1, 16), Shape(2, 2, 32), Shape(4, 4, 32), Shape(8, 8, 64), Shape(16, 16, 128), Shape(32, 32, 128))
# The search for mistakes is slow: of each result so many that need it are searched.
_SEARCHES = 4
NORMAL = "normal"
# Added to the seed for a second, independent input.
_ANOTHER = 1 << 32


class AuditInput(NamedTuple):
    """What a callable is given: a kind of data and a shape. `how` says what was changed in the data afterwards."""

    data: str
    shape: Shape
    how: str = ""


class Auditor:
    """What all checks of one audit share. `tried` counts judged results. `sound` becomes False once numbers were
    found wrong: checks that compare results with their promise then say nothing new. `ceilings` are None where the
    device's are not known. Checks leave here the `times` by kind of data, the `work` of a call of the kernel and of
    the baseline, and the seconds of both (`compared`)."""

    def __init__(
        self, subject: Subject, seed: int, ceilings: Ceilings | None = None, baseline: Subject | None = None
    ) -> None:
        self.subject, self.seed, self.ceilings, self.baseline = subject, seed, ceilings, baseline
        self.tried, self.sound = 0, True
        self.times: dict[str, float] = {}
        self.work: dict[str, CallWork] = {}
        self.compared: dict[str, float] = {}
        self._searches: Counter[str] = Counter()

    def shapes(self) -> tuple[Shape, ...]:
        return tuple(dict.fromkeys(map(self.fitting, self.subject.shapes)))

    def fitting(self, shape: Shape) -> Shape:
        """Rounds each side up to a multiple that the callable takes."""
        multiple = self.subject.signature.multiple
        return Shape(*(math.ceil(side / multiple) * multiple for side in shape))

    def input_text(self, given: AuditInput) -> str:
        """Returns for example 'M=64 N=96 K=256, normal'."""
        sides = " ".join(f"{name}={getattr(given.shape, side)}" for side, name in self.subject.sides)
        return ", ".join(filter(None, (sides, given.data, given.how)))

    def matrices(self, given: AuditInput) -> Matrices:
        return self.subject.drawn(given.data, given.shape, self.seed)

    def results(self, matrices: Matrices) -> dict[str, Tensor]:
        return self.subject.results(self.subject.arguments(matrices))

    def judge(self, matrices: Matrices, results: dict[str, Tensor]) -> dict[str, PromiseVerdict]:
        promises, verdicts = self.subject.promises(matrices), {}
        for name, result in results.items():
            self.tried += 1
            verdicts[name] = promises[name].judge(result, self._searches[name] < _SEARCHES)
            self._searches[name] += verdicts[name].remark
        return verdicts

    def problems(self, given: AuditInput) -> dict[str, PromiseVerdict]:
        """Returns, by the result's name, each verdict that is a failure or a remark. A mistake is named only if a
        second, independent input shows it as well."""
        matrices = self.matrices(given)
        results = self.results(matrices)
        verdicts = {name: verdict for name, verdict in self.judge(matrices, results).items() if verdict.code}
        if all(verdict.remark or verdict.code in CERTAIN for verdict in verdicts.values()):
            return verdicts
        other = self.subject.drawn(given.data, given.shape, self.seed + _ANOTHER)
        second, promises = self.judge(other, self.results(other)), self.subject.promises(matrices)
        for name, verdict in verdicts.items():
            if verdict.remark or verdict.code in (second[name].code, *CERTAIN):
                continue
            # The second input does not confirm the mistake: it stays without a name. A figure may have been chance.
            verdicts[name] = unnamed = promises[name].judge(results[name], search=False)
            if unnamed.code in FIGURES and not second[name].failed:
                why = f"on one input of two {unnamed.why}"
                verdicts[name] = unnamed._replace(code="other-rounding", why=why, remark=True)
        return verdicts

    def smallest(self, given: AuditInput, name: str, code: str) -> AuditInput:
        """Returns the smallest input whose result of that name fails with `code`; `given` if no smaller one does."""
        for shape in map(self.fitting, () if given.how else _SMALLER):
            smaller = AuditInput(given.data, shape)
            try:
                verdict = self.problems(smaller).get(name)
            except Exception:  # noqa: BLE001 - it may refuse what is small
                continue
            if verdict is not None and verdict.code == code:
                return smaller
        return given


class AuditCheck(ABC):
    """One way to find a lie. `name` is shown. Its findings are about the input `given`, unless they name another."""

    name: ClassVar[str]
    # Whether it decides if the callable is sound; whether it runs only on sound ones; the kinds it can look at.
    decides: ClassVar[bool] = False
    needs_sound: ClassVar[bool] = False
    kinds: ClassVar[frozenset[AuditKind]] = frozenset(AuditKind)

    def __init__(self, auditor: Auditor) -> None:
        self.auditor, self.subject = auditor, auditor.subject
        self.given: AuditInput | None = None

    @abstractmethod
    def look(self) -> Iterable[AuditFinding]:
        """Yields what is wrong or worth a remark; nothing where all is well. It may raise whatever foreign code
        raises: what it has yielded by then stands."""

    def applies(self) -> bool:
        return self.subject.kind in self.kinds and (self.auditor.sound or not self.needs_sound)

    def fail(
        self, code: str, why: str, given: AuditInput | None = None, outcome: AuditOutcome = AuditOutcome.FAIL
    ) -> AuditFinding:
        about = given or self.given
        return AuditFinding(self.name, outcome, code, why, self.auditor.input_text(about) if about else "")

    def remark(self, code: str, why: str, given: AuditInput | None = None) -> AuditFinding:
        return self.fail(code, why, given, AuditOutcome.PASS)

    def finding(self, given: AuditInput, name: str, verdict: PromiseVerdict) -> AuditFinding:
        result = "" if len(self.subject.sides) < 3 or name == "product" else f"{name}: "
        about = given if verdict.remark else self.auditor.smallest(given, name, verdict.code)
        report = self.remark if verdict.remark else self.fail
        finding = report(verdict.code, result + verdict.why, about)
        return replace(finding, error=verdict.error, expected=verdict.expected)


class NumbersCheck(AuditCheck):
    """Holds the results on every shape and kind of data against the promise."""

    name, decides = "numbers", True

    def look(self) -> Iterator[AuditFinding]:
        """Yields the first failure of each result, and each remark once."""
        reported: set[tuple[str, str]] = set()
        for shape in self.auditor.shapes():
            for data in self.subject.data:
                self.given = AuditInput(data, shape)
                for name, verdict in self.auditor.problems(self.given).items():
                    key = name, verdict.code if verdict.remark else "failed"
                    if key not in reported:
                        reported.add(key)
                        yield self.finding(self.given, name, verdict)
            if any(code == "failed" for _, code in reported):
                return


class ManyStepsCheck(AuditCheck):
    """Takes many steps of an optimizer: a count that stands still, or updates that are lost, show late."""

    name, needs_sound, kinds = "many steps", True, frozenset({AuditKind.OPTIMIZER})

    def look(self) -> Iterator[AuditFinding]:
        assert isinstance(self.subject, OptimizerSubject)
        self.given = AuditInput(NORMAL, self.subject.many)
        for name, verdict in self.auditor.problems(self.given).items():
            yield self.finding(self.given, name, verdict)


def audited(
    target: str,
    function: Callable[..., Any],
    signature: Signature,
    facts: DeviceFacts,
    seed: int,
    checks: Sequence[type[AuditCheck]],
    ceilings: Ceilings | None = None,
    baseline: Callable[..., Any] | None = None,
) -> Audit:
    """Runs every check in turn. One that fails stops none of the others: they may find what explains it."""
    started = time.perf_counter()
    subject_of = SUBJECTS[signature.kind]
    other = None if baseline is None else subject_of(baseline, replace(signature, takes=Takes.VALUES), facts)
    auditor = Auditor(subject_of(function, signature, facts), seed, ceilings, other)
    findings: list[AuditFinding] = []
    for check in (check_class(auditor) for check_class in checks):
        if not check.applies():
            continue
        own: list[AuditFinding] = []
        try:
            own += check.look()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything, at any time
            own.append(check.fail("raises", own_words(error), outcome=AuditOutcome.CANNOT_TELL))
        findings += own or [AuditFinding(check.name, AuditOutcome.PASS)]
        if check.decides:
            if any(finding.code == "raises" for finding in own):
                break
            auditor.sound = all(finding.outcome is AuditOutcome.PASS for finding in own)
    return Audit(
        target, signature, tuple(findings), auditor.tried, time.perf_counter() - started,
        times=tuple(auditor.times.items()),
        work=tuple((side, work, auditor.compared.get(side)) for side, work in auditor.work.items()),
    )  # fmt: skip
