"""Runs the checks of an audit over one callable: what they share, and the engine that runs a table of them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fp8bench.features.audit.promises import CERTAIN, FIGURES, Matrices
from fp8bench.features.audit.subjects import SUBJECTS, Shape, Subject
from fp8bench.features.audit.values import Audit, AuditFinding, AuditOutcome, CallWork
from fp8bench.model import Ceilings, DeviceFacts
from fp8bench.model.promises import AuditKind, Signature, Takes
from fp8bench.user_code import own_words

# Tried in this order to find the smallest input that shows a failure.
_SMALLER = (Shape(1, 1, 16), Shape(2, 2, 32), Shape(4, 4, 32), Shape(8, 8, 64), Shape(16, 16, 128), Shape(32, 32, 128))
# The search for mistakes is slow: of each result so many that need it are searched.
_SEARCHES = 4
NORMAL = "normal"
# Codes of results that no other check can look at.
_NOTHING = ("raises", "shape", "dtype")
# Added to the seed for a second, independent input.
_ANOTHER = 1 << 32


class AuditInput(NamedTuple):
    """What a callable is given: a kind of data and a shape. `how` says what was changed in the data afterwards."""

    data: str
    shape: Shape
    how: str = ""


class Auditor:
    """What all checks of one audit share. `given` is what a check tries at the moment: its findings are about that,
    unless they name another input. `tried` counts judged results. `sound` becomes False once numbers were found
    wrong: checks that compare results with their promise then say nothing new. `ceilings` are None where the
    device's are not known. Checks leave here the `times` by kind of data, the `work` of a call of the kernel and of
    the baseline, and the seconds of both where they were compared."""

    def __init__(
        self, subject: Subject, seed: int, ceilings: Ceilings | None = None, baseline: Subject | None = None
    ) -> None:
        self.subject, self.seed, self.ceilings, self.baseline = subject, seed, ceilings or Ceilings(), baseline
        self.given: AuditInput | None = None
        self.tried, self.sound = 0, True
        self.times: dict[str, float] = {}
        self.work: tuple[tuple[str, CallWork, float | None], ...] = ()
        self._searches: Counter[str] = Counter()

    def shapes(self) -> tuple[Shape, ...]:
        return tuple(dict.fromkeys(map(self.fitting, self.subject.shapes)))

    @property
    def first(self) -> AuditInput:
        return AuditInput(NORMAL, self.fitting(self.subject.shapes[0]))

    def fitting(self, shape: Shape) -> Shape:
        """Rounds each side up to a multiple that the callable takes."""
        multiple = self.subject.signature.multiple
        return Shape(*(math.ceil(side / multiple) * multiple for side in shape))

    def about(self, given: AuditInput, finding: AuditFinding) -> AuditFinding:
        """Writes for example 'M=64 N=96 K=256, normal' as the finding's input."""
        sides = " ".join(f"{name}={getattr(given.shape, side)}" for side, name in self.subject.sides)
        return replace(finding, input=", ".join(filter(None, (sides, given.data, given.how))))

    def matrices(self, given: AuditInput) -> Matrices:
        return self.subject.drawn(given.data, given.shape, self.seed)

    def results(self, matrices: Matrices) -> dict[str, Tensor]:
        return self.subject.results(self.subject.arguments(matrices))

    def judge(self, matrices: Matrices, results: dict[str, Tensor], search: bool = True) -> dict[str, AuditFinding]:
        promises, verdicts = self.subject.promises(matrices), {}
        for name, result in results.items():
            self.tried += 1
            verdicts[name] = promises[name].judge(result, search and self._searches[name] < _SEARCHES)
            self._searches[name] += search and verdicts[name].remark
        return verdicts

    def wrong(self, matrices: Matrices, results: dict[str, Tensor], search: bool = True) -> AuditFinding | None:
        """Returns the first failure among the results, if any."""
        verdicts = self.judge(matrices, results, search).items()
        return next((replace(bad, why=f"{name}: {bad.why}") for name, bad in verdicts if bad.failed), None)

    def problems(self, given: AuditInput) -> dict[str, AuditFinding]:
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
                verdicts[name] = replace(unnamed, outcome=AuditOutcome.PASS, code="other-rounding", why=why)
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

    def finding(self, given: AuditInput, name: str, verdict: AuditFinding) -> AuditFinding:
        """Says of which result a verdict is; a failure is about the smallest input that shows it."""
        result = "" if len(self.subject.sides) < 3 or name == "product" else f"{name}: "
        about = given if verdict.remark else self.smallest(given, name, verdict.code)
        return self.about(about, replace(verdict, why=result + verdict.why))


class AuditCheck(NamedTuple):
    """One way to find a lie. `look` yields what is wrong or worth a remark, nothing where all is well. It may raise
    whatever foreign code raises: what it has yielded by then stands. `kinds` are those that it can look at; with
    `needs_sound` it runs only where numbers are right, which the check that `decides` says."""

    name: str
    look: Callable[[Auditor], Iterable[AuditFinding]]
    kinds: frozenset[AuditKind] = frozenset(AuditKind)
    needs_sound: bool = False
    decides: bool = False

    def findings(self, auditor: Auditor) -> Iterator[AuditFinding]:
        auditor.given = None
        try:
            for finding in self.look(auditor):
                yield self._named(auditor, finding)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything, at any time
            raised = AuditFinding("", AuditOutcome.CANNOT_TELL, "raises", own_words(error))
            yield self._named(auditor, raised)

    def _named(self, auditor: Auditor, finding: AuditFinding) -> AuditFinding:
        given = None if finding.input else auditor.given
        return replace(auditor.about(given, finding) if given else finding, check=self.name)


def audited(
    target: str,
    function: Callable[..., Any],
    signature: Signature,
    facts: DeviceFacts,
    seed: int,
    checks: Sequence[AuditCheck],
    ceilings: Ceilings | None = None,
    baseline: Callable[..., Any] | None = None,
) -> Audit:
    """Runs every check in turn. One that fails stops none of the others: they may find what explains it."""
    started = time.perf_counter()
    subject_of = SUBJECTS[signature.kind]
    other = None if baseline is None else subject_of(baseline, replace(signature, takes=Takes.VALUES), facts)
    auditor = Auditor(subject_of(function, signature, facts), seed, ceilings, other)
    findings: list[AuditFinding] = []
    for check in checks:
        if signature.kind not in check.kinds or (check.needs_sound and not auditor.sound):
            continue
        own = list(check.findings(auditor))
        findings += own or [AuditFinding(check.name)]
        if check.decides:
            if any(finding.code in _NOTHING for finding in own):
                break
            auditor.sound = all(finding.outcome is AuditOutcome.PASS for finding in own)
    return Audit(
        target, signature, tuple(findings), auditor.tried, time.perf_counter() - started,
        times=tuple(auditor.times.items()), work=auditor.work,
    )  # fmt: skip
