"""Figures from a step's recorded operators: metrics, comparisons of several recordings, and the shares of the step's
time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from fp8bench import units
from fp8bench.analysis.metric import Metric, MetricSources
from fp8bench.errors import UsageError
from fp8bench.model import (
    CELL_PHASES,
    UNATTRIBUTED,
    Case,
    Finding,
    OperatorCount,
    Phase,
    PhaseCount,
    Record,
    Run,
    Share,
    Shares,
    Tape,
    specs,
)
from fp8bench.model.specs import STEP, MetricSpec

# Patterns that find the width of an element in the name of a dtype.
_FLOAT_NAME_PATTERN = re.compile(r"e(\d)m(\d)")
_TRAILING_DIGITS_PATTERN = re.compile(r"(\d+)$")


def get_operand_bits(path: str) -> int:
    """Returns the number of bits per operand of products in this dtype: 8 for 'e4m3', 4 for 'e2m1x2', and 32 for
    'tf32', which reads float32. Returns 0 if `path` is not a dtype.
    """
    if path == "tf32":
        return 32
    if float_name := _FLOAT_NAME_PATTERN.match(path):
        # One bit is the sign.
        return 1 + int(float_name[1]) + int(float_name[2])
    digits_match = _TRAILING_DIGITS_PATTERN.search(path)
    return int(digits_match[1]) if digits_match else 0


def compute_flops_share(tape: Tape, bits: int) -> float | None:
    """Returns the share of a step's FLOPs in products whose operands have this many bits."""
    flops = sum(count for path, count in tape.by_path.items() if get_operand_bits(path) == bits)
    return flops / tape.flops if tape.flops else None


def compute_intensity(tape: Tape) -> float | None:
    """Returns the FLOPs per byte of a step, or None if no bytes move or if an operator has no formula."""
    return tape.flops / tape.bytes if tape.bytes and tape.complete else None


# Padding adds fewer elements than this number to a side of a matrix.
_SIDE_PADDING_LIMIT = 128
_OperatorPair = tuple[OperatorCount, OperatorCount]
_SHAPE_PATTERN = re.compile(r"\[([\d,]+)\]")


@dataclass(frozen=True)
class ProductWork:
    """The FLOPs of a step's matrix products: the useful FLOPs, and the additional FLOPs that this precision causes."""

    useful_flops: int
    rotation_flops: int = 0
    padding_flops: int = 0
    recomputed_flops: int = 0

    @property
    def overhead(self) -> dict[MetricSpec, int]:
        """The FLOPs of rotation, padding and recomputation by metric, without those that are 0."""
        flops_by_spec = {
            specs.ROTATION_FLOPS: self.rotation_flops,
            specs.PADDING_FLOPS: self.padding_flops,
            specs.RECOMPUTED_FLOPS: self.recomputed_flops,
        }
        return {spec: flops for spec, flops in flops_by_spec.items() if flops}


def sum_product_work(tape: Tape, reference: Tape | None = None) -> ProductWork:
    """Returns the useful and the additional FLOPs of a recorded step's products. `reference` is the recording of the
    same step without padding and recomputation.
    """
    cast_count = tape.of(Phase.CAST)
    rotation_flops = cast_count.flops if cast_count is not None else 0
    flops = tape.flops - rotation_flops
    flops_beyond_reference = flops - sum_product_work(reference).useful_flops if reference is not None else 0
    if reference is None or flops_beyond_reference <= 0:
        return ProductWork(flops, rotation_flops)
    # Padding and recomputation together cannot exceed the additional FLOPs.
    recomputed_flops = min(
        flops_beyond_reference, max(0, _count_recomputed_flops(tape) - _count_recomputed_flops(reference))
    )
    padding_flops = min(flops_beyond_reference - recomputed_flops, _count_padding_flops(tape, reference))
    return ProductWork(flops - recomputed_flops - padding_flops, rotation_flops, padding_flops, recomputed_flops)


def _list_products(tape: Tape) -> list[OperatorCount]:
    return [operator for operator in tape.operators if operator.flops and operator.phase != Phase.CAST]


def _count_recomputed_flops(tape: Tape) -> int:
    """Returns the FLOPs of products that the backward pass repeats from the forward pass."""
    products = _list_products(tape)
    forward_product_keys = {(product.operator, product.inputs) for product in products if not product.backward}
    flops = 0
    for product in products:
        if product.backward and (product.operator, product.inputs) in forward_product_keys:
            flops += product.calls * (product.flops or 0)
    return flops


def _count_padding_flops(tape: Tape, reference: Tape) -> int:
    """Returns the FLOPs that padding adds. A padded product has slightly longer sides than its counterpart in the
    reference.

    Products are paired with counterparts in order. If the sides of some pair do not fit, as with experts that are
    padded to equal size, products are paired by size: the largest first, each with the largest unpaired counterpart
    that it can contain.
    """
    products, references = _list_product_calls(tape), _list_product_calls(reference)
    if len(products) != len(references):
        return 0
    case_and_reference_products = list(zip(products, references, strict=True))
    if not all(
        _matrix_sides_of(padded_product) == _matrix_sides_of(reference_product)
        or _is_padded_product(padded_product, reference_product)
        for padded_product, reference_product in case_and_reference_products
    ):
        case_and_reference_products = list(_pair_products_by_size(products, references))
    return sum(
        (padded_product.flops or 0) - (reference_product.flops or 0)
        for padded_product, reference_product in case_and_reference_products
        if _is_padded_product(padded_product, reference_product)
    )


def _list_product_calls(tape: Tape) -> list[OperatorCount]:
    calls: list[OperatorCount] = []
    for product in _list_products(tape):
        calls += [product] * product.calls
    return calls


def _pair_products_by_size(
    products: Sequence[OperatorCount], references: Sequence[OperatorCount]
) -> Iterator[_OperatorPair]:
    unpaired_reference_products = sorted(references, key=lambda product: -(product.flops or 0))
    for product in sorted(products, key=lambda product: -(product.flops or 0)):
        index = next(
            (
                index
                for index, reference in enumerate(unpaired_reference_products)
                if _is_padded_product(product, reference)
            ),
            None,
        )
        if index is not None:
            yield product, unpaired_reference_products.pop(index)


def _matrix_sides_of(operator: OperatorCount) -> Sequence[int]:
    return _parse_matrix_sides(operator.inputs)


@lru_cache(maxsize=4096)
def _parse_matrix_sides(inputs: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the numbers of rows and columns of an operator's first two tensors, parsed from texts like
    'fp32[512,256]'. The tensors are matrices or stacks of matrices.
    """
    shape_matches = [_SHAPE_PATTERN.search(text) for text in inputs]
    shapes = [match[1] for match in shape_matches if match]
    return tuple(map(int, ",".join(shapes[:2]).split(","))) if shapes else ()


def _is_padded_product(product: OperatorCount, reference: OperatorCount) -> bool:
    """Returns whether a product may be the padded form of the reference's product. Each side is then at least as long
    as in the reference, and longer by less than _SIDE_PADDING_LIMIT.
    """
    product_sides, reference_sides = _matrix_sides_of(product), _matrix_sides_of(reference)
    matrix_side_pairs = zip(product_sides, reference_sides, strict=False)
    return len(product_sides) == len(reference_sides) and all(
        0 <= side - reference_side < _SIDE_PADDING_LIMIT for side, reference_side in matrix_side_pairs
    )


def get_tape_counts(tape: Tape) -> tuple[int, int, int]:
    """Returns the FLOPs, bytes and launches of a recorded step, in the order of COUNTS."""
    return tape.flops, tape.bytes, tape.launches


def tape_metrics(sources: MetricSources) -> Iterator[Metric]:
    """Yields the counts of the step and its phases, useful and additional FLOPs, the share of FLOPs by operand width,
    and the arithmetic intensity.
    """
    tape = sources.record.tape
    if tape is None:
        return
    counts: list[tuple[str, Tape | PhaseCount]] = [(STEP, tape)]
    counts += [(count.phase, count) for count in tape.phases]
    for phase, count in counts:
        values = (count.flops, count.bytes, count.launches, count.unknown)
        for spec, value in zip((*specs.COUNTS, specs.UNKNOWN_OPERATORS), map(float, values), strict=True):
            # Only these counts have samples, which a history stores.
            samples = partial(tuple, (value,))
            yield Metric(spec, value, phase=phase, why=tape.fused, samples=samples)
    if tape.flops:
        product_work_amounts = sum_product_work(tape, sources.base.tape if sources.base is not None else None)
        for spec, flops in (
            {specs.USEFUL_FLOPS: product_work_amounts.useful_flops} | product_work_amounts.overhead
        ).items():
            yield Metric(spec, float(flops))
    figures = {specs.INTENSITY: compute_intensity(tape)}
    figures |= {spec: compute_flops_share(tape, bits) for bits, spec in specs.FLOP_SHARE_BY_ELEMENT_BITS.items()}
    for spec, figure in figures.items():
        if figure is not None:
            yield Metric(spec, figure)


def yield_coverage_metrics(sources: MetricSources) -> Iterator[Metric]:
    if sources.record.coverage is not None:
        yield Metric(specs.SHARE_OF_FLOPS_CONVERTED, sources.record.coverage.share)


@dataclass(frozen=True)
class CaseTape:
    """The recorded step of one case. If it was not recorded, `why` is the reason. `declared` is the number of FLOPs
    that the suite declares.
    """

    setting: str
    mode: str
    tape: Tape | None = None
    why: str = ""
    declared: float = 0.0


@dataclass(frozen=True)
class OperatorSums:
    """Sums over all calls of one operator, of any shape, in one phase and direction. `flops` is None if the operator
    has no formula.
    """

    calls: int = 0
    flops: int | None = 0
    bytes: int = 0

    def __add__(self, operator: OperatorCount) -> OperatorSums:
        flops = None if self.flops is None or operator.flops is None else self.flops + operator.calls * operator.flops
        return OperatorSums(self.calls + operator.calls, flops, self.bytes + operator.calls * operator.bytes)


@dataclass(frozen=True)
class OperatorTapeRow:
    """One operator, and its sums in each of several recordings."""

    phase: str
    operator: str
    backward: bool
    sums: tuple[OperatorSums, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.sums)) > 1


# A text names at most this many operators, and counts the rest.
_MAX_NAMED_OPERATORS = 4


def describe_tape_changes(old: Tape, new: Tape) -> str:
    """Returns a text with the changes between two recordings, the largest first, or '' if the recordings are equal.

    An example is 'mm in gemm: 18 calls, then 20; mul in gemm: 1 MiB, then 2 MiB'.
    """
    changes = [row for row in tabulate_operators([old, new]) if row.differs]
    changes.sort(key=lambda row: -max(sums.bytes for sums in row.sums))
    words = [_describe_operator_change(row) for row in changes[:_MAX_NAMED_OPERATORS]]
    if len(changes) > _MAX_NAMED_OPERATORS:
        words.append(f"and {len(changes) - _MAX_NAMED_OPERATORS} more operators")
    return "; ".join(words)


def _describe_operator_change(row: OperatorTapeRow) -> str:
    old_sums, new_sums = row.sums
    name = f"{row.operator} in {row.phase}{', backward' if row.backward else ''}"
    if old_sums.calls != new_sums.calls:
        return f"{name}: {old_sums.calls} call{'s' * (old_sums.calls != 1)}, then {new_sums.calls}"
    return f"{name}: {units.size(old_sums.bytes)}, then {units.size(new_sums.bytes)}"


def tabulate_operators(tapes: Sequence[Tape]) -> list[OperatorTapeRow]:
    """Returns the operators of several recordings by phase. In each phase, operators with the most FLOPs or bytes
    come first.
    """
    operator_sums_by_key: dict[tuple[str, str, bool], list[OperatorSums]] = {}
    for index, tape in enumerate(tapes):
        for operator in tape.operators:
            key = (operator.phase, operator.operator, operator.backward)
            sums = operator_sums_by_key.setdefault(key, [OperatorSums()] * len(tapes))
            sums[index] = sums[index] + operator
    rows = [OperatorTapeRow(*key, tuple(sums)) for key, sums in operator_sums_by_key.items()]
    return sorted(rows, key=_make_row_sort_key)


def _make_row_sort_key(row: OperatorTapeRow) -> tuple[int, int, int]:
    flops = max(sums.flops or 0 for sums in row.sums)
    return CELL_PHASES.index(row.phase), -flops, -max(sums.bytes for sums in row.sums)


_EMULATED_REMARK = "emulated: these are parts of what the emulation costs, not the precision's speed"


@dataclass(frozen=True)
class TimeSharePart:
    """A part of a step, or its unattributed time: the share of the step's time, and the seconds, which are None if
    the part was not timed.
    """

    kind: str
    module: str
    direction: str
    what: str
    calls: int
    share: float
    seconds: float | None


@dataclass(frozen=True)
class StepShares:
    """The parts of a case's step, or the reason why they were not recorded.

    `seconds` is the step's best case. For an emulated case it is the cost of emulation.
    """

    case: Case
    shares: Shares | None
    why: str = ""
    seconds: float | None = None
    emulated: bool = False

    @property
    def rows(self) -> Iterator[TimeSharePart]:
        """Yields the parts of the step in order of decreasing time, then the unattributed time."""
        shares = self.shares
        if shares is None:
            return
        for part in shares.parts:
            direction = "forward" if part.module else ""
            if part.backward:
                direction = "backward"
            share = part.seconds / shares.whole
            seconds = self._convert_share_to_seconds(share)
            yield TimeSharePart(part.kind.value, part.module, direction, part.what, part.calls, share, seconds)
        yield TimeSharePart(
            UNATTRIBUTED,
            "",
            "",
            "",
            0,
            shares.unattributed_share,
            self._convert_share_to_seconds(shares.unattributed_share),
        )

    @property
    def by_kind(self) -> dict[str, float]:
        """Shares of the step's time by kind of work. Unattributed time comes last. Convolutions are separate from other
        products.
        """
        if self.shares is None:
            return {}
        shares = self.shares.sum_by(_name_kind)
        return {**dict(sorted(shares.items(), key=lambda part: -part[1])), UNATTRIBUTED: self.shares.unattributed_share}

    @property
    def by_module(self) -> dict[str, float]:
        """Shares of the step's time by module in decreasing order, without work outside modules."""
        return {} if self.shares is None else {name: share for name, share in self.shares.by_module.items() if name}

    @property
    def remarks(self) -> Iterator[str]:
        if self.shares is None:
            return
        if self.emulated:
            yield _EMULATED_REMARK
        unknown_call_counts = {part.what: part.calls for part in self.shares.parts if part.kind == "unknown"}
        for name, calls in unknown_call_counts.items():
            yield f"unknown: {name}, {calls} calls a step, whose kind of work is unknown"

    def _convert_share_to_seconds(self, share: float) -> float | None:
        return None if self.seconds is None else share * self.seconds


def _name_kind(part: Share) -> str:
    return f"{part.kind.value} ({part.what})" if part.what and part.kind.value != "unknown" else part.kind.value


def list_step_shares(run: Run, findings: Mapping[str, Finding]) -> list[StepShares]:
    return [make_step_shares(record, findings.get(record.case.id)) for record in run.records]


def make_step_shares(record: Record, finding: Finding | None) -> StepShares:
    reason = "" if record.shares is not None else record.reason or record.detail or "they were not recorded"
    seconds = None if finding is None else finding.best_seconds
    return StepShares(record.case, record.shares, reason, seconds, record.support.is_emulated)


def require_step_shares(run: Run) -> None:
    """Raises UsageError for a run that did not record the shares of its steps."""
    if not any(record.shares for record in run.records):
        raise UsageError(f"the run {run.id} has no shares of its steps. Measure it again with --shares.")
