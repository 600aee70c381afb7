"""The answer for each precision of a step: the verdict, its cost, the reason, and what would settle it.

Terminal and page show the same sentences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

from fp8bench import units
from fp8bench.analysis.phase_gains import Cause, Reason, find_reason
from fp8bench.analysis.verdicts import BAND, SAME
from fp8bench.errors import UsageError
from fp8bench.model import UNATTRIBUTED, Interval, Label, Phase, PhaseGain, Verdict
from fp8bench.model.run import BENCH
from fp8bench.model.specs import DIFFERENCE_ERROR, OUTPUT_ERROR
from fp8bench.registry import precisions
from fp8bench.report.case_status import Standing, speed_up, standing, status_words, tone_of
from fp8bench.report.elements import Sentences
from fp8bench.report.panels import Cases, NamedCase, Panel, Result, together, value_of
from fp8bench.report.terminal.short_answer import Answer
from fp8bench.report.topics.energy import ratio_of
from fp8bench.report.topics.memory import device_share_of, share_of
from fp8bench.report.words.naming import common_tone, shorten_line

QUESTION = "Does low precision pay here?"
QUESTION_OF_CALLABLES = "Is it faster, and as exact?"
# Beyond this ratio the smaller of two errors counts as more exact.
_NEARER = 1.05
# In letters.
LONGEST_REASON = 300
# Longer runs than this are not proposed.
_MOST_SECONDS = 900
# Commands with these options continue another command's plan.
_OF_ANOTHER_PLAN = ("--plan", "--cell", "--resume")
_WITH_VALUE = ("--budget", "--rounds", "--seeds")
# A default run spends this many seconds per group.
_GROUP_SECONDS = 10
_MEASURED = {
    "gradient_error": "gradients",
    "product_error": "products",
    "update_error": "updates",
    "output_error": "outputs",
    "loss_error": "loss",
    "relative_error": "results",
}
# Phases in a sentence.
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


def find_answers(cases: Iterable[NamedCase]) -> list[Answer]:
    """Returns an answer for each precision, from all of its cases; references are left out."""
    by_mode = together((case.mode, case) for case in cases if case.mode != case.group.reference)
    return list(map(find_answer, by_mode.values()))


def find_answer(cases: Cases) -> Answer:
    """Returns the answer for one precision; several cases are summed up."""
    speeds = [speed for case in cases if (speed := speed_up(case)) is not None]
    if len(speeds) == len(cases) == 1:
        figure = describe_speed(speeds[0])
    elif speeds:
        figure = units.span((speed.point for speed in speeds), units.speed_up)
    else:
        figure = _why_no_speed(cases)
    accuracy = _accuracy_of_callables(cases) if cases[0].suite == BENCH else _accuracy(cases)
    # A reason is only named if all cases share it.
    reasons = {describe_reason(case) or case.record.reason for case in cases}
    return Answer(
        cases[0].mode,
        _describe_verdicts(cases),
        common_tone(map(tone_of, cases)),
        figure,
        (accuracy, _memory(cases), _energy(cases)),
        shorten_line(reasons.pop(), LONGEST_REASON) if len(reasons) == 1 else "",
    )


def _describe_verdicts(results: Sequence[Result]) -> str:
    """Returns 'faster', or 'faster in 4 of 5, slower in 1'; failures come first."""
    words = Counter(map(verdict_word, results))
    (first, number), *less_common = sorted(words.items(), key=lambda pair: (pair[0] != "FAILED", -pair[1]))
    if not less_common:
        return first
    remaining = [f"{word} in {count}" for word, count in less_common]
    return ", ".join([f"{first} in {number} of {len(results)}", *remaining])


def _why_no_speed(results: Sequence[Result]) -> str:
    """Returns why a precision is emulated, without how: 'no hardware for FP8'; '' for native ones."""
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
    """Yields a row of VERDICT_COLUMNS for each case except references; memory and energy are relative to the
    reference."""
    for panel in panels:
        for case in panel.members:
            if case.is_reference:
                continue
            speed = speed_up(case)
            bounds = (speed.point, speed.low, speed.high) if speed is not None else (None, None, None)
            ratio = ratio_of(case)
            yield (
                case.suite,
                case.place,
                case.mode,
                panel.reference,
                verdict_word(case),
                *bounds,
                case.error,
                share_of(case),
                ratio.point if ratio is not None else None,
                describe_reason(case),
            )


def verdict_word(result: Result) -> str:
    """Returns the verdict in words for readers who have never seen the tool."""
    plain_words = {
        Standing.EMULATED: "no speed here",
        Standing.SAME: "as fast",
        Standing.UNTIMED: "not timed",
    }
    return plain_words.get(standing(result)) or status_words(result).replace(Verdict.SAME, "as fast")


def describe_speed(speed: Interval) -> str:
    """Returns '1.01x, could be 0.997x to 1.02x'; 'seen 0.99x to 1.1x' for the range of few rounds."""
    if math.isinf(speed.half_width) or not math.isfinite(speed.low):
        return units.speed_up(speed.point)
    verb = "could be" if speed.level else "seen"
    return f"{units.speed_up(speed.point)}, {verb} {units.speed_up(speed.low)} to {units.speed_up(speed.high)}"


def _accuracy(cases: Cases) -> str:
    """Returns the largest error of the cases, as 'gradients 0.55% off'; NaN counts as the largest."""
    errors = [(case.error, case.group.error) for case in cases if case.error is not None]
    if not errors:
        return ""
    worst, metric = max(errors, key=lambda pair: (math.isnan(pair[0]), abs(pair[0])))
    measured = _MEASURED.get(metric, metric.removesuffix("_error").replace("_", " "))
    if not math.isfinite(worst):
        return f"{measured} not finite"
    return f"{measured} {'up to ' if len(errors) > 1 else ''}{units.percentage(100 * worst)} off"


def _accuracy_of_callables(cases: Cases) -> str:
    """Returns 'differs from torch:matmul by 2.9e-03; off float64 by 2.9e-03 (torch:matmul 2.9e-07, more exact)'.

    For several cases the largest difference counts; '' if none has a difference.
    """
    # 1. How far it is from the reference.
    differences = []
    for case in cases:
        difference = value_of(case.record.measurement(DIFFERENCE_ERROR))
        if difference is not None:
            differences.append((difference, case))
    if not differences:
        return ""
    largest, case = max(differences, key=itemgetter(0))
    mode = case.group.reference
    reference = case.lead
    show = units.relative_error
    most = "up to " if len(differences) > 1 else ""
    words = f"differs from {mode} by {most}{show(largest)}" if largest else f"equal to {mode}"
    # 2. How far both are from float64.
    error = value_of(case.record.measurement(OUTPUT_ERROR))
    reference_error = value_of(reference.record.measurement(OUTPUT_ERROR)) if reference is not None else None
    if error is None or reference_error is None:
        return f"{words}; its error is unknown: {mode} does not compute in float64"
    if max(error, reference_error) <= _NEARER * min(error, reference_error):
        return f"{words}; both off float64 by {show(error)}"
    word = "less" if error < reference_error else "more"
    return f"{words}; off float64 by {show(error)} ({mode} {show(reference_error)}, {word} exact)"


def _memory(cases: Cases) -> str:
    """Returns 'memory +1.1%'; if all cases are emulated, the estimate for a device with the formats."""
    native = [share for case in cases if not case.is_emulated and (share := share_of(case)) is not None]
    if native:
        return f"memory {units.span(native, units.change)}"
    # The memory of an emulation does not apply to a device with its formats.
    derived = [share for case in cases if case.is_emulated and (share := device_share_of(case)) is not None]
    if derived:
        return f"memory {units.span(derived, units.change)} (est.)"
    return ""


def _energy(cases: Cases) -> str:
    ratios = [ratio.point for case in cases if not case.is_emulated and (ratio := ratio_of(case)) is not None]
    if ratios:
        return f"energy {units.span(ratios, units.change)}"
    return ""


def describe_reason(case: NamedCase) -> str:
    """Returns 'matmul saves 10.4 ms (2.7x), attention costs 8.1 ms (3.7x slower): they nearly cancel'.

    '' for emulations, and if a hard label withdrew the verdict.
    """
    finding = case.finding
    if finding is None or case.is_emulated:
        return ""
    if {*finding.hard} == {Label.LAUNCH_BOUND} and Label.LAUNCH_BOUND in finding.labels:
        return "the device waits for the host, so faster arithmetic cannot shorten this step"
    reason = reason_of(case)
    if reason is not None:
        return describe(reason)
    return ""


def reason_of(case: NamedCase) -> Reason | None:
    """Returns the explanation by phases, ignoring those too short compared with the cost of marking them."""
    finding = case.finding
    reference = case.lead
    if finding is None or finding.hard:
        return None
    short = {*finding.below_floor}
    if reference is not None and reference.finding is not None:
        short.update(reference.finding.below_floor)
    return find_reason(finding.gains, short)


def describe(reason: Reason) -> str:
    changes = _describe_gains(reason.gains)
    saved = reason.reference_seconds - reason.step_seconds
    match reason.cause:
        case Cause.CANCEL:
            return f"{changes}: they nearly cancel"
        case Cause.CASTS:
            gained = sum(gain.saved_seconds for gain in reason.gains if gain.saved_seconds > 0)
            casts = -sum(gain.saved_seconds for gain in reason.gains if gain.phase == Phase.CAST)
            return f"{changes}: casts take {'all' if saved <= 0 and casts >= gained else 'most'} of the gain"
        case Cause.SMALL_SHARE:
            (first, *_) = (gain for gain in reason.gains if gain.saved_seconds > 0)
            share = units.percent(first.reference_seconds / reason.reference_seconds, 0)
            return f"{changes}: {_PHASE_NOUNS[first.phase]} had only {share} of the step"
        case Cause.ONE_PHASE:
            return f"{_describe_gains(reason.gains[:1])}, which is nearly all of the gain"
        case _:
            return changes


def _describe_gains(gains: Sequence[PhaseGain]) -> str:
    """Returns 'matmul saves 10.4 ms (2.70x), attention costs 8.10 ms (3.70x slower), casts 2.30 ms'."""
    words = []
    previous_verb = ""
    for gain in gains:
        noun = _PHASE_NOUNS[gain.phase]
        verb = "save" if gain.saved_seconds > 0 else "cost"
        if verb != previous_verb:
            noun += f" {verb}" if gain.phase == Phase.CAST else f" {verb}s"
        words.append(f"{noun} {_describe_seconds(gain)}")
        previous_verb = verb
    return ", ".join(words)


def _describe_seconds(gain: PhaseGain) -> str:
    seconds = units.seconds(abs(gain.saved_seconds))
    if min(gain.seconds, gain.reference_seconds) <= 0:
        return seconds
    if gain.saved_seconds > 0:
        return f"{seconds} ({units.speed_up(gain.reference_seconds / gain.seconds)})"
    return f"{seconds} ({units.speed_up(gain.seconds / gain.reference_seconds)} slower)"


def propose(cases: Cases, command: str, under_load: bool = False, budget: float | None = None) -> Sentences:
    """Yields what would settle open verdicts, then what could remove the reason, or check a callable further, each with
    a command. `command` and `budget` are those of the run.
    """
    yield from _propose_runs(cases, command, under_load, budget)
    callables = [case.mode for case in cases if case.suite == BENCH and not case.is_reference]
    if callables:
        audit = f"fp8bench audit {callables[0]} --kind product --precision fp8"
        yield f"check a kernel in full, by its own kind and precision: {audit}"


def _propose_runs(cases: Cases, command: str, under_load: bool, budget: float | None) -> Sentences:
    # 1. Under load, more rounds do not help.
    if under_load:
        in_full = without_option(without_option(command, "--quick"), "--rounds")
        yield f"free the machine, and measure again: {in_full}"
    measures = any(f"fp8bench {word} " in command for word in ("suite", BENCH))
    if not measures or any(f" {option}" in command for option in _OF_ANOTHER_PLAN):
        return
    # 2. Propose more rounds for open verdicts.
    if not under_load:
        # More rounds cannot restore a verdict that a label withdrew.
        unsettled = []
        for case in cases:
            withdrawn_by = {*case.finding.hard} - {Label.CONTENDED} if case.finding else ()
            if standing(case) is Standing.UNSURE and not withdrawn_by:
                unsettled.append(case)
        usual = _GROUP_SECONDS * len({case.group.case.setting for case in cases})
        yield from _settle(unsettled, command, budget or usual)
    # 3. Propose changes that would affect the reason.
    yield from dict.fromkeys(chain.from_iterable(_change(case, command) for case in cases))


def _settle(cases: Cases, command: str, budget: float) -> Sentences:
    speeds = [speed for case in cases if (speed := speed_up(case)) is not None]
    if not speeds:
        return
    plain = without_option(without_option(command, "--quick"), "--rounds")
    # The range of few rounds does not show how many more would be enough.
    if any(speed.level == 0 for speed in speeds):
        yield f"measure this again in full on a quiet machine: {plain}"
        return
    seconds = max(_seconds_to_settle(speed, budget) for speed in speeds)
    if seconds <= _MOST_SECONDS:
        text = f"{without_option(plain, '--budget')} --budget {seconds}"
        yield f"measure for {units.clock(seconds)}, long enough for a verdict on this difference: {text}"


def _seconds_to_settle(speed: Interval, budget: float) -> int:
    """Returns the seconds after which the interval is narrow enough for some verdict, rounded up to whole tens.

    Its width falls with the square root of the rounds.
    """
    effect = abs(math.log(speed.point))
    narrow_enough = max(SAME - effect, effect - BAND, BAND)
    longer = max(2.0, (speed.half_width / narrow_enough) ** 2)
    return 10 * math.ceil(min(budget * longer, 10 * _MOST_SECONDS) / 10)


def _change(case: NamedCase, command: str) -> Sentences:
    reason = reason_of(case)
    if reason is None or standing(case) is Standing.FASTER:
        return
    params = dict(case.record.case.params)
    losing = {gain.phase for gain in reason.gains if gain.saved_seconds < 0}
    if Phase.ATTENTION in losing and params.get("attention") == "auto" and "attention=" not in command:
        yield f"compare torch's kernels of attention, in twice the time: {command} --set attention=auto,math"
    # A graph cannot keep the state that a precision carries from step to step.
    can_compile = params.get("compile") == "no" and params.get("models") != "rlhf" and not _remembers(case)
    if Phase.CAST in losing and can_compile and "compile=" not in command:
        yield f"let torch.compile fuse the casts into their neighbours: {command} --set compile=yes"


def _remembers(case: NamedCase) -> bool:
    """Whether the precision keeps state from step to step."""
    try:
        return precisions.get(case.record.case.precision).remembers
    except UsageError:
        return True


def without_option(command: str, option: str) -> str:
    """Drops an option, and the value of one that has a value."""
    words = iter(command.split(" "))
    remaining = []
    for word in words:
        if word == option and option in _WITH_VALUE:
            next(words, None)
        elif word != option and not word.startswith(f"{option}="):
            remaining.append(word)
    return " ".join(remaining)
