"""The tables of a panel beside its times: energy, memory, the largest batch, and what its data are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.analysis.energy import EnergyFigures
from fp8bench.analysis.phase_energy import PhaseJoules
from fp8bench.analysis.sustained import sustained_figures, sustained_ratio
from fp8bench.model import MemoryRole, TensorStatistics, specs
from fp8bench.model.specs import (
    ENERGY,
    ENERGY_PER,
    MAX_BATCH,
    MAX_BATCH_MEMORY,
    MAX_BATCH_TOKENS,
    MEMORY_COUNTERS,
    MetricSpec,
    memory_of_role,
)
from fp8bench.report import capacities
from fp8bench.report.case_status import emulated, inverse, show_speed
from fp8bench.report.elements import Column, Element, Field, Table, Text, Tone
from fp8bench.report.energies import (
    figures_of,
    named_source,
    phases_of,
    power_limits_of,
    ratio_against,
    show_ratio,
    sources_of,
)
from fp8bench.report.memories import highest_in, roles_of, sentences, share_of, use_of
from fp8bench.report.metric_columns import with_figures
from fp8bench.report.panels import Figures, Panel, Result, ResultGroup, together
from fp8bench.report.words.energy import DEMANDS
from fp8bench.report.words.legend import MEMORY_TITLES, PHASE_TITLES
from fp8bench.report.words.naming import named_cases


def energy(panel: Panel) -> Iterator[Element]:
    """What a step of each case takes in joules, and its device in watts; nothing where there are no windows."""
    sources = sources_of(panel.results)
    if not sources:
        return
    caption = f"energy of a step, by {named_source(sources[0])}"
    if len(sources) > 1:
        caption = f"energy of a step; sources differ, and their figures do not compare ({', '.join(sources)})"
    known = [(group, one, found) for group, one in panel.members if (found := figures_of(one))]
    first = {name for _, _, found in known for name, _ in found.per[:1]}
    counts = [spec for spec, _ in ENERGY_PER.values() if spec in first]
    columns = (
        Column("group", shared=True), Column("case"), Column("per step", number=True),
        Column(f"vs {panel.reference or 'reference'}"), Column(""), Column("net/step", number=True),
        *(Column(spec.heading, number=True) for spec in counts), Column("power", number=True),
        Column("idle", number=True), Column("windows"), Column("clock", number=True),
        *([Column("source")] if len(sources) > 1 else []),
    )  # fmt: skip
    rows = tuple(
        (Field(panel.place(group)), *_energy_row(group, one, found, counts), Field(found.source))[: len(columns)]
        for group, one, found in known
    )
    yield with_figures(Table("energy", caption, columns, rows), ((group, one) for group, one, _ in known))


def _energy_row(group: ResultGroup, result: Result, found: EnergyFigures, counts: Sequence[str]) -> Iterator[Field]:
    figures, ratio = Figures(group, result), ratio_against(result, group.lead)
    word = "reference" if result.record.is_reference else "emulated" if emulated(result) else units.NONE
    tone = DEMANDS[ratio.demand] if ratio else Tone.PLAIN
    yield Field(result.mode)
    yield Field(figures.shown(ENERGY))
    yield Field(ratio.demand.value if ratio else word, tone=tone)
    yield Field(show_ratio(ratio) if ratio else "", tone=tone)
    limits = power_limits_of(result)
    yield from (Field(figures.shown(name)) for name in (specs.ENERGY_NET, *counts))
    yield Field(figures.shown(specs.POWER) + (f" of {limits}" if limits else ""))
    yield Field(figures.shown(specs.IDLE_POWER))
    unsure = f" (+-{units.percent(found.uncertainty)})" if found.uncertainty is not None else ""
    yield Field(f"{len(found.windows)}{unsure}")
    yield Field(units.count(found.sm_clock, "Hz"))


def energy_of_phases(panel: Panel) -> Iterator[Element]:
    """What each phase takes of a step in joules, estimates in brackets; nothing where nobody asked for phases."""
    known = [
        (group, one, {phase.phase: phase for phase in found.phases})
        for group, one in panel.members
        if one.record.energy is not None and one.record.energy.phases and (found := phases_of(one)) is not None
    ]
    names = [name for name in PHASE_TITLES if any(name in phases for _, _, phases in known)]
    if not names:
        return
    columns = (
        Column("group", shared=True), Column("case"), *(Column(PHASE_TITLES[name], number=True) for name in names)
    )  # fmt: skip
    rows = tuple(
        (Field(panel.place(group)), Field(one.mode), *(_phase_field(phases.get(name)) for name in names))
        for group, one, phases in known
    )
    yield Table("phase-energy", "joules per step of each phase by itself; (estimated) by share of time", columns, rows)


def _phase_field(found: PhaseJoules | None) -> Field:
    if found is None:
        return Field(units.NONE)
    if found.found is None:
        return Field(f"({units.joules(found.joules)})", tone=Tone.DOUBT)
    return Field(f"{units.joules(found.joules)} +-{units.percent(found.found.width / 2 / found.joules)}")


def sustained(panel: Panel) -> Iterator[Element]:
    """What each case sustains, beside its time in slots; nothing where nobody asked."""
    known = [
        (group, one, found)
        for group, one in panel.members
        if (found := sustained_figures(one.record, one.finding)) is not None
    ]
    if not known:
        return
    columns = (
        Column("group", shared=True), Column("case"), Column("sustained", number=True), Column("speed-up"),
        Column("vs slots", number=True), Column("clock", number=True), Column("power", number=True), Column("turns"),
    )  # fmt: skip
    rows = []
    for group, one, found in known:
        ratio = sustained_ratio(one.record, group.lead.record if group.lead else None)
        word = "reference" if one.record.is_reference else units.NONE
        settled = "cannot be told" if found.settled is None else f"{found.settled} settled"
        words = (panel.place(group), one.mode, units.seconds(found.seconds),
                 show_speed(inverse(ratio)) or word, units.change(found.change), units.count(found.clock, "Hz"),
                 units.count(found.watts, "W"), f"{found.turns}, {settled}")  # fmt: skip
        rows.append(tuple(map(Field, words)))
    caption = "sustained: a step in turns of seconds, back to back; settled: clock and temperature stood still before"
    yield with_figures(Table("sustained", caption, columns, tuple(rows)), ((group, one) for group, one, _ in known))


def tells_memory(panel: Panel) -> bool:
    """Whether memory is for more than one thing in any case of a panel."""
    return any(len(roles_of(one)) > 1 for one in panel.results)


def counted(panel: Panel) -> list[MetricSpec]:
    """What others count of memory, as far as they know of any case."""
    known = [Figures(group, one) for group, one in panel.members if use_of(one.record) is not None]
    return [spec for spec in MEMORY_COUNTERS if any(one[spec].value is not None for one in known)]


def memory(panel: Panel) -> Iterator[Element]:
    """What a step's memory is for at its highest point, and a sentence for each precision; nothing without roles."""
    if not tells_memory(panel):
        return
    present, others = {role for one in panel.results for role in roles_of(one)}, counted(panel)
    roles = [role for role in MemoryRole if role in present]
    known = [(group, one, use) for group, one in panel.members if (use := use_of(one.record))]
    scale, unit = units.binary_unit(max(use.peak for _, _, use in known))

    def shown(size: float | None) -> str:
        if not size:
            return units.NONE
        return units.significant(size / scale) if size / scale >= 0.01 else "<0.01"

    columns = (
        Column("group", shared=True), Column("case"), Column("peak", number=True),
        Column(f"vs {panel.reference or 'reference'}", number=True),
        *(Column(MEMORY_TITLES[role], number=True) for role in roles), Column("in"),
        *(Column(spec.heading, number=True) for spec in others),
    )  # fmt: skip
    rows = []
    for group, one, use in known:
        figures, phase = Figures(group, one), next(iter(highest_in(use)), units.NONE)
        words = (panel.place(group), one.mode, shown(use.peak), units.ratio(share_of(group, one)),
                 *(shown(figures[memory_of_role(role)].value) for role in roles), PHASE_TITLES.get(phase, phase),
                 *(shown(figures[spec].value) for spec in others))  # fmt: skip
        rows.append(tuple(map(Field, words)))
    yield Table("memory", f"memory at the highest point of a step, in {unit}", columns, tuple(rows))
    yield from map(Text, sentences(panel, named_cases(panel)))


def capacity(panel: Panel) -> Iterator[Element]:
    """The largest batches that fit, and what it comes to; nothing where nobody asked."""
    found = list(capacities.searched(panel))
    if not found:
        return
    columns = (
        Column("group", shared=True), Column("case"), Column("largest", number=True),
        Column(f"vs {panel.reference or 'reference'}"), Column(MAX_BATCH_TOKENS.heading, number=True),
        Column(MAX_BATCH_MEMORY.heading, number=True), Column("does not fit"),
    )  # fmt: skip
    rows = []
    for group, result, one in found:
        figures = Figures(group, result)
        share = figures[MAX_BATCH].interval
        word = "reference" if result.record.is_reference else units.NONE
        versus = units.speed_up(share.point) if share else capacities.EMULATED if emulated(result) else word
        words = (capacities.place_of(panel, group, one), result.mode, capacities.show_batch(one), versus,
                 figures.shown(MAX_BATCH_TOKENS), figures.shown(MAX_BATCH_MEMORY), figures[MAX_BATCH].why)  # fmt: skip
        rows.append(tuple(map(Field, words)))
    table = Table("capacity", capacities.title(found[0][2]), columns, tuple(rows))
    yield with_figures(table, ((group, one) for group, one, _ in found))
    yield from map(Text, capacities.sentences(panel))


@dataclass(frozen=True)
class DataSummary:
    """One statistic for each kind and role over all groups of a panel, under a title that says so.

    `crossed` are the formats whose range some value lies outside of.
    """

    title: str
    worst: tuple[TensorStatistics, ...]
    crossed: tuple[str, ...]


def summary(panel: Panel) -> DataSummary | None:
    """What the data of a panel are made of; None where nobody looked at them."""
    looked_at = [one.record.statistics for one in panel.results if one.record.statistics]
    by_name = together(((one.kind, one.role), one) for group in looked_at for one in group)
    worst = tuple(map(_largest, by_name.values()))
    if not worst:
        return None
    names = dict.fromkeys(name for one in worst for name, _, _ in one.outside)
    crossed = tuple(name for name in names if any(any(shares_of(one, name)) for one in worst))
    contained = ", ".join(name for name in names if name not in crossed)
    title = "data, before any scaling"
    title += f"; each figure is the largest of {len(looked_at)} groups" if len(looked_at) > 1 else ""
    title += f"; all within the range of {contained}" if contained else ""
    return DataSummary(title, worst, crossed)


def data(panel: Panel) -> Iterator[Element]:
    """A row for each kind and role, over all groups; a format has a column only if some value is outside its range."""
    found = summary(panel)
    if found is None:
        return
    columns = (Column("data"), *(Column(title, number=True) for title in ("values", "amax", *found.crossed)))
    rows = tuple(
        tuple(map(Field, (name_of(one), units.whole(one.count), units.significant(one.amax),
                          *(show_shares(one, name) for name in found.crossed))))
        for one in found.worst
    )  # fmt: skip
    yield Table("data", found.title, columns, rows)


def _largest(members: Sequence[TensorStatistics]) -> TensorStatistics:
    """The largest count, magnitude and shares of any."""
    shares = together((name, pair) for one in members for name, *pair in one.outside)
    outside = tuple((name, *map(max, zip(*pairs, strict=True))) for name, pairs in shares.items())
    count, amax = max(one.count for one in members), max(one.amax for one in members)
    return TensorStatistics(members[0].kind, members[0].role, count, amax, outside)


def name_of(one: TensorStatistics) -> str:
    """'mlp gradient'; once where kind and role are the same word."""
    return one.kind if one.role in ("", one.kind) else f"{one.kind} {one.role}"


def shares_of(one: TensorStatistics, name: str) -> tuple[float, float]:
    """The shares above a format's range and vanishing in it; none where the format was not asked about."""
    return next(((above, vanishing) for known, above, vanishing in one.outside if known == name), (0.0, 0.0))


def show_shares(one: TensorStatistics, name: str) -> str:
    """'0.02% / 1.3%', '-' where nothing lies outside."""
    pair = shares_of(one, name)
    return " / ".join(units.share(share) for share in pair) if any(pair) else units.NONE
