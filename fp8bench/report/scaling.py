"""What several ranks gain over one, and what each of them sends for it, as the terminal and the page both tell it."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.scaling import efficiency
from fp8bench.model.ranks import Sent
from fp8bench.report.case_status import emulated
from fp8bench.report.elements import Column, Field, Table, Text, Tone
from fp8bench.report.panels import Panel
from fp8bench.report.untold import reasons, within


def scaling(panel: Panel) -> Iterator[Table | Text]:
    """Nothing of cases that one rank could not take as well."""
    if (table := _efficiencies(panel)) is not None:
        yield table
        yield from map(Text, _none_told(panel))
    yield from filter(None, [_sent(panel)])


def _efficiencies(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"),
        Column("one rank", number=True, unit="s", hint="a step of the whole batch by one rank, the others waiting"),
        Column("its share", number=True, unit="s", hint="a step of one rank's share of the batch by one rank"),
        Column("together", number=True, unit="s", hint="a step of the whole batch by all ranks"),
        Column("strong", number=True, unit="%", hint="one rank over ranks times together; between: what rounds leave"),
        Column("weak", number=True, unit="%", hint="its share over together; between: what rounds leave"),
    )  # fmt: skip
    rows = []
    for group, result in panel.members:
        found = efficiency(result.record)
        if found is None:
            continue
        times = (Field(units.seconds(one), one) for one in found.seconds)
        tone = Tone.DOUBT if emulated(result) else Tone.PLAIN
        shares = (within(one, units.percent, 100, tone) for one in (found.strong, found.weak))
        rows.append((Field(panel.place(group)), Field(result.mode), *times, *shares))
    title = f"scaling efficiency of {panel.case.ranks} ranks"
    return Table("scaling", title, columns, tuple(rows)) if rows else None


def _none_told(panel: Panel) -> Iterator[str]:
    told = [(one.mode, found) for _, one in panel.members if (found := efficiency(one.record)) is not None]
    yield from reasons("efficiency", ((mode, one) for mode, found in told for one in (found.strong, found.weak)))


def _sent(panel: Panel) -> Table | None:
    columns = (
        Column("", shared=True), Column("case"), Column("operation"), Column("dtype"),
        Column("calls", number=True, hint="of the rank that sends most by it"),
        Column("most", number=True, unit="B", hint="by the rank that sends most; of a collective a ring's share"),
        Column("least", number=True, unit="B", hint="by the rank that sends least"),
    )  # fmt: skip
    rows = []
    for group, result in panel.members:
        for (operation, dtype), each in _by_operation(result.record.sent).items():
            most = max(each, key=lambda one: one.bytes)
            least = min(one.bytes for one in each) if len(each) == panel.case.ranks else 0.0
            numbers = (Field(str(most.calls), most.calls), *(Field(units.size(b), b) for b in (most.bytes, least)))
            rows.append((Field(panel.place(group)), Field(result.mode), Field(operation), Field(dtype), *numbers))
    return Table("sent", "what a rank sends in a step, counted", columns, tuple(rows)) if rows else None


def _by_operation(sent: tuple[Sent, ...]) -> dict[tuple[str, str], list[Sent]]:
    found: dict[tuple[str, str], list[Sent]] = {}
    for one in sent:
        found.setdefault((one.operation, one.dtype), []).append(one)
    return found
