"""The subjects of audits and the engine that runs the checks: data and arguments for each kind of callable, what it
promises, the state that checks share, and the loop over checks."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from random import Random
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fp8bench.errors import WorkerFault, WorkerHung, WorkerLost
from fp8bench.features.audit.host import (
    KernelHost,
    KernelRaised,
    PackedTensor,
    describe_stop,
    digest_of,
    pack,
    unpack_results,
)
from fp8bench.features.audit.operands import (
    DATA,
    Promised,
    Rounded,
    draw_matrix,
    promise_of,
    round_operand,
    sampled_rows,
)
from fp8bench.features.audit.promises import (
    CERTAIN,
    FIGURES,
    TIES,
    AttentionPromise,
    Matrices,
    ProductPromise,
    Promise,
    SampledPlaces,
)
from fp8bench.features.audit.readings import TELLING, describe_reading
from fp8bench.features.audit.values import Audit, AuditFinding, AuditOutcome, fail
from fp8bench.formats.codes import DTYPES
from fp8bench.formats.hardware import has_hopper_units
from fp8bench.formats.recipes import Treatment
from fp8bench.model import Ceilings, DeviceFacts
from fp8bench.model.promises import AuditKind, Signature, Takes
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.protocols import Role

_LAYER = "audit"
# The batch size for attention.
_BATCH = 2


class Shape(NamedTuple):
    """The sides of an input. A product is (M, K) x (N, K); attention has M positions of N heads of size K."""

    m: int
    n: int
    k: int


SUBJECTS: dict[AuditKind, type[Subject]] = {}
# In a large result, this many rows and about this many elements are compared.
_SAMPLED_ROWS, _SAMPLED = 24, 1024


class Subject(ABC):
    """One callable under audit. Matrices are drawn and judged on the CPU, whatever device it runs on. `shapes` are
    sizes that it must accept, while `odd` ones and `sizes` may be refused; `data` are the informative kinds of data;
    `timed` is the first shape that is timed, `tall` one larger than the blocks that kernels are tested with, and than
    the sums that bfloat16 can hold. `sizes` come from real models and from decoding: only a sample of their results is
    judged."""

    kind: ClassVar[AuditKind]
    # Three distinct sides, a square whose shape hides a transposition, and a long sum.
    shapes: ClassVar[tuple[Shape, ...]] = (Shape(64, 96, 256), Shape(128, 128, 128), Shape(32, 48, 1024))
    odd: ClassVar[tuple[Shape, ...]] = (
        Shape(1, 96, 256),
        Shape(33, 47, 256),
        Shape(64, 96, 200),
        Shape(17, 40, 48),
        Shape(130, 258, 144),
        Shape(1, 1, 16),
    )
    timed: ClassVar[Shape] = Shape(256, 256, 256)
    tall: ClassVar[Shape] = Shape(520, 264, 4096)
    small: ClassVar[Shape] = Shape(16, 32, 64)
    sizes: ClassVar[tuple[Shape, ...]] = (
        Shape(1, 512, 768),
        Shape(1, 1024, 4096),
        Shape(2, 640, 2048),
        Shape(3, 1000, 1000),
        Shape(4, 256, 11008),
        Shape(5, 520, 5120),
        Shape(6, 1030, 520),
        Shape(7, 300, 14336),
        Shape(8, 4096, 1024),
        Shape(12, 32000, 32),
        Shape(16, 768, 768),
        Shape(24, 3072, 768),
        Shape(20, 136, 3072),
        Shape(32, 11008, 128),
        Shape(16, 14336, 64),
        Shape(256, 256, 256),
        Shape(40, 384, 384),
        Shape(512, 512, 512),
        Shape(256, 1024, 1536),
        Shape(1024, 1024, 1024),
        Shape(2048, 2048, 128),
        Shape(4096, 64, 64),
        Shape(48, 2048, 2048),
        Shape(64, 264, 8192),
        Shape(257, 513, 769),
        Shape(1000, 129, 1000),
        Shape(768, 1280, 640),
        Shape(32, 4096, 4096),
    )
    data: ClassVar[tuple[str, ...]] = tuple(DATA)
    zeroed: ClassVar[tuple[int, ...]] = (0,)

    def __init_subclass__(cls) -> None:
        SUBJECTS[cls.kind] = cls

    def __init__(self, host: KernelHost, signature: Signature, facts: DeviceFacts) -> None:
        self.host, self.signature, self.facts, self.device = host, signature, facts, facts.key

    @cached_property
    def promise(self) -> Promised:
        return promise_of(self.signature.precision, self.facts)

    def draw(self, data: str, shape: Shape, seed: int) -> Matrices:
        rows = enumerate((shape.m, shape.n))
        return tuple(draw_matrix(data, place, count, shape.k, seed, self.promise.carrier) for place, count in rows)

    def arguments(self, matrices: Matrices) -> Matrices:
        """Returns the callable's arguments, still on the CPU."""
        return matrices

    @abstractmethod
    def promises(self, matrices: Matrices, chance: Random | None = None) -> dict[str, Promise]:
        """Returns what each result should be. With `chance`, only for random rows and columns."""


class ProductSubject(Subject):
    """A callable that takes two matrices, or the codes and scales of both."""

    kind = AuditKind.PRODUCT

    def arguments(self, matrices: Matrices) -> Matrices:
        turned = self.signature.second == "kn"
        if self.signature.takes is Takes.VALUES:
            a, b = matrices
            return super().arguments((a, b.t().contiguous() if turned else b))
        operands, treatment = self._round_both(*matrices), self.promise.treatments[0]
        codes, scales = [side.codes for side in operands], [side.scales for side in operands]
        fmt = None if treatment is None or treatment.scaling is None else treatment.scaling.scale
        if fmt is None:
            scales = [scale.reshape(()) if scale.numel() == 1 else scale for scale in scales]
        else:
            scales = [scale.to(torch.float8_e8m0fnu if fmt.name == "e8m0" else DTYPES[fmt.name]) for scale in scales]
        tensor_scales = [torch.tensor(side.tensor_scale) for side in operands if side.tensor_scale is not None]
        return codes[0], codes[1].t() if turned else codes[1], *scales, *tensor_scales

    def promises(self, matrices: Matrices, chance: Random | None = None) -> dict[str, Promise]:
        a, b, places = _sample_product(matrices[0], matrices[1], self.promise.treatments, chance)
        return {"product": ProductPromise(*self._round_both(a, b), None, has_hopper_units(self.facts), places)}

    def _round_both(self, a: Tensor, b: Tensor) -> tuple[Rounded, Rounded]:
        first, second, _ = self.promise.treatments
        operands = round_operand(a, first), round_operand(b, second)
        if self.signature.takes is Takes.VALUES:
            return operands
        # A callable that gets codes is not blamed for the error of rounding to them.
        return replace(operands[0], given=None), replace(operands[1], given=None)


class LinearSubject(Subject):
    """A callable that takes inputs and a weight that need gradients. The gradient of its result is random."""

    kind = AuditKind.LINEAR
    tall = Shape(520, 264, 2080)

    def draw(self, data: str, shape: Shape, seed: int) -> Matrices:
        gradient = draw_matrix("normal", 2, shape.m, shape.n, seed, self.promise.carrier)
        return (*super().draw(data, shape, seed), gradient)

    def promises(self, matrices: Matrices, chance: Random | None = None) -> dict[str, Promise]:
        x, weight, gradient = matrices
        role = dict(zip(Role, self.promise.treatments, strict=True))
        high = self.promise.recipe is not None and self.promise.recipe.high_weight_gradient
        products = {
            "forward": ((x, Role.INPUT), (weight, Role.WEIGHT), False),
            "input gradient": ((gradient, Role.GRADIENT), (weight.t(), Role.WEIGHT), False),
            "weight gradient": ((gradient.t(), Role.GRADIENT), (x.t(), Role.INPUT), True),
        }
        promises: dict[str, Promise] = {}
        for name, ((first_source, of_left), (second_source, of_right), last) in products.items():
            treatments = [None if high and last else role[which] for which in (of_left, of_right)]
            a, b, places = _sample_product(first_source.contiguous(), second_source.contiguous(), treatments, chance)
            emulated = self._emulate((a, of_left), (b, of_right), last)
            first, second = round_operand(a, treatments[0]), round_operand(b, treatments[1])
            promises[name] = ProductPromise(first, second, emulated, has_hopper_units(self.facts), places)
        return promises

    def _emulate(self, a: tuple[Tensor, Role], b: tuple[Tensor, Role], last: bool) -> Tensor | None:
        recipe = self.promise.recipe
        draws = recipe is not None and any(role is Role.GRADIENT and recipe.gradient.stochastic for _, role in (a, b))
        if recipe is None or not (draws or (last and recipe.hadamard)):
            return None
        arithmetic = RecipeArithmetic(recipe, self.promise.carrier).layer(_LAYER)
        cast = arithmetic.cast_transpose if last else arithmetic.cast
        first, second = (cast(tensor.contiguous(), role) for tensor, role in (a, b))
        return arithmetic.product(first, second, self.promise.carrier)


class AttentionSubject(Subject):
    """A callable that takes queries, keys and values, (2, heads, positions, size) each, and divides scores by
    sqrt(size)."""

    kind = AuditKind.ATTENTION
    shapes = (Shape(64, 4, 64), Shape(128, 2, 32), Shape(96, 3, 128))
    odd = (Shape(1, 2, 64), Shape(33, 3, 64), Shape(65, 2, 32), Shape(130, 1, 128))
    timed = Shape(128, 1, 64)
    zeroed = (2,)
    tall = Shape(520, 1, 64)
    small = Shape(16, 2, 32)
    sizes = (
        Shape(1, 8, 64),
        Shape(2, 4, 128),
        Shape(5, 12, 64),
        Shape(8, 32, 128),
        Shape(256, 12, 64),
        Shape(257, 2, 80),
        Shape(300, 3, 96),
        Shape(192, 1, 256),
        Shape(512, 4, 64),
        Shape(577, 2, 64),
        Shape(640, 1, 64),
        Shape(777, 1, 40),
        Shape(1024, 2, 64),
        Shape(1500, 1, 112),
        Shape(2048, 1, 128),
    )
    data = ("normal", "uniform", "integers", "small", "outliers across the contraction")

    def draw(self, data: str, shape: Shape, seed: int) -> Matrices:
        m, n, k = shape
        matrices = (draw_matrix(data, place, _BATCH * n * m, k, seed, torch.float32) for place in range(3))
        # Keep scores within a few units: the softmax of larger ones picks one value and hides how they were computed.
        scaled = (tensor / tensor.square().mean().sqrt().clamp(min=2.0**-30) for tensor in matrices)
        return tuple(tensor.view(_BATCH, n, m, k).to(self.promise.carrier) for tensor in scaled)

    def promises(self, matrices: Matrices, chance: Random | None = None) -> dict[str, Promise]:
        places = None
        if chance is not None:
            shape = batch, heads, length, _ = matrices[0].shape
            which = torch.tensor([chance.randrange(batch * heads)])
            rows = [0, length - 1, *(chance.randrange(length) for _ in range(2 * _SAMPLED_ROWS))]
            places = SampledPlaces(tuple(shape), which, torch.tensor(sorted(set(rows))))
            matrices = tuple(tensor.flatten(0, 1)[which][None] for tensor in matrices)
        return {"attention": AttentionPromise(matrices, self.promise.treatments[0], self.signature.causal, places)}


def _sample_product(
    a: Tensor, b: Tensor, treatments: Sequence[Treatment | None], chance: Random | None
) -> tuple[Tensor, Tensor, SampledPlaces | None]:
    """Returns some rows of both operands of a product, and their places in its result; all rows without `chance`."""
    if chance is None:
        return a, b, None
    rows = sampled_rows(a, treatments[0], _SAMPLED_ROWS, chance)
    columns = sampled_rows(b, treatments[1], max(_SAMPLED // len(rows), _SAMPLED_ROWS), chance)
    return a[rows], b[columns], SampledPlaces((len(a), len(b)), rows, columns)


# Tried in this order to find the smallest input that shows a failure.
_SMALLER = (Shape(1, 1, 16), Shape(2, 2, 32), Shape(4, 4, 32), Shape(8, 8, 64), Shape(16, 16, 128), Shape(32, 32, 128))
# The search for mistakes is slow: it runs for at most this many results of the same kind.
_SEARCHES = 4
NORMAL = "normal"
# Codes of failures after which no other check can judge the result.
_NOTHING = ("raises", "shape", "dtype", "lazy-result")
# Exceptions of the kernel, in this process or in the kernel's.
REFUSALS = (KernelRaised, WorkerFault)
# Added to the seed for a second, independent input.
ANOTHER = 1 << 32


class AuditInput(NamedTuple):
    """An input of a callable: a kind of data and a shape. `how` describes later changes to the data."""

    data: str
    shape: Shape
    how: str = ""


class Auditor:
    """The state that all checks of one audit share. `current` is the input being tried: findings are about it, unless
    they name another input. `tried` counts judged results. Once numbers were wrong, nothing is `sound`: checks that
    compare results with their promise add nothing new."""

    def __init__(self, subject: Subject, seed: int, ceilings: Ceilings | None = None) -> None:
        self.subject, self.seed, self.ceilings = subject, seed, ceilings or Ceilings()
        self.current: AuditInput | None = None
        self.tried, self.sound = 0, True
        self.changed: AuditFinding | None = None
        self._searches: Counter[str] = Counter()
        self._readings: dict[str, str] = {}

    @property
    def first(self) -> AuditInput:
        return AuditInput(NORMAL, self.fitting(self.subject.shapes[0]))

    def fitting(self, shape: Shape) -> Shape:
        """Rounds each side up to a multiple that the callable accepts."""
        multiple = self.subject.signature.multiple
        return Shape(*(math.ceil(side / multiple) * multiple for side in shape))

    def about(self, tried: AuditInput | None, finding: AuditFinding) -> AuditFinding:
        """Adds an input such as 'M=64 N=96 K=256, normal' to the finding, if it has none."""
        if tried is None or finding.input:
            return finding
        sides = "M={} N={} K={}".format(*tried.shape)
        return replace(finding, input=", ".join(filter(None, (sides, tried.data, tried.how))))

    def matrices(self, tried: AuditInput) -> Matrices:
        return self.subject.draw(tried.data, tried.shape, self.seed)

    def results(self, matrices: Matrices) -> dict[str, Tensor]:
        return self.call(self.subject.arguments(matrices))

    def place(self, arguments: Matrices, slot: int = 0, moved: bool = True) -> tuple[PackedTensor, ...]:
        """Moves arguments to where the kernel runs, and returns what was sent."""
        packed = tuple(map(pack, arguments))
        self.subject.host.place(slot, packed, moved)
        return packed

    def call(self, arguments: Matrices, slot: int = 0, moved: bool = True) -> dict[str, Tensor]:
        """Calls the kernel and returns copies of its results. Notes whether the memory of its arguments has changed."""
        placed = self.place(arguments, slot, moved)
        results, digests = self.subject.host.call(slot)
        self.note_changes(self.current, placed, digests)
        return unpack_results(results)

    def note_changes(self, tried: AuditInput | None, placed: Sequence[PackedTensor], digests: Sequence[int]) -> None:
        """Records the first finding of an argument whose memory has changed its digest after calls."""
        for place, (packed, digest) in enumerate(zip(placed, digests, strict=True)):
            if digest_of(packed) != digest and self.changed is None:
                reason = f"the memory of argument {place + 1} was changed by the call"
                self.changed = self.about(tried, fail("input-changed", reason))

    def wrong_sample(self, matrices: Matrices, results: dict[str, Tensor], chance: Random) -> AuditFinding | None:
        """Returns the first failure among some rows and columns of the results, if any."""
        promises = self.subject.promises(matrices, chance)
        self.tried += len(results)
        verdicts = {name: promises[name].judge(result, search=False) for name, result in results.items()}
        return next((replace(bad, why=f"{name}: {bad.why}") for name, bad in verdicts.items() if bad.failed), None)

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

    def problems(self, tried: AuditInput) -> dict[str, AuditFinding]:
        """Returns verdicts that are failures or remarks, by the result's name. A mistake is named only if a second,
        independent input also shows it."""
        matrices = self.matrices(tried)
        results = self.results(matrices)
        verdicts = {name: verdict for name, verdict in self.judge(matrices, results).items() if verdict.code}
        if all(verdict.remark or verdict.code in CERTAIN for verdict in verdicts.values()):
            return verdicts
        second_input = self.subject.draw(tried.data, tried.shape, self.seed + ANOTHER)
        second, promises = self.judge(second_input, self.results(second_input)), self.subject.promises(matrices)
        for name, verdict in verdicts.items():
            if verdict.remark or verdict.code in (second[name].code, *CERTAIN):
                continue
            # The second input does not confirm the mistake, so it stays unnamed. A figure may have been chance.
            verdicts[name] = unnamed = promises[name].judge(results[name], search=False)
            if unnamed.code in FIGURES and not second[name].failed:
                verdicts[name] = replace(
                    unnamed, outcome=AuditOutcome.PASS, code="other-rounding", why=f"on one input of two {unnamed.why}"
                )
        return verdicts

    def smallest(self, tried: AuditInput, name: str, code: str) -> AuditInput:
        """Returns the smallest input whose result of that name fails with `code`; `tried` if no smaller one does."""
        for shape in map(self.fitting, () if tried.how else _SMALLER):
            smaller = AuditInput(tried.data, shape)
            try:
                verdict = self.problems(smaller).get(name)
            except REFUSALS:  # it may refuse small inputs
                continue
            except (
                WorkerHung,
                WorkerLost,
            ):  # earlier findings are kept, and the next call reports that the process is gone
                break
            if verdict is not None and verdict.code == code:
                return smaller
        return tried

    def finding(self, tried: AuditInput, name: str, verdict: AuditFinding) -> AuditFinding:
        """Adds the name of the result to a verdict; a failure is reported for the smallest input that shows it."""
        result = "" if name == "product" else f"{name}: "
        if verdict.remark or verdict.code in _NOTHING:
            return self.about(tried, replace(verdict, why=result + verdict.why))
        if name not in self._readings:
            promised = self.subject.signature.precision
            telling = [data for data in TELLING if data in self.subject.data]
            self._readings[name] = describe_reading(promised, telling, partial(self._is_kept, name))
        reason = f"{result}{verdict.why}. {self._readings[name]}"
        return self.about(self.smallest(tried, name, verdict.code), replace(verdict, why=reason))

    def _is_kept(self, name: str, precision: str, data: str) -> bool:
        """Whether the named result on that data matches a precision."""
        matrices = self.matrices(self.first._replace(data=data))
        subject = type(self.subject)(self.subject.host, self.subject.signature, self.subject.facts)
        subject.signature = replace(subject.signature, precision=precision)
        verdict = subject.promises(matrices)[name].judge(self.results(matrices)[name], search=False)
        return not verdict.failed and verdict.why in ("", TIES)


class AuditCheck(NamedTuple):
    """One check. `look` yields failures and remarks; it may raise whatever foreign code raises, and earlier yields
    still count. With `needs_sound` it runs only if numbers are right, which the check that `decides` determines."""

    name: str
    look: Callable[[Auditor], Iterable[AuditFinding]]
    kinds: frozenset[AuditKind] = frozenset(AuditKind)
    needs_sound: bool = False
    decides: bool = False


def run_checks(
    target: str,
    host: KernelHost,
    signature: Signature,
    facts: DeviceFacts,
    seed: int,
    checks: Sequence[AuditCheck],
    ceilings: Ceilings | None = None,
) -> Audit:
    """Runs every check in turn. A failed check does not stop the others: they may explain it."""
    started = time.perf_counter()
    auditor = Auditor(SUBJECTS[signature.kind](host, signature, facts), seed, ceilings)
    findings: list[AuditFinding] = []
    has_ended = is_changed = False
    for check in checks:
        if has_ended or signature.kind not in check.kinds or (check.needs_sound and not auditor.sound):
            continue
        check_findings, auditor.current = list[AuditFinding](), None
        try:
            for finding in check.look(auditor):
                check_findings.append(auditor.about(auditor.current, finding))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything, at any time
            check_findings.append(auditor.about(auditor.current, describe_stop(error)))
            has_ended = isinstance(error, (WorkerHung, WorkerLost))
        if auditor.changed is not None and not is_changed:
            check_findings.append(auditor.changed)
            is_changed = True
        # A check without findings has passed, which counts as a finding.
        findings += [replace(finding, check=check.name) for finding in check_findings] or [AuditFinding(check.name)]
        if check.decides:
            if any(finding.code in _NOTHING for finding in check_findings):
                break
            auditor.sound = all(finding.outcome is AuditOutcome.PASS for finding in check_findings)
    return Audit(target, signature, tuple(findings), auditor.tried, time.perf_counter() - started)
