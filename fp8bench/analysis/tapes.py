"""The parts of a step: metrics of its tape, operators of several tapes side by side, shares of its time."""

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

# Element widths of paths whose names do not end in a number of bits.
_FLOATS = re.compile(r"e(\d)m(\d)")
_INTEGERS = re.compile(r"(\d+)$")


def bits_of(path: str) -> int:
    """Returns the bits per element that a product multiplies: 8 for 'e4m3', 4 for 'e2m1x2', 32 for 'tf32', which reads
    float32; 0 if it is not a path of products."""
    if path == "tf32":
        return 32
    if float_name := _FLOATS.match(path):
        return 1 + int(float_name[1]) + int(float_name[2])
    digits = _INTEGERS.search(path)
    return int(digits[1]) if digits else 0


def share_of(tape: Tape, bits: int) -> float | None:
    """Returns the share of a step's FLOPs that multiply elements of this many bits."""
    flops = sum(count for path, count in tape.by_path.items() if bits_of(path) == bits)
    return flops / tape.flops if tape.flops else None


def intensity_of(tape: Tape) -> float | None:
    """Returns FLOPs per byte; None if nothing moves, or an operator has no formula."""
    return tape.flops / tape.bytes if tape.bytes and tape.complete else None


# Padding adds less than this to a side of a matrix.
_MOST_PADDING = 128
_Pair = tuple[OperatorCount, OperatorCount]
_SIDES = re.compile(r"\[([\d,]+)\]")


@dataclass(frozen=True)
class ProductWork:
    """The FLOPs of a step's products: the useful ones, and the extra ones of this precision."""

    useful: int
    rotations: int = 0
    padding: int = 0
    recomputed: int = 0

    @property
    def overhead(self) -> dict[MetricSpec, int]:
        """The extra FLOPs by metric, without zeros."""
        flops_by_spec = {
            specs.ROTATION_FLOPS: self.rotations,
            specs.PADDING_FLOPS: self.padding,
            specs.RECOMPUTED_FLOPS: self.recomputed,
        }
        return {spec: flops for spec, flops in flops_by_spec.items() if flops}


def product_work(tape: Tape, reference: Tape | None = None) -> ProductWork:
    """Returns the work of a tape. The reference is the same step without padding and recomputation."""
    casts = tape.of(Phase.CAST)
    rotations = casts.flops if casts is not None else 0
    flops = tape.flops - rotations
    excess = flops - product_work(reference).useful if reference is not None else 0
    if reference is None or excess <= 0:
        return ProductWork(flops, rotations)
    recomputed = min(excess, max(0, _recomputed_flops(tape) - _recomputed_flops(reference)))
    padding = min(excess - recomputed, _padding_flops(tape, reference))
    return ProductWork(flops - recomputed - padding, rotations, padding, recomputed)


def _list_products(tape: Tape) -> list[OperatorCount]:
    return [operator for operator in tape.operators if operator.flops and operator.phase != Phase.CAST]


def _recomputed_flops(tape: Tape) -> int:
    """Returns the FLOPs of products in a backward pass that repeat products of the forward pass."""
    products = _list_products(tape)
    forward = {(product.operator, product.inputs) for product in products if not product.backward}
    backward = [product for product in products if product.backward]
    repeated = [product for product in backward if (product.operator, product.inputs) in forward]
    return sum(product.calls * (product.flops or 0) for product in repeated)


def _padding_flops(tape: Tape, reference: Tape) -> int:
    """Returns the FLOPs added by padding: products with sides slightly longer than their counterparts in the reference.

    Counterparts are matched in order. If their sides do not fit (padded parts of experts are equally large, unpadded
    ones are not), each product takes the largest unmatched one that it can contain, the largest product first.
    """
    products, references = _list_calls(tape), _list_calls(reference)
    if len(products) != len(references):
        return 0
    pairs = list(zip(products, references, strict=True))
    if not all(_sides(padded) == _sides(plain) or _is_padded(padded, plain) for padded, plain in pairs):
        pairs = list(_pair_by_size(products, references))
    return sum((padded.flops or 0) - (plain.flops or 0) for padded, plain in pairs if _is_padded(padded, plain))


def _list_calls(tape: Tape) -> list[OperatorCount]:
    calls: list[OperatorCount] = []
    for product in _list_products(tape):
        calls += [product] * product.calls
    return calls


def _pair_by_size(products: Sequence[OperatorCount], references: Sequence[OperatorCount]) -> Iterator[_Pair]:
    unpaired = sorted(references, key=lambda product: -(product.flops or 0))
    for product in sorted(products, key=lambda product: -(product.flops or 0)):
        place = next((place for place, plain in enumerate(unpaired) if _is_padded(product, plain)), None)
        if place is not None:
            yield product, unpaired.pop(place)


def _sides(operator: OperatorCount) -> Sequence[int]:
    return _parse_sides(operator.inputs)


@lru_cache(maxsize=4096)
def _parse_sides(inputs: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the sides of the first two tensors, which are matrices or stacks of them."""
    matches = [_SIDES.search(words) for words in inputs]
    shapes = [match[1] for match in matches if match]
    return tuple(map(int, ",".join(shapes[:2]).split(","))) if shapes else ()


def _is_padded(product: OperatorCount, plain: OperatorCount) -> bool:
    """Whether the sides of a product equal those of the plain one, or are longer by at most the padding."""
    sides, plain_sides = _sides(product), _sides(plain)
    pairs = zip(sides, plain_sides, strict=False)
    return len(sides) == len(plain_sides) and all(0 <= side - plain < _MOST_PADDING for side, plain in pairs)


def counts_of(tape: Tape) -> tuple[int, int, int]:
    """Returns the exact counts of a tape in the order of COUNTS."""
    return tape.flops, tape.bytes, tape.launches


def tape_metrics(sources: MetricSources) -> Iterator[Metric]:
    """Yields the counts of the step and of its phases, its FLOPs by use and by width, and its intensity."""
    tape = sources.record.tape
    if tape is None:
        return
    counts: list[tuple[str, Tape | PhaseCount]] = [(STEP, tape)]
    counts += [(count.phase, count) for count in tape.phases]
    for phase, count in counts:
        values = (count.flops, count.bytes, count.launches, count.unknown)
        for spec, value in zip((*specs.COUNTS, specs.UNKNOWN_OPERATORS), map(float, values), strict=True):
            samples = partial(tuple, (value,))
            yield Metric(spec, value, phase=phase, why=tape.fused, samples=samples)
    if tape.flops:
        work = product_work(tape, sources.base.tape if sources.base is not None else None)
        for spec, flops in ({specs.USEFUL_FLOPS: work.useful} | work.overhead).items():
            yield Metric(spec, float(flops))
    figures = {specs.INTENSITY: intensity_of(tape)}
    figures |= {spec: share_of(tape, bits) for bits, spec in specs.SHARES_BY_BITS.items()}
    for spec, figure in figures.items():
        if figure is not None:
            yield Metric(spec, figure)


def coverage_metrics(sources: MetricSources) -> Iterator[Metric]:
    if sources.record.coverage is not None:
        yield Metric(specs.SHARE_CONVERTED, sources.record.coverage.share)


@dataclass(frozen=True)
class Taped:
    """The tape of a case in one mode, or `why` it has none. `declared` are the FLOPs that its suite declares."""

    setting: str
    mode: str
    tape: Tape | None = None
    why: str = ""
    declared: float = 0.0


@dataclass(frozen=True)
class Sums:
    """Sums over the calls of one operator in one phase and direction, regardless of shape. `flops` is None if the
    operator has no formula."""

    calls: int = 0
    flops: int | None = 0
    bytes: int = 0

    def __add__(self, operator: OperatorCount) -> Sums:
        flops = None if self.flops is None or operator.flops is None else self.flops + operator.calls * operator.flops
        return Sums(self.calls + operator.calls, flops, self.bytes + operator.calls * operator.bytes)


@dataclass(frozen=True)
class TapeRow:
    """One operator with its sums in each of several tapes."""

    phase: str
    operator: str
    backward: bool
    sums: tuple[Sums, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.sums)) > 1


# Operators beyond this number are counted, not named.
_MOST_NAMED = 4


def describe_changes(old: Tape, new: Tape) -> str:
    """Returns 'mm in gemm: 18 calls, then 20; mul in gemm: 1 MiB, then 2 MiB', the largest first; '' if none."""
    changes = [row for row in side_by_side([old, new]) if row.differs]
    changes.sort(key=lambda row: -max(sums.bytes for sums in row.sums))
    words = [_describe_change(row) for row in changes[:_MOST_NAMED]]
    if len(changes) > _MOST_NAMED:
        words.append(f"and {len(changes) - _MOST_NAMED} more operators")
    return "; ".join(words)


def _describe_change(row: TapeRow) -> str:
    old, new = row.sums
    name = f"{row.operator} in {row.phase}{', backward' if row.backward else ''}"
    if old.calls != new.calls:
        return f"{name}: {old.calls} call{'s' * (old.calls != 1)}, then {new.calls}"
    return f"{name}: {units.size(old.bytes)}, then {units.size(new.bytes)}"


def side_by_side(tapes: Sequence[Tape]) -> list[TapeRow]:
    """Returns operators by phase, those with the most FLOPs or bytes first."""
    sums_by_key: dict[tuple[str, str, bool], list[Sums]] = {}
    for place, tape in enumerate(tapes):
        for operator in tape.operators:
            key = (operator.phase, operator.operator, operator.backward)
            sums = sums_by_key.setdefault(key, [Sums()] * len(tapes))
            sums[place] = sums[place] + operator
    rows = [TapeRow(*key, tuple(sums)) for key, sums in sums_by_key.items()]
    return sorted(rows, key=_rank_row)


def _rank_row(row: TapeRow) -> tuple[int, int, int]:
    flops = max(sums.flops or 0 for sums in row.sums)
    return CELL_PHASES.index(row.phase), -flops, -max(sums.bytes for sums in row.sums)


_EMULATED = "emulated: these are parts of what the emulation costs, not the precision's speed"


@dataclass(frozen=True)
class SharePart:
    """A part of a step, or its unattributed rest: its share of the step, and its seconds (None if not timed)."""

    kind: str
    module: str
    direction: str
    what: str
    calls: int
    share: float
    seconds: float | None


@dataclass(frozen=True)
class StepShares:
    """The parts of a case's step, or the reason without them. `seconds` is its best case; for an emulated case, the
    cost of emulation."""

    case: Case
    shares: Shares | None
    why: str = ""
    seconds: float | None = None
    emulated: bool = False

    @property
    def rows(self) -> Iterator[SharePart]:
        """Returns the parts, the longest first, and the unattributed rest at the end."""
        shares = self.shares
        if shares is None:
            return
        for part in shares.parts:
            direction = "forward" if part.module else ""
            if part.backward:
                direction = "backward"
            share = part.seconds / shares.whole
            seconds = self._seconds_of(share)
            yield SharePart(part.kind.value, part.module, direction, part.what, part.calls, share, seconds)
        yield SharePart(
            UNATTRIBUTED, "", "", "", 0, shares.unattributed_share, self._seconds_of(shares.unattributed_share)
        )

    @property
    def by_kind(self) -> dict[str, float]:
        """Shares of the step by kind of work, with the rest; convolutions are separate from other products."""
        if self.shares is None:
            return {}
        shares = self.shares.sum_by(_kind_in_words)
        return {**dict(sorted(shares.items(), key=lambda part: -part[1])), UNATTRIBUTED: self.shares.unattributed_share}

    @property
    def by_module(self) -> dict[str, float]:
        """Shares of the step by module, the largest first, without work outside all modules."""
        return {} if self.shares is None else {name: share for name, share in self.shares.by_module.items() if name}

    @property
    def remarks(self) -> Iterator[str]:
        if self.shares is None:
            return
        if self.emulated:
            yield _EMULATED
        unknown = {part.what: part.calls for part in self.shares.parts if part.kind == "unknown"}
        for name, calls in unknown.items():
            yield f"unknown: {name}, {calls} calls a step, of which no rule says what it does"

    def _seconds_of(self, share: float) -> float | None:
        return None if self.seconds is None else share * self.seconds


def _kind_in_words(part: Share) -> str:
    return f"{part.kind.value} ({part.what})" if part.what and part.kind.value != "unknown" else part.kind.value


def parts_of(run: Run, findings: Mapping[str, Finding]) -> list[StepShares]:
    return [parts_of_record(record, findings.get(record.case.id)) for record in run.records]


def parts_of_record(record: Record, finding: Finding | None) -> StepShares:
    reason = "" if record.shares is not None else record.reason or record.detail or "none were looked for"
    seconds = None if finding is None else finding.best_seconds
    return StepShares(record.case, record.shares, reason, seconds, record.support.is_emulated)


def refuse_none(run: Run) -> None:
    """Raises UsageError for a run without shares."""
    if not any(record.shares for record in run.records):
        raise UsageError(f"the run {run.id} has no shares of its steps. Measure it again with --shares.")
