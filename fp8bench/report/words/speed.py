"""Sentences on the verdicts of a panel: a precision against its reference, in one case or in several.

Only a verdict without doubt reads as a fact; others say 'perhaps', or that it is not clear, with the reason. Speed is
how many times as fast: above 1x is faster.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.analysis.verdicts import SAME
from fp8bench.model import Finding, Label, Status, Verdict
from fp8bench.protocols.axes import LAYOUT, VALUES
from fp8bench.report.case_status import Standing, emulated, show_speed, show_speed_up, speed_up, standing, tone_of
from fp8bench.report.elements import Text
from fp8bench.report.energies import energy_clause
from fp8bench.report.panels import Panel, Result, show_params, together, value_of
from fp8bench.report.topics.phases import is_mixed, phase_clauses
from fp8bench.report.words.legend import LABELS
from fp8bench.report.words.naming import common_tone, listed, many, setting_of

_COMPARED = (
    Standing.FASTER, Standing.SLOWER, Standing.SAME, Standing.DOUBTED, Standing.UNSURE, Standing.UNTIMED,
)  # fmt: skip
# Explains a speed, and casts no doubt on it.
_PACE = Label.POWER_CAPPED
# An axis that a verdict depends on, and the metric of how uneven its load is.
_LOAD, _UNEVEN = "load", "load_ratio"
# Up to this many cases are named one by one.
_NAMED = 2
_WITHIN = f"within {units.percent(SAME, 0)}"


@dataclass(frozen=True)
class ComparedAs:
    """A way in which a case compares: the verdict, and whether it is in doubt."""

    standing: Standing
    verdict: Verdict

    @property
    def words(self) -> str:
        """'faster', 'perhaps as fast', 'not clear'."""
        if self.standing is Standing.UNTIMED:
            return "not timed"
        if self.standing is Standing.UNSURE:
            return "not clear"
        perhaps = "perhaps " if self.standing is Standing.DOUBTED else ""
        return perhaps + ("as fast" if self.verdict is Verdict.SAME else self.verdict.value)


def kind_of(result: Result) -> ComparedAs:
    status, timed = standing(result), result.finding
    return ComparedAs(status, Verdict.NONE if status is Standing.UNTIMED or timed is None else timed.verdict)


def shared_labels(panels: Iterable[Panel]) -> frozenset[Label]:
    """Labels that every compared case has: one sentence says so for all."""
    doubts = [
        frozenset(_doubts(result)) for panel in panels for result in panel.results if standing(result) in _COMPARED
    ]
    return frozenset.intersection(*doubts) if len(doubts) > 1 else frozenset()


def doubt_of_all(labels: frozenset[Label]) -> str:
    """'Every comparison here is in doubt: ...'; '' without labels."""
    reasons = [f"{LABELS[label].reason} ({label})" for label in Label if label in labels]
    return f"Every comparison here is in doubt: {listed(reasons, len(Label))}." if reasons else ""


def comparisons(panel: Panel, device: str = "", said: frozenset[Label] = frozenset()) -> list[Text]:
    """A sentence for each precision of a panel; names `device` if given, leaves out the labels in `said`."""
    where = f" on {device}" if device else ""
    modes = dict.fromkeys(result.mode for result in panel.results if standing(result) in _COMPARED)
    return [_comparison(panel, mode, where, said) for mode in modes] or list(map(Text, _alone(panel, where)))


def _comparison(panel: Panel, mode: str, where: str, said: frozenset[Label]) -> Text:
    members = [
        (setting_of(group), result, group.lead)
        for group, result in panel.members
        if result.mode == mode and standing(result) in _COMPARED
    ]
    reference, suite = panel.reference or "its reference", panel.case.workload
    if len(members) == 1:
        place, result, against = members[0]
        energy = energy_clause([(result, against)])
        return Text(_single(result, against, reference, suite, place, where, said) + energy, tone_of(result))
    places = [(place, result) for place, result, _ in members]
    energy = energy_clause([(result, against) for _, result, against in members])
    words = _several(places, reference, f"{suite}{where}", said) + energy
    return Text(words, common_tone(tone_of(result) for _, result in places))


def _single(
    result: Result, against: Result | None, reference: str, suite: str, place: str, where: str, said: frozenset[Label]
) -> str:
    """'bf16 is 1.62x [1.60, 1.64] faster than fp32 on gemm m=512'; for a step of several phases, also theirs."""
    kind, clauses = kind_of(result), ""
    subject = f"{suite} {place}".rstrip() + where
    own, base = result.finding, against.finding if against else None
    if own is not None and base is not None and is_mixed(base) and kind.standing is not Standing.UNTIMED:
        subject = f"the whole step of {suite}{where}"
        if kind.standing in (Standing.FASTER, Standing.SLOWER, Standing.SAME):
            clauses = phase_clauses(own, base)
    return f"{_claim(kind, result, reference, subject)}{clauses}{_doubt(kind, [result], said)}{_pace([result])}"


def _claim(kind: ComparedAs, result: Result, reference: str, subject: str) -> str:
    speed = show_speed_up(result)
    if speed and kind.verdict is Verdict.FASTER:
        perhaps = "perhaps " if kind.standing is Standing.DOUBTED else ""
        return f"{result.mode} is {perhaps}{speed} faster than {reference} on {subject}"
    claim = f"{_opening(kind, result.mode, reference)} on {subject}"
    if kind.standing is Standing.UNSURE:
        return f"{claim} ({speed} its speed)" if speed else claim
    shown = f": {speed} its speed" if speed else ""
    return f"{claim}{shown}{f', {_WITHIN}' if kind.verdict is Verdict.SAME else ''}"


def _several(results: Sequence[tuple[str, Result]], reference: str, suite: str, said: frozenset[Label]) -> str:
    """'bf16 is faster than fp32 in 4 of 5 cases of gemm, 1.21x to 2.10x (median 1.84x); slower in 1 (m=1: 0.940x)'."""
    by_kind = together((kind_of(pair[1]), pair) for pair in results)
    parts: list[str] = []
    for kind in sorted(by_kind, key=lambda kind: (_COMPARED.index(kind.standing), [*Verdict].index(kind.verdict))):
        members, head = by_kind[kind], f"{kind.words} in {len(by_kind[kind])}"
        if not parts:
            some = f"{len(members)} of {len(results)}"
            number = some if len(members) < len(results) else "both" if len(results) == 2 else f"all {len(results)}"
            head = f"{_opening(kind, members[0][1].mode, reference)} in {number} cases of {suite}"
        parts.append(head + _speeds(kind, members) + _doubt(kind, [result for _, result in members], said))
    return "; ".join(parts) + _pace([result for _, result in results])


def _opening(kind: ComparedAs, mode: str, reference: str) -> str:
    if kind.standing is Standing.UNTIMED:
        return f"{mode} was not timed"
    if kind.standing is Standing.UNSURE:
        return f"it is not clear whether {mode} is faster than {reference}"
    return f"{mode} is {kind.words} {'as' if kind.verdict is Verdict.SAME else 'than'} {reference}"


def _speeds(kind: ComparedAs, members: Sequence[tuple[str, Result]]) -> str:
    if kind.verdict is Verdict.SAME:
        return f" ({_WITHIN})"
    speeds = [(place, speed.point) for place, result in members if (speed := speed_up(result)) is not None]
    if len(members) <= _NAMED:
        known = dict(speeds)
        named = [f"{place}: {units.speed_up(known[place])}" if place in known else place for place, _ in members]
        return f" ({'; '.join(named)})"
    return f", {span([value for _, value in speeds])}" if speeds else ""


def of_all_calls(finding: Finding) -> str:
    """'1.02x [0.99, 1.04]' by the mean over all calls; for SAME, also which rare slow calls it would have seen."""
    if finding.typical is None:
        return units.NONE
    seen = f", {would_have_seen(finding)}" if finding.verdict is Verdict.SAME else ""
    return f"{show_speed(finding.typical.inverse)}{seen}"


def would_have_seen(finding: Finding) -> str:
    if finding.rarest is None:
        return "too few calls to have seen some that take twice as long"
    rarer = (
        ", not surely 1 in 20 that takes 60% more (its mean moves by 3%)" if finding.rarest < _OF_THREE_PERCENT else ""
    )
    return f"would have seen 1 call in {finding.rarest} that takes twice as long{rarer}"


# With 1 in 33 that takes twice as long a mean moves by 3%.
_OF_THREE_PERCENT = 33


def span(speeds: Sequence[float]) -> str:
    """'1.21x to 2.10x (median 1.84x)'; one number where all look alike."""
    low, middle, high = (units.speed_up(value) for value in (min(speeds), statistics.median(speeds), max(speeds)))
    return low if low == high else f"{low} to {high} (median {middle})"


def _doubt(kind: ComparedAs, results: Sequence[Result], said: frozenset[Label]) -> str:
    reasons, because = "", _because(results, said)
    if kind.standing is Standing.DOUBTED:
        return f", but {because}" if because else ""
    if kind.standing is Standing.UNSURE:
        whys = [result.finding.why for result in results if result.finding and result.finding.why]
        reasons = "; ".join(filter(None, (*_counted(whys), because)))
    elif kind.standing is Standing.UNTIMED:
        reasons = listed(list(dict.fromkeys(result.record.detail for result in results if result.record.detail)))
    return f": {reasons}" if reasons else ""


def _counted(reasons: Iterable[str]) -> Iterator[str]:
    """Reasons that differ only in their numbers are said once: 'contended (8 of 10 slots) (so in 3 of them)'."""
    for alike in together((re.sub(r"[0-9.]+", "#", reason), reason) for reason in reasons).values():
        yield alike[0] + (f" (so in {len(alike)} of them)" if len({*alike}) > 1 else "")


def _because(results: Sequence[Result], said: frozenset[Label]) -> str:
    numbers = {label: sum(label in _doubts(result) for result in results) for label in Label}
    reasons = [
        f"{LABELS[label].reason}{f' in {number} of them' if number < len(results) else ''} ({label})"
        for label, number in numbers.items()
        if number and label not in said
    ]
    return listed(reasons, len(Label))


def _doubts(result: Result) -> list[Label]:
    """The labels that make it 'perhaps'; those that took the verdict away stand in its why."""
    if result.finding is not None and result.finding.judged and not result.finding.doubtful:
        return []
    told = result.finding.hard if result.finding else ()
    return [label for label in result.labels if label.casts_doubt and label not in told]


def _pace(results: Sequence[Result]) -> str:
    """'; it ran at the clocks that ... in 1 of 3 (power-capped)': explains a speed without doubting it."""
    reasons = [result.reason(_PACE) for result in results if _PACE in result.labels]
    where = "" if len(reasons) == len(results) else f" in {len(reasons)} of {len(results)}"
    known = f", {reasons[0]}" if reasons and reasons[0] and len({*reasons}) == 1 else ""
    return f"; {LABELS[_PACE].reason}{where} ({_PACE}{known})" if reasons else ""


def _alone(panel: Panel, where: str) -> Iterator[str]:
    timed = [
        result
        for result in panel.results
        if result.record.status is Status.OK and standing(result) is Standing.REFERENCE
    ]
    subject = f"{panel.case.workload}{where}"
    if len(timed) == 1 and timed[0].best is not None:
        time = units.seconds(timed[0].best)
        yield f"{panel.reference} alone was timed on {subject}, at {time}: there is nothing to compare it with"
    elif any(result.best is not None for result in timed):
        number = many(len(timed), "case")
        yield f"{panel.reference} alone was timed, in {number} of {subject}: there is nothing to compare"


def over_values(panel: Panel) -> Iterator[str]:
    """'bf16 by values (normal, zeros): best 1.20 ms to 1.31 ms, 1.09x apart; speed-up 1.84x to 1.91x'.

    The same for memory layouts, fastest first. It is no verdict, because the groups were measured one after the other.
    """
    for axis in (VALUES, LAYOUT):
        yield from _over(panel, axis.name, axis.default[0])


def _over(panel: Panel, axis: str, default: str) -> Iterator[str]:
    timed = [result for result in panel.results if result.best and not emulated(result)]
    for mode, place, results in _alike_but_for(axis, timed, panel):
        if axis == LAYOUT.name:
            results.sort(key=lambda result: result.best or 0.0)
        # Cases do not have the default as a parameter.
        kinds = dict.fromkeys(str(dict(result.record.case.params).get(axis, default)) for result in results)
        if len(kinds) < 2:
            continue
        times = [result.best for result in results if result.best]
        told = [f"best {units.span(times, units.seconds)}, {units.ratio(max(times) / min(times))} apart"]
        if speeds := [speed.point for result in results if (speed := speed_up(result)) is not None]:
            told.append(f"speed-up {units.span(speeds, units.speed_up)}")
        yield f"{' '.join(filter(None, (mode, place)))} by {axis} ({', '.join(kinds)}): {'; '.join(told)}"


def _alike_but_for(axis: str, results: Iterable[Result], panel: Panel) -> Iterator[tuple[str, str, list[Result]]]:
    """Results that differ in that axis only, with their precision and other parameters."""
    alike = together(
        ((result.mode, tuple(pair for pair in result.record.case.params if pair[0] != axis)), result)
        for result in results
    )
    for (mode, rest), members in alike.items():
        yield mode, show_params(pair for pair in rest if pair not in panel.shared), members


def over_loads(panel: Panel) -> Iterator[str]:
    """'bf16 against fp32: the load decides: faster with load=uniform (1.42x [...]); slower with ...'."""
    loaded = [
        result for result in panel.results if speed_up(result) is not None and _LOAD in dict(result.record.case.params)
    ]
    for mode, place, results in _alike_but_for(_LOAD, loaded, panel):
        kinds = together((kind_of(result), result) for result in results)
        turning = [kind for kind in kinds if kind.verdict in (Verdict.FASTER, Verdict.SLOWER)]
        if len({kind.verdict for kind in turning}) < 2:
            continue
        decides = "may decide" if any(kind.standing is Standing.DOUBTED for kind in turning) else "decides"
        clauses = (f"{kind.words} with {listed(list(map(_load_of, some)))}" for kind, some in kinds.items())
        subject = f"{mode} against {panel.reference}{f' ({place})' if place else ''}"
        yield f"{subject}: the load {decides}: {'; '.join(clauses)}"


def _load_of(result: Result) -> str:
    """'load=zipf:1 (0.81x [0.80, 0.82], max/mean 3.2)'."""
    ratio = value_of(result.record.measurement(_UNEVEN))
    uneven = "" if ratio is None else f", max/mean {units.significant(ratio, 2)}"
    return f"{_LOAD}={result.record.case.param(_LOAD)} ({show_speed_up(result)}{uneven})"
