"""What became of cases that have no speed, in sentences: failed, skipped, emulated. One for each reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.report.case_status import Standing, standing
from fp8bench.report.panels import Panel, Result, together
from fp8bench.report.terminal.tables import main_error, value_of
from fp8bench.report.words.naming import listed, setting_of
from fp8bench.report.words.run_facts import many, shortened

LONGEST_REASON = 300
_MOST_SUITES = 2
# So many emulated precisions have a sentence each.
_MOST_ALONE = 2


@dataclass(frozen=True)
class Outcome:
    """One case with where it stands: its panel's error metric, and what its group is called."""

    result: Result
    setting: str
    metric: str

    @property
    def suite(self) -> str:
        return self.result.record.case.workload

    @property
    def reason(self) -> str:
        """Its reason in one line that is not too long."""
        return shortened(self.result.record.reason, LONGEST_REASON) or "no reason was given"


def outcomes(panels: Iterable[Panel]) -> list[Outcome]:
    """Every case, in order."""
    return [
        Outcome(result, setting_of(panel, group), metric)
        for panel in panels
        for metric in [main_error(panel)]
        for group, result in panel.members
    ]


def failures(found: Sequence[Outcome]) -> list[str]:
    """'FAILED: fp8 on gemm m=512: out of memory, even alone', loud."""
    failed = [one for one in found if standing(one.result) is Standing.FAILED]
    told = []
    by_reason = together(((one.suite, one.result.mode, one.reason), one) for one in failed)
    for (suite, mode, reason), alike in by_reason.items():
        places = listed([one.setting for one in alike])
        where = f"in {len(alike)} cases of {suite} ({places})" if len(alike) > 1 else f"on {suite} {places}".rstrip()
        told.append(f"FAILED: {mode} {where}: {reason}")
    return told


def skips(found: Sequence[Outcome]) -> list[str]:
    """'nvfp4 was skipped in 3 cases of gemm: no hardware for FP4'."""
    skipped = [one for one in found if standing(one.result) is Standing.SKIPPED]
    told = []
    for reason, alike in together((one.reason, one) for one in skipped).items():
        modes = list(dict.fromkeys(one.result.mode for one in alike))
        suites = list(dict.fromkeys(one.suite for one in alike))
        were = "was" if len(modes) == 1 else "were"
        told.append(f"{listed(modes)} {were} skipped in {many(len(alike), 'case')} of {listed(suites)}: {reason}")
    return told


def emulations(found: Sequence[Outcome], name_devices: bool = False) -> list[str]:
    """'fp8 is emulated on this CPU: its numbers are right (product_error 3.7e-02), its time says nothing ...'."""
    emulated = [one for one in found if standing(one.result) is Standing.EMULATED]
    by_mode = together(((one.result.mode, one.result.record.case.device), one) for one in emulated).values()
    by_place = together((_place(alike, found, name_devices), alike) for alike in by_mode)
    told = []
    for place, modes in by_place.items():
        names = [alike[0].result.mode for alike in modes]
        if len(modes) > _MOST_ALONE and all(map(_finite, modes)):  # one sentence for all of many
            named = f"{listed(names)} are emulated {place}"
            told.append(f"{named}: their numbers are right, their times say nothing about speed")
        else:
            numbers = zip(names, map(_numbers, modes), strict=True)
            told += [f"{mode} is emulated {place}: {say}, its time says nothing about speed" for mode, say in numbers]
    return told


def _place(alike: Sequence[Outcome], found: Sequence[Outcome], name_devices: bool) -> str:
    """'on this CPU'; with the suites, where another one has the mode natively."""
    first = alike[0].result.record.case
    here = "this CPU" if first.device == "cpu" else "this device"
    suites = dict.fromkeys(one.suite for one in alike)
    ran = [one for one in found if standing(one.result) not in (Standing.SKIPPED, Standing.FAILED)]
    same = [one for one in ran if (one.result.mode, one.result.record.case.device) == (first.mode, first.device)]
    others = {one.suite for one in same} - {*suites}
    return f"on {first.device if name_devices else here}{f' in {listed(list(suites))}' if others else ''}"


def _errors(alike: Iterable[Outcome]) -> dict[tuple[str, str], list[float]]:
    """The errors of each suite, by suite and metric."""
    return together(
        ((one.suite, one.metric), value)
        for one in alike
        if one.metric and (value := value_of(one.result.record.measurement(one.metric))) is not None
    )


def _finite(alike: Iterable[Outcome]) -> bool:
    return all(math.isfinite(value) for values in _errors(alike).values() for value in values)


def _numbers(alike: Sequence[Outcome]) -> str:
    """That the numbers count, with the errors of a few suites."""
    errors = _errors(alike)
    if not _finite(alike):
        return "its errors are not all finite"
    if not errors or len(errors) > _MOST_SUITES:
        return "its numbers are right"
    several = len({suite for suite, _ in errors}) > 1
    shown = [
        f"{metric} {units.span(values, units.relative_error)}{f' in {suite}' if several else ''}"
        for (suite, metric), values in errors.items()
    ]
    return f"its numbers are right ({listed(shown)})"
