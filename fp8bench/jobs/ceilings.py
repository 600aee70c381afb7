"""Ceilings: the peaks of devices, measured and stored; and quoted figures, checked against datasheets.

The suite `ceilings` is a run like any other, with a record for each rate.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path

from fp8bench import __version__
from fp8bench.analysis.roofline import Datasheet, datasheets, kind_of_path
from fp8bench.errors import UsageError
from fp8bench.measure.ceilings import measure_ceilings
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import ProcessWorker, Worker, claim_process
from fp8bench.measure.sensors.device_state import device_state_of
from fp8bench.measure.sensors.meter import meter_for
from fp8bench.model import (
    Case,
    Ceiling,
    Ceilings,
    DeviceFacts,
    Group,
    Level,
    Limit,
    Measurement,
    Plan,
    PlannedCase,
    Rate,
    Record,
    Request,
    Run,
    Scalar,
    Status,
    Support,
    Work,
    specs,
)
from fp8bench.model.raw import Settings
from fp8bench.model.run import CEILINGS
from fp8bench.pipeline import now
from fp8bench.plan.make import choose_devices
from fp8bench.registry import precisions
from fp8bench.report.topics.roofline import UNITS, shape_words, spread_words
from fp8bench.store.ceilings import new_ceilings
from fp8bench.store.runs.run_file import check_store, load_run, start_run

# The dtype of the arrays for limits other than products.
_ARRAYS = "fp32"


def ceilings_run(request: Request, store: Path, command: str) -> Run:
    """Measures the suite `ceilings` on the request's devices and stores it as a run. Other options are refused."""
    allowed = Request(CEILINGS, devices=request.devices, threads=request.threads)
    if request != allowed:
        raise UsageError(
            "the suite ceilings measures what a device does at most, and takes --devices, --threads and options that "
            "say where to write. Leave the others out."
        )
    check_store(store)
    started = now()
    # 1. Measure the rates of each device.
    groups: list[list[Record]] = []
    with claim_process(True), ProcessWorker(Settings(request.threads)) as worker:
        facts = worker.probe()
        environment = gather(worker.software(), __version__, request.threads)
        for device in choose_devices(request, facts):
            state, ceilings = _measure_device(worker, device, store, request.threads)
            environment = environment.also(state)
            for _, rates in groupby(ceilings.rates, lambda rate: rate.limit):
                groups.append([_record(rate, device) for rate in rates])
    # 2. Write them as a run with a group for each limit.
    plan = Plan(tuple(map(_plan_group, groups)))
    run = Run(secrets.token_hex(4), started, command, request, plan, environment, facts)
    writer = start_run(run, store)
    try:
        for group in groups:
            writer.append(group)
        writer.finish("finished")
    finally:
        writer.close()
    return load_run(writer.path)


def _plan_group(records: Sequence[Record]) -> Group:
    return Group(tuple(PlannedCase(record.case, record.support, record.work) for record in records), 0)


def _measure_device(
    worker: Worker, device: DeviceFacts, store: Path, threads: int
) -> tuple[dict[str, Scalar | None], Ceilings]:
    """Measures and stores a device's ceilings; returns them with the device's state as its driver reports it."""
    with meter_for(device) as meter:
        state = device_state_of(device, meter)
    environment = gather(worker.software(), __version__, threads).also(state)
    return state, new_ceilings(store, environment, device, partial(measure_ceilings, worker, device))


def _record(rate: Rate, device: DeviceFacts) -> Record:
    """Returns the record of a rate; skipped, with the device's reason, if it was not measured."""
    name = rate.precision or _ARRAYS
    case = Case(CEILINGS, (("limit", rate.limit.value),), name, device.key)
    support = precisions.get(name).support(device) if rate.precision else Support(Level.NATIVE, "")
    first = name == _ARRAYS
    if rate.value is None:
        return Record(case, support, Status.SKIPPED, is_reference=first, reason=rate.why)
    rates = Measurement(
        specs.CEILING_RATE, UNITS[rate.limit], rate.runs, description="the most that was done in a second"
    )
    amount = 1.0 if rate.limit is Limit.LAUNCH else 1e9
    times = Measurement(specs.CEILING_TIME, "s", tuple(amount / run for run in rate.runs))
    return Record(
        case,
        support,
        Status.OK,
        Work(),
        first,
        detail=f"{shape_words(rate)}; {spread_words(rate)}",
        measurements=(rates, times),
        ceiling=Ceiling(rates=(rate,), device=device.name),
    )


# Figures of a datasheet other than peaks: the field, the factor to its unit, and the unit of a quoted number.
_FIGURES = {
    "bandwidth": ("bandwidth", 1e9, "GB/s"),
    "memory": ("capacity", 1e9, "GB"),
    "capacity": ("capacity", 1e9, "GB"),
    "link": ("link", 1e9, "GB/s"),
    "watts": ("watts", 1.0, "W"),
}
_VENDORS = ("nvidia", "amd", "instinct", "intel", "google")
# Vendors round: 989 and 989.5 are the same figure.
_ROUNDING = 0.01
_FORM = (
    "Expected a device, what is said of it, and the number if one was quoted: 'H200 tf32 312' (TFLOP/s, dense), "
    "'H200 bandwidth 4800' (GB/s), 'H200 memory 141' (GB), 'H200 link 450' (GB/s one way), 'H200 watts 700'"
)


@dataclass(frozen=True)
class Quote:
    """A number quoted for a figure of a device; `number` is None if the user asks for the figure."""

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
    """Parses a quote. Raises UsageError for invalid text, or a figure that no datasheet has."""
    # 1. Split off the number at the end, the figure before it, and the device.
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
        raise UsageError(f"--peak {text!r:.80}: {figure!r:.40} is not a figure of a datasheet. {_FORM}.")
    # 2. Find the datasheets of devices with these words in their name.
    device_words = {word.lower() for word in name} - set(_VENDORS)
    names = {sheet.name.replace(",", ""): sheet for sheet in datasheets()}
    fitting = [sheet for name, sheet in names.items() if device_words and device_words <= {*name.lower().split()}]
    if not fitting:
        raise UsageError(f"--peak {text!r:.80}: no datasheet of {' '.join(name)!r:.60}. Known: {', '.join(names)}.")
    # 3. Select those that publish the figure.
    quote = Quote(text, tuple(fitting), figure, number)
    published = tuple(sheet for sheet in fitting if quote.of(sheet) is not None)
    if not published:
        sheet = fitting[0]
        if reason := sheet.lacks.get(kind_of_path(figure)):
            raise UsageError(f"--peak {text!r:.80}: {sheet.name} has no peak of {figure}: {reason} ({sheet.source}).")
        raise UsageError(f"--peak {text!r:.80}: nothing is published of {figure} on {sheet.name}.")
    return replace(quote, devices=published)


def quote_lines(quotes: Sequence[Quote]) -> Iterator[str]:
    for quote in quotes:
        yield from _lines_of(quote)
    devices = chain.from_iterable(quote.devices for quote in quotes)
    if any(device.published for device in devices):
        yield "  only published: fp8bench does not run on such a device, and has measured none"


def is_wrong(quote: Quote) -> bool:
    return quote.number is not None and not any(quote.is_(quote.of(device)) for device in quote.devices)


def _lines_of(quote: Quote) -> Iterator[str]:
    if quote.number is not None:
        wrong = is_wrong(quote)
        verdict = f"WRONG: {quote.number:g} {quote.unit} is not {quote.figure} of" if wrong else "right of"
        meant = [device.name for device in quote.devices if wrong or quote.is_(quote.of(device))]
        yield f"{quote.text}: {verdict} {' or '.join(meant)}"
        yield from (f"  {words}" for words in _confusions(quote)) if wrong else ()
    else:
        yield f"{quote.text}:"
    for device in quote.devices:
        dense = ", dense" * (quote.figure not in _FIGURES)
        field = _FIGURES[quote.figure][0] if quote.figure in _FIGURES else "dense"
        yield (
            f"  {device.name}: {quote.of(device):g} {quote.unit}{dense} ({device.cite(field)}, {device.date}, "
            f"{device.source})"
        )


def _confusions(quote: Quote) -> Iterator[str]:
    """Yields alternative meanings of the number: with sparsity, or the figure of a different dtype or device."""
    for device in quote.devices:
        if quote.is_(quote.of(device, sparse=True)):
            yield f"that is what {device.name} does of operands with 2:4 structure, half of which are zeros"
        same = [path for path, peak in device.dense.items() if quote.is_(peak / 1e12)]
        if quote.figure not in _FIGURES and same:
            yield f"that is {' and '.join(same)} of {device.name}"
    sheets = [sheet for sheet in datasheets() if sheet not in quote.devices]
    for sparse in (False, True):
        if names := [sheet.name for sheet in sheets if quote.is_(quote.of(sheet, sparse))]:
            yield f"that is {'sparse ' * sparse}{quote.figure} of {', '.join(names)}"
