"""What the values of the operands do to times: cases of a panel that differ in these alone."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.model import Scalar
from fp8bench.protocols.axes import VALUES
from fp8bench.report.case_status import emulated, speed_up
from fp8bench.report.panels import Panel, Result, show_params, together


def over_values(panel: Panel) -> Iterator[str]:
    """'bf16 by values (normal, zeros): best 1.20 ms to 1.31 ms, 1.09x apart; speed-up 1.84x to 1.91x' for each case.

    Its groups were measured one after the other, so that this is no verdict.
    """
    alike = together((_rest(one), one) for one in panel.results if one.best and not emulated(one))
    for (mode, rest), results in alike.items():
        kinds = dict.fromkeys(str(_kind(one)) for one in results)
        if len(kinds) < 2:
            continue
        times = [one.best for one in results if one.best]
        told = [f"best {units.span(times, units.seconds)}, {units.ratio(max(times) / min(times))} apart"]
        if speeds := [speed.point for one in results if (speed := speed_up(one)) is not None]:
            told.append(f"speed-up {units.span(speeds, units.speed_up)}")
        place = show_params(pair for pair in rest if pair not in panel.shared)
        yield f"{' '.join(filter(None, (mode, place)))} by values ({', '.join(kinds)}): {'; '.join(told)}"


def _kind(result: Result) -> Scalar:
    """The default is no parameter of a case."""
    return dict(result.record.case.params).get(VALUES.name, VALUES.default[0])


def _rest(result: Result) -> tuple[str, tuple[tuple[str, Scalar], ...]]:
    case = result.record.case
    return case.mode, tuple(pair for pair in case.params if pair[0] != VALUES.name)
