"""The evidence for advice: the cases of a run with their references, and the sensitivity studies and trainings in the
store.

Shares of a step, and ratios between the times of two parts of steps, have intervals over rounds, like verdicts. A rule
of the checklist asks one question about a precision (mode) in a setting. The answer `yes` always favours the lower
precision. Figures from other machines are not used. A figure that was not measured here is reported as missing, with
the command that would measure it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.errors import UsageError
from fp8bench.features.advise.values import AdviceGround, AdviceQuestion, AdviceRuleOutcome, RuleAnswer
from fp8bench.features.infer.values import ServingAnswer
from fp8bench.features.sensitivity.study import SensitivityStudy, format_map
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
from fp8bench.report.case_status import show_bounds
from fp8bench.report.panels import together

# The phases that a lower precision changes if values between products keep their dtype.
_PRODUCT_PHASES = frozenset({Phase.CAST, Phase.GEMM, Phase.ATTENTION})


@dataclass(frozen=True)
class ComparedCase:
    """A case with its reference, which is None if no reference was measured."""

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
    def is_emulated(self) -> bool:
        return Level.EMULATED in {
            record.support.level for record in (self.record, self.reference) if record is not None
        }

    @property
    def is_timed(self) -> bool:
        return not self.is_emulated and all(
            record is not None and record.is_ok and record.timing is not None and record.timing.slots
            for record in (self.record, self.reference)
        )

    @property
    def is_training(self) -> bool:
        # A user's model marks no optimizer phase. Only records of a user's model have a `coverage`, and they count as
        # training.
        return self.record.coverage is not None or any(
            record is not None and record.timing and Phase.OPTIMIZER_STEP in record.timing.segments.phases
            for record in (self.record, self.reference)
        )

    @property
    def speed(self) -> Interval | None:
        """How many times as fast as its reference the case is. None if it was not timed, or if a label withdraws its
        verdict.
        """
        finding = self.finding
        if not self.is_timed or finding is None or finding.ratio is None or finding.hard:
            return None
        return finding.ratio.inverse

    @cached_property
    def affected_phases(self) -> frozenset[str]:
        """The phases whose time this precision may change. Time outside of all phases is always included, because it
        may belong to any of them.

        If the case and its reference have tapes (recorded work of a step by phase), the phases are those whose work
        differs. Otherwise they are products and casts, or all phases if the reference does not mark products.
        """
        assert self.reference is not None
        # Leave out phases whose recorded work is the same in the case and its reference, because the precision does not
        # change their time.
        tape = self.record.tape
        reference_tape = self.reference.tape
        if tape is not None and reference_tape is not None:
            return frozenset(
                {UNATTRIBUTED, *(name for name in CELL_PHASES if tape.of(name) != reference_tape.of(name))}
            )
        marked_phases = set(self.reference.timing.segments.phases) if self.reference.timing is not None else set()
        return _PRODUCT_PHASES | {UNATTRIBUTED} if Phase.GEMM in marked_phases else frozenset(CELL_PHASES)

    def measure_phase_share(self, phases: Collection[str]) -> Interval | None:
        if self.reference is None or self.reference.timing is None:
            return None
        timed_share = compute_phase_time_ratio(self.reference.timing, phases, self.reference.timing, CELL_PHASES)
        # Prefer timed phases to those of an untimed profile.
        profiled_share = _sum_profiled_shares(self.reference, phases)
        return (
            Interval(profiled_share, profiled_share, profiled_share, 0.0)
            if timed_share is None and profiled_share
            else timed_share
        )

    def affected_share(self) -> Interval | None:
        """Returns the share of the reference's step that this precision may change. The share comes from an untimed
        profile if the precision changes only products, and the reference's step does not mark its products.
        """
        differs_in_products_only = self.is_reference_estimated and _changes_only_products(self)
        return self.measure_phase_share(_PRODUCT_PHASES if differs_in_products_only else self.affected_phases)

    @property
    def is_reference_estimated(self) -> bool:
        """Whether the shares of the reference's phases come from an untimed profile. They do if the reference has a
        profile and its timed steps do not mark products.
        """
        reference = self.reference
        if reference is None or reference.shares is None:
            return False
        return reference.timing is None or Phase.GEMM not in reference.timing.segments.phases

    def ratio_to_reference(self, phases: Collection[str], reference_phases: Collection[str]) -> Interval | None:
        """Returns the time of some phases of this case, divided by the time of `reference_phases` of its reference.
        The ratio agrees with the two times that reports show. None if a time is unknown.
        """
        if not self.is_timed or self.record.timing is None or self.reference is None:
            return None
        # Prefer the reference's calls in rounds that also have calls of this case, if there are any.
        reference_timing = self.record.paired_with or self.reference.timing
        timed_ratio = (
            compute_phase_time_ratio(self.record.timing, phases, reference_timing, reference_phases)
            if reference_timing is not None
            else None
        )
        if timed_ratio is not None:
            return scale_to_reported_seconds(
                timed_ratio, (self.finding, phases), (self.reference_finding, reference_phases)
            )
        return self._estimate_ratio_by_shares(phases, reference_phases) if self.is_reference_estimated else None

    def _estimate_ratio_by_shares(
        self, case_phases: Collection[str], reference_phases: Collection[str]
    ) -> Interval | None:
        """Returns the ratio as `ratio_to_reference` does, but estimated and without an interval. Each of the two
        times is a share from an untimed profile, multiplied by the median seconds of that step.
        """
        seconds = [
            _sum_profiled_shares(record, phases) * (finding.median_seconds or 0.0)
            for record, finding, phases in (
                (self.record, self.finding, case_phases),
                (self.reference, self.reference_finding, reference_phases),
            )
            if record is not None and finding is not None
        ]
        # Without profiled times of both steps, no ratio can be estimated.
        if len(seconds) < 2 or not all(seconds):
            return None
        ratio = seconds[0] / seconds[1]
        return Interval(ratio, ratio, ratio, 0.0)


_USER_MODEL_SUITE = "model"


def _changes_only_products(pair: ComparedCase) -> bool:
    """Returns whether the precision changes nothing except products. This is the case in a user's model, and if values
    between products keep the reference's dtype.
    """
    assert pair.reference is not None
    # In a user's model, only layers with products are converted.
    if pair.reference.case.workload == _USER_MODEL_SUITE:
        return True
    try:
        return precisions.get(pair.record.case.precision).carried_by == pair.reference.case.precision
    except UsageError:
        return False


def describe_time_doubts(pair: ComparedCase) -> str:
    """Returns a text with all labels that cast doubt on the times behind an advice, each once. For example ';
    labelled noisy; its reference labelled bimodal'.
    """
    owner_prefix_by_label: dict[str, str] = {}
    for owner_label, finding in (("", pair.finding), ("its reference ", pair.reference_finding)):
        for label in finding.labels if finding is not None else ():
            if label.casts_doubt:
                owner_prefix_by_label.setdefault(label, owner_label)
    labels = together((owner_label, str(label)) for label, owner_label in owner_prefix_by_label.items())
    return "".join(f"; {owner_label}labelled {', '.join(names)}" for owner_label, names in labels.items())


# Phases that an untimed profile can distinguish.
_SHARE_KIND_BY_PHASE = {Phase.GEMM: ShareKind.GEMM, Phase.CAST: ShareKind.CAST, Phase.ATTENTION: ShareKind.ATTENTION}


def _sum_profiled_shares(record: Record, phases: Collection[str]) -> float:
    """Returns the share of a step that these phases take in an untimed profile; 0 without a profile."""
    share_by_work_kind = record.shares.by_kind if record.shares is not None else {}
    return sum(share_by_work_kind.get(kind, 0.0) for phase, kind in _SHARE_KIND_BY_PHASE.items() if phase in phases)


def compute_phase_time_ratio(
    timing: Timing, phases: Collection[str], base: Timing, base_phases: Collection[str]
) -> Interval | None:
    """Returns the best time of some phases, divided by the best time of some phases in `base`. None if the phases
    were not timed in both.
    """
    rounds = verdicts.find_common_rounds([timing, base])
    if not rounds:
        return None
    # The two timings may have different numbers of calls per slot, so use the smallest number from every slot.
    calls = min(len(slot.calls_ns) for slot in (*timing.slots, *base.slots))
    samples = []
    for compared_timing, names in ((timing, phases), (base, base_phases)):
        chosen_phase_mask = [name in names for name in compared_timing.segments.phases]
        chosen_cell_seconds = verdicts.cell_seconds(compared_timing, calls, rounds)[:, chosen_phase_mask]
        if not chosen_cell_seconds.size or chosen_cell_seconds.sum(axis=1).min() <= 0:
            return None
        samples.append(chosen_cell_seconds)
    resampled_numerator, resampled_denominator = map(stats.resample_best_case, samples)
    # Too few rounds for an interval: use their range.
    if len(rounds) < LEAST_ROUNDS:
        return stats.replace_interval_by_range(
            stats.ratio(resampled_numerator, [resampled_denominator]),
            [chosen_cell_seconds.sum(axis=1) for chosen_cell_seconds in samples],
        )
    return stats.ratio(resampled_numerator, [resampled_denominator], verdicts.FINAL_LEVEL)


def scale_to_reported_seconds(ratio: Interval, *parts: tuple[Finding | None, Collection[str]]) -> Interval:
    """Scales the ratio of two parts of steps, so that it equals the quotient of the seconds that reports show for these
    parts.
    """
    seconds, base = (_sum_reported_seconds(*part) for part in parts)
    if not (seconds > 0 and base > 0 and math.isfinite(seconds / base)):
        return ratio
    # Scale the ratio and both bounds by the same factor, so that the ratio is the quotient of the seconds that reports
    # show.
    correction_factor = seconds / base / ratio.point
    return transform_interval(ratio, lambda value: value * correction_factor)


def _sum_reported_seconds(finding: Finding | None, phases: Collection[str]) -> float:
    seconds_by_phase = finding.phases if finding is not None else ()
    return sum(seconds for phase, seconds in seconds_by_phase if phase in phases)


@dataclass(frozen=True)
class AdviceBasis:
    """A run with its findings, and the sensitivity studies and the training that are evidence on its precisions.

    `serving_answers` are the answers of `fp8bench infer` that use this run. `min_gain` is the smallest gain, as a
    share, that makes a precision worthwhile. `store_options` are the options with which suggested commands find the
    run.
    """

    run: Run
    findings: Mapping[str, Finding]
    studies: tuple[SensitivityStudy, ...] = ()
    training: JudgedTraining | None = None
    min_gain: float = 0.1
    serving_answers: tuple[ServingAnswer, ...] = ()
    store_options: str = ""

    @cached_property
    def cases(self) -> tuple[ComparedCase, ...]:
        case_pairs = []
        for records in together((record.case.setting, record) for record in self.run.records).values():
            reference = next((record for record in records if record.is_reference), None)
            reference_finding = self.findings.get(reference.case.id) if reference is not None else None
            compared_records = (record for record in records if not record.is_reference)
            case_pairs += [
                ComparedCase(candidate, self.findings.get(candidate.case.id), reference, reference_finding)
                for candidate in compared_records
            ]
        return tuple(case_pairs)


@dataclass(frozen=True)
class RuleReply:
    """A rule's reply: the answer to its question, the figure that decides it, and the evidence for the figure."""

    met: AdviceRuleOutcome
    figure: str
    grounds: tuple[AdviceGround, ...] = ()


# The function of a rule. It returns a RuleReply, or a text with the reason why the rule's figure was not measured here.
# It returns None if the rule does not apply to the case.
RuleFunction = Callable[[ComparedCase, AdviceBasis], RuleReply | str | None]


@dataclass(frozen=True)
class AdviceRule:
    """One question of the checklist. `measure` is the command that would answer it, where {again} stands for the
    command that measured the case.

    Emulated precisions have no speed, so only the question whether they learn can be measured.
    """

    name: str
    topic: AdviceQuestion
    question: str
    ask: RuleFunction
    measure: str

    def answer(self, pair: ComparedCase, basis: AdviceBasis) -> RuleAnswer | None:
        rule_reply = self.ask(pair, basis)
        case = pair.record.case
        if rule_reply is None:
            return None
        answer = RuleAnswer(
            self.name, self.topic, self.question, case.setting, case.mode, AdviceRuleOutcome.NOT_MEASURED
        )
        if isinstance(rule_reply, RuleReply):
            return replace(answer, met=rule_reply.met, figure=rule_reply.figure, grounds=rule_reply.grounds)
        # No command can measure the speed of an emulated precision.
        is_speed_unmeasurable = pair.is_emulated and self.topic is not AdviceQuestion.DOES_IT_LEARN
        measuring_command = (
            ""
            if is_speed_unmeasurable
            else self.measure.format(**_make_command_placeholders(pair, basis.store_options))
        )
        return replace(answer, figure=rule_reply, measure=measuring_command)


def dtype_option(case: Case) -> str:
    """Returns a precision as an argument of --dtypes. If the case has a precision map, --precision-map follows it."""
    return case.precision + (f" --precision-map {format_map(case.precision_map)}" if case.precision_map else "")


def _make_command_placeholders(pair: ComparedCase, store: str) -> dict[str, str]:
    """Returns the commands and options that replace {again}, {study}, {train} and {store} in `AdviceRule.measure`. They
    differ between a case of a suite and a case of a user's model.
    """
    case = pair.record.case
    reference = pair.reference.case.mode if pair.reference is not None else "bf16"
    params = dict(case.params)
    dtypes_option = f"--dtypes {reference},{dtype_option(case)}"
    # The arguments of the commands for a suite. For a user's model they are replaced below.
    measuring_arguments = f"suite {case.workload} {dtypes_option}"
    sensitivity_arguments = f"sensitivity --dtype {case.precision} --reference {reference}"
    training_arguments = f"train {dtypes_option}"
    if "make" in params:
        make_target = params["make"]
        forward_option = " --forward" * (params.get("pass") == "forward")
        measuring_arguments = f"profile {make_target}{forward_option} --dtypes {dtype_option(case)}"
        sensitivity_arguments = f"sensitivity {make_target} --dtype {case.precision}"
        training_arguments = f"train {make_target} {dtypes_option}"
    return {
        "again": f"fp8bench {measuring_arguments}{store}",
        "study": f"fp8bench {sensitivity_arguments}{store}",
        "train": f"fp8bench {training_arguments} --seeds 5{store}",
        "store": store,
    }


def compare_with_minimum(gain: Interval, min_gain: float) -> AdviceRuleOutcome:
    """Returns YES if the whole interval of a gain is at least `min_gain`, NO if it is below, else UNCLEAR."""
    return (
        AdviceRuleOutcome.YES
        if gain.low >= min_gain
        else AdviceRuleOutcome.NO
        if gain.high < min_gain
        else AdviceRuleOutcome.UNCLEAR
    )


def amdahl(affected_share: float, ratio: float) -> float:
    """Returns the speed-up of a step by Amdahl's law. `affected_share` of the step takes `ratio` times its former
    time."""
    # If a step consists only of products and these take no time, its speed-up is infinite.
    relative_duration = 1 - affected_share + affected_share * ratio
    return 1 / relative_duration if relative_duration > 0 else math.inf


def transform_interval(interval: Interval, function: Callable[[float], float]) -> Interval:
    return Interval(function(interval.point), function(interval.low), function(interval.high), interval.level)


def show_gain(gain: Interval) -> str:
    """Returns a gain as text: '1.62x [1.60, 1.64]', '1.6x (1.5 to 1.7)' for few rounds, or '1.62x' without bounds."""
    is_single_number = units.format_significant_digits(gain.low) == units.format_significant_digits(gain.high)
    return units.speed_up(gain.point) + ("" if is_single_number else f" {show_bounds(gain)}")


def format_share_interval(interval: Interval) -> str:
    """Returns a share with its interval, for example '54% [52%, 55%]'."""
    low = units.percent(interval.low, 0)
    high = units.percent(interval.high, 0)
    share_text = units.percent(interval.point, 0)
    return share_text if low == high else f"{share_text} [{low}, {high}]"
