"""Computes the findings of a group of cases: times, phases, labels and verdicts.

A hard label removes the verdict of its case: the case becomes UNSURE, with the reason. Examples are hardware
throttling, a process that had less than a fifth of a core, and a failed comparison of the reference with itself. A
hard label of the reference removes the verdicts of all cases compared with it. Ratios stay visible. An emulated case
never has a verdict on speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats, verdicts
from fp8bench.analysis.claims import label_false_claims
from fp8bench.analysis.compare.interval import student_quantile
from fp8bench.analysis.doubts import (
    SlotPositionEffect,
    find_position_effect,
    label_clock_offset,
    label_size_independent_times,
    label_unsettled_device,
)
from fp8bench.analysis.labels import (
    LabelWithReason,
    collect_hard_labels,
    collect_labels,
    have_too_few_undisturbed_rounds,
    label_in_process_cases,
)
from fp8bench.analysis.phase_gains import find_phase_gains, scale_gains_to_ratio
from fp8bench.model import (
    UNATTRIBUTED,
    Finding,
    Interval,
    Label,
    Overheads,
    PhaseGain,
    Record,
    Reruns,
    Run,
    Timing,
    Verdict,
)
from fp8bench.model.stopping import LEAST_ROUNDS, MIN_RETIMING_CANDIDATES
from fp8bench.model.words import UNTOUCHED

BELOW_FLOOR_MARKERS = 20
_FINAL_LEVEL_AND_SAME_BAND = verdicts.FINAL_LEVEL, verdicts.SAME_BAND
# Two half-widths of an interval count as equal if they differ by at most this relative tolerance.
_INTERVAL_WIDTH_TOLERANCE = 1e-9
# The last part of the reason for UNSURE if runs differ more than rounds.
MORE_ROUNDS_DO_NOT_HELP = "more rounds do not help"
# The largest half-width of an interval, as a logarithm. The exponential of a larger number could overflow.
_MAX_LOG_HALF_WIDTH = 100.0


@dataclass(frozen=True)
class _Baseline:
    """The reference that cases are compared with, the timing of its control (a copy of the reference), and its hard
    labels.

    `position_effect` is how a position in the round changes the time of the case that is timed there, if this exceeds
    noise. `claim_labels` are hard labels of the reference that apply in every session. With `whole_steps`, whole steps
    are compared instead of their parts. `best_seconds` is the geometric mean of the best cases of the reference and its
    control.
    """

    record: Record | None = None
    timing: Timing | None = None
    control: Timing | None = None
    emulated: bool = False
    hard_labels: tuple[LabelWithReason, ...] = ()
    position_effect: SlotPositionEffect | None = None
    claim_labels: tuple[LabelWithReason, ...] = ()
    whole_steps: bool = False
    best_seconds: float = 0.0
    threads: int = 1


def findings(run: Run) -> dict[str, Finding]:
    """Returns the finding of each record, by case id."""
    groups: dict[str, list[Record]] = {}
    labels: dict[str, tuple[LabelWithReason, ...]] = {}
    run_labels = label_in_process_cases(run)
    flat_time_labels = label_size_independent_times(run.records, run.request.threads)
    for record in run.records:
        case = record.case
        groups.setdefault(case.setting, []).append(record)
        labels[case.id] = (flat_time_labels[case.id], *run_labels) if case.id in flat_time_labels else run_labels
    findings_by_case = {}
    for records in groups.values():
        for finding in find(records, dict(run.overheads), labels, run.request.threads):
            findings_by_case[finding.case.id] = finding
    return findings_by_case


def find(
    records: Sequence[Record],
    overheads: Mapping[str, Overheads],
    run_labels: Mapping[str, Sequence[LabelWithReason]] = MappingProxyType({}),
    threads: int = 1,
) -> list[Finding]:
    """Returns the finding (times, labels and verdict) of each record of one group."""
    reference = next((record for record in records if record.is_reference and record.timing), None)
    baseline, aa_ratio = _Baseline(), None
    if reference is not None and reference.timing is not None:
        aa_ratio = verdicts.compute_aa_interval(reference.timing, reference.control)
        baseline = _make_baseline(reference, reference.timing, records, aa_ratio, threads)
    group_findings = []
    for record in records:
        case = record.case
        group_findings.append(
            _make_finding(record, baseline, aa_ratio, overheads.get(case.device), run_labels.get(case.id, ()))
        )
    return _note_chosen_fastest(records, group_findings, baseline)


def _make_baseline(
    reference: Record, timing: Timing, records: Sequence[Record], aa: Interval | None, threads: int
) -> _Baseline:
    false_claim_labels = tuple(label_false_claims(reference, None))
    paired_timings = [record.timing for record in records if record.paired and record.paired_with is None]
    uses_whole_steps = verdicts.needs_whole_steps(timing, reference.control)
    return _Baseline(
        reference,
        timing,
        reference.control,
        reference.support.is_emulated,
        (*collect_hard_labels(timing, reference.watch, aa, reference.case.device), *false_claim_labels),
        _position_effect_beyond_noise([*paired_timings, reference.control], aa),
        false_claim_labels,
        uses_whole_steps,
        _average_reference_best_case(reference, uses_whole_steps),
        threads,
    )


def _average_reference_best_case(reference: Record, uses_whole_steps: bool) -> float:
    """Returns the geometric mean of the best cases of the reference and its control. Returns 0 if neither was timed."""
    reference_timings = [
        timing for timing in (reference.timing, reference.control) if timing is not None and timing.slots
    ]
    best_cases = [verdicts.best_seconds(timing, uses_whole_steps) for timing in reference_timings]
    log_best_cases = [math.log(best_seconds) for best_seconds in best_cases if best_seconds > 0]
    return math.exp(fmean(log_best_cases)) if log_best_cases else 0.0


def _scale_phases_to_ratio(
    phases: tuple[tuple[str, float], ...], record: Record, reference_seconds: float, ratio: Interval | None
) -> tuple[tuple[str, float], ...]:
    """Scales the phases of a case so that their sum is the reference's time multiplied by the displayed ratio.

    Without scaling the displayed times and ratio may disagree: for the ratio, case and reference use equally many
    rounds and calls, while the best case of the case alone may use more.
    """
    time_ratio = ratio.point if ratio is not None else 0.0
    seconds = sum(seconds for _, seconds in phases)
    scaled_step_seconds = reference_seconds * (1.0 if record.is_reference else time_ratio)
    if not (0 < seconds < math.inf and 0 < scaled_step_seconds < math.inf):
        return phases
    return tuple((phase, of_phase * scaled_step_seconds / seconds) for phase, of_phase in phases)


def _note_chosen_fastest(records: Sequence[Record], results: list[Finding], baseline: _Baseline) -> list[Finding]:
    """Adds a note to the fastest of several cases if it was not timed again after it was chosen. The choice of the
    fastest case makes its speed-up look larger than it is.
    """
    if baseline.timing is None or any(record.fresh for record in records):
        return results
    candidate_indices, timings = [], []
    for index, record in enumerate(records):
        is_fastest_candidate = record.support.is_native and not record.is_reference
        if record.timing and is_fastest_candidate and record.paired and record.paired_with is None:
            candidate_indices.append(index)
            timings.append(record.timing)
    if len(timings) < MIN_RETIMING_CANDIDATES:
        return results
    fastest_index = verdicts.find_fastest_candidate(timings, baseline.timing, baseline.control)
    if fastest_index is not None and results[candidate_indices[fastest_index]].is_judged:
        note = f"the fastest of {len(timings)} by these rounds, and not timed again: choosing it inflates its speed-up"
        results[candidate_indices[fastest_index]] = _add_note_to_reason(results[candidate_indices[fastest_index]], note)
    return results


def _add_note_to_reason(finding: Finding, note: str) -> Finding:
    return replace(finding, why=f"{finding.why}; {note}" if finding.why else note)


def _position_effect_beyond_noise(timings: Sequence[Timing | None], aa: Interval | None) -> SlotPositionEffect | None:
    """Returns how the position of a slot in its round affects its time. Returns None if the effect is within the
    noise of identical code.
    """
    position_effect = find_position_effect([timing for timing in timings if timing is not None])
    noise_floor = max(verdicts.VERDICT_BAND, aa.reach if aa is not None else 0.0)
    return (
        position_effect if position_effect is not None and abs(position_effect.ratio.point - 1) > noise_floor else None
    )


def _make_finding(
    record: Record,
    baseline: _Baseline,
    aa: Interval | None,
    overheads: Overheads | None,
    run_labels: Sequence[LabelWithReason],
) -> Finding:
    timing = record.timing
    if not record.is_ok or timing is None or not timing.slots:
        return Finding(record.case, Verdict.NONE)
    # 1. Choose the rounds for the verdict, normally those of the case's session. If the case was chosen as the fastest
    # of several, use only rounds that were measured after the choice.
    baseline = _use_reference_of_session(record, timing, baseline)
    if record.fresh is not None:
        baseline = replace(baseline, timing=record.fresh.reference, control=record.fresh.control)
        record = replace(record, timing=record.fresh.timing)
    conclusion = _conclude_verdict(record, baseline)
    # 2. Scale times so that they match the displayed speed-up.
    uses_whole_steps = (
        conclusion.whole_steps if conclusion is not None else baseline.whole_steps if record.is_reference else None
    )
    ratio = conclusion.ratio if conclusion is not None else None
    phases = _scale_phases_to_ratio(
        verdicts.compute_best_phase_seconds(timing, uses_whole_steps), record, baseline.best_seconds, ratio
    )
    step_seconds_per_call = verdicts.step_seconds_of_calls(timing)
    finding_without_verdict = Finding(
        record.case,
        Verdict.NONE,
        best_seconds=sum(seconds for _, seconds in phases),
        median_seconds=float(np.median(step_seconds_per_call)),
        spread=stats.relative_quartile_spread(step_seconds_per_call),
        phases=phases,
        below_floor=_list_too_short_phases(timing, phases, overheads),
        gains=_compute_phase_gains(record, baseline, conclusion),
    )
    # 3. Add the verdict and the labels. Hard labels remove the verdict.
    finding, aa = _add_verdict(finding_without_verdict, record, baseline, conclusion, aa)
    if record.fresh is not None:
        note = f"the fastest of {record.fresh.candidates}: its speed-up is from rounds after the choice"
        finding = _add_note_to_reason(finding, note)
    claims = [*label_false_claims(record, baseline.record, baseline.threads), *_label_clocks(record, baseline)]
    if uses_whole_steps:
        claims.append(_make_whole_steps_label(record, baseline))
    if baseline.position_effect is not None and record.paired:
        claims.append(baseline.position_effect.label)
    labels = collect_labels(record, finding, baseline.timing, aa, [*claims, *run_labels])
    finding = replace(
        finding,
        labels=tuple(labelled.label for labelled in labels),
        label_reasons=tuple((labelled.label, labelled.reason) for labelled in labels if labelled.reason),
    )
    return _withhold_verdict(finding, [label for label in labels if label.hard], baseline.hard_labels)


def _use_reference_of_session(record: Record, timing: Timing, baseline: _Baseline) -> _Baseline:
    """Returns the baseline with the reference's timings from the session in which the case was timed."""
    if record.paired_with is None:
        return baseline
    reference_labels = collect_hard_labels(record.paired_with, None, None, record.case.device)
    aa_ratio = verdicts.compute_aa_interval(record.paired_with, record.control)
    position_effect = _position_effect_beyond_noise([timing, record.paired_with, record.control], aa_ratio)
    reference_labels = (*reference_labels, *baseline.claim_labels)
    return replace(
        baseline,
        timing=record.paired_with,
        control=record.control,
        hard_labels=reference_labels,
        position_effect=position_effect,
    )


def _make_whole_steps_label(record: Record, baseline: _Baseline) -> LabelWithReason:
    """Returns a label that explains why whole steps are compared: the fastest parts come from different steps and sum
    to less than the fastest whole step, in the case or in its reference.
    """
    largest_share_below_step, reason = 0.0, ""
    labelled_timings = (
        (record.timing, ""),
        (baseline.timing, "in the reference, "),
        (baseline.control, "in the reference, "),
    )
    for timing, timing_place_text in labelled_timings:
        share_below_fastest_step = verdicts.share_below_fastest_step(timing) if timing and timing.slots else 0.0
        if timing is None or share_below_fastest_step <= largest_share_below_step:
            continue
        fastest_step_seconds = float(verdicts.step_seconds_of_calls(timing).min())
        sum_text = units.seconds(fastest_step_seconds * (1 - share_below_fastest_step))
        step_text = units.seconds(fastest_step_seconds)
        steps_text = f"the fastest of {timing.num_calls} steps takes {step_text}"
        reason = f"{timing_place_text}the fastest stretches sum to {sum_text}, {steps_text}"
        largest_share_below_step = share_below_fastest_step
    return LabelWithReason(Label.WHOLE_STEPS, reason)


def _label_clocks(record: Record, baseline: _Baseline) -> Iterator[LabelWithReason]:
    """Yields labels for a clock that was still changing before round 1, or that differed from the reference's clock."""
    yield from label_unsettled_device(record.watch)
    if record.is_reference or not record.paired or record.support.is_emulated or record.timing is None:
        return
    if baseline.record is not None and baseline.timing is not None and not baseline.emulated:
        reference_timings = verdicts.list_reference_timings(baseline.timing, baseline.control)
        yield from label_clock_offset(record.timing, reference_timings, baseline.record.case.mode)


def _conclude_verdict(record: Record, baseline: _Baseline) -> verdicts.Conclusion | None:
    """Returns the verdict and the ratios of a case. Returns None for the reference, if the case or the reference is
    emulated, and if they share no rounds.
    """
    if record.support.is_emulated or baseline.emulated or record.is_reference or not record.paired:
        return None
    if record.timing is None or baseline.timing is None:
        return None
    timings = [record.timing, *verdicts.list_reference_timings(baseline.timing, baseline.control)]
    lacks_undisturbed_rounds = record.case.device.startswith("cpu") and have_too_few_undisturbed_rounds(*timings)
    return verdicts.conclude_comparison(
        record.timing,
        baseline.timing,
        baseline.control,
        *_FINAL_LEVEL_AND_SAME_BAND,
        half_width_of_reruns(record.reruns),
        record.sessions,
        lacks_undisturbed_rounds,
        _find_rerun_log_range(record.reruns),
    )


def _compute_phase_gains(
    record: Record, baseline: _Baseline, conclusion: verdicts.Conclusion | None
) -> tuple[PhaseGain, ...]:
    """Returns the gain of each phase. Returns () for a case without a speed or with too few rounds for an interval."""
    if conclusion is None or record.timing is None or baseline.timing is None:
        return ()
    timings = [record.timing, *verdicts.list_reference_timings(baseline.timing, baseline.control)]
    rounds = verdicts.find_common_rounds(timings)
    if len(rounds) < LEAST_ROUNDS or set(timings[0].segments.phases) == {UNATTRIBUTED}:
        return ()
    has_untouched_reference = baseline.record is not None and baseline.record.case.precision == UNTOUCHED
    phase_gains = find_phase_gains(timings, rounds, conclusion.whole_steps, has_untouched_reference)
    return scale_gains_to_ratio(phase_gains, conclusion.ratio.point) if record.sessions else phase_gains


def _add_verdict(
    finding: Finding, record: Record, baseline: _Baseline, conclusion: verdicts.Conclusion | None, aa: Interval | None
) -> tuple[Finding, Interval | None]:
    """Returns the finding with its verdict, and the A/A interval in the rounds of the case."""
    assert record.timing is not None
    if record.support.is_emulated:
        return replace(finding, verdict=Verdict.EMULATED), None
    if record.is_reference:
        return replace(finding, verdict=Verdict.REFERENCE, floor=_compute_noise_floor(aa, baseline)), aa
    if baseline.timing is None or not record.paired:
        return _make_unsure_finding(finding, "the case shares no rounds with a reference"), None
    # The reference's time is the cost of emulation.
    if baseline.emulated:
        return _make_unsure_finding(finding, "the reference is emulated, so there is no speed-up"), None
    if conclusion is None:
        return _make_unsure_finding(finding, "no round contains both the case and the reference"), None
    noise_floor = _compute_noise_floor(conclusion.aa, baseline)
    finding = replace(
        finding,
        verdict=conclusion.verdict,
        ratio=conclusion.ratio,
        typical=conclusion.ratio_of_means,
        floor=noise_floor,
        why=_explain_unsure_verdict(conclusion, record, noise_floor) if conclusion.verdict is Verdict.UNSURE else "",
    )
    return finding, conclusion.aa


def half_width_of_reruns(reruns: Reruns | None) -> float:
    """Returns the half-width of an interval that covers the differences between earlier runs, as a logarithm. Returns 0
    if these differences are unknown.
    """
    # The file may have been edited, so check the numbers.
    if reruns is None or reruns.freedom < 1 or not 0 <= reruns.spread < math.inf:
        return 0.0
    half_width = student_quantile(verdicts.FINAL_LEVEL, reruns.freedom) * reruns.spread
    return min(half_width, max(0.0, reruns.max_reach), _MAX_LOG_HALF_WIDTH)


def _find_rerun_log_range(reruns: Reruns | None) -> tuple[float, float]:
    """Returns the lowest and highest ratio of the case in earlier runs, as logarithms. Without earlier runs, returns
    (inf, -inf).
    """
    # The file may have been edited, so check the numbers.
    if reruns is None or not -_MAX_LOG_HALF_WIDTH <= reruns.low <= reruns.high <= _MAX_LOG_HALF_WIDTH:
        return math.inf, -math.inf
    return reruns.low, reruns.high


def _compute_noise_floor(aa: Interval | None, baseline: _Baseline) -> float | None:
    """Returns the noise floor: how much the times of identical code differ, within these rounds or between earlier
    runs, whichever is more.
    """
    reruns = baseline.record.reruns if baseline.record is not None else None
    return max(aa.reach, math.expm1(half_width_of_reruns(reruns))) if aa is not None else None


def _make_unsure_finding(finding: Finding, why: str) -> Finding:
    return replace(finding, verdict=Verdict.UNSURE, why=why)


def _explain_unsure_verdict(conclusion: verdicts.Conclusion, record: Record, noise_floor: float | None) -> str:
    """Returns the first reason that explains an UNSURE verdict, with a remedy."""
    assert record.timing is not None
    interval, rounds, reruns = conclusion.ratio, record.timing.num_rounds, record.reruns
    if rounds < verdicts.MIN_ROUNDS_FOR_VERDICT:
        round_count_text = "1 round is" if rounds == 1 else f"{rounds} rounds are"
        return f"{round_count_text} too few for a verdict; give it more time (--budget) or rounds"
    # The interval alone gives a verdict, so the mean prevented it.
    if verdicts.decide_verdict(interval, verdicts.compute_verdict_band(conclusion.aa)) is not Verdict.UNSURE:
        return "the mean over all calls contradicts the fastest calls; give it more time (--budget)"
    # The interval is outside the fixed band, but not outside the wider band of the A/A interval.
    if interval.low > 1 + verdicts.VERDICT_BAND or interval.high < 1 - verdicts.VERDICT_BAND:
        return "the reference differs from its control, which runs the same code, by as much"
    if rounds < LEAST_ROUNDS:
        return f"{rounds} rounds are too few, and they do not agree; give it {LEAST_ROUNDS} or more (no --quick)"
    # The interval was widened to cover the differences between runs. More rounds cannot narrow it.
    if reruns is not None and interval.half_width <= half_width_of_reruns(reruns) * (1 + _INTERVAL_WIDTH_TOLERANCE):
        rerun_difference_text = units.percent(math.expm1(half_width_of_reruns(reruns)))
        return (
            f"runs on this machine may differ by {rerun_difference_text}, as {reruns.runs} earlier ones show: "
            f"{MORE_ROUNDS_DO_NOT_HELP}"
        )
    # An end of the interval is a ratio of an earlier run, so more rounds cannot move it.
    lowest_log_ratio, highest_log_ratio = _find_rerun_log_range(reruns)
    if math.exp(lowest_log_ratio) <= interval.low or interval.high <= math.exp(highest_log_ratio):
        speed_range_text = (
            f"{units.speed_up(math.exp(-highest_log_ratio))} to {units.speed_up(math.exp(-lowest_log_ratio))}"
        )
        return f"earlier runs of the case gave {speed_range_text}: {MORE_ROUNDS_DO_NOT_HELP}"
    reasons = [f"{rounds} rounds"]
    if interval.level == 0.0:
        reasons.append("other programs took the CPU in most of them")
    if noise_floor is not None:
        reasons.append(f"noise floor {units.percent(noise_floor)} (A/A)")
    aa_band_half_width = verdicts.compute_verdict_band(conclusion.aa)
    return f"{', '.join(reasons)}: {_describe_visible_difference(interval, aa_band_half_width, noise_floor or 0.0)}"


# If the true ratio is this many half-widths away from the band around 1, nine of ten 99% intervals are outside the
# band: 1 + 1.2816 / 2.5758.
_HALF_WIDTHS_FOR_90_PERCENT = 1.5


def _describe_visible_difference(interval: Interval, band_half_width: float, noise_floor: float) -> str:
    """Describes the smallest difference from the reference that 90% of runs with this much noise would detect. It is at
    least the noise floor.
    """
    if math.isinf(interval.half_width):
        return "no difference would have been seen"
    visible_difference = math.expm1(math.log1p(band_half_width) + _HALF_WIDTHS_FOR_90_PERCENT * interval.half_width)
    smallest_visible_difference = max(visible_difference, noise_floor)
    return f"a difference of {units.percent(smallest_visible_difference)} or more would have been seen"


def _withhold_verdict(
    finding: Finding, case_labels: Sequence[LabelWithReason], reference_labels: Sequence[LabelWithReason]
) -> Finding:
    """Removes the verdict if the case or its reference has a hard label."""
    names = {labelled.label for labelled in case_labels}
    reference_only_labels = [labelled for labelled in reference_labels if labelled.label not in names]
    if finding.ratio is None or not (case_labels or reference_only_labels):
        return finding
    reasons = []
    if case_labels:
        reasons.append(f"labelled {_join_labels(case_labels)}")
    if reference_only_labels:
        reasons.append(f"the reference is labelled {_join_labels(reference_only_labels)}")
    unsure_finding = _make_unsure_finding(finding, f"{'; '.join(reasons)}, so there is no verdict")
    return replace(unsure_finding, hard=tuple(labelled.label for labelled in (*case_labels, *reference_only_labels)))


def _join_labels(labels: Sequence[LabelWithReason]) -> str:
    words = [f"{labelled.label} ({labelled.reason})" if labelled.reason else labelled.label for labelled in labels]
    return " and ".join(words)


def _list_too_short_phases(
    timing: Timing, phases: tuple[tuple[str, float], ...], overheads: Overheads | None
) -> tuple[str, ...]:
    """Returns the phases that are shorter than 20 times the overhead of marking their start and end."""
    if overheads is None:
        return ()
    phase_marker_seconds = max(overheads.marker_on, overheads.event_pair or 0.0)
    entry_count_by_phase = dict(timing.entries)
    return tuple(
        phase
        for phase, seconds in phases
        if 0 < seconds < BELOW_FLOOR_MARKERS * phase_marker_seconds * entry_count_by_phase.get(phase, 1)
    )
