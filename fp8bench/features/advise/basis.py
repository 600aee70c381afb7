"""What advice rests on: the cases of a run beside their references, and the studies and trainings that were found.

Shares of a step and ratios of its parts have the interval of the rounds that they come from, as verdicts have.

A rule of the checklist is a question about a mode in a setting, and how what was measured here answers it. A `yes`
always speaks for the lower precision. No rule has a figure of another machine in it: what was not measured here is said
to be so, with the command that would measure it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.errors import UsageError
from fp8bench.features.advise.values import Ground, Met, RuleAnswer
from fp8bench.features.infer.values import ServingAnswer
from fp8bench.features.sensitivity.study import Study
from fp8bench.features.train.values import KeptTraining
from fp8bench.features.train.verdicts.verdicts import TrainingVerdicts
from fp8bench.model import (
    CELL_PHASES,
    UNATTRIBUTED,
    Finding,
    Interval,
    Label,
    Level,
    Phase,
    Record,
    Run,
    ShareKind,
    Status,
    Timing,
)
from fp8bench.model.stopping import LEAST_ROUNDS
from fp8bench.registry import precisions
from fp8bench.report.panels import together

# What a lower precision changes of a step that is carried in the same one; and what nobody knows, which it may change.
_PRODUCTS = frozenset({Phase.CAST, Phase.GEMM, Phase.ATTENTION})


@dataclass(frozen=True)
class Trained:
    """A training with what is said of its arms."""

    kept: KeptTraining
    verdicts: TrainingVerdicts


@dataclass(frozen=True)
class ComparedCase:
    """A case that is no reference, beside its reference. `lead` is None where that was not measured."""

    record: Record
    finding: Finding | None
    lead: Record | None
    lead_finding: Finding | None
    group: tuple[tuple[Record, Finding | None], ...] = ()

    @property
    def mode(self) -> str:
        return self.record.case.mode

    @property
    def row(self) -> str:
        return self.record.case.id

    @property
    def emulated(self) -> bool:
        return Level.EMULATED in {record.support.level for record in (self.record, self.lead) if record is not None}

    @property
    def timed(self) -> bool:
        return not self.emulated and all(
            record is not None and record.status is Status.OK and record.timing is not None and record.timing.slots
            for record in (self.record, self.lead)
        )

    @property
    def trains(self) -> bool:
        return self.record.coverage is not None or any(
            record is not None and record.timing and Phase.OPTIMIZER_STEP in record.timing.segments.phases
            for record in (self.record, self.lead)
        )

    @property
    def speed(self) -> Interval | None:
        return speed_of(self.finding) if self.timed and self.finding is not None else None

    @cached_property
    def touched(self) -> frozenset[str]:
        """The phases of a step that this precision may change, time that is in none among them: nobody knows of that.

        By the counts of both tapes, where there are some; else products and casts, and where the reference marks no
        products all.
        """
        assert self.lead is not None
        own, base = self.record.tape, self.lead.tape
        if own is not None and base is not None:
            return frozenset({UNATTRIBUTED, *(name for name in CELL_PHASES if own.of(name) != base.of(name))})
        marked = set(self.lead.timing.segments.phases) if self.lead.timing is not None else set()
        return _PRODUCTS | {UNATTRIBUTED} if Phase.GEMM in marked else frozenset(CELL_PHASES)

    def share(self, phases: Collection[str]) -> Interval | None:
        if self.lead is None or self.lead.timing is None:
            return None
        timed = part_ratio(self.lead.timing, phases, self.lead.timing, CELL_PHASES)
        looked = _looked_into(self.lead, phases)
        return Interval(looked, looked, looked, 0.0) if timed is None and looked else timed

    def share_touched(self) -> Interval | None:
        """Of the reference's step what this precision may change, over all phases. A model as it came marks none: where
        products alone change, the pass that looked into it says how much of it multiplies."""
        multiplied = self.estimated and products_alone(self, self.record.case.precision)
        return self.share(_PRODUCTS if multiplied else self.touched)

    @property
    def estimated(self) -> bool:
        """Whether the parts of its reference are known by such a pass alone: a model as it came marks no products."""
        marked = self.lead.timing.segments.phases if self.lead is not None and self.lead.timing is not None else ()
        return Phase.GEMM not in marked and self.lead is not None and self.lead.shares is not None

    def of_reference(self, own: Collection[str], theirs: Collection[str]) -> Interval | None:
        if not self.timed or self.record.timing is None or self.lead is None:
            return None
        base = self.record.paired_with or self.lead.timing
        timed = part_ratio(self.record.timing, own, base, theirs) if base is not None else None
        return timed if timed is not None or not self.estimated else self._by_shares(own, theirs)

    def _by_shares(self, own: Collection[str], theirs: Collection[str]) -> Interval | None:
        """The same by shares of both median steps; nobody knows an interval of it."""
        seconds = [
            _looked_into(record, phases) * (finding.median_seconds or 0.0)
            for record, finding, phases in (
                (self.record, self.finding, own), (self.lead, self.lead_finding, theirs)
            ) if record is not None and finding is not None
        ]  # fmt: skip
        if len(seconds) < 2 or not all(seconds):
            return None
        ratio = seconds[0] / seconds[1]
        return Interval(ratio, ratio, ratio, 0.0)


def speed_of(finding: Finding) -> Interval | None:
    """How many times as fast as its reference a case is; None where a label forbids to say. Where the fastest calls say
    something else than all of them, all of them count: on a loaded machine the best case of many short phases is below
    any call that there was."""
    if finding.ratio is None or finding.hard:
        return None
    typical = finding.typical if Label.UNEVEN in finding.labels else None
    return (typical or finding.ratio).inverse


_OWN_MODEL = "model"


def products_alone(pair: ComparedCase, mode: str) -> bool:
    """Whether this precision changes products and nothing else of the step: in copies of a person's own model, and
    where it is carried in what the reference is."""
    assert pair.lead is not None
    if pair.lead.case.workload == _OWN_MODEL:
        return True
    try:
        return precisions.get(mode).carried_by == pair.lead.case.precision
    except UsageError:
        return False


def doubts(pair: ComparedCase, products: Iterable[Finding | None] = ()) -> str:
    """'; labelled noisy; its reference labelled bimodal': what casts doubt on the times of advice, each once.

    Of its `products` too where it is a projection.
    """
    told: dict[str, str] = {}
    for whose, findings in (("", [pair.finding]), ("its reference ", [pair.lead_finding]), ("products ", products)):
        for label in (label for finding in findings if finding is not None for label in finding.labels):
            if label.casts_doubt:
                told.setdefault(label, whose)
    several = {whose: ", ".join(label for label, of in told.items() if of == whose) for whose in told.values()}
    return "".join(f"; {whose}labelled {labels}" for whose, labels in several.items())


# The kinds of work that a pass tells which are phases of a step.
_KINDS = {Phase.GEMM: ShareKind.GEMM, Phase.CAST: ShareKind.CAST, Phase.ATTENTION: ShareKind.ATTENTION}


def _looked_into(record: Record, phases: Collection[str]) -> float:
    """The share of a step that these take, by a pass that looked; 0 where none did."""
    kinds = record.shares.by_kind if record.shares is not None else {}
    return sum(kinds.get(kind, 0.0) for phase, kind in _KINDS.items() if phase in phases)


def part_ratio(own: Timing, phases: Collection[str], base: Timing, theirs: Collection[str]) -> Interval | None:
    """The best case of some phases over that of some phases of another; None where nothing of either was timed."""
    rounds = verdicts.common_rounds([own, base])
    if not rounds:
        return None
    calls = min(len(slot.calls_ns) for timing in (own, base) for slot in timing.slots)
    samples = [
        verdicts.cells(timing, calls, rounds)[:, [name in wanted for name in timing.segments.phases]]
        for timing, wanted in ((own, phases), (base, theirs))
    ]
    if not all(sample.size and sample.sum(axis=1).min() > 0 for sample in samples):
        return None
    first, second = map(stats.best_case, samples)
    if len(rounds) < LEAST_ROUNDS:
        return stats.extent(stats.ratio(first, [second]), [sample.sum(axis=1) for sample in samples])
    return stats.ratio(first, [second], verdicts.FINAL_LEVEL)


@dataclass(frozen=True)
class Basis:
    """A run with what its samples say, and what else was measured with the same device: studies, trainings.

    `other_runs` are of the same machine: what they timed answers questions about this one. `served` is what `infer`
    answered by these runs. `least` is the gain from which on a precision is worth the trouble, as a share.
    """

    run: Run
    findings: Mapping[str, Finding]
    studies: tuple[Study, ...] = ()
    training: Trained | None = None
    least: float = 0.1
    other_runs: tuple[tuple[Run, Mapping[str, Finding]], ...] = ()
    served: tuple[ServingAnswer, ...] = ()

    @cached_property
    def besides(self) -> tuple[ComparedCase, ...]:
        return _besides(self.run, self.findings)

    @cached_property
    def known(self) -> tuple[ComparedCase, ...]:
        return (*self.besides, *(compared for run, found in self.other_runs for compared in _besides(run, found)))

    def differing(self, pair: ComparedCase, axis: str) -> list[ComparedCase]:
        """The same mode where that parameter alone is another one, by its value."""
        own = dict(pair.record.case.params)
        if axis not in own:
            return []
        beside = {name: own[name] for name in (axis, *_WITH.get(axis, ())) if name in own}
        others = [
            other for other in self.known
            if other.mode == pair.mode and other.record.case.workload == pair.record.case.workload
            and other.record.case.device == pair.record.case.device
            and {**dict(other.record.case.params), **beside} == own
            and other.record.case.param(axis) != own[axis]
        ]  # fmt: skip
        return sorted(others, key=lambda other: str(other.record.case.param(axis)))


# What may differ with an axis, because it has no meaning at its other value.
_WITH = {"pass": ("optimizer",)}


def _besides(run: Run, findings: Mapping[str, Finding]) -> tuple[ComparedCase, ...]:
    pairs: list[ComparedCase] = []
    for records in together((record.case.setting, record) for record in run.records).values():
        known = tuple((record, findings.get(record.case.id)) for record in records)
        lead, finding = next((pair for pair in known if pair[0].is_reference), (None, None))
        pairs += [ComparedCase(*case, lead, finding, known) for case in known if not case[0].is_reference]
    return tuple(pairs)


@dataclass(frozen=True)
class Reply:
    """What was found out: whether the question is met, the figure that decides it, and what it rests on."""

    met: Met
    figure: str
    grounds: tuple[Ground, ...] = ()


# What a rule finds out: what it is Told, or why that was not measured here; None where the question makes no sense.
Ask = Callable[[ComparedCase, Basis], Reply | str | None]


@dataclass(frozen=True)
class AdviceRule:
    """One row of the checklist.

    `measure` is the command that would answer it where nothing does ({again} is what measured the case): where
    a precision is emulated none does, of a question that is `of_speed` or what a step takes.
    """

    name: str
    question: str
    ask: Ask
    measure: str
    of_speed: bool = True

    def answer(self, pair: ComparedCase, basis: Basis) -> RuleAnswer | None:
        told, case = self.ask(pair, basis), pair.record.case
        if told is None:
            return None
        if isinstance(told, Reply):
            return RuleAnswer(self.name, self.question, case.setting, case.mode, told.met, told.figure, told.grounds)
        how = "" if self.of_speed and pair.emulated else self.measure.format(**_words(pair))
        return RuleAnswer(self.name, self.question, case.setting, case.mode, Met.UNKNOWN, told, measure=how)


# What low precision is held against, and what that itself is.
_WIDE = frozenset({"bf16", "fp16", "tf32"})


def _words(pair: ComparedCase) -> dict[str, str]:
    case = pair.record.case
    params = dict(case.params)
    reference = pair.lead.case.mode if pair.lead is not None else "bf16"
    words = {"mode": case.mode, "make": "MODULE:make", "high": reference}
    if "make" not in params:
        again = f"fp8bench suite {case.workload} --dtypes {reference},{case.mode}"
        return {**words, "again": again, "compiled": "--set compile=no,yes", "larger": "--set batch=1,4,16",
                "study": f"fp8bench sensitivity --dtype {case.mode} --reference {reference}",
                "train": f"fp8bench train --dtypes {reference},{case.mode} --seeds 5"}  # fmt: skip
    forward = " --forward" if params.get("pass") == "forward" else ""
    again = f"fp8bench profile {params['make']}{forward} --dtypes {case.mode}"
    words |= {"make": str(params["make"]), "high": "fp32" if case.precision in _WIDE else "bf16"}
    return {**words, "again": again, "compiled": "--compile", "larger": "with a function that gives a larger batch",
            "study": f"fp8bench sensitivity {params['make']} --dtype {case.mode}",
            "train": f"fp8bench train {params['make']} --dtypes {reference},{case.mode} --seeds 5"}  # fmt: skip


def met_above(gain: Interval, least: float) -> Met:
    """Whether all of an interval lies at or above a bound, below it, or on both sides."""
    return Met.YES if gain.low >= least else Met.NO if gain.high < least else Met.UNCLEAR


def amdahl(share: float, ratio: float) -> float:
    """Amdahl's law: the step's speed-up where a share of it takes `ratio` of its time."""
    left = 1 - share + share * ratio
    return 1 / left if left > 0 else math.inf


def mapped(interval: Interval, by: Callable[[float], float]) -> Interval:
    """What an interval becomes by a function that only rises."""
    return Interval(by(interval.point), by(interval.low), by(interval.high), interval.level)


def times(gain: Interval) -> str:
    """'1.62x [1.60, 1.64]'; one number where that is all there is."""
    low, high = units.significant(gain.low), units.significant(gain.high)
    return units.speed_up(gain.point) + (f" [{low}, {high}]" if low != high else "")


def part(share: Interval) -> str:
    """'54% [52%, 55%]'."""
    low, high = units.percent(share.low, 0), units.percent(share.high, 0)
    middle = units.percent(share.point, 0)
    return middle if low == high else f"{middle} [{low}, {high}]"
