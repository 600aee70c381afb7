"""What a step is made of: metrics of its tape, operators of several tapes side by side, shares of its time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import partial

from fp8bench import units
from fp8bench.analysis.metric import Metric, Told
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
    """Returns the bits of the elements that a product multiplies: 8 for 'e4m3', 4 for 'e2m1x2', 32 for 'tf32', which
    reads float32; 0 for no product."""
    if path == "tf32":
        return 32
    if known := _FLOATS.match(path):
        return 1 + int(known[1]) + int(known[2])
    return int(digits[1]) if (digits := _INTEGERS.search(path)) else 0


def share_of(tape: Tape, bits: int) -> float | None:
    wanted = sum(flops for path, flops in tape.by_path.items() if bits_of(path) == bits)
    return wanted / tape.flops if tape.flops else None


def intensity_of(tape: Tape) -> float | None:
    """Returns FLOPs for each byte; None where nothing moves, or an operator has no formula."""
    return tape.flops / tape.bytes if tape.bytes and tape.complete else None


# Padding adds less than this to a side.
_FILLED = 128
_Pair = tuple[list[int], list[int], OperatorCount, OperatorCount]
_SIDES = re.compile(r"\[([\d,]+)\]")


@dataclass(frozen=True)
class ProductWork:
    """The FLOPs of a step's products: the useful ones, and others in this precision."""

    useful: int
    rotations: int = 0
    padding: int = 0
    recomputed: int = 0

    @property
    def apart(self) -> dict[MetricSpec, int]:
        told = specs.ROTATION_FLOPS, specs.PADDING_FLOPS, specs.RECOMPUTED_FLOPS
        return {spec: flops for spec, flops in zip(told, astuple(self)[1:], strict=True) if flops}


def product_work(tape: Tape, reference: Tape | None = None) -> ProductWork:
    """Returns the work of a tape. The reference's does the same step without padding, and without recomputing."""
    casts = tape.of(Phase.CAST)
    rotations = casts.flops if casts is not None else 0
    left = tape.flops - rotations
    if reference is None or (more := left - product_work(reference).useful) <= 0:
        return ProductWork(left, rotations)
    recomputed = min(more, max(0, _recomputed_flops(tape) - _recomputed_flops(reference)))
    padding = min(more - recomputed, _padding_flops(tape, reference))
    return ProductWork(left - recomputed - padding, rotations, padding, recomputed)


def _products(tape: Tape) -> list[OperatorCount]:
    return [operator for operator in tape.operators if operator.flops and operator.phase != Phase.CAST]


def _recomputed_flops(tape: Tape) -> int:
    """Returns the FLOPs of products in a backward pass that repeat products of the forward pass."""
    products = _products(tape)
    forward = {(product.operator, product.inputs) for product in products if not product.backward}
    again = (product for product in products if product.backward and (product.operator, product.inputs) in forward)
    return sum(count.calls * (count.flops or 0) for count in again)


def _padding_flops(tape: Tape, reference: Tape) -> int:
    """Returns FLOPs of products whose sides are a little longer than those of their counterparts in the reference.

    Counterparts are taken in order. If these do not fit (the parts of experts, once filled up, are alike where the
    tokens' are not), each takes the largest that is left and may be its own, the largest first.
    """
    own, others = ([product for product in _products(some) for _ in range(product.calls)] for some in (tape, reference))
    if len(own) != len(others):
        return 0
    pairs = list(zip(map(_sides, own), map(_sides, others), own, others, strict=True))
    if not all(mine == theirs or _is_longer(mine, theirs) for mine, theirs, _, _ in pairs):
        pairs = list(_paired(own, others))
    return sum(
        (count.flops or 0) - (other.flops or 0) for mine, theirs, count, other in pairs if _is_longer(mine, theirs)
    )


def _paired(own: Sequence[OperatorCount], others: Sequence[OperatorCount]) -> Iterator[_Pair]:
    left = sorted(((_sides(product), product) for product in others), key=lambda each: -(each[1].flops or 0))
    for product in sorted(own, key=lambda product: -(product.flops or 0)):
        mine = _sides(product)
        place = next((place for place, (theirs, _) in enumerate(left) if _is_longer(mine, theirs)), None)
        if place is not None:
            theirs, other = left.pop(place)
            yield mine, theirs, product, other


def _sides(operator: OperatorCount) -> list[int]:
    """Returns the sides of the first two tensors: matrices, or stacks of them."""
    shapes = [sides[1] for words in operator.inputs if (sides := _SIDES.search(words))]
    return [int(side) for shape in shapes[:2] for side in shape.split(",")]


def _is_longer(own: Sequence[int], other: Sequence[int]) -> bool:
    pairs = list(zip(own, other, strict=False))
    return len(own) == len(other) and all(0 <= mine - theirs < _FILLED for mine, theirs in pairs)


def counts_of(tape: Tape) -> tuple[int, int, int]:
    """Returns its exact counts in the order of COUNTS."""
    return tape.flops, tape.bytes, tape.launches


def tape_metrics(told: Told) -> Iterator[Metric]:
    tape = told.record.tape
    if tape is None:
        return
    whole: tuple[str, Tape | PhaseCount] = STEP, tape
    for phase, count in (whole, *((phase_count.phase, phase_count) for phase_count in tape.phases)):
        counted = (count.flops, count.bytes, count.launches, count.unknown)
        for spec, value in zip((*specs.COUNTS, specs.UNKNOWN_OPERATORS), map(float, counted), strict=True):
            samples = partial(tuple, (value,))
            yield Metric(spec, value, phase=phase, why=tape.fused, samples=samples)
    base = told.base.tape if told.base is not None else None
    work = product_work(tape, base)
    for spec, flops in ({specs.USEFUL_FLOPS: work.useful} | work.apart).items() if tape.flops else ():
        yield Metric(spec, float(flops))
    shares = ((spec, share_of(tape, bits)) for bits, spec in specs.SHARES_BY_BITS.items())
    for spec, known in ((specs.INTENSITY, intensity_of(tape)), *shares):
        if known is not None:
            yield Metric(spec, known)


def coverage_metrics(told: Told) -> Iterator[Metric]:
    if told.record.coverage is not None:
        yield Metric(specs.SHARE_CONVERTED, told.record.coverage.share)


@dataclass(frozen=True)
class Taped:
    """The tape of a case in one mode; `why` there is none. `declared` are the FLOPs that its suite declares."""

    setting: str
    mode: str
    tape: Tape | None = None
    why: str = ""
    declared: float = 0.0


@dataclass(frozen=True)
class Sums:
    """Sums over the calls of one operator in one phase and direction, whatever the shapes. `flops` is None where no
    call has a formula."""

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


# So many operators are named, the others counted.
_MOST_NAMED = 4


def what_changed(before: Tape, after: Tape) -> str:
    """Returns 'mm in gemm: 18 calls, then 20; mul in gemm: 3 more', the largest first; '' if nothing changed."""
    changed = [row for row in side_by_side([before, after]) if row.differs]
    changed.sort(key=lambda row: -max(sums.bytes for sums in row.sums))
    words = [_changed(row) for row in changed[:_MOST_NAMED]]
    more = len(changed) - _MOST_NAMED
    return "; ".join([*words, *([f"and {more} more operators"] if more > 0 else [])])


def _changed(row: TapeRow) -> str:
    old, new = row.sums
    name = f"{row.operator} in {row.phase}{', backward' if row.backward else ''}"
    if old.calls != new.calls:
        return f"{name}: {old.calls} call{'s' * (old.calls != 1)}, then {new.calls}"
    return f"{name}: {units.size(old.bytes)}, then {units.size(new.bytes)}"


def side_by_side(tapes: Sequence[Tape]) -> list[TapeRow]:
    """Returns operators by phase, those that multiply or move most first."""
    sums_by_key: dict[tuple[str, str, bool], list[Sums]] = {}
    for place, tape in enumerate(tapes):
        for operator in tape.operators:
            sums = sums_by_key.setdefault((operator.phase, operator.operator, operator.backward), [Sums()] * len(tapes))
            sums[place] = sums[place] + operator
    rows = [TapeRow(*key, tuple(sums)) for key, sums in sums_by_key.items()]
    phases = list(CELL_PHASES)
    most = {row: (max(sums.flops or 0 for sums in row.sums), max(sums.bytes for sums in row.sums)) for row in rows}
    return sorted(rows, key=lambda row: (phases.index(row.phase), -most[row][0], -most[row][1]))


_EMULATED = "emulated: these are parts of what the emulation costs, and say nothing of the precision's speed"


@dataclass(frozen=True)
class SharePart:
    """A part of a step, or the rest of it: its `share`, and the seconds of the timed step that this is; None if it
    was not timed."""

    kind: str
    module: str
    direction: str
    what: str
    calls: int
    share: float
    seconds: float | None


@dataclass(frozen=True)
class StepShares:
    """The parts of a case's step, or why there are none. `seconds` are its best case; for an emulated case these and
    the parts are what the emulation costs."""

    case: Case
    shares: Shares | None
    why: str = ""
    seconds: float | None = None
    emulated: bool = False

    @property
    def rows(self) -> Iterator[SharePart]:
        """The longest first, and the rest of the step at the end."""
        shares = self.shares
        if shares is None:
            return
        for part in shares.parts:
            direction = "backward" if part.backward else "forward" if part.module else ""
            yield SharePart(
                part.kind.value, part.module, direction, part.what, part.calls, *self._of(part.seconds / shares.whole)
            )
        yield SharePart(UNATTRIBUTED, "", "", "", 0, *self._of(shares.unattributed))

    @property
    def by_kind(self) -> dict[str, float]:
        """Shares of the step by kind of work, and the rest; convolutions are apart from other products."""
        if self.shares is None:
            return {}
        shares = self.shares.summed(_kind_in_words)
        return {**dict(sorted(shares.items(), key=lambda part: -part[1])), UNATTRIBUTED: self.shares.unattributed}

    @property
    def by_module(self) -> dict[str, float]:
        """Shares of the step by module, the largest first, without work outside of all modules."""
        return {} if self.shares is None else {name: share for name, share in self.shares.by_module.items() if name}

    @property
    def remarks(self) -> Iterator[str]:
        if self.shares is None:
            return
        if self.emulated:
            yield _EMULATED
        unknown = {part.what: part.calls for part in self.shares.parts if part.kind == "unknown"}
        yield from (
            f"unknown: {name}, {calls} calls a step, of which no rule says what it does"
            for name, calls in unknown.items()
        )

    def _of(self, share: float) -> tuple[float, float | None]:
        return share, None if self.seconds is None else share * self.seconds


def _kind_in_words(part: Share) -> str:
    return f"{part.kind.value} ({part.what})" if part.what and part.kind.value != "unknown" else part.kind.value


def parts_of(run: Run, findings: Mapping[str, Finding]) -> list[StepShares]:
    return [parts_of_record(record, findings.get(record.case.id)) for record in run.records]


def parts_of_record(record: Record, finding: Finding | None) -> StepShares:
    why = "" if record.shares is not None else record.reason or record.detail or "none were looked for"
    seconds = None if finding is None else finding.best_seconds
    return StepShares(record.case, record.shares, why, seconds, record.support.is_emulated)


def refuse_none(run: Run) -> None:
    """Raises UsageError for a run without shares."""
    if not any(record.shares for record in run.records):
        raise UsageError(
            f"the run {run.id} does not know what parts of its steps take. Measure it again, with --shares."
        )
