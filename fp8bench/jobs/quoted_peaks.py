"""Figures that are quoted of a device, held against what its vendor says: right, or the right one and where from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8bench.analysis.roofline import Datasheet, datasheets, kind_of_path
from fp8bench.errors import UsageError

# What else of a datasheet can be quoted: the field, what a number is multiplied by, and its unit.
_FIGURES = {
    "bandwidth": ("bandwidth", 1e9, "GB/s"), "memory": ("capacity", 1e9, "GB"), "capacity": ("capacity", 1e9, "GB"),
    "link": ("link", 1e9, "GB/s"), "watts": ("watts", 1.0, "W"),
}  # fmt: skip
_VENDORS = ("nvidia", "amd", "instinct", "intel", "google")
# Vendors round: 989 and 989.5 are one figure.
_ROUNDING = 0.01
_FORM = (
    "Expected a device, what is said of it, and the number if one was quoted: 'H200 tf32 312' (TFLOP/s, dense), "
    "'H200 bandwidth 4800' (GB/s), 'H200 memory 141' (GB), 'H200 link 450' (GB/s one way), 'H200 watts 700'"
)


@dataclass(frozen=True)
class Quote:
    """A number said of a figure of a device; `number` is None where somebody asks."""

    text: str
    devices: tuple[Datasheet, ...]
    figure: str
    number: float | None

    @property
    def unit(self) -> str:
        return _FIGURES[self.figure][2] if self.figure in _FIGURES else "TFLOP/s"

    def of(self, device: Datasheet, sparse: bool = False) -> float | None:
        if self.figure in _FIGURES:
            name, factor, _ = _FIGURES[self.figure]
            value = None if sparse else getattr(device, name)
            return None if value is None else float(value) / factor
        peak = (device.sparse if sparse else device.dense).get(kind_of_path(self.figure))
        return None if peak is None else peak / 1e12

    def is_(self, value: float | None) -> bool:
        return value is not None and self.number is not None and math.isclose(value, self.number, rel_tol=_ROUNDING)


def quote_of(text: str) -> Quote:
    """Raises UsageError for what is none, or of which nobody says anything."""
    words = text.replace(",", " ").split()
    number: float | None = None
    try:
        number = float(words[-1])
        words.pop()
    except (ValueError, IndexError):
        pass
    if len(words) < 2 or (number is not None and not 0 < number < math.inf):
        raise UsageError(f"--peak {text!r:.80} cannot be read. {_FORM}.")
    *name, figure = words
    figure = figure.lower()
    if figure not in _FIGURES and not kind_of_path(figure):
        raise UsageError(f"--peak {text!r:.80}: {figure!r:.40} is no figure of a datasheet. {_FORM}.")
    wanted = [word.lower() for word in name if word.lower() not in _VENDORS]
    found = [datasheet for datasheet in datasheets() if wanted and all(word in _words(datasheet) for word in wanted)]
    if not found:
        known = ", ".join(datasheet.name.replace(",", "") for datasheet in datasheets())
        raise UsageError(f"--peak {text!r:.80}: no datasheet of {' '.join(name)!r:.60}. Known: {known}.")
    quote = Quote(text, tuple(found), figure, number)
    told = tuple(datasheet for datasheet in found if quote.of(datasheet) is not None)
    if not told:
        raise UsageError(f"--peak {text!r:.80}: nothing is published of {figure} on {found[0].name}.")
    return Quote(text, told, figure, number)


def _words(device: Datasheet) -> list[str]:
    return device.name.lower().replace(",", "").split()


def told(quotes: Sequence[Quote]) -> Iterator[str]:
    for quote in quotes:
        yield from _told(quote)
    if any(device.published for quote in quotes for device in quote.devices):
        yield "  published alone: fp8bench runs on no such device, and nothing of it was measured"


def wrong(quote: Quote) -> bool:
    return quote.number is not None and not any(quote.is_(quote.of(device)) for device in quote.devices)


def _told(quote: Quote) -> Iterator[str]:
    if quote.number is not None:
        verdict = f"WRONG: {quote.number:g} {quote.unit} is not {quote.figure} of" if wrong(quote) else "right of"
        meant = [device.name for device in quote.devices if wrong(quote) or quote.is_(quote.of(device))]
        yield f"{quote.text}: {verdict} {' or '.join(meant)}"
        yield from (f"  {words}" for words in _confusions(quote)) if wrong(quote) else ()
    else:
        yield f"{quote.text}:"
    for device in quote.devices:
        dense = ", dense" * (quote.figure not in _FIGURES)
        field = _FIGURES[quote.figure][0] if quote.figure in _FIGURES else "dense"
        yield (
            f"  {device.name}: {quote.of(device):g} {quote.unit}{dense} ({device.told(field)}, {device.date}, "
            f"{device.source})"
        )


def _confusions(quote: Quote) -> Iterator[str]:
    """What the number is instead, if it is anything here: sparse, of another path, of another device."""
    for device in quote.devices:
        if quote.is_(quote.of(device, sparse=True)):
            yield f"that is what {device.name} does of operands with 2:4 structure, half of which are zeros"
        same = [path for path, peak in device.dense.items() if quote.is_(peak / 1e12)]
        if quote.figure not in _FIGURES and same:
            yield f"that is {' and '.join(same)} of {device.name}"
    others = [
        datasheet.name
        for datasheet in datasheets()
        if datasheet not in quote.devices and quote.is_(quote.of(datasheet))
    ]
    doubled = [
        datasheet.name
        for datasheet in datasheets()
        if datasheet not in quote.devices and quote.is_(quote.of(datasheet, sparse=True))
    ]
    if others:
        yield f"that is {quote.figure} of {', '.join(others)}"
    if doubled:
        yield f"that is sparse {quote.figure} of {', '.join(doubled)}"
