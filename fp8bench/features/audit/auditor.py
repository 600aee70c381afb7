"""What is audited, and the engine that audits it: which data and arguments each kind of callable is called with, what
it promises, what all checks share, and how a table of them runs."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp8bench.features.audit.operands import (
    DATA,
    Promised,
    Rounded,
    drawn,
    promised_by,
    rounded,
)
from fp8bench.features.audit.promises import (
    CERTAIN,
    FIGURES,
    OTHER_READINGS,
    READINGS,
    TIES,
    AttentionPromise,
    Matrices,
    ProductPromise,
    Promise,
)
from fp8bench.features.audit.values import Audit, AuditFinding, AuditOutcome, CallWork
from fp8bench.formats.codes import DTYPES
from fp8bench.formats.hardware import has_hopper_units
from fp8bench.formats.recipes import Recipe, ScaleRounding
from fp8bench.model import Ceilings, DeviceFacts
from fp8bench.model.promises import AuditKind, Signature, Takes
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from fp8bench.user_code import own_words

_LAYER = "audit"
# Attention is called with a batch of so many.
_BATCH = 2


class Shape(NamedTuple):
    """The sides of an input. A product is (M, K) x (N, K), attention M places of N heads of size K."""

    m: int
    n: int
    k: int


SUBJECTS: dict[AuditKind, type[Subject]] = {}


class Subject(ABC):
    """One callable under audit. Matrices are drawn and judged on the processor, whatever device it runs on. `shapes`
    are sizes that it has promised to take, `odd` ones may be refused; `data` are the kinds of data that say something
    about it; `timed` is the first shape that is timed, `tall` one beyond the blocks that kernels are tried with, and
    beyond the sums that bfloat16 holds."""

    kind: ClassVar[AuditKind]
    # No two sides alike, a square in which a transposition keeps the shape, and a long sum.
    shapes: ClassVar[tuple[Shape, ...]] = (Shape(64, 96, 256), Shape(128, 128, 128), Shape(32, 48, 1024))
    odd: ClassVar[tuple[Shape, ...]] = (
        Shape(1, 96, 256), Shape(33, 47, 256), Shape(64, 96, 200), Shape(17, 40, 48), Shape(130, 258, 144),
        Shape(1, 1, 16),
    )  # fmt: skip
    timed: ClassVar[Shape] = Shape(256, 256, 256)
    tall: ClassVar[Shape] = Shape(520, 264, 4096)
    data: ClassVar[tuple[str, ...]] = tuple(DATA)
    zeroed: ClassVar[tuple[int, ...]] = (0,)

    def __init_subclass__(cls) -> None:
        SUBJECTS[cls.kind] = cls

    def __init__(self, function: Callable[..., Any], signature: Signature, facts: DeviceFacts) -> None:
        self.function, self.signature, self.facts, self.device = function, signature, facts, facts.key

    @cached_property
    def promised(self) -> Promised:
        return promised_by(self.signature.precision, self.facts)

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        rows = enumerate((shape.m, shape.n))
        return tuple(drawn(data, place, count, shape.k, seed, self.promised.carrier) for place, count in rows)

    def arguments(self, matrices: Matrices) -> Matrices:
        return tuple(matrix.to(self.device, copy=True) for matrix in matrices)

    def results(self, arguments: Matrices) -> dict[str, Tensor]:
        """Calls it, and returns copies of its results on the processor, by name."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.raw(arguments).items()}

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        return {self.kind.value: self._tensor(self.function(*arguments))}

    @abstractmethod
    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        """What each result should be."""

    def _tensor(self, answer: object) -> Tensor:
        if not isinstance(answer, Tensor):
            raise TypeError(f"it gave {type(answer).__name__}, and a tensor was expected")
        return answer


class ProductSubject(Subject):
    """Is called with two matrices, or with the codes and scales of both."""

    kind = AuditKind.PRODUCT

    def arguments(self, matrices: Matrices) -> Matrices:
        turned = self.signature.second == "kn"
        if self.signature.takes is Takes.VALUES:
            a, b = matrices
            return super().arguments((a, b.t().contiguous() if turned else b))
        kept, treatment = self._kept(matrices), self.promised.treatments[0]
        codes, scales = [side.codes.to(self.device) for side in kept], [side.scales for side in kept]
        fmt = None if treatment is None or treatment.scaling is None else treatment.scaling.scale
        if fmt is None:
            scales = [scale.reshape(()) if scale.numel() == 1 else scale for scale in scales]
        else:
            scales = [scale.to(torch.float8_e8m0fnu if fmt.name == "e8m0" else DTYPES[fmt.name]) for scale in scales]
        scales = [scale.to(self.device) for scale in scales]
        whole = [torch.tensor(side.tensor_scale, device=self.device) for side in kept if side.tensor_scale is not None]
        return codes[0], codes[1].t() if turned else codes[1], *scales, *whole

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        return {"product": ProductPromise(*self._kept(matrices), hopper=has_hopper_units(self.facts))}

    def _kept(self, matrices: Matrices) -> tuple[Rounded, Rounded]:
        (a, b), (first, second, _) = matrices, self.promised.treatments
        kept = rounded(a, first), rounded(b, second)
        given = self.signature.takes is Takes.VALUES
        return kept if given else (replace(kept[0], given=None), replace(kept[1], given=None))


class LinearSubject(Subject):
    """Is called with inputs and a weight that need gradients. The gradient of its result is drawn."""

    kind = AuditKind.LINEAR
    tall = Shape(520, 264, 2080)

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        gradient = drawn("normal", 2, shape.m, shape.n, seed, self.promised.carrier)
        return (*super().drawn(data, shape, seed), gradient)

    def arguments(self, matrices: Matrices) -> Matrices:
        x, weight, gradient = super().arguments(matrices)
        return x.requires_grad_(), weight.requires_grad_(), gradient

    def raw(self, arguments: Matrices) -> dict[str, Tensor]:
        x, weight, gradient = arguments
        answer = self._tensor(self.function(x, weight))
        into_x, into_weight = torch.autograd.grad(answer, (x, weight), gradient.to(answer.dtype))
        return {"forward": answer, "input gradient": into_x, "weight gradient": into_weight}

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        x, weight, gradient = matrices
        role = dict(zip(Role, self.promised.treatments, strict=True))
        high = self.promised.recipe is not None and self.promised.recipe.high_weight_gradient
        products = {
            "forward": ((x, Role.INPUT), (weight, Role.WEIGHT), False),
            "input gradient": ((gradient, Role.GRADIENT), (weight.t(), Role.WEIGHT), False),
            "weight gradient": ((gradient.t(), Role.GRADIENT), (x.t(), Role.INPUT), True),
        }
        promises: dict[str, Promise] = {}
        for name, (a, b, last) in products.items():
            first, second = (
                rounded(tensor.contiguous(), None if high and last else role[which]) for tensor, which in (a, b)
            )
            promises[name] = ProductPromise(first, second, self._emulated(a, b, last), has_hopper_units(self.facts))
        return promises

    def _emulated(self, a: tuple[Tensor, Role], b: tuple[Tensor, Role], last: bool) -> Tensor | None:
        recipe = self.promised.recipe
        drawn = recipe is not None and any(role is Role.GRADIENT and recipe.gradient.stochastic for _, role in (a, b))
        if recipe is None or not (drawn or (last and recipe.hadamard)):
            return None
        arithmetic = RecipeArithmetic(recipe, self.promised.carrier).layer(_LAYER)
        cast = arithmetic.turned if last else arithmetic.cast
        first, second = (cast(tensor.contiguous(), role) for tensor, role in (a, b))
        return arithmetic.product(first, second, self.promised.carrier)


class AttentionSubject(Subject):
    """Is called with queries, keys and values, (2, heads, places, size) each; it divides scores by sqrt(size)."""

    kind = AuditKind.ATTENTION
    shapes = (Shape(64, 4, 64), Shape(128, 2, 32), Shape(96, 3, 128))
    odd = (Shape(1, 2, 64), Shape(33, 3, 64), Shape(65, 2, 32), Shape(130, 1, 128))
    timed = Shape(128, 1, 64)
    zeroed = (2,)
    tall = Shape(520, 1, 64)
    data = ("normal", "uniform", "integers", "small", "outliers across the contraction")

    def drawn(self, data: str, shape: Shape, seed: int) -> Matrices:
        m, n, k = shape
        made = (drawn(data, place, _BATCH * n * m, k, seed, torch.float32) for place in range(3))
        # Scores of a few units: the softmax of larger ones picks one value, and would hide how they were made.
        scaled = (tensor / tensor.square().mean().sqrt().clamp(min=2.0**-30) for tensor in made)
        return tuple(tensor.view(_BATCH, n, m, k).to(self.promised.carrier) for tensor in scaled)

    def promises(self, matrices: Matrices) -> dict[str, Promise]:
        return {"attention": AttentionPromise(matrices, self.promised.treatments[0], self.signature.causal)}


# Tried in this order to find the smallest input that shows a failure.
_SMALLER = (Shape(1, 1, 16), Shape(2, 2, 32), Shape(4, 4, 32), Shape(8, 8, 64), Shape(16, 16, 128), Shape(32, 32, 128))
# The search for mistakes is slow: of each result so many that need it are searched.
_SEARCHES = 4
NORMAL = "normal"
# Kinds of data that tell precisions apart.
_TELLING = (NORMAL, "rows of different sizes", "many octaves")
_SCALES = {
    ScaleRounding.EXACT: "the largest magnitude / the format's largest, not rounded",
    ScaleRounding.POWER_OF_TWO: "powers of two",
}
# Codes of results that no other check can look at.
_NOTHING = ("raises", "shape", "dtype")
# Added to the seed for a second, independent input.
ANOTHER = 1 << 32


class AuditInput(NamedTuple):
    """What a callable is given: a kind of data and a shape. `how` says what was changed in the data afterwards."""

    data: str
    shape: Shape
    how: str = ""


class Auditor:
    """What all checks of one audit share. `given` is what a check tries at the moment: its findings are about that,
    unless they name another input. `tried` counts judged results. Once numbers were wrong, nothing is `sound`: checks
    that compare results with their promise say nothing new. Checks leave `times` and `work` here."""

    def __init__(self, subject: Subject, seed: int, ceilings: Ceilings | None = None) -> None:
        self.subject, self.seed, self.ceilings = subject, seed, ceilings or Ceilings()
        self.given: AuditInput | None = None
        self.tried, self.sound = 0, True
        self.times: dict[str, float] = {}
        self.work: CallWork | None = None
        self._searches: Counter[str] = Counter()
        self._readings: dict[str, str] = {}

    @property
    def first(self) -> AuditInput:
        return AuditInput(NORMAL, self.fitting(self.subject.shapes[0]))

    def fitting(self, shape: Shape) -> Shape:
        """Rounds each side up to a multiple that the callable takes."""
        multiple = self.subject.signature.multiple
        return Shape(*(math.ceil(side / multiple) * multiple for side in shape))

    def about(self, given: AuditInput | None, finding: AuditFinding) -> AuditFinding:
        """Writes for example 'M=64 N=96 K=256, normal' as the finding's input, if it has none."""
        if given is None or finding.input:
            return finding
        sides = "M={} N={} K={}".format(*given.shape)
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
        other = self.subject.drawn(given.data, given.shape, self.seed + ANOTHER)
        second, promises = self.judge(other, self.results(other)), self.subject.promises(matrices)
        for name, verdict in verdicts.items():
            if verdict.remark or verdict.code in (second[name].code, *CERTAIN):
                continue
            # The second input does not confirm the mistake: it stays without a name. A figure may have been chance.
            verdicts[name] = unnamed = promises[name].judge(results[name], search=False)
            if unnamed.code in FIGURES and not second[name].failed:
                verdicts[name] = replace(
                    unnamed, outcome=AuditOutcome.PASS, code="other-rounding", why=f"on one input of two {unnamed.why}"
                )
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
        result = "" if name == "product" else f"{name}: "
        if verdict.remark or verdict.code in _NOTHING:
            return self.about(given, replace(verdict, why=result + verdict.why))
        if name not in self._readings:
            self._readings[name] = self._reading(name)
        why = f"{result}{verdict.why}. {self._readings[name]}"
        return self.about(self.smallest(given, name, verdict.code), replace(verdict, why=why))

    def _reading(self, name: str) -> str:
        """Says what was promised, and which other precision gives the results of that name, if one does."""
        promised = self.subject.signature.precision
        said = f"Promised: {_with_scales(promised)}. Found: "
        readings = list(dict.fromkeys((promised, *READINGS, *OTHER_READINGS)))
        for data in (data for data in _TELLING if data in self.subject.data):
            try:
                given = AuditInput(data, self.first.shape)
                matrices = self.matrices(given)
                result = self.results(matrices)[name]
                readings = [each for each in readings if self._is_kept(each, name, matrices, result)]
            except Exception:  # noqa: BLE001 - foreign code may raise anything
                readings = []
        if not readings:
            return f"{said}the results of no precision that is known here."
        if readings[0] == promised:
            return f"{said}the same on everyday data, but not on this input."
        return f"{said}{_with_scales(readings[0])}; give --precision {readings[0]} to promise that."

    def _is_kept(self, precision: str, name: str, matrices: Matrices, result: Tensor) -> bool:
        subject = type(self.subject)(self.subject.function, self.subject.signature, self.subject.facts)
        subject.signature = replace(subject.signature, precision=precision)
        verdict = subject.promises(matrices)[name].judge(result, search=False)
        return not verdict.failed and verdict.why in ("", TIES)


def _with_scales(precision: str) -> str:
    """Returns for example 'fp8-rowwise, whose scales are powers of two'."""
    recipe = getattr(precisions.get(precision), "recipe", None)
    scaling = recipe.input.scaling if isinstance(recipe, Recipe) else None
    words = "" if scaling is None else _SCALES.get(scaling.rounding, f"rounded by {scaling.rounding.value}")
    return f"{precision}, whose scales are {words}" if words else precision


class AuditCheck(NamedTuple):
    """One way to find a lie. `look` yields what is wrong or worth a remark; it may raise whatever foreign code raises:
    what it has yielded by then stands. With `needs_sound` it runs only where numbers are right, which the check that
    `decides` says."""

    name: str
    look: Callable[[Auditor], Iterable[AuditFinding]]
    kinds: frozenset[AuditKind] = frozenset(AuditKind)
    needs_sound: bool = False
    decides: bool = False


def audited(
    target: str,
    function: Callable[..., Any],
    signature: Signature,
    facts: DeviceFacts,
    seed: int,
    checks: Sequence[AuditCheck],
    ceilings: Ceilings | None = None,
) -> Audit:
    """Runs every check in turn. One that fails stops none of the others: they may find what explains it."""
    started = time.perf_counter()
    auditor = Auditor(SUBJECTS[signature.kind](function, signature, facts), seed, ceilings)
    findings: list[AuditFinding] = []
    for check in checks:
        if signature.kind not in check.kinds or (check.needs_sound and not auditor.sound):
            continue
        own, auditor.given = list[AuditFinding](), None
        try:
            for finding in check.look(auditor):
                own.append(auditor.about(auditor.given, finding))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything, at any time
            raised = AuditFinding("", AuditOutcome.CANNOT_TELL, "raises", own_words(error))
            own.append(auditor.about(auditor.given, raised))
        findings += [replace(finding, check=check.name) for finding in own or [AuditFinding()]]
        if check.decides:
            if any(finding.code in _NOTHING for finding in own):
                break
            auditor.sound = all(finding.outcome is AuditOutcome.PASS for finding in own)
    return Audit(
        target, signature, tuple(findings), auditor.tried, time.perf_counter() - started,
        times=tuple(auditor.times.items()), work=auditor.work,
    )  # fmt: skip
