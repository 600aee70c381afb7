"""Who audits, what all checks have in common, and those on which the others rest: whether results are those of the
promised precision, on data in which one mistake or another shows.
"""

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

# What is tried for the smallest one that shows the same.
_SMALLER = (Shape(1, 1, 16), Shape(2, 2, 32), Shape(4, 4, 32), Shape(8, 8, 64), Shape(16, 16, 128), Shape(32, 32, 128))
# A result that lies in the band without being the promised one is searched for mistakes so often, of each name.
_SEARCHES = 4
NORMAL = "normal"
# What the seed of an input is moved by for one that has nothing to do with it.
_ANOTHER = 1 << 32
# Of an optimizer's state: scales, and the count of steps, beside the moments.
_MORE = 1.05


class AuditInput(NamedTuple):
    """What a callable is given: data of a shape, or matrices made of it (`how` says what was done to them)."""

    data: str
    shape: Shape
    how: str = ""


class Auditor:
    """`tried` counts the results that were judged. It is `sound` until numbers were found wrong: what compares results
    with their promise says nothing new of one that is not. `ceilings` are the device's, where they are known; checks
    leave their `times` by data, and the `work` of a call and of the `baseline`'s with the time of both (`compared`).
    """

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
        """The next one of whole multiples."""
        multiple = self.subject.signature.multiple
        return Shape(*(math.ceil(side / multiple) * multiple for side in shape))

    def words(self, given: AuditInput) -> str:
        """'M=64 N=96 K=256, normal'."""
        sides = " ".join(f"{name}={getattr(given.shape, side)}" for side, name in self.subject.sides)
        return ", ".join(filter(None, (sides, given.data, given.how)))

    def matrices(self, given: AuditInput) -> Matrices:
        return self.subject.drawn(given.data, given.shape, self.seed)

    def results(self, matrices: Matrices) -> dict[str, Tensor]:
        return self.subject.results(self.subject.arguments(matrices))

    def judged(self, matrices: Matrices, results: dict[str, Tensor]) -> dict[str, PromiseVerdict]:
        promises, verdicts = self.subject.promises(matrices), {}
        for name, result in results.items():
            self.tried += 1
            verdicts[name] = promises[name].judge(result, self._searches[name] < _SEARCHES)
            self._searches[name] += verdicts[name].remark
        return verdicts

    def wrong(self, given: AuditInput) -> dict[str, PromiseVerdict]:
        matrices = self.matrices(given)
        results = self.results(matrices)
        verdicts = {name: verdict for name, verdict in self.judged(matrices, results).items() if verdict.code}
        if all(verdict.remark or verdict.code in CERTAIN for verdict in verdicts.values()):
            return verdicts
        fresh = self.subject.drawn(given.data, given.shape, self.seed + _ANOTHER)
        again, promises = self.judged(fresh, self.results(fresh)), self.subject.promises(matrices)
        for name, verdict in verdicts.items():
            if not verdict.remark and verdict.code not in (again[name].code, *CERTAIN):
                # What another input does not show has no name, and is no figure that was chance.
                left = promises[name].judge(results[name], search=False)
                if left.code in FIGURES and not again[name].failed:
                    left = left._replace(code="other-rounding", why=f"on one input of two {left.why}", remark=True)
                verdicts[name] = left
        return verdicts

    def smallest(self, given: AuditInput, name: str, judged: PromiseVerdict) -> AuditInput:
        for shape in map(self.fitting, () if given.how else _SMALLER):
            smaller = AuditInput(given.data, shape)
            try:
                verdict = self.wrong(smaller).get(name)
            except Exception:  # noqa: BLE001 - it may refuse what is small
                continue
            if verdict is not None and verdict.code == judged.code:
                return smaller
        return given


class AuditCheck(ABC):
    """One way to find a lie, by the name that is shown. Its findings are about what was `given`, unless they say of
    another input."""

    name: ClassVar[str]
    # Whether the others rest on it, whether it says nothing new where numbers are wrong, and what it is of.
    grounds: ClassVar[bool] = False
    of_sound: ClassVar[bool] = False
    kinds: ClassVar[frozenset[AuditKind]] = frozenset(AuditKind)

    def __init__(self, auditor: Auditor) -> None:
        self.auditor, self.subject = auditor, auditor.subject
        self.given: AuditInput | None = None

    @abstractmethod
    def look(self) -> Iterable[AuditFinding]:
        """What it found; nothing where all is well. It may raise whatever foreign code raises: what it has yielded by
        then stands."""

    def applies(self) -> bool:
        return self.subject.kind in self.kinds and (self.auditor.sound or not self.of_sound)

    def fail(
        self, code: str, why: str, given: AuditInput | None = None, outcome: AuditOutcome = AuditOutcome.FAIL
    ) -> AuditFinding:
        about = given or self.given
        return AuditFinding(self.name, outcome, code, why, self.auditor.words(about) if about else "")

    def remark(self, code: str, why: str, given: AuditInput | None = None) -> AuditFinding:
        return self.fail(code, why, given, AuditOutcome.PASS)

    def judged(self, given: AuditInput, name: str, judged: PromiseVerdict) -> AuditFinding:
        """Of a result that is wrong, with the smallest input that shows the same, or is remarked on."""
        result = "" if len(self.subject.sides) < 3 or name == "product" else f"{name}: "
        about = given if judged.remark else self.auditor.smallest(given, name, judged)
        say = self.remark if judged.remark else self.fail
        return replace(say(judged.code, result + judged.why, about), error=judged.error, expected=judged.expected)


class NumbersCheck(AuditCheck):
    """The check that the others rest on."""

    name, grounds = "numbers", True

    def look(self) -> Iterator[AuditFinding]:
        """The first failure of each result; each remark once."""
        said: set[tuple[str, str]] = set()
        for shape in self.auditor.shapes():
            for data in self.subject.data:
                self.given = AuditInput(data, shape)
                for name, verdict in self.auditor.wrong(self.given).items():
                    key = name, verdict.code if verdict.remark else "failed"
                    if key not in said:
                        said.add(key)
                        yield self.judged(self.given, name, verdict)
            if any(code == "failed" for _, code in said):
                return


class ManyStepsCheck(AuditCheck):
    """Counts that stand still, and updates that are lost, show late."""

    name, of_sound, kinds = "many steps", True, frozenset({AuditKind.OPTIMIZER})

    def look(self) -> Iterator[AuditFinding]:
        assert isinstance(self.subject, OptimizerSubject)
        self.given = AuditInput(NORMAL, self.subject.many)
        for name, verdict in self.auditor.wrong(self.given).items():
            yield self.judged(self.given, name, verdict)
        few = AuditInput(NORMAL, self.subject.held)
        state = self.subject.state_bytes(self.auditor.matrices(few))
        if state is not None and state[0] > _MORE * state[1]:
            why = f"its state takes {state[0]:.3g} bytes an element, and {state[1]:.3g} were promised"
            yield self.remark("state-bytes", why, few)


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
    """Every check in turn. One that fails stops none of the others: they may find what explains it."""
    started = time.perf_counter()
    kind, plain = SUBJECTS[signature.kind], replace(signature, takes=Takes.VALUES)
    other = None if baseline is None else kind(baseline, plain, facts)
    auditor = Auditor(kind(function, signature, facts), seed, ceilings, other)
    findings: list[AuditFinding] = []
    for check in (kind_of_check(auditor) for kind_of_check in checks):
        if not check.applies():
            continue
        own: list[AuditFinding] = []
        try:
            own += check.look()
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything, at any time
            own.append(check.fail("raises", own_words(error), outcome=AuditOutcome.CANNOT_TELL))
        findings += own or [AuditFinding(check.name, AuditOutcome.PASS)]
        if check.grounds:
            if any(finding.code == "raises" for finding in own):
                break
            auditor.sound = all(finding.outcome is AuditOutcome.PASS for finding in own)
    return Audit(
        target, signature, tuple(findings), auditor.tried, time.perf_counter() - started,
        times=tuple(auditor.times.items()),
        work=tuple((side, work, auditor.compared.get(side)) for side, work in auditor.work.items()),
    )  # fmt: skip
