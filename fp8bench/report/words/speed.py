"""Sentences on the verdicts of a panel: a precision against its reference, in one case or in several.

Only a verdict without doubt reads as a fact; others say 'perhaps' or 'unsure', with labels and reasons. Speed is how
many times as fast: above 1x is faster.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.model import Finding, Label, Status, Verdict
from fp8bench.protocols.axes import LAYOUT, VALUES
from fp8bench.report.case_status import (
    FACTS,
    Standing,
    emulated,
    show_speed,
    show_speed_up,
    speed_up,
    standing,
    status_words,
    tone_of,
)
from fp8bench.report.elements import Text
from fp8bench.report.panels import NamedCase, Panel, Result, show_params, together, value_of
from fp8bench.report.topics.phases import is_mixed, phase_clauses
from fp8bench.report.words.naming import common_tone, listed, many, setting_of

_COMPARED = (*FACTS.values(), Standing.DOUBTED, Standing.UNSURE, Standing.UNTIMED)
# An axis that a verdict depends on, and the metric of how uneven its load is.
_LOAD, _UNEVEN = "load", "load_ratio"
_MOST_REASONS = 3


def comparisons(panel: Panel, device: str = "") -> list[Text]:
    """A sentence for each precision of a panel; names `device` if given."""
    where = f" on {device}" if device else ""
    compared = [case for case in panel.members if standing(case.result) in _COMPARED]
    by_mode = together((case.result.mode, case) for case in compared)
    return [_comparison(panel, cases, where) for cases in by_mode.values()] or list(map(Text, _alone(panel, where)))


def _comparison(panel: Panel, cases: Sequence[NamedCase], where: str) -> Text:
    """'bf16 is faster than fp32 on gemm m=512: 1.62x [1.60, 1.64]'; for a step of several phases, also theirs.

    Of several cases: 'bf16 is perhaps faster than fp32 in 4 of 5 cases of gemm, slower in 1: 0.94x to 2.10x (noisy)'.
    """
    results, suite = [case.result for case in cases], panel.case.workload
    reference = panel.reference or "its reference"
    if len(cases) > 1:
        claim = verdicts_in(results, reference, f" of {suite}{where}")
        speeds = [speed.point for result in results if (speed := speed_up(result)) is not None]
        said = span(speeds) if speeds else ""
    else:
        claim, said = verdicts_in(results, reference), show_speed_up(results[0])
        own, lead = results[0].finding, cases[0].group.lead
        base = lead.finding if lead else None
        if own and base and is_mixed(base):
            claim += f" on the whole step of {suite}{where}"
            said += phase_clauses(own, base) if standing(results[0]) in FACTS.values() else ""
        else:
            claim += f" on {suite} {setting_of(cases[0].group)}".rstrip() + where
    words = f"{results[0].mode} is {claim}{f': {said}' if said else ''}{_labels(results)}"
    reasons = dict.fromkeys(reason for result in results for reason in _reasons(result))
    told = f"; {listed(list(reasons), _MOST_REASONS)}" if reasons else ""
    return Text(words + told, common_tone(map(tone_of, results)))


def verdicts_in(results: Sequence[Result], reference: str, of: str = "") -> str:
    """'perhaps faster than fp32', 'FAILED in 1 of 3 cases, emulated in 2'; `of` is what the cases are of."""
    counts = Counter(status_words(result).replace(units.NONE, "not timed") for result in results)
    (first, number), *others = sorted(counts.items(), key=lambda pair: (pair[0] != "FAILED", -pair[1]))
    where = f" in {number} of {len(results)} cases{of}" if others or of else ""
    link = " than " if first.endswith(("faster", "slower")) else " as " if first.endswith("same") else ""
    against = f"{link}{reference}" if link else ""
    return f"{first.replace('same', 'the same')}{against}{where}" + "".join(f", {word} in {n}" for word, n in others)


def span(speeds: Sequence[float]) -> str:
    """'1.21x to 2.10x (median 1.84x)'; one number where all look alike."""
    low, middle, high = (units.speed_up(value) for value in (min(speeds), statistics.median(speeds), max(speeds)))
    return low if low == high else f"{low} to {high} (median {middle})"


def _labels(results: Sequence[Result]) -> str:
    """' (noisy) (drift in 2 of them)': what makes them doubtful, and a power cap, which explains a speed."""
    numbers = Counter(label for result in results for label in _doubts(result))
    return "".join(
        f" ({label}{f' in {numbers[label]} of them' if numbers[label] < len(results) else ''})"
        for label in Label
        if numbers[label]
    )


def _doubts(result: Result) -> list[Label]:
    """Those that took the verdict away stand in its why."""
    finding = result.finding
    sure = finding is not None and finding.judged and not finding.doubtful
    hard = finding.hard if finding else ()
    doubts = [label for label in result.labels if label.casts_doubt and label not in hard and not sure]
    return [*doubts, *({Label.POWER_CAPPED} & {*result.labels})]


def _reasons(result: Result) -> Iterator[str]:
    if standing(result) is Standing.UNSURE and result.finding and result.finding.why:
        yield result.finding.why
    if standing(result) is Standing.UNTIMED and result.record.detail:
        yield result.record.detail


def of_all_calls(finding: Finding) -> str:
    """'1.02x [0.99, 1.04]' by the mean over all calls; for SAME, also which rare slow calls it would have seen."""
    if finding.typical is None:
        return units.NONE
    seen = "too few calls to have seen some that take twice as long"
    if finding.rarest is not None:
        seen = f"would have seen 1 call in {finding.rarest} that takes twice as long"
    return show_speed(finding.typical.inverse) + (f", {seen}" if finding.verdict is Verdict.SAME else "")


def _alone(panel: Panel, where: str) -> Iterator[str]:
    timed = [result for result in panel.results if result.record.status is Status.OK and result.best is not None
             and standing(result) is Standing.REFERENCE]  # fmt: skip
    if timed:
        cases = f"{many(len(timed), 'case')} of {panel.case.workload}{where}"
        yield f"{panel.reference} alone was timed, in {cases}: there is nothing to compare it with"


def over_values(panel: Panel) -> Iterator[str]:
    """'bf16 by values (normal, zeros): best 1.20 ms to 1.31 ms, 1.09x apart; speed-up 1.84x to 1.91x'.

    The same for memory layouts, fastest first. It is no verdict, because the groups were measured one after the other.
    """
    timed = [result for result in panel.results if result.best and not emulated(result)]
    for axis in (VALUES, LAYOUT):
        for subject, results in _alike_but_for(axis.name, timed, panel):
            if axis is LAYOUT:
                results.sort(key=lambda result: result.best or 0.0)
            # Cases do not have the default as a parameter.
            params = (dict(result.record.case.params) for result in results)
            kinds = dict.fromkeys(str(own.get(axis.name, axis.default[0])) for own in params)
            if len(kinds) < 2:
                continue
            times = [result.best for result in results if result.best]
            told = [f"best {units.span(times, units.seconds)}, {units.ratio(max(times) / min(times))} apart"]
            if speeds := [speed.point for result in results if (speed := speed_up(result)) is not None]:
                told.append(f"speed-up {units.span(speeds, units.speed_up)}")
            yield f"{subject} by {axis.name} ({', '.join(kinds)}): {'; '.join(told)}"


def _alike_but_for(axis: str, results: Iterable[Result], panel: Panel) -> Iterator[tuple[str, list[Result]]]:
    """Results that differ in that axis only, with their precision and other parameters: 'bf16 m=512'."""
    alike = together(
        ((result.mode, tuple(pair for pair in result.record.case.params if pair[0] != axis)), result)
        for result in results
    )
    for (mode, rest), members in alike.items():
        yield f"{mode} {show_params(pair for pair in rest if pair not in panel.shared)}".strip(), members


def over_loads(panel: Panel) -> Iterator[str]:
    """'bf16 against fp32: the load decides: faster with load=uniform (1.42x [...]); slower with ...'."""
    loaded = [
        result for result in panel.results if speed_up(result) is not None and _LOAD in dict(result.record.case.params)
    ]
    for subject, results in _alike_but_for(_LOAD, loaded, panel):
        kinds = together((status_words(result), result) for result in results)
        turning = [words for words in kinds if words.endswith(("faster", "slower"))]
        if len({words.split()[-1] for words in turning}) < 2:
            continue
        decides = "decides" if {*turning} == {"faster", "slower"} else "may decide"
        clauses = (f"{words} with {listed(list(map(_load_of, some)))}" for words, some in kinds.items())
        yield f"{subject} against {panel.reference}: the load {decides}: {'; '.join(clauses)}"


def _load_of(result: Result) -> str:
    """'load=zipf:1 (0.81x [0.80, 0.82], max/mean 3.2)'."""
    ratio = value_of(result.record.measurement(_UNEVEN))
    uneven = "" if ratio is None else f", max/mean {units.significant(ratio, 2)}"
    return f"{_LOAD}={result.record.case.param(_LOAD)} ({show_speed_up(result)}{uneven})"
