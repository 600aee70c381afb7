"""What a lint of shapes found, as text for a terminal: what fits in a line, what does not in a row with its reasons."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from fp8bench import units
from fp8bench.analysis.shape_findings import Finding, Judgement, Outcome, homeless
from fp8bench.formats.product_rules import conditions
from fp8bench.formats.scaled_products import Sides
from fp8bench.report.elements import Column, Element, Field, Items, Page, Part, Table, Text, Tone

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
# Where something is so: pairs of a mode and a device by their names.
Places = Iterable[tuple[str, str]]
# So many products are named; more are counted.
_MOST_NAMES = 4


def page_of(title: str, findings: Sequence[Finding]) -> Page:
    """What fits where, what does not and why, what is missing, where there is any; at last one sentence."""
    sections: dict[str, Sequence[Element]] = {
        "products that fit as they are; -: there is no such product": [_overview(findings)],
        "refused, and no padding helps": _items(_unpadded(findings)),
        "refused unless they are padded, and what that costs more": _padded(findings),
        "why there is no such product": _items(_missing(findings)),
        "Transformer Engine, where it says more than torch": _items(_of_te(findings)),
        "what these products need besides their shape": _items(_needs(findings)),
    }
    parts = [Part(f"part-{n}", words, tuple(found)) for n, (words, found) in enumerate(sections.items()) if found]
    return Page(title, "", (*parts, Part("conclusion", "", (Text(conclusion(findings)),))))


def _items(lines: Iterable[str]) -> list[Element]:
    texts = tuple(map(Text, lines))
    return [Items(texts)] if texts else []


def conclusion(findings: Sequence[Finding]) -> str:
    """Whether everything fits somewhere, in one sentence."""
    lost = homeless(findings)
    if not lost:
        return "Every product fits as it is on some of these devices, in every mode."
    by_products = _grouped(dict.fromkeys(one.mode for one in lost), lambda mode: _lost_in(mode, lost, findings))
    parts = [f"in {_listed(modes)}: {products}" for products, modes in by_products.items()]
    return f"Not taken as they are by any of these devices, {'; '.join(parts)}."


def _lost_in(mode: str, lost: Sequence[Finding], findings: Sequence[Finding]) -> str:
    return _products([one for one in lost if one.mode == mode], findings)


def _overview(findings: Sequence[Finding]) -> Table:
    """A row for every device and a column for every mode: how many of the products fit there."""
    modes, counts = list(dict.fromkeys(one.mode for one in findings)), _counts(findings)
    devices = dict.fromkeys(one.device.name for one in findings)
    rows = tuple((Field(device), *(_count(counts.get((mode, device))) for mode in modes)) for device in devices)
    return Table("fitting", "", (Column("device"), *(Column(mode, number=True) for mode in modes)), rows)


def _counts(findings: Sequence[Finding]) -> dict[tuple[str, str], tuple[int, int]]:
    """How many products fit in a mode on a device that has it, and how many there are."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for one in findings:
        if one.torch.outcome is not Outcome.MISSING:
            fits, all_ = found.get(_place(one), (0, 0))
            found[_place(one)] = (fits + (one.torch.outcome is Outcome.FITS), all_ + 1)
    return found


def _count(known: tuple[int, int] | None) -> Field:
    if known is None:
        return Field(units.NONE)
    fits, all_ = known
    return Field("all", tone=Tone.GOOD) if fits == all_ else Field(f"{fits} of {all_}", tone=Tone.DOUBT)


def _unpadded(findings: Sequence[Finding]) -> Iterator[str]:
    """What no padding mends, by its reasons."""
    wrong = [one for one in findings if one.torch.outcome is Outcome.REFUSED]
    return _by_reason(wrong, lambda one: _why(one.torch, mended=False), findings)


def _padded(findings: Sequence[Finding]) -> list[Element]:
    """A row for every product and what padding would make of it; under it who objects, and where."""
    wrong = [one for one in findings if one.torch.outcome is Outcome.PAD]
    rows = []
    for same in _grouped(wrong, lambda one: (_name(one), one.product.sides, one.torch.padded)).values():
        first = same[0]
        more = [_more([one.torch.more_flops for one in same]), _more([one.torch.more_bytes for one in same])]
        reasons = "\n".join(_reasons(same, lambda one: one.torch))
        words = (_name(first), _sides(first.product.sides), _sides(first.torch.padded), *more, reasons)
        rows.append(tuple(map(Field, words)))
    titles = ("M x N x K", "padded to", "FLOPs", "bytes")
    columns = (Column("product"), *(Column(title, number=True) for title in titles), Column("why", below=True))
    return [Table("padded", "", columns, tuple(rows))] if rows else []


def _more(shares: Sequence[float]) -> str:
    decimals = 2 if max(shares) < 0.1 else 1 if max(shares) < 1 else 0
    low, high = (f"+{units.percent(one, decimals)}" for one in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def _missing(findings: Sequence[Finding]) -> Iterator[str]:
    """Modes and devices by the reason why there is none."""
    return _reasons([one for one in findings if one.torch.outcome is Outcome.MISSING], lambda one: one.torch)


def _of_te(findings: Sequence[Finding]) -> Iterator[str]:
    """What it objects to where torch has the product and says nothing of the kind."""
    more = [
        one for one in findings
        if one.te is not None and one.torch.outcome in (Outcome.FITS, Outcome.PAD) and _beyond(one.te, one.torch)
    ]  # fmt: skip
    return _by_reason(more, lambda one: [objection.why for objection in _te(one).objections], findings)


def _te(one: Finding) -> Judgement:
    assert one.te is not None
    return one.te


def _beyond(te: Judgement, torch: Judgement) -> bool:
    """Whether it asks for more than torch's padding gives, or refuses."""
    if te.outcome is not Outcome.PAD:
        return te.outcome is Outcome.REFUSED
    assert te.padded is not None
    return torch.padded is None or any(own > theirs for own, theirs in zip(te.padded, torch.padded, strict=True))


def _needs(findings: Sequence[Finding]) -> Iterator[str]:
    there = [one for one in findings if one.torch.outcome is not Outcome.MISSING and one.product.scheme]
    needs = {_place(one): conditions(one.product.scheme, one.device) for one in there if one.product.scheme is not None}
    for words, places in _grouped([place for place in needs if needs[place]], lambda place: needs[place]).items():
        yield f"{_places(places)}: {', '.join(words)}"
    if needs:
        yield "everywhere: both operands with their contraction innermost, the second one column by column"


def _by_reason(
    some: Sequence[Finding], why: Callable[[Finding], list[str]], findings: Sequence[Finding]
) -> Iterator[str]:
    """One line for all that are what they are for the same reasons."""
    for reasons, same in _grouped(some, lambda one: "; ".join(why(one))).items():
        yield f"{reasons}: {_products(same, findings)}, {_places(dict.fromkeys(map(_place, same)))}"


def _why(judgement: Judgement, mended: bool = True) -> list[str]:
    """The objections and whose they are; those that padding answers too, unless they are left out."""
    return [f"{one.why} ({one.source})" for one in judgement.objections if mended or one.multiples is None]


def _products(some: Sequence[Finding], findings: Sequence[Finding]) -> str:
    """Which products those are, by their names where they are few."""
    names, all_ = dict.fromkeys(map(_name, some)), {_name(one) for one in findings}
    if len(names) == len(all_):
        return "every product"
    return _listed(names) if len(names) <= _MOST_NAMES else f"{len(names)} of {len(all_)} products"


def _reasons(findings: Sequence[Finding], judgement: Callable[[Finding], Judgement]) -> Iterator[str]:
    """Each objection once, whose it is, and in which modes on which devices."""
    found: dict[str, dict[tuple[str, str], None]] = {}
    for one in findings:
        for why in _why(judgement(one)):
            found.setdefault(why, {})[_place(one)] = None
    for why, where in found.items():
        yield f"{why}: {_places(where)}"


def _places(places: Places) -> str:
    """'fp8, fp8-rowwise on l40s, h100; fp8-block on h100'."""
    devices: dict[str, dict[str, None]] = {}
    for mode, device in places:
        devices.setdefault(mode, {})[device] = None
    modes = _grouped(devices, lambda mode: tuple(devices[mode]))
    return "; ".join(f"{', '.join(same)} on {', '.join(names)}" for names, same in modes.items())


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by a key, both in the order in which they came."""
    found: dict[Key, list[Item]] = {}
    for one in items:
        found.setdefault(key(one), []).append(one)
    return found


def _place(one: Finding) -> tuple[str, str]:
    return one.mode, one.device.name


def _name(one: Finding) -> str:
    return f"{one.shape.name} {one.kind}"


def _sides(sides: Sides | None) -> str:
    return units.NONE if sides is None else " x ".join(map(str, sides))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
