"""What a step is made of, as text: kinds of work side by side, and the modules that take most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fp8bench import units
from fp8bench.analysis.shares import StepParts
from fp8bench.model import UNATTRIBUTED, Run
from fp8bench.report.elements import Column, Element, Field, Items, Page, Part, Table, Text
from fp8bench.report.panels import together

# So many modules are told by name.
MOST_MODULES = 20
_LEGEND = (
    "shares are those of a pass of its own, which looks at every operator; times are estimated: share x best case",
    f"{UNATTRIBUTED}: between operators, on the host; view: no work, but the time to call it",
    "cast: between dtypes of floating-point numbers; copy: without one; gather: by index",
    "module: its path in the model, and the model's class for what is done between its modules",
)


def page_of(run: Run, parts: Sequence[StepParts]) -> Page:
    """A part for each setting: its precisions side by side."""
    found = [
        Part(f"setting-{place}", setting, tuple(_elements(some)))
        for place, (setting, some) in enumerate(together((one.case.setting, one) for one in parts).items())
    ]
    return Page(f"what a step of run {run.id} is made of", "", tuple(found), _LEGEND)


def _elements(parts: Sequence[StepParts]) -> list[Element]:
    known = [(one.case.mode, one) for one in parts if one.shares is not None]
    found: list[Element] = list(tables_of(known, ("", ""))) if known else []
    words = [f"{one.case.mode}: nothing is known of its parts: {one.why}" for one in parts if one.shares is None]
    words += [f"{name}: {remark}" for name, one in known for remark in one.remarks]
    return [*found, Items(tuple(map(Text, words)))] if words else found


def tables_of(parts: Sequence[tuple[str, StepParts]], captions: tuple[str, str]) -> Iterator[Table]:
    """A row for each kind of work, and for each of the modules that take most in any; none where no module is known."""
    names = [name for name, _ in parts]
    shares = [one.by_kind for _, one in parts]
    kinds = dict.fromkeys(kind for one in shares for kind in one if kind != UNATTRIBUTED)
    ordered = sorted(kinds, key=lambda kind: -max(one.get(kind, 0.0) for one in shares))
    yield _table("kinds", captions[0], "kind", names, [*ordered, UNATTRIBUTED], shares, parts)
    shares = [one.by_module for _, one in parts]
    modules = dict.fromkeys(module for one in shares for module in one)
    first = sorted(modules, key=lambda module: -max(one.get(module, 0.0) for one in shares))[:MOST_MODULES]
    if first:
        yield _table("modules", captions[1], "module", names, first, shares, parts)


def _table(
    name: str, caption: str, first: str, names: Sequence[str], keys: Sequence[str],
    shares: Sequence[Mapping[str, float]], parts: Sequence[tuple[str, StepParts]],
) -> Table:  # fmt: skip
    columns = (Column(first), *(Column(one, number=True) for one in names))
    rows = [
        (Field(key), *(_cell(one, own.get(key)) for (_, one), own in zip(parts, shares, strict=True))) for key in keys
    ]
    return Table(name, caption, columns, tuple(rows))


def _cell(one: StepParts, share: float | None) -> Field:
    """'64.1%  1.20 ms'."""
    if share is None:
        return Field(units.NONE)
    seconds = "" if one.seconds is None else f"  {units.seconds(share * one.seconds)}"
    return Field(f"{units.percent(share)}{seconds}", share)
