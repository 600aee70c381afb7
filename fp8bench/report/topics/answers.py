"""The answer for each precision of a step: the verdict, what it costs, why, and what would settle it.

Terminal and page show the same sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.analysis.phase_gains import Cause, Reason, find_reason
from fp8bench.analysis.verdicts import BAND, SAME
from fp8bench.errors import UsageError
from fp8bench.model import UNATTRIBUTED, Interval, Label, Phase, PhaseGain, Verdict
from fp8bench.model.run import BENCH
from fp8bench.model.specs import DIFFERENCE_ERROR, OUTPUT_ERROR
from fp8bench.registry import precisions
from fp8bench.report.case_status import Standing, emulated, speed_up, standing, status_words, tone_of
from fp8bench.report.elements import Tone
from fp8bench.report.panels import NamedCase, Panel, Result, value_of
from fp8bench.report.topics.energy import ratio_against
from fp8bench.report.topics.memory import device_share_of, share_of
from fp8bench.report.words.legend import error_word

QUESTION = "Does low precision pay here?"
QUESTION_OF_CALLABLES = "Is it faster, and as exact?"
# Beyond this ratio the smaller of two errors is nearer to float64.
_NEARER = 1.05
# Longer runs than this are not proposed.
_MOST_SECONDS = 900
# Commands with these measure what another command planned.
_OF_ANOTHER_PLAN = ("--plan", "--cell", "--resume")
# A default run gives a group so many seconds.
_GROUP_SECONDS = 10
_MEASURED = {
    "gradient_error": "gradients",
    "product_error": "products",
    "update_error": "updates",
    "output_error": "outputs",
    "loss_error": "loss",
}
# Phases in a sentence: the noun, and whether it is plural.
_PHASE_NOUNS = {
    Phase.DATA_LOAD: ("data loading", False),
    Phase.DECODE: ("decoding", False),
    Phase.CAST: ("casts", True),
    Phase.GEMM: ("matmul", False),
    Phase.ATTENTION: ("attention", False),
    Phase.ACCUMULATE: ("accumulation", False),
    Phase.OPTIMIZER_STEP: ("the optimizer", False),
    Phase.ELEMENTWISE: ("elementwise work", False),
    Phase.COMMUNICATION: ("communication", False),
    UNATTRIBUTED: ("the rest of the step", False),
}


@dataclass(frozen=True)
class Answer:
    """What a reader is told of one precision. `reason` is '' where the phases show none."""

    mode: str
    verdict: str
    tone: Tone
    speed: str
    costs: tuple[str, ...]
    reason: str


def find_answers(panel: Panel) -> list[Answer]:
    """Returns the answer for each case of a panel of one group, the reference apart."""
    return [find_answer(case) for case in panel.members if not case.result.record.is_reference]


def find_answer(case: NamedCase) -> Answer:
    result = case.result
    speed = speed_up(result)
    accuracy = _accuracy_of_callable(case) if case.suite == BENCH else _accuracy(case)
    costs = tuple(filter(None, (accuracy, _memory(case), _energy(case))))
    words = describe_speed(speed) if speed is not None else _why_no_speed(result)
    return Answer(result.mode, verdict_word(result), tone_of(result), words, costs, describe_reason(case))


def _why_no_speed(result: Result) -> str:
    if result.record.reason or result.record.support.is_native:
        return result.record.reason
    return result.record.support.reason


VERDICT_COLUMNS = (
    "suite", "setting", "dtype", "reference", "verdict", "speed_up", "low", "high", "error", "memory", "energy",
    "reason",
)  # fmt: skip


def verdict_rows(panels: Sequence[Panel]) -> Iterator[tuple[str | float | None, ...]]:
    """Yields a row of VERDICT_COLUMNS for each case but references; memory and energy are over the reference's."""
    for panel in panels:
        for case in panel.members:
            result, speed = case.result, speed_up(case.result)
            if result.record.is_reference:
                continue
            bounds = (speed.point, speed.low, speed.high) if speed is not None else (None, None, None)
            ratio = ratio_against(result, case.group.lead)
            yield (
                case.suite, case.place, result.mode, panel.reference, verdict_word(result), *bounds, case.error,
                share_of(case.group, result), ratio.point if ratio is not None else None, describe_reason(case),
            )  # fmt: skip


def verdict_word(result: Result) -> str:
    """The verdict as a reader who has never seen the tool understands it."""
    known = {
        Standing.UNSURE: "cannot tell",
        Standing.EMULATED: "no speed here",
        Standing.SAME: "as fast",
        Standing.UNTIMED: "not timed",
    }
    return known.get(standing(result)) or status_words(result).replace(Verdict.SAME, "as fast")


def describe_speed(speed: Interval) -> str:
    """'1.01x, could be 0.997x to 1.02x'; the range of few rounds is what was seen, and no interval."""
    if math.isinf(speed.half_width) or not math.isfinite(speed.low):
        return units.speed_up(speed.point)
    verb = "could be" if speed.level else "seen"
    return f"{units.speed_up(speed.point)}, {verb} {units.speed_up(speed.low)} to {units.speed_up(speed.high)}"


def _accuracy(case: NamedCase) -> str:
    if case.error is None:
        return ""
    measured = _MEASURED.get(case.group.error, case.group.error.removesuffix("_error").replace("_", " "))
    if not math.isfinite(case.error):
        return f"accuracy: {measured} not finite"
    word = error_word([(case.group.error, case.error)])
    return f"accuracy: {measured} {units.percentage(100 * case.error)} off ({word})"


def _accuracy_of_callable(case: NamedCase) -> str:
    """'accuracy: 2.9e-03 from torch:matmul (small); from float64 2.9e-03, torch:matmul 2.9e-07: torch:matmul is
    nearer'."""
    own, mode, lead = case.result.record, case.group.reference, case.group.lead
    apart, exact = value_of(own.measurement(DIFFERENCE_ERROR)), value_of(own.measurement(OUTPUT_ERROR))
    theirs = value_of(lead.record.measurement(OUTPUT_ERROR)) if lead is not None else None
    if apart is None:
        return ""
    shown = units.relative_error
    words = f"accuracy: {shown(apart)} from {mode} ({error_word([(DIFFERENCE_ERROR, apart)])})"
    words = words if apart else f"accuracy: equal to {mode}"
    if exact is None or theirs is None:
        return f"{words}; not known from float64, in which {mode} does not compute"
    if max(exact, theirs) <= _NEARER * min(exact, theirs):
        return f"{words}; both {shown(exact)} from float64"
    nearer = case.result.mode if exact < theirs else mode
    return f"{words}; from float64 {shown(exact)}, {mode} {shown(theirs)}: {nearer} is nearer"


def _memory(case: NamedCase) -> str:
    """'memory +1.1%'; for an emulated case what a device with its formats would take, which is an estimate."""
    if emulated(case.result):
        share = device_share_of(case.group, case.result)
        return f"memory {units.change(share)} (estimate)" if share is not None else ""
    share = share_of(case.group, case.result)
    return f"memory {units.change(share)}" if share is not None else ""


def _energy(case: NamedCase) -> str:
    ratio = ratio_against(case.result, case.group.lead)
    return f"energy {units.change(ratio.point)}" if ratio is not None and not emulated(case.result) else ""


def describe_reason(case: NamedCase) -> str:
    """'matmul saves 10.4 ms (2.7x), attention costs 8.1 ms (3.7x slower): they nearly cancel'; else ''.

    Nothing is said of emulations, or where a hard label took the verdict away.
    """
    finding = case.result.finding
    if finding is None or emulated(case.result):
        return ""
    if {*finding.hard} == {Label.LAUNCH_BOUND} and Label.LAUNCH_BOUND in finding.labels:
        return "the device waits for the host, so faster arithmetic cannot shorten this step"
    reason = reason_of(case)
    return describe(reason) if reason is not None else ""


def reason_of(case: NamedCase) -> Reason | None:
    """Returns what the phases show, those apart that are too short to be told from the cost of marking them."""
    finding, lead = case.result.finding, case.group.lead
    if finding is None or finding.hard:
        return None
    reference = lead.finding if lead is not None else None
    short = {*finding.below_floor, *(reference.below_floor if reference is not None else ())}
    return find_reason(finding.gains, short)


def describe(reason: Reason) -> str:
    changes = ", ".join(map(_describe_gain, reason.gains))
    saved = reason.reference_seconds - reason.step_seconds
    match reason.cause:
        case Cause.CANCEL:
            return f"{changes}: they nearly cancel"
        case Cause.CASTS:
            gained = sum(gain.saved for gain in reason.gains if gain.saved > 0)
            casts = -sum(gain.saved for gain in reason.gains if gain.phase == Phase.CAST)
            return f"{changes}: casts take {'all' if saved <= 0 and casts >= gained else 'most'} of the gain"
        case Cause.SMALL_SHARE:
            (first, *_) = (gain for gain in reason.gains if gain.saved > 0)
            share = units.percent(first.reference_seconds / reason.reference_seconds, 0)
            return f"{changes}: {_PHASE_NOUNS[first.phase][0]} had only {share} of the step"
        case Cause.ONE_PHASE:
            return f"{_describe_gain(reason.gains[0])}, which is nearly all of the gain"
        case _:
            return changes


def _describe_gain(gain: PhaseGain) -> str:
    noun, plural = _PHASE_NOUNS[gain.phase]
    seconds = units.seconds(abs(gain.saved))
    verb = "save" if gain.saved > 0 else "cost"
    verb += "s" * (not plural)
    if min(gain.seconds, gain.reference_seconds) <= 0:
        return f"{noun} {verb} {seconds}"
    if gain.saved > 0:
        return f"{noun} {verb} {seconds} ({units.speed_up(gain.reference_seconds / gain.seconds)})"
    return f"{noun} {verb} {seconds} ({units.speed_up(gain.seconds / gain.reference_seconds)} slower)"


def propose(panel: Panel, command: str, under_load: bool = False, budget: float | None = None) -> Iterator[str]:
    """Yields what would settle open verdicts, then what would change the reason, or check a callable further, each with
    the command to type.

    `command` and `budget` are those of the run. More time is no remedy for what was measured `under_load`.
    """
    yield from _propose_runs(panel, command, under_load, budget)
    if panel.case.workload == BENCH:
        yield from _audit(panel)


def _propose_runs(panel: Panel, command: str, under_load: bool, budget: float | None) -> Iterator[str]:
    measures = any(f"fp8bench {word} " in command for word in ("suite", BENCH))
    if not measures or any(f" {option}" in command for option in _OF_ANOTHER_PLAN):
        return
    unsettled = [case for case in panel.members if standing(case.result) is Standing.UNSURE]
    if not under_load:
        yield from _settle([case for case in unsettled if not _is_spoilt(case)], command, budget or _GROUP_SECONDS)
    yield from dict.fromkeys(words for case in panel.members for words in _change(case, command))


def _audit(panel: Panel) -> Iterator[str]:
    """Proposes the full check of the first callable."""
    words = "check a kernel in full, by its own kind and precision"
    for target in [case.result.mode for case in panel.members if case.result.mode != panel.reference][:1]:
        yield f"{words}: fp8bench audit {target} --kind product --precision fp8"


def _is_spoilt(case: NamedCase) -> bool:
    """Whether a label took the verdict away, so that more rounds do not bring it back."""
    return case.result.finding is not None and bool({*case.result.finding.hard} - {Label.CONTENDED})


def _settle(cases: Sequence[NamedCase], command: str, budget: float) -> Iterator[str]:
    speeds = [speed for case in cases if (speed := speed_up(case.result)) is not None]
    if not speeds:
        return
    plain = _without(_without(command, "--quick"), "--rounds")
    if any(speed.level == 0 for speed in speeds):
        yield f"measure this again in full on a quiet machine: {plain}"
        return
    seconds = max(_seconds_to_settle(speed, budget) for speed in speeds)
    if seconds <= _MOST_SECONDS:
        text = f"{_without(plain, '--budget')} --budget {seconds}"
        yield f"tell such a difference from none in {units.clock(seconds)}: {text}"


def _seconds_to_settle(speed: Interval, budget: float) -> int:
    """Returns the seconds after which the interval is narrow enough for some verdict, rounded up to whole tens.

    Its width falls with the square root of the rounds.
    """
    effect = abs(math.log(speed.point))
    narrow_enough = max(SAME - effect, effect - BAND, BAND)
    longer = max(2.0, (speed.half_width / narrow_enough) ** 2)
    return 10 * math.ceil(min(budget * longer, 10 * _MOST_SECONDS) / 10)


def _change(case: NamedCase, command: str) -> Iterator[str]:
    reason = reason_of(case)
    if reason is None or standing(case.result) is Standing.FASTER:
        return
    params = dict(case.result.record.case.params)
    losing = {gain.phase for gain in reason.gains if gain.saved < 0}
    if Phase.ATTENTION in losing and params.get("attention") == "auto" and "attention=" not in command:
        yield f"compare torch's kernels of attention, in twice the time: {command} --set attention=auto,math"
    can_compile = params.get("compile") == "no" and params.get("models") != "rlhf" and not _remembers(case)
    if Phase.CAST in losing and can_compile and "compile=" not in command:
        yield f"let torch.compile fuse the casts into their neighbours: {command} --set compile=yes"


def _remembers(case: NamedCase) -> bool:
    """Whether the precision keeps something from step to step, which no compiled graph may."""
    try:
        return precisions.get(case.result.record.case.precision).remembers
    except UsageError:
        return True


def _without(command: str, option: str) -> str:
    """Drops an option, and the value of one that has a value."""
    words = iter(command.split(" "))
    kept = []
    for word in words:
        if word == option and option in ("--budget", "--rounds"):
            next(words, None)
        elif word != option and not word.startswith(f"{option}="):
            kept.append(word)
    return " ".join(kept)
