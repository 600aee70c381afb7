"""Words the answer for each precision: the verdict, its costs, the reason, and a command that would settle the
verdict.

The terminal and the page show the same sentences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

from fp8bench import units
from fp8bench.analysis.findings import MORE_ROUNDS_DO_NOT_HELP
from fp8bench.analysis.phase_gains import PhaseGainCause, PhaseGainReason, find_explaining_phases
from fp8bench.analysis.verdicts import SAME_BAND, VERDICT_BAND
from fp8bench.errors import UsageError
from fp8bench.model import UNATTRIBUTED, Interval, Label, Phase, PhaseGain, Verdict
from fp8bench.model.run import BENCH
from fp8bench.model.specs import BEYOND_ROUNDING_ERROR, DIFFERENCE_ERROR, OUTPUT_ERROR
from fp8bench.registry import precisions
from fp8bench.report.case_status import (
    CaseStatus,
    describe_case_status,
    find_case_status,
    has_finite_bounds,
    list_speeds,
    speed_up,
    status_tone,
)
from fp8bench.report.elements import Sentences, Tone
from fp8bench.report.panels import Cases, NamedCase, Panel, Result, together
from fp8bench.report.terminal.short_answer import PrecisionAnswer
from fp8bench.report.topics.energy import ratio_to_reference
from fp8bench.report.topics.memory import device_peak_ratio, peak_ratio
from fp8bench.report.words.naming import find_majority_tone, name_work_outside_phases, shorten_line

LOW_PRECISION_QUESTION_TEXT = "Does low precision pay here?"
QUESTION_OF_CALLABLES = "Is it faster, and as exact?"
# Two errors count as equal unless the larger one exceeds the smaller one by this factor.
_EQUAL_ERROR_RATIO = 1.05
# A reason has at most this many characters.
MAX_REASON_LENGTH = 300
# A run is not proposed if it would take longer than this.
_MAX_PROPOSED_SECONDS = 900
# A command with one of these options measures a stored plan, whose precisions and rounds cannot be changed.
_OPTIONS_OF_A_STORED_PLAN = ("--plan", "--cell", "--resume")
_OPTIONS_WITH_VALUE = ("--budget", "--dtypes", "--rounds", "--seeds")
# A run without --budget spends about this many seconds on each group.
_DEFAULT_GROUP_SECONDS = 10
_SUBJECT_BY_ERROR_METRIC = {
    "gradient_error": "gradients",
    "product_error": "products",
    "update_error": "updates",
    "output_error": "outputs",
    "loss_error": "loss",
    "relative_error": "results",
}
# The name of each phase within a sentence.
_PHASE_NOUNS = {
    Phase.DATA_LOAD: "data loading",
    Phase.DECODE: "decoding",
    Phase.CAST: "casts",
    Phase.GEMM: "matmul",
    Phase.ATTENTION: "attention",
    Phase.ACCUMULATE: "accumulation",
    Phase.OPTIMIZER_STEP: "the optimizer",
    Phase.ELEMENTWISE: "elementwise work",
    Phase.COMMUNICATION: "communication",
    UNATTRIBUTED: "the rest of the step",
}


def find_case_answers(cases: Iterable[NamedCase]) -> list[PrecisionAnswer]:
    """Returns an answer for each precision except the reference. All cases of a precision share one answer."""
    cases_by_mode = together((case.mode, case) for case in cases if case.mode != case.group.reference)
    return list(map(make_precision_answer, cases_by_mode.values()))


def make_precision_answer(cases: Cases) -> PrecisionAnswer:
    """Returns the answer to the report's question about one precision. It sums up all cases of this precision."""
    speeds = list_speeds(cases)
    if len(cases) == 1 and speeds:
        speed_text = describe_speed(speeds[0])
    else:
        speed_text = units.span((speed.point for speed in speeds), units.speed_up) or _explain_emulation(cases)
    accuracy_text = _describe_callable_accuracy(cases) if cases[0].suite == BENCH else _describe_accuracy(cases)
    is_case_wrong = any(case.record.measurement(BEYOND_ROUNDING_ERROR) for case in cases)
    # The answer for several cases has a reason only if it is the same for all of them.
    reasons = {explain_speed(case) or case.record.reason for case in cases}
    return PrecisionAnswer(
        cases[0].mode,
        f"{'WRONG, ' * is_case_wrong}{_describe_verdicts(cases)}",
        Tone.BAD if is_case_wrong else find_majority_tone(map(status_tone, cases)),
        speed_text,
        (accuracy_text, _describe_memory(cases), _describe_energy(cases)),
        shorten_line(reasons.pop(), MAX_REASON_LENGTH) if len(reasons) == 1 else "",
    )


def _describe_verdicts(results: Sequence[Result]) -> str:
    """Returns the verdicts of a precision, as 'faster' or 'faster in 4 of 5, slower in 1'. Failures come first."""
    verdict_counts = Counter(map(verdict_word, results)).most_common()
    (main_verdict, main_count), *less_common = sorted(verdict_counts, key=lambda pair: pair[0] != "FAILED")
    if not less_common:
        return main_verdict
    less_common_verdict_texts = [f"{word} in {count}" for word, count in less_common]
    return ", ".join([f"{main_verdict} in {main_count} of {len(results)}", *less_common_verdict_texts])


def _explain_emulation(results: Sequence[Result]) -> str:
    """Returns why a precision is emulated, as 'no hardware for FP8', or '' if it is native."""
    reasons = dict.fromkeys(result.record.support.reason.partition(":")[0] for result in results if result.is_emulated)
    return next(iter(reasons), "")


VERDICT_COLUMNS = (
    "suite",
    "setting",
    "dtype",
    "reference",
    "verdict",
    "speed_up",
    "low",
    "high",
    "error",
    "memory",
    "energy",
    "reason",
)


def verdict_rows(panels: Sequence[Panel]) -> Iterator[tuple[str | float | None, ...]]:
    """Yields a row with VERDICT_COLUMNS for each case except references. Memory and energy are relative to those of
    the reference.
    """
    for panel in panels:
        for case in panel.named_cases:
            if case.is_reference:
                continue
            speed = speed_up(case)
            speed_fields = (speed.point, speed.low, speed.high) if speed is not None else (None, None, None)
            ratio = ratio_to_reference(case)
            yield (
                case.suite,
                case.setting_name,
                case.mode,
                panel.reference,
                verdict_word(case),
                *speed_fields,
                case.error_value,
                peak_ratio(case),
                ratio.point if ratio is not None else None,
                explain_speed(case),
            )


def verdict_word(result: Result) -> str:
    """Returns the verdict on a case in words that need no knowledge of this tool, as 'as fast' for 'same'."""
    word_by_status = {
        CaseStatus.EMULATED: "speed unknown",
        CaseStatus.SAME: "as fast",
        CaseStatus.UNTIMED: "not timed",
    }
    return word_by_status.get(find_case_status(result)) or describe_case_status(result).replace(Verdict.SAME, "as fast")


def describe_speed(speed: Interval) -> str:
    """Returns a speed as '1.01x, could be 0.997x to 1.02x'. A speed from a few rounds has only a range, as 'seen
    0.99x to 1.1x'.
    """
    if not has_finite_bounds(speed):
        return units.speed_up(speed.point)
    range_word = "could be" if speed.level else "seen"
    return f"{units.speed_up(speed.point)}, {range_word} {units.speed_up(speed.low)} to {units.speed_up(speed.high)}"


def _describe_accuracy(cases: Cases) -> str:
    """Returns the largest error of these cases, as 'gradients 0.55% off'. NaN counts as the largest error."""
    errors = [(case.error_value, case.group.error_metric) for case in cases if case.error_value is not None]
    if not errors:
        return ""
    largest_error, metric = max(errors, key=lambda pair: (math.isnan(pair[0]), abs(pair[0])))
    subject = _SUBJECT_BY_ERROR_METRIC.get(metric, metric.removesuffix("_error").replace("_", " "))
    if not math.isfinite(largest_error):
        return f"{subject} not finite"
    return f"{subject} {'up to ' if len(errors) > 1 else ''}{units.percentage(100 * largest_error)} off"


def _describe_callable_accuracy(cases: Cases) -> str:
    """Returns how much the results of a user's function differ from those of the reference and from float64 results.
    The text describes the case with the largest difference. Returns '' if no case has a difference.

    An example: 'differs from torch:matmul by 2.9e-03; less exact: off float64 by 2.9e-03, torch:matmul by 2.9e-07'.
    """
    # 1. Compare the callable with the results of the reference.
    case_difference_errors = [(case.median(DIFFERENCE_ERROR), case) for case in cases]
    differences = [(difference, case) for difference, case in case_difference_errors if difference is not None]
    if not differences:
        return ""
    largest_difference, case = max(differences, key=itemgetter(0))
    mode = case.group.reference
    if case.record.measurement(BEYOND_ROUNDING_ERROR):
        if largest_difference < 0.5:
            return f"a column differs from {mode} by more than half of its size, which rounding does not explain"
        return (
            f"it differs from {mode} by {largest_difference:.3g} times the size of the result, which rounding does not "
            "explain"
        )
    show_error = units.relative_error
    prefix = "up to " if len(differences) > 1 else ""
    difference_text = (
        f"differs from {mode} by {prefix}{show_error(largest_difference)}" if largest_difference else f"equal to {mode}"
    )
    # 2. Compare the callable and the reference with results in float64.
    output_error = case.median(OUTPUT_ERROR)
    reference_output_error = case.reference_result.median(OUTPUT_ERROR) if case.reference_result is not None else None
    if output_error is None or reference_output_error is None:
        return f"{difference_text}; its error is unknown: {mode} does not compute in float64"
    if max(output_error, reference_output_error) <= _EQUAL_ERROR_RATIO * min(output_error, reference_output_error):
        return f"{difference_text}; as exact: both off float64 by {show_error(output_error)}"
    accuracy_comparison_word = "more" if output_error < reference_output_error else "less"
    errors_text = f"off float64 by {show_error(output_error)}, {mode} by {show_error(reference_output_error)}"
    return f"{difference_text}; {accuracy_comparison_word} exact: {errors_text}"


def _describe_memory(cases: Cases) -> str:
    """Returns the change of peak memory, as 'memory +1.1%'. If all cases are emulated, the change is an estimate for
    hardware with the formats.
    """
    measured_memory_ratios = [
        ratio for case in cases if not case.is_emulated and (ratio := peak_ratio(case)) is not None
    ]
    if measured_memory_ratios:
        return f"memory {units.span(measured_memory_ratios, units.change)}"
    # The memory of an emulation is not that of hardware with the format, so use the estimate for this hardware.
    estimated_memory_ratios = [
        ratio for case in cases if case.is_emulated and (ratio := device_peak_ratio(case)) is not None
    ]
    return f"memory {units.span(estimated_memory_ratios, units.change)} (est.)" if estimated_memory_ratios else ""


def _describe_energy(cases: Cases) -> str:
    ratios = [ratio.point for case in cases if (ratio := ratio_to_reference(case)) is not None]
    return f"energy {units.span(ratios, units.change)}" if ratios else ""


def explain_speed(case: NamedCase) -> str:
    """Returns why a case is faster or slower, as 'matmul saves 10.4 ms (2.7x), attention costs 8.1 ms (3.7x slower):
    they nearly cancel'.

    Returns '' for an emulated case. Also returns '' if a label prevented the verdict, unless it was only the label
    launch-bound, which explains the speed itself.
    """
    if case.is_emulated:
        return ""
    if {*case.finding.hard} == {Label.LAUNCH_BOUND} and Label.LAUNCH_BOUND in case.labels:
        return "the device waits for the host, so faster arithmetic cannot shorten this step"
    reason = find_speed_reason(case)
    return describe_speed_reason(reason, name_work_outside_phases(case)) if reason is not None else ""


def find_speed_reason(case: NamedCase) -> PhaseGainReason | None:
    """Returns which phases explain the speed of a case, or None if unknown. Phases that are too short to measure are
    ignored.
    """
    if case.finding.hard:
        return None
    too_short_phases = {*case.finding.below_floor}
    if case.reference_result is not None:
        too_short_phases.update(case.reference_result.finding.below_floor)
    return find_explaining_phases(case.finding.gains, too_short_phases)


def describe_speed_reason(reason: PhaseGainReason, work_outside_phases: str = "") -> str:
    """Returns the reason for a step's speed. `work_outside_phases` is the name for time outside of phases, or ''."""
    gains_text = _describe_gains(reason.gains, work_outside_phases)
    saved_seconds = reason.reference_seconds - reason.step_seconds
    match reason.cause:
        case PhaseGainCause.CANCEL:
            return f"{gains_text}: they nearly cancel"
        case PhaseGainCause.CASTS:
            gained_seconds = sum(gain.saved_seconds for gain in reason.gains if gain.saved_seconds > 0)
            cast_seconds = -sum(gain.saved_seconds for gain in reason.gains if gain.phase == Phase.CAST)
            casts_take_whole_gain = saved_seconds <= 0 and cast_seconds >= gained_seconds
            return f"{gains_text}: casts take {'all' if casts_take_whole_gain else 'most'} of the gain"
        case PhaseGainCause.SMALL_SHARE:
            (first_gain, *_) = (gain for gain in reason.gains if gain.saved_seconds > 0)
            step_share = units.percent(first_gain.reference_seconds / reason.reference_seconds, 0)
            return f"{gains_text}: {_PHASE_NOUNS[first_gain.phase]} had only {step_share} of the step"
        case PhaseGainCause.ONE_PHASE:
            return f"{_describe_gains(reason.gains[:1], work_outside_phases)}, which is nearly all of the gain"
        case _:
            return gains_text


def _describe_gains(gains: Sequence[PhaseGain], work_outside_phases: str) -> str:
    """Returns what phases save or cost, as 'matmul saves 10.4 ms (2.70x), attention costs 8.10 ms (3.70x slower),
    casts 2.30 ms'. `work_outside_phases` is the name for time outside of phases, or ''.
    """
    phase_gain_phrases = []
    previous_gain_verb = ""
    for gain in gains:
        phase_noun = (
            work_outside_phases if work_outside_phases and gain.phase == UNATTRIBUTED else _PHASE_NOUNS[gain.phase]
        )
        gain_verb = "save" if gain.saved_seconds > 0 else "cost"
        if gain_verb != previous_gain_verb:
            is_noun_plural = gain.phase == Phase.CAST or " and " in phase_noun
            phase_noun += f" {gain_verb}" if is_noun_plural else f" {gain_verb}s"
        phase_gain_phrases.append(f"{phase_noun} {_describe_seconds(gain)}")
        previous_gain_verb = gain_verb
    return ", ".join(phase_gain_phrases)


def _describe_seconds(gain: PhaseGain) -> str:
    seconds = units.seconds(abs(gain.saved_seconds))
    shorter_seconds, longer_seconds = sorted((gain.seconds, gain.reference_seconds))
    # A phase that only one of the two steps has gives no ratio.
    if shorter_seconds <= 0:
        return seconds
    return (
        f"{seconds} ({units.speed_up(longer_seconds / shorter_seconds)}{'' if gain.saved_seconds > 0 else ' slower'})"
    )


def propose_commands(cases: Cases, command: str, under_load: bool = False, budget: float | None = None) -> Sentences:
    """Yields sentences with commands. Each command would settle an open verdict, remove a slow-down, or check a
    user's function.

    `command` is the command line of the run, and `budget` its time limit in seconds.
    """
    yield from _propose_commands(cases, command, under_load, budget)
    callables = [case.mode for case in cases if case.suite == BENCH and not case.is_reference]
    if callables:
        audit_command = f"fp8bench audit {callables[0]} --kind product --precision fp8"
        yield f"check a kernel in full, by its own kind and precision: {audit_command}"


def _propose_commands(cases: Cases, command: str, under_load: bool, budget: float | None) -> Sentences:
    # 1. If only references were measured, propose precisions. Otherwise, if the machine is loaded, propose to free it,
    # because more rounds would not help.
    is_measuring_command = any(f"fp8bench {word} " in command for word in ("suite", BENCH))
    is_measuring_command = is_measuring_command and not any(
        f" {option}" in command for option in _OPTIONS_OF_A_STORED_PLAN
    )
    if is_measuring_command and cases and all(case.is_reference for case in cases):
        yield f"name precisions to compare: {remove_option(command, '--dtypes')} --dtypes fp32,bf16,fp8"
    elif under_load:
        yield f"free the machine, and measure again: {remove_option(command, '--quick', '--rounds')}"
    if not is_measuring_command:
        return
    # 2. Propose more rounds for verdicts that are open.
    if not under_load:
        # If a label other than CONTENDED prevents a verdict, more rounds do not help.
        unsure_cases = [
            case
            for case in cases
            if find_case_status(case) is CaseStatus.UNSURE
            and not {*case.finding.hard} - {Label.CONTENDED}
            and not case.finding.why.endswith(MORE_ROUNDS_DO_NOT_HELP)
        ]
        default_budget_seconds = _DEFAULT_GROUP_SECONDS * len({case.group.case.setting for case in cases})
        yield from _propose_longer_run(unsure_cases, command, budget or default_budget_seconds)
    # 3. Propose changes that would act on the reason for the speed.
    yield from dict.fromkeys(chain.from_iterable(_propose_command_changes(case, command) for case in cases))


def _propose_longer_run(cases: Cases, command: str, budget: float) -> Sentences:
    speeds = list_speeds(cases)
    if not speeds:
        return
    full_run_command = remove_option(command, "--quick", "--rounds")
    # A run of only a few rounds does not show how many rounds a verdict needs.
    if any(speed.level == 0 for speed in speeds):
        yield f"measure this again in full on a quiet machine: {full_run_command}"
        return
    seconds = max(_estimate_seconds_to_verdict(speed, budget) for speed in speeds)
    if seconds <= _MAX_PROPOSED_SECONDS:
        longer_run_command = f"{remove_option(full_run_command, '--budget')} --budget {seconds}"
        yield f"measure for {units.clock(seconds)}, long enough for a verdict on this difference: {longer_run_command}"


def _estimate_seconds_to_verdict(speed: Interval, budget: float) -> int:
    """Returns how many seconds of measuring would make the interval narrow enough for a verdict, rounded up to tens.

    The width of the interval falls with the square root of the number of rounds.
    """
    log_speed = abs(math.log(speed.point))
    # With this half-width the interval fits into the band of "as fast", or stays outside the band around 1x.
    target_interval_width = max(SAME_BAND - log_speed, log_speed - VERDICT_BAND, VERDICT_BAND)
    budget_growth_factor = max(2.0, (speed.half_width / target_interval_width) ** 2)
    # An infinite half-width would overflow. The caller drops a proposal that reaches this limit.
    return 10 * math.ceil(min(budget * budget_growth_factor, 10 * _MAX_PROPOSED_SECONDS) / 10)


def _propose_command_changes(case: NamedCase, command: str) -> Sentences:
    reason = find_speed_reason(case)
    if reason is None or find_case_status(case) is CaseStatus.FASTER:
        return
    params = dict(case.record.case.params)
    slower_phases = {gain.phase for gain in reason.gains if gain.saved_seconds < 0}
    if Phase.ATTENTION in slower_phases and params.get("attention") == "auto" and "attention=" not in command:
        yield f"compare torch's kernels of attention, in twice the time: {command} --set attention=auto,math"
    # A compiled graph cannot keep the state that some precisions carry from step to step.
    can_compile = params.get("compile") == "no" and params.get("models") != "rlhf" and not _precision_keeps_state(case)
    if Phase.CAST in slower_phases and can_compile and "compile=" not in command:
        yield f"let torch.compile fuse the casts into their neighbours: {command} --set compile=yes"


def _precision_keeps_state(case: NamedCase) -> bool:
    """Returns whether the precision keeps state between steps, as delayed scaling does."""
    try:
        return precisions.get(case.record.case.precision).remembers
    except UsageError:
        # This version does not know the precision, so do not propose to compile it.
        return True


def remove_option(command: str, *options: str) -> str:
    """Returns the command line without the given options and their values."""
    command_words = iter(command.split(" "))
    remaining_command_words = []
    for word in command_words:
        # An option and its value are one word if they are joined by '=', otherwise two words.
        if word.partition("=")[0] not in options:
            remaining_command_words.append(word)
        elif word in _OPTIONS_WITH_VALUE:
            next(command_words, None)
    return " ".join(remaining_command_words)
