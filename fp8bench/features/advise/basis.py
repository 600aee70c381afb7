"""The evidence for advice: the cases of a run with their references, and the store's studies and trainings.

Shares of a step and ratios of its parts have intervals over rounds, as verdicts have.

A rule of the checklist asks about one mode in one setting; `yes` always favours the lower precision. No rule uses a
figure from another machine: what was not measured here is reported as missing, with the command that would measure it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.errors import UsageError
from fp8bench.features.advise.values import Ground, Met, Question, RuleAnswer
from fp8bench.features.infer.values import ServingAnswer
from fp8bench.features.sensitivity.study import Study, as_words
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.model import (
    CELL_PHASES,
    UNATTRIBUTED,
    Case,
    Finding,
    Interval,
    Level,
    Phase,
    Record,
    Run,
    ShareKind,
    Timing,
)
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.registry import precisions
from fp8bench.report.case_status import bounds
from fp8bench.report.panels import together

# The phases that a lower precision changes if values between products keep their dtype.
_PRODUCTS = frozenset({Phase.CAST, Phase.GEMM, Phase.ATTENTION})


@dataclass(frozen=True)
class ComparedCase:
    """A case with its reference, which is None if it was not measured."""

    record: Record
    finding: Finding | None
    reference: Record | None
    reference_finding: Finding | None

    @property
    def mode(self) -> str:
        return self.record.case.mode

    @property
    def row(self) -> str:
        return self.record.case.id

    @property
    def emulated(self) -> bool:
        return Level.EMULATED in {
            record.support.level for record in (self.record, self.reference) if record is not None
        }

    @property
    def timed(self) -> bool:
        return not self.emulated and all(
            record is not None and record.is_ok and record.timing is not None and record.timing.slots
            for record in (self.record, self.reference)
        )

    @property
    def trains(self) -> bool:
        # A user's model marks no optimizer, but a step with coverage is a training step.
        return self.record.coverage is not None or any(
            record is not None and record.timing and Phase.OPTIMIZER_STEP in record.timing.segments.phases
            for record in (self.record, self.reference)
        )

    @property
    def speed(self) -> Interval | None:
        """How many times as fast as its reference it is; None if it was not timed, or a label withdraws its verdict."""
        finding = self.finding
        if not self.timed or finding is None or finding.ratio is None or finding.hard:
            return None
        return finding.ratio.inverse

    @cached_property
    def touched(self) -> frozenset[str]:
        """The phases that this precision may change, plus unattributed time, which is unknown. The counts of both tapes
        decide, if they exist; otherwise these are products and casts, or all phases if the reference marks no products.
        """
        assert self.reference is not None
        # Work that both tapes share costs the same.
        tape, base = self.record.tape, self.reference.tape
        if tape is not None and base is not None:
            return frozenset({UNATTRIBUTED, *(name for name in CELL_PHASES if tape.of(name) != base.of(name))})
        marked = set(self.reference.timing.segments.phases) if self.reference.timing is not None else set()
        return _PRODUCTS | {UNATTRIBUTED} if Phase.GEMM in marked else frozenset(CELL_PHASES)

    def share(self, phases: Collection[str]) -> Interval | None:
        if self.reference is None or self.reference.timing is None:
            return None
        timed = part_ratio(self.reference.timing, phases, self.reference.timing, CELL_PHASES)
        # Timed phases take precedence over an untimed profile.
        looked = _profiled_share(self.reference, phases)
        return Interval(looked, looked, looked, 0.0) if timed is None and looked else timed

    def share_touched(self) -> Interval | None:
        """Returns the share of the reference's step that this precision may change. A user's model marks no products:
        if only these change, an untimed profile of the step shows their share."""
        multiplied = self.estimated and _changes_products_alone(self)
        return self.share(_PRODUCTS if multiplied else self.touched)

    @property
    def estimated(self) -> bool:
        """Whether parts of the reference are known only from an untimed profile, because it marks no products."""
        marked = (
            self.reference.timing.segments.phases
            if self.reference is not None and self.reference.timing is not None
            else ()
        )
        return Phase.GEMM not in marked and self.reference is not None and self.reference.shares is not None

    def of_reference(self, phases: Collection[str], theirs: Collection[str]) -> Interval | None:
        """Returns the time of some phases over that of phases of the reference (`theirs`), as reports show both; None
        if it is unknown."""
        if not self.timed or self.record.timing is None or self.reference is None:
            return None
        # A reference that shared its rounds is the fairer base, if there is one.
        base = self.record.paired_with or self.reference.timing
        timed = part_ratio(self.record.timing, phases, base, theirs) if base is not None else None
        if timed is not None:
            return scale_to_report(timed, (self.finding, phases), (self.reference_finding, theirs))
        return self._by_shares(phases, theirs) if self.estimated else None

    def _by_shares(self, phases_here: Collection[str], theirs: Collection[str]) -> Interval | None:
        """Like of_reference, from shares of both median steps; without an interval."""
        seconds = [
            _profiled_share(record, phases) * (finding.median_seconds or 0.0)
            for record, finding, phases in (
                (self.record, self.finding, phases_here),
                (self.reference, self.reference_finding, theirs),
            )
            if record is not None and finding is not None
        ]
        # A ratio needs a share on both sides.
        if len(seconds) < 2 or not all(seconds):
            return None
        ratio = seconds[0] / seconds[1]
        return Interval(ratio, ratio, ratio, 0.0)


_OWN_MODEL = "model"


def _changes_products_alone(pair: ComparedCase) -> bool:
    """Whether the precision changes only products: in a user's model, and if other values stay in the reference's
    dtype."""
    assert pair.reference is not None
    # Converters replace only the layers of products.
    if pair.reference.case.workload == _OWN_MODEL:
        return True
    try:
        return precisions.get(pair.record.case.precision).carried_by == pair.reference.case.precision
    except UsageError:
        return False


def doubts(pair: ComparedCase) -> str:
    """Returns text such as '; labelled noisy; its reference labelled bimodal', with each label that casts doubt on the
    times behind an advice, once."""
    owners: dict[str, str] = {}
    for whose, finding in (("", pair.finding), ("its reference ", pair.reference_finding)):
        for label in finding.labels if finding is not None else ():
            if label.casts_doubt:
                owners.setdefault(label, whose)
    labels = together((whose, str(label)) for label, whose in owners.items())
    return "".join(f"; {whose}labelled {', '.join(several)}" for whose, several in labels.items())


# The phases that an untimed profile can distinguish.
_KINDS = {Phase.GEMM: ShareKind.GEMM, Phase.CAST: ShareKind.CAST, Phase.ATTENTION: ShareKind.ATTENTION}


def _profiled_share(record: Record, phases: Collection[str]) -> float:
    """Returns the share of a step that these phases take in an untimed profile; 0 without one."""
    kinds = record.shares.by_kind if record.shares is not None else {}
    return sum(kinds.get(kind, 0.0) for phase, kind in _KINDS.items() if phase in phases)


def part_ratio(timing: Timing, phases: Collection[str], base: Timing, base_phases: Collection[str]) -> Interval | None:
    """Returns the best time of some phases over that of some phases of `base`; None if either has none that was
    timed."""
    rounds = verdicts.common_rounds([timing, base])
    if not rounds:
        return None
    # Slots of both sides may differ in calls: compare equally many of each.
    calls = min(len(slot.calls_ns) for slot in (*timing.slots, *base.slots))
    samples = []
    for part, names in ((timing, phases), (base, base_phases)):
        is_chosen = [name in names for name in part.segments.phases]
        sample = verdicts.cells(part, calls, rounds)[:, is_chosen]
        if not sample.size or sample.sum(axis=1).min() <= 0:
            return None
        samples.append(sample)
    first, second = map(stats.best_case, samples)
    # With too few rounds for an interval, use their range.
    if len(rounds) < LEAST_ROUNDS:
        return stats.extent(stats.ratio(first, [second]), [sample.sum(axis=1) for sample in samples])
    return stats.ratio(first, [second], verdicts.FINAL_LEVEL)


def scale_to_report(ratio: Interval, *parts: tuple[Finding | None, Collection[str]]) -> Interval:
    """Scales a ratio of parts of two steps to the seconds that all reports show for them."""
    seconds, base = (_reported_seconds(*part) for part in parts)
    if not (seconds > 0 and base > 0 and math.isfinite(seconds / base)):
        return ratio
    # The point becomes the quotient of the displayed numbers, and the ends move with it.
    times = seconds / base / ratio.point
    return map_ends(ratio, lambda value: value * times)


def _reported_seconds(finding: Finding | None, phases: Collection[str]) -> float:
    by_phase = finding.phases if finding is not None else ()
    return sum(seconds for phase, seconds in by_phase if phase in phases)


@dataclass(frozen=True)
class Basis:
    """A run with its findings, and other measurements on the same device. `served` are answers of `infer` by this run.
    `least` is the gain, as a share, from which a precision is worth the effort."""

    run: Run
    findings: Mapping[str, Finding]
    studies: tuple[Study, ...] = ()
    training: JudgedTraining | None = None
    least: float = 0.1
    served: tuple[ServingAnswer, ...] = ()

    @cached_property
    def cases(self) -> tuple[ComparedCase, ...]:
        pairs: list[ComparedCase] = []
        for records in together((record.case.setting, record) for record in self.run.records).values():
            reference = next((record for record in records if record.is_reference), None)
            reference_finding = self.findings.get(reference.case.id) if reference is not None else None
            candidates = (record for record in records if not record.is_reference)
            pairs += [
                ComparedCase(candidate, self.findings.get(candidate.case.id), reference, reference_finding)
                for candidate in candidates
            ]
        return tuple(pairs)


@dataclass(frozen=True)
class Reply:
    """A rule's reply: whether the question is met, the figure that decides it, and the evidence."""

    met: Met
    figure: str
    grounds: tuple[Ground, ...] = ()


# A rule's function: returns a Reply, or why it was not measured here, or None if the question does not apply.
Ask = Callable[[ComparedCase, Basis], Reply | str | None]


@dataclass(frozen=True)
class AdviceRule:
    """One row of the checklist. `measure` is the command that would answer it ({again} stands for the command that
    measured the case). For an emulated precision only learning can be measured."""

    name: str
    topic: Question
    question: str
    ask: Ask
    measure: str

    def answer(self, pair: ComparedCase, basis: Basis) -> RuleAnswer | None:
        reply, case = self.ask(pair, basis), pair.record.case
        if reply is None:
            return None
        answer = RuleAnswer(self.name, self.topic, self.question, case.setting, case.mode, Met.UNKNOWN)
        if isinstance(reply, Reply):
            return replace(answer, met=reply.met, figure=reply.figure, grounds=reply.grounds)
        # No command gives an emulated precision a speed.
        unmeasurable = pair.emulated and self.topic is not Question.LEARNS
        measure = "" if unmeasurable else self.measure.format(**_words(pair))
        return replace(answer, figure=reply, measure=measure)


def dtype_words(case: Case) -> str:
    """Returns a case's precision as --dtypes accepts it, followed by its map."""
    return case.precision + (f" --precision-map {as_words(case.precision_map)}" if case.precision_map else "")


def _words(pair: ComparedCase) -> dict[str, str]:
    """Returns the words that fill in rules' commands, for a suite or for a user's model."""
    case, reference = pair.record.case, pair.reference.case.mode if pair.reference is not None else "bf16"
    params = dict(case.params)
    both = f"--dtypes {reference},{dtype_words(case)}"
    # A suite is named, a user's model is given by its maker.
    if "make" not in params:
        return {
            "again": f"fp8bench suite {case.workload} {both}",
            "study": f"fp8bench sensitivity --dtype {case.precision} --reference {reference}",
            "train": f"fp8bench train {both} --seeds 5",
        }
    make, forward = params["make"], " --forward" * (params.get("pass") == "forward")
    return {
        "again": f"fp8bench profile {make}{forward} --dtypes {dtype_words(case)}",
        "study": f"fp8bench sensitivity {make} --dtype {case.precision}",
        "train": f"fp8bench train {make} {both} --seeds 5",
    }


def met_above(gain: Interval, least: float) -> Met:
    """Returns YES if the whole interval is at least `least`, NO if below, else UNCLEAR."""
    return Met.YES if gain.low >= least else Met.NO if gain.high < least else Met.UNCLEAR


def amdahl(share: float, ratio: float) -> float:
    """Amdahl's law: returns the step's speed-up if a share of it takes `ratio` of its time."""
    # A step made only of products that take no time has unlimited gain.
    duration = 1 - share + share * ratio
    return 1 / duration if duration > 0 else math.inf


def map_ends(interval: Interval, by: Callable[[float], float]) -> Interval:
    return Interval(by(interval.point), by(interval.low), by(interval.high), interval.level)


def gain_text(gain: Interval) -> str:
    """Returns for example '1.62x [1.60, 1.64]', '1.6x (1.5 to 1.7)' for few rounds, or a single number without
    bounds."""
    alone = units.significant(gain.low) == units.significant(gain.high)
    return units.speed_up(gain.point) + ("" if alone else f" {bounds(gain)}")


def share_text(share: Interval) -> str:
    """Returns for example '54% [52%, 55%]'."""
    low, high = units.percent(share.low, 0), units.percent(share.high, 0)
    middle = units.percent(share.point, 0)
    return middle if low == high else f"{middle} [{low}, {high}]"
