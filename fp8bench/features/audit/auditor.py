"""Defines what an audit calls and how it runs the checks: the inputs and expected results for each kind of callable,
the state that checks share, and the loop over the checks.
"""

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
    KernelFailure,
    KernelHost,
    PackedTensor,
    compute_digest,
    describe_stop,
    pack_tensor,
    unpack_results,
)
from fp8bench.features.audit.operands import (
    DRAW_FUNCTIONS_BY_DATA_KIND,
    PromisedCasts,
    RoundedOperand,
    choose_audited_row_indices,
    draw_matrix,
    find_promised_casts,
    round_operand,
)
from fp8bench.features.audit.promises import (
    CERTAIN_FINDING_CODES,
    FIGURE_FINDING_CODES,
    ROUNDING_REASON,
    ExpectedAttention,
    ExpectedProduct,
    ExpectedResult,
    Matrices,
    ResultSample,
)
from fp8bench.features.audit.readings import INFORMATIVE_DATA, describe_found_precision
from fp8bench.features.audit.values import AuditFinding, AuditOutcome, AuditReport, make_failure
from fp8bench.formats.codes import CODE_DTYPES
from fp8bench.formats.hardware import has_hopper_units
from fp8bench.formats.recipes import Treatment
from fp8bench.model import Ceilings, DeviceFacts
from fp8bench.model.promises import AuditedCallableKind, CallablePromise, OperandForm
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.protocols import Role

_PLACEHOLDER_LAYER_NAME = "audit"
_ATTENTION_BATCH = 2


class Shape(NamedTuple):
    """The sizes of an input. A matrix product multiplies (M, K) by the transpose of (N, K). Attention has M positions
    and N heads of size K."""

    m: int
    n: int
    k: int


def _parse_shapes(text: str) -> tuple[Shape, ...]:
    """Returns the shapes of a text such as '64x96x256,1x1x16', whose sides are M, N and K."""
    return tuple(Shape(*map(int, sides.split("x"))) for sides in text.split(","))


SUBJECT_BY_KIND: dict[AuditedCallableKind, type[AuditSubject]] = {}
# Of a large result, only _SAMPLED_ROWS rows and about _SAMPLED_ELEMENTS elements are judged.
_SAMPLED_ROWS, _SAMPLED_ELEMENTS = 24, 1024


class AuditSubject(ABC):
    """The callable under audit. A subclass draws its inputs and computes its expected results, always on the CPU. The
    callable must accept `shapes`, but may refuse `unaligned_shapes` and `real_shapes`. `timed_shape` is the first shape
    that is timed. `tall_shape` is larger than the blocks with which kernels are usually tested, and its sums have more
    terms than bfloat16 can count. `real_shapes` come from real models and from decoding; only a sample of their results
    is judged."""

    kind: ClassVar[AuditedCallableKind]
    # Three shapes: three different sides, a square (in which a transposition hides), and long sums.
    shapes: ClassVar[tuple[Shape, ...]] = _parse_shapes("64x96x256,128x128x128,32x48x1024")
    unaligned_shapes: ClassVar[tuple[Shape, ...]] = _parse_shapes(
        "1x96x256,33x47x256,64x96x200,17x40x48,130x258x144,1x1x16"
    )
    timed_shape: ClassVar[Shape] = Shape(256, 256, 256)
    tall_shape: ClassVar[Shape] = Shape(520, 264, 4096)
    small_shape: ClassVar[Shape] = Shape(16, 32, 64)
    real_shapes: ClassVar[tuple[Shape, ...]] = _parse_shapes(
        "1x512x768,1x1024x4096,2x640x2048,3x1000x1000,4x256x11008,5x520x5120,6x1030x520,7x300x14336,"
        "8x4096x1024,12x32000x32,16x768x768,24x3072x768,20x136x3072,32x11008x128,16x14336x64,256x256x256,"
        "40x384x384,512x512x512,256x1024x1536,1024x1024x1024,2048x2048x128,4096x64x64,48x2048x2048,"
        "64x264x8192,257x513x769,1000x129x1000,768x1280x640,32x4096x4096"
    )
    data_kinds: ClassVar[tuple[str, ...]] = tuple(DRAW_FUNCTIONS_BY_DATA_KIND)
    zeroed_operand_index: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        SUBJECT_BY_KIND[cls.kind] = cls

    def __init__(self, host: KernelHost, signature: CallablePromise, facts: DeviceFacts) -> None:
        self.host = host
        self.signature = signature
        self.facts = facts
        self.device = facts.key

    @cached_property
    def promised_casts(self) -> PromisedCasts:
        return find_promised_casts(self.signature.precision, self.facts)

    def draw_operands(self, data: str, shape: Shape, seed: int) -> Matrices:
        row_counts = enumerate((shape.m, shape.n))
        return tuple(
            draw_matrix(data, place, count, shape.k, seed, self.promised_casts.carrier) for place, count in row_counts
        )

    def make_arguments(self, matrices: Matrices) -> Matrices:
        """Returns the arguments of the callable for these matrices, still on the CPU."""
        return matrices

    @abstractmethod
    def expected_results(self, matrices: Matrices, rng: Random | None = None) -> dict[str, ExpectedResult]:
        """Returns the expected results by name. With `rng`, they cover only random rows and columns."""


class ProductSubject(AuditSubject):
    """A matrix product: the callable takes two matrices, or the codes and scales of two quantised matrices."""

    kind = AuditedCallableKind.PRODUCT

    def make_arguments(self, matrices: Matrices) -> Matrices:
        is_second_transposed = self.signature.second == "kn"
        if self.signature.takes is OperandForm.VALUES:
            a, b = matrices
            return a, b.t().contiguous() if is_second_transposed else b
        operands = self._round_operands(*matrices)
        treatment = self.promised_casts.treatments[0]
        codes = [side.codes for side in operands]
        scales = [side.scales for side in operands]
        scale_format = None if treatment is None or treatment.scaling is None else treatment.scaling.scale
        if scale_format is None:
            scales = [scale.reshape(()) if scale.numel() == 1 else scale for scale in scales]
        else:
            scales = [
                scale.to(torch.float8_e8m0fnu if scale_format.name == "e8m0" else CODE_DTYPES[scale_format.name])
                for scale in scales
            ]
        tensor_scales = [torch.tensor(side.tensor_scale) for side in operands if side.tensor_scale is not None]
        return codes[0], codes[1].t() if is_second_transposed else codes[1], *scales, *tensor_scales

    def expected_results(self, matrices: Matrices, rng: Random | None = None) -> dict[str, ExpectedResult]:
        a, b, sample = _sample_product(matrices[0], matrices[1], self.promised_casts.treatments, rng)
        return {"product": ExpectedProduct(*self._round_operands(a, b), None, has_hopper_units(self.facts), sample)}

    def _round_operands(self, a: Tensor, b: Tensor) -> tuple[RoundedOperand, RoundedOperand]:
        first_treatment, second_treatment, _ = self.promised_casts.treatments
        operands = round_operand(a, first_treatment), round_operand(b, second_treatment)
        if self.signature.takes is OperandForm.VALUES:
            return operands
        # A callable that gets codes did not round them, so its error is measured against the codes.
        return replace(operands[0], unrounded_tensor=None), replace(operands[1], unrounded_tensor=None)


class LinearSubject(AuditSubject):
    """A linear layer: the callable takes an input and a weight, both of which require gradients. Its backward pass
    starts from a random gradient of the output."""

    kind = AuditedCallableKind.LINEAR
    tall_shape = Shape(520, 264, 2080)

    def draw_operands(self, data: str, shape: Shape, seed: int) -> Matrices:
        gradient = draw_matrix("normal", 2, shape.m, shape.n, seed, self.promised_casts.carrier)
        return (*super().draw_operands(data, shape, seed), gradient)

    def expected_results(self, matrices: Matrices, rng: Random | None = None) -> dict[str, ExpectedResult]:
        x, weight, gradient = matrices
        treatment_by_role = dict(zip(Role, self.promised_casts.treatments, strict=True))
        has_high_weight_gradient = (
            self.promised_casts.recipe is not None and self.promised_casts.recipe.high_weight_gradient
        )
        # The two gradients are products too, each of a different pair of operands.
        products = {
            "forward": ((x, Role.INPUT), (weight, Role.WEIGHT), False),
            "input gradient": ((gradient, Role.GRADIENT), (weight.t(), Role.WEIGHT), False),
            "weight gradient": ((gradient.t(), Role.GRADIENT), (x.t(), Role.INPUT), True),
        }
        expected_results: dict[str, ExpectedResult] = {}
        for name, ((first_source, of_left), (second_source, of_right), is_weight_gradient) in products.items():
            # Some recipes compute the weight gradient in high precision, so its operands are not cast.
            operand_treatments = [
                None if has_high_weight_gradient and is_weight_gradient else treatment_by_role[which]
                for which in (of_left, of_right)
            ]
            a, b, sample = _sample_product(
                first_source.contiguous(), second_source.contiguous(), operand_treatments, rng
            )
            emulated_result = self._emulate((a, of_left), (b, of_right), is_weight_gradient)
            first_operand = round_operand(a, operand_treatments[0])
            second_operand = round_operand(b, operand_treatments[1])
            expected_results[name] = ExpectedProduct(
                first_operand, second_operand, emulated_result, has_hopper_units(self.facts), sample
            )
        return expected_results

    def _emulate(self, a: tuple[Tensor, Role], b: tuple[Tensor, Role], is_weight_gradient: bool) -> Tensor | None:
        recipe = self.promised_casts.recipe
        is_stochastic = recipe is not None and any(
            role is Role.GRADIENT and recipe.gradient.stochastic for _, role in (a, b)
        )
        if recipe is None or not (is_stochastic or (is_weight_gradient and recipe.hadamard)):
            return None
        arithmetic = RecipeArithmetic(recipe, self.promised_casts.carrier).layer(_PLACEHOLDER_LAYER_NAME)
        cast_operand = arithmetic.cast_transpose if is_weight_gradient else arithmetic.cast
        first_operand, second_operand = (cast_operand(tensor.contiguous(), role) for tensor, role in (a, b))
        return arithmetic.product(first_operand, second_operand, self.promised_casts.carrier)


class AttentionSubject(AuditSubject):
    """Attention: the callable takes queries, keys and values, each of shape (2, heads, positions, size), and divides
    the scores by sqrt(size)."""

    kind = AuditedCallableKind.ATTENTION
    shapes = _parse_shapes("64x4x64,128x2x32,96x3x128")
    unaligned_shapes = _parse_shapes("1x2x64,33x3x64,65x2x32,130x1x128")
    timed_shape = Shape(128, 1, 64)
    zeroed_operand_index = 2
    tall_shape = Shape(520, 1, 64)
    small_shape = Shape(16, 2, 32)
    real_shapes = _parse_shapes(
        "1x8x64,2x4x128,5x12x64,8x32x128,256x12x64,257x2x80,300x3x96,192x1x256,512x4x64,577x2x64,640x1x64,"
        "777x1x40,1024x2x64,1500x1x112,2048x1x128"
    )
    data_kinds = ("normal", "uniform", "integers", "small", "outliers across the contraction")

    def draw_operands(self, data: str, shape: Shape, seed: int) -> Matrices:
        m, n, k = shape
        matrices = (draw_matrix(data, place, _ATTENTION_BATCH * n * m, k, seed, torch.float32) for place in range(3))
        # Scale queries and keys to keep scores small: the softmax of large ones picks one value and hides their errors.
        scaled_matrices = (tensor / tensor.square().mean().sqrt().clamp(min=2.0**-30) for tensor in matrices)
        return tuple(
            tensor.view(_ATTENTION_BATCH, n, m, k).to(self.promised_casts.carrier) for tensor in scaled_matrices
        )

    def expected_results(self, matrices: Matrices, rng: Random | None = None) -> dict[str, ExpectedResult]:
        sample = None
        if rng is not None:
            shape = batch, heads, length, _ = matrices[0].shape
            head_index = torch.tensor([rng.randrange(batch * heads)])
            rows = [0, length - 1, *(rng.randrange(length) for _ in range(2 * _SAMPLED_ROWS))]
            sample = ResultSample(tuple(shape), head_index, torch.tensor(sorted(set(rows))))
            matrices = tuple(tensor.flatten(0, 1)[head_index][None] for tensor in matrices)
        return {
            "attention": ExpectedAttention(matrices, self.promised_casts.treatments[0], self.signature.causal, sample)
        }


def _sample_product(
    a: Tensor, b: Tensor, treatments: Sequence[Treatment | None], rng: Random | None
) -> tuple[Tensor, Tensor, ResultSample | None]:
    """Returns random rows of the two operands of a product, with the rows and columns of the result that they
    produce. Without `rng`, returns all rows."""
    if rng is None:
        return a, b, None
    rows = choose_audited_row_indices(a, treatments[0], _SAMPLED_ROWS, rng)
    columns = choose_audited_row_indices(b, treatments[1], max(_SAMPLED_ELEMENTS // len(rows), _SAMPLED_ROWS), rng)
    return a[rows], b[columns], ResultSample((len(a), len(b)), rows, columns)


# The search for mistakes is slow, so for each result name it stops after this many results with remarks. Failed results
# are always searched.
_MAX_SEARCHED_REMARKS = 4
NORMAL_DATA = "normal"
# Failures after which no other check can judge the results, so the audit ends.
_UNUSABLE_RESULT_CODES = ("raises", "shape", "dtype", "lazy-result")
# Exceptions that a kernel raised, in this process or in the kernel's separate process.
REFUSAL_ERRORS = (KernelFailure, WorkerFault)
# Added to the seed to draw a second, independent input.
SECOND_SEED_OFFSET = 1 << 32


class AuditInput(NamedTuple):
    """An input of the callable: a kind of data (such as 'normal') and a shape. `data_change` describes a change of the
    drawn data."""

    data: str
    shape: Shape
    data_change: str = ""


class AuditSession:
    """The state that all checks of one audit share. `current` is the input that is being tried. Findings refer to it
    unless they name an input. `tried` counts the judged results. Once results were wrong, `has_right_numbers` is
    False. Checks that compare results with expected ones are then skipped."""

    def __init__(self, subject: AuditSubject, seed: int, ceilings: Ceilings | None = None) -> None:
        self.subject = subject
        self.seed = seed
        self.ceilings = ceilings or Ceilings()
        self.current: AuditInput | None = None
        self.tried = 0
        self.has_right_numbers = True
        self.argument_change: AuditFinding | None = None
        self._searches: Counter[str] = Counter()
        self._readings: dict[str, str] = {}

    @property
    def first_input(self) -> AuditInput:
        return AuditInput(NORMAL_DATA, self.round_up_shape(self.subject.shapes[0]))

    def round_up_shape(self, shape: Shape) -> Shape:
        """Rounds each side of a shape up to a multiple that the callable accepts."""
        multiple = self.subject.signature.multiple
        return Shape(*(math.ceil(side / multiple) * multiple for side in shape))

    def add_input_to_finding(self, audit_input: AuditInput | None, finding: AuditFinding) -> AuditFinding:
        """Returns the finding with an input, such as 'M=64 N=96 K=256, normal', unless it already names one."""
        if audit_input is None or finding.input:
            return finding
        input_sides_text = "M={} N={} K={}".format(*audit_input.shape)
        return replace(
            finding, input=", ".join(filter(None, (input_sides_text, audit_input.data, audit_input.data_change)))
        )

    def draw_matrices(self, audit_input: AuditInput) -> Matrices:
        return self.subject.draw_operands(audit_input.data, audit_input.shape, self.seed)

    def compute_results(self, matrices: Matrices) -> dict[str, Tensor]:
        return self.call_kernel(self.subject.make_arguments(matrices))

    def send_arguments(
        self, arguments: Matrices, slot: int = 0, at_new_address: bool = True
    ) -> tuple[PackedTensor, ...]:
        """Sends arguments to the process and device of the kernel, and returns the tensors as they were sent."""
        packed_arguments = tuple(map(pack_tensor, arguments))
        self.subject.host.place_arguments(slot, packed_arguments, at_new_address)
        return packed_arguments

    def call_kernel(self, arguments: Matrices, slot: int = 0, at_new_address: bool = True) -> dict[str, Tensor]:
        """Calls the kernel and returns copies of its results. Records a finding if the kernel changed its arguments."""
        sent_arguments = self.send_arguments(arguments, slot, at_new_address)
        results, argument_digests = self.subject.host.call_kernel(slot)
        self.record_changed_arguments(self.current, sent_arguments, argument_digests)
        return unpack_results(results)

    def record_changed_arguments(
        self, audit_input: AuditInput | None, sent_arguments: Sequence[PackedTensor], digests: Sequence[int]
    ) -> None:
        """Records a finding that names the first argument whose checksum differs after the call."""
        for index, (packed_argument, digest) in enumerate(zip(sent_arguments, digests, strict=True)):
            if compute_digest(packed_argument) != digest and self.argument_change is None:
                reason = f"the call changed the memory of argument {index + 1}"
                self.argument_change = self.add_input_to_finding(audit_input, make_failure("input-changed", reason))

    def judge_results(
        self, matrices: Matrices, results: dict[str, Tensor], search_mistakes: bool = True, rng: Random | None = None
    ) -> dict[str, AuditFinding]:
        expected_results = self.subject.expected_results(matrices, rng)
        verdicts = {}
        for name, result in results.items():
            self.tried += 1
            verdicts[name] = expected_results[name].judge(
                result, search_mistakes and self._searches[name] < _MAX_SEARCHED_REMARKS
            )
            if search_mistakes and verdicts[name].has_failed:
                verdicts[name] = expected_results[name].judge(result)
            self._searches[name] += search_mistakes and verdicts[name].is_remark
        return verdicts

    def find_failure(
        self, matrices: Matrices, results: dict[str, Tensor], rng: Random | None = None, search_mistakes: bool = False
    ) -> AuditFinding | None:
        """Judges the results of one call. With `rng`, only a random sample of their rows and columns is judged.
        Returns the first failure, or None."""
        verdicts = self.judge_results(matrices, results, search_mistakes, rng).items()
        prefix = "a sample of the " * (rng is not None)
        return next((replace(bad, why=f"{prefix}{name}: {bad.why}") for name, bad in verdicts if bad.has_failed), None)

    def judge_kernel_on_input(self, audit_input: AuditInput) -> dict[str, AuditFinding]:
        """Calls the kernel on an input. Returns failures and remarks, each with the name of the result. A mistake is
        only named if a second, independent input shows it too."""
        matrices = self.draw_matrices(audit_input)
        results = self.compute_results(matrices)
        verdicts = {name: verdict for name, verdict in self.judge_results(matrices, results).items() if verdict.code}
        if all(verdict.is_remark or verdict.code in CERTAIN_FINDING_CODES for verdict in verdicts.values()):
            return verdicts
        second_seed = self.seed + SECOND_SEED_OFFSET
        second_seed_matrices = self.subject.draw_operands(audit_input.data, audit_input.shape, second_seed)
        confirming_verdicts = self.judge_results(second_seed_matrices, self.compute_results(second_seed_matrices))
        expected_results = self.subject.expected_results(matrices)
        for name, verdict in verdicts.items():
            if verdict.is_remark or verdict.code in (confirming_verdicts[name].code, *CERTAIN_FINDING_CODES):
                continue
            # The second input does not confirm the mistake, so do not name it. If a figure (error or gain) deviated,
            # this may have been chance.
            verdicts[name] = unnamed_finding = expected_results[name].judge(results[name], search_mistakes=False)
            if unnamed_finding.code in FIGURE_FINDING_CODES and not confirming_verdicts[name].has_failed:
                verdicts[name] = replace(
                    unnamed_finding,
                    outcome=AuditOutcome.PASS,
                    code="other-rounding",
                    why=f"on one input of two {unnamed_finding.why}",
                )
        return verdicts

    def make_finding(self, audit_input: AuditInput, name: str, verdict: AuditFinding) -> AuditFinding:
        """Returns the finding for a verdict on the named result. For a failure, it names the precision that the results
        seem to have."""
        result_name_prefix = "" if name == "product" else f"{name}: "
        if verdict.is_remark or verdict.code in _UNUSABLE_RESULT_CODES:
            return self.add_input_to_finding(audit_input, replace(verdict, why=result_name_prefix + verdict.why))
        if name not in self._readings:
            promised_precision = self.subject.signature.precision
            informative_data_kinds = [data for data in INFORMATIVE_DATA if data in self.subject.data_kinds]
            self._readings[name] = describe_found_precision(
                promised_precision, informative_data_kinds, partial(self._matches_precision, name)
            )
        return self.add_input_to_finding(
            audit_input, replace(verdict, why=f"{result_name_prefix}{verdict.why}. {self._readings[name]}")
        )

    def _matches_precision(self, name: str, precision: str, data: str) -> bool:
        """Calls the kernel on inputs of one kind of data. Returns whether its result `name` has the values that
        `precision` would give."""
        matrices = self.draw_matrices(self.first_input._replace(data=data))
        subject = type(self.subject)(self.subject.host, self.subject.signature, self.subject.facts)
        subject.signature = replace(subject.signature, precision=precision)
        verdict = subject.expected_results(matrices)[name].judge(
            self.compute_results(matrices)[name], search_mistakes=False
        )
        return not verdict.has_failed and verdict.why in ("", ROUNDING_REASON)


class AuditCheck(NamedTuple):
    """One check of an audit. `run` yields failures and remarks. If it raises an exception, the findings that it yielded
    before still count. If the check that `judges_numbers` finds wrong results, all checks with `needs_correct_numbers`
    are skipped."""

    name: str
    run: Callable[[AuditSession], Iterable[AuditFinding]]
    kinds: frozenset[AuditedCallableKind] = frozenset(AuditedCallableKind)
    needs_correct_numbers: bool = False
    judges_numbers: bool = False


def run_checks(
    target: str,
    host: KernelHost,
    signature: CallablePromise,
    facts: DeviceFacts,
    seed: int,
    checks: Sequence[AuditCheck],
    ceilings: Ceilings | None = None,
) -> AuditReport:
    """Runs every check in turn and returns the audit. A failed check does not stop later checks, because they may
    explain the failure."""
    start_seconds = time.perf_counter()
    auditor = AuditSession(SUBJECT_BY_KIND[signature.kind](host, signature, facts), seed, ceilings)
    findings = []
    is_kernel_lost = has_reported_change = False
    for check in checks:
        if (
            is_kernel_lost
            or signature.kind not in check.kinds
            or (check.needs_correct_numbers and not auditor.has_right_numbers)
        ):
            continue
        findings_of_check = list[AuditFinding]()
        auditor.current = None
        try:
            for finding in check.run(auditor):
                findings_of_check.append(auditor.add_input_to_finding(auditor.current, finding))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything, at any time
            findings_of_check.append(auditor.add_input_to_finding(auditor.current, describe_stop(error)))
            is_kernel_lost = isinstance(error, (WorkerHung, WorkerLost))
        if auditor.argument_change is not None and not has_reported_change:
            findings_of_check.append(auditor.argument_change)
            has_reported_change = True
        # A check without findings has passed; add a finding that says so.
        findings += [replace(finding, check=check.name) for finding in findings_of_check] or [AuditFinding(check.name)]
        if check.judges_numbers:
            if any(finding.code in _UNUSABLE_RESULT_CODES for finding in findings_of_check):
                break
            auditor.has_right_numbers = all(finding.outcome is AuditOutcome.PASS for finding in findings_of_check)
    run_names = {finding.check for finding in findings}
    checks_not_run = tuple(
        check.name for check in checks if signature.kind in check.kinds and check.name not in run_names
    )
    return AuditReport(
        target, signature, tuple(findings), auditor.tried, time.perf_counter() - start_seconds, (), checks_not_run
    )
