"""Measures and stores the ceilings (highest rates) of devices, and checks quoted figures against datasheets.

The suite `ceilings` is an ordinary run, with a record for each rate.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path

from fp8bench import __version__
from fp8bench.analysis.roofline import Datasheet, load_datasheets, product_kind_of
from fp8bench.errors import UsageError
from fp8bench.measure.ceilings import measure_ceilings
from fp8bench.measure.environment import gather
from fp8bench.measure.handle import ProcessWorker, Worker, register_process_run
from fp8bench.measure.sensors.device_state import read_device_settings
from fp8bench.measure.sensors.meter import open_meter
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
from fp8bench.report.topics.roofline import UNIT_OF_LIMIT, describe_shape, describe_spread
from fp8bench.store.ceilings import remeasure_ceilings
from fp8bench.store.runs.run_file import check_store, load_run, start_run

# The dtype of arrays in all measurements except products.
_ARRAY_DTYPE = "fp32"


def run_ceilings(request: Request, store: Path, command: str) -> Run:
    """Measures the suite `ceilings` on the devices of the request, and stores it as a run. Raises UsageError if the
    request has options that would have no effect.
    """
    default_ceilings_request = Request(CEILINGS, devices=request.devices, threads=request.threads)
    if request != default_ceilings_request:
        raise UsageError(
            "the suite ceilings measures the peak rates of a device. It takes only --devices, --threads and "
            "options for output. Leave other options out."
        )
    check_store(store)
    started = now()
    # 1. Measure the rates of each device. The `limit` of a rate is what was timed, such as products or copies.
    groups: list[list[Record]] = []
    with register_process_run(isolation=True), ProcessWorker(Settings(request.threads)) as worker:
        facts = worker.probe()
        environment = gather(worker.software(), __version__, request.threads)
        for device in choose_devices(request, facts):
            device_settings, ceilings = _measure_device(worker, device, store, request.threads)
            environment = environment.also(device_settings)
            for _, rates in groupby(ceilings.rates, lambda rate: rate.limit):
                groups.append([_make_record(rate, device) for rate in rates])
    # 2. Write the records as a run. The rates of a device with the same limit, such as products, are a group.
    plans = [[PlannedCase(record.case, record.support, record.work) for record in group] for group in groups]
    ceiling_plan = Plan(tuple(Group(tuple(cases), reference=0) for cases in plans))
    run = Run(secrets.token_hex(4), started, command, request, ceiling_plan, environment, facts)
    writer = start_run(run, store)
    try:
        for group in groups:
            writer.append(group)
        writer.finish("finished")
    finally:
        writer.close()
    return load_run(writer.path)


def _measure_device(
    worker: Worker, device: DeviceFacts, store: Path, threads: int
) -> tuple[dict[str, Scalar | None], Ceilings]:
    """Measures and stores the ceilings of a device. Returns the device's settings as its driver reports them, and the
    ceilings.
    """
    with open_meter(device) as meter:
        device_settings = read_device_settings(device, meter)
    environment = gather(worker.software(), __version__, threads).also(device_settings)
    return device_settings, remeasure_ceilings(store, environment, device, partial(measure_ceilings, worker, device))


def _make_record(rate: Rate, device: DeviceFacts) -> Record:
    """Returns a rate as a record. A rate that was not measured gives a skipped record with the reason."""
    name = rate.precision or _ARRAY_DTYPE
    case = Case(CEILINGS, (("limit", rate.limit.value),), name, device.key)
    support = precisions.get(name).support(device) if rate.precision else Support(Level.NATIVE, "")
    # Products in fp32 are the reference of the other products. Each rate without a precision is its own reference.
    is_reference = name == _ARRAY_DTYPE
    if rate.value is None:
        return Record(case, support, Status.SKIPPED, is_reference=is_reference, reason=rate.why)
    rates = Measurement(
        specs.CEILING_RATE, UNIT_OF_LIMIT[rate.limit], rate.runs, description="the highest rate, per second"
    )
    # Also store the rate as a time: how long 1e9 FLOPs or bytes, or one launch, take.
    timed_work_amount = 1.0 if rate.limit is Limit.LAUNCH else 1e9
    time_measurement = Measurement(specs.CEILING_TIME, "s", tuple(timed_work_amount / run for run in rate.runs))
    return Record(
        case,
        support,
        Status.OK,
        Work(),
        is_reference,
        detail=f"{describe_shape(rate)}; {describe_spread(rate)}",
        measurements=(rates, time_measurement),
        ceiling=Ceiling(rates=(rate,), device=device.name),
    )


# Figures of datasheets that are not peak rates. Each has the field's name, the factor from the quoted unit to the
# field's unit, and the quoted unit. A user may call the memory size `memory` or `capacity`.
_DATASHEET_FIGURES = {
    "bandwidth": ("bandwidth", 1e9, "GB/s"),
    "memory": ("capacity", 1e9, "GB"),
    "capacity": ("capacity", 1e9, "GB"),
    "link": ("link", 1e9, "GB/s"),
    "watts": ("watts", 1.0, "W"),
}
_PEAK_DATASHEET_FIELD = "dense"
_VENDORS = ("nvidia", "amd", "instinct", "intel", "google")
# The largest relative difference of equal figures. Vendors round: 989 and 989.5 are the same figure.
_ROUNDING_TOLERANCE = 0.01
_QUOTE_SYNTAX = (
    "Expected a device, a figure, and the number if one was quoted: 'H200 tf32 312' (TFLOP/s, dense), "
    "'H200 bandwidth 4800' (GB/s), 'H200 memory 141' (GB), 'H200 link 450' (GB/s one way), 'H200 watts 700'"
)


@dataclass(frozen=True)
class DeviceFigureQuote:
    """A number that somebody claims for a figure of a device, such as a peak from a datasheet. `number` is None if the
    user asks for the figure instead of claiming a number.
    """

    text: str
    devices: tuple[Datasheet, ...]
    figure: str
    number: float | None

    @property
    def datasheet_conversion(self) -> tuple[str, float, str]:
        """The datasheet field that holds this figure, the factor that converts `number` to the field's unit, and the
        unit of `number`.
        """
        return _DATASHEET_FIGURES.get(self.figure, (_PEAK_DATASHEET_FIELD, 1e12, "TFLOP/s"))

    def of(self, device: Datasheet, sparse: bool = False) -> float | None:
        """Returns the number of this figure in a datasheet, in the unit of `number`; None if the datasheet lacks it.
        With `sparse`, returns the peak for operands with 2:4 sparsity.
        """
        field, factor, _ = self.datasheet_conversion
        value: float | None = None
        if field == _PEAK_DATASHEET_FIELD:
            product_kind = product_kind_of(self.figure)  # 'fp8' for the figure 'e4m3fn'
            value = (device.sparse if sparse else device.dense).get(product_kind)
        elif not sparse:
            value = getattr(device, field)
        return None if value is None else float(value) / factor

    def is_equal_to(self, value: float | None) -> bool:
        return (
            value is not None
            and self.number is not None
            and math.isclose(value, self.number, rel_tol=_ROUNDING_TOLERANCE)
        )


def parse_quoted_figure(text: str) -> DeviceFigureQuote:
    """Parses a quoted figure. Raises UsageError for invalid text, or for a figure that no datasheet has."""
    # 1. Split the text into the device, the figure, and the number at the end.
    parts = text.replace(",", " ").split()
    number: float | None = None
    with suppress(ValueError, IndexError):
        number = float(parts[-1])
        parts.pop()
    if len(parts) < 2 or (number is not None and not 0 < number < math.inf):
        raise UsageError(f"--peak {text!r:.80} cannot be read. {_QUOTE_SYNTAX}.")
    *name, figure = parts
    figure = figure.lower()
    if figure not in _DATASHEET_FIGURES and not product_kind_of(figure):
        raise UsageError(f"--peak {text!r:.80}: {figure!r:.40} is not a figure of a datasheet. {_QUOTE_SYNTAX}.")
    # 2. Find the datasheets of devices whose names contain these words.
    device_name_words = {word.lower() for word in name} - set(_VENDORS)
    datasheets_by_name = {datasheet.name.replace(",", ""): datasheet for datasheet in load_datasheets()}
    matching_datasheets = [
        datasheet
        for sheet_name, datasheet in datasheets_by_name.items()
        if device_name_words and device_name_words <= {*sheet_name.lower().split()}
    ]
    if not matching_datasheets:
        raise UsageError(
            f"--peak {text!r:.80}: no datasheet of {' '.join(name)!r:.60}. Known: {', '.join(datasheets_by_name)}."
        )
    # 3. Select the datasheets that publish the figure.
    parsed_quote = DeviceFigureQuote(text, tuple(matching_datasheets), figure, number)
    publishing_datasheets = tuple(
        datasheet for datasheet in matching_datasheets if parsed_quote.of(datasheet) is not None
    )
    if not publishing_datasheets:
        datasheet = matching_datasheets[0]
        if reason := datasheet.lacks.get(product_kind_of(figure)):
            raise UsageError(
                f"--peak {text!r:.80}: {datasheet.name} has no peak of {figure}: {reason} ({datasheet.source})."
            )
        raise UsageError(f"--peak {text!r:.80}: the vendor of {datasheet.name} publishes no {figure}.")
    return replace(parsed_quote, devices=publishing_datasheets)


def describe_quoted_figures(quotes: Sequence[DeviceFigureQuote]) -> Iterator[str]:
    for quote in quotes:
        yield from _describe_quoted_figure(quote)
    devices = chain.from_iterable(quote.devices for quote in quotes)
    if any(device.published for device in devices):
        yield "  published figures only: fp8bench does not run on such a device"


def is_quote_wrong(quote: DeviceFigureQuote) -> bool:
    return quote.number is not None and not any(quote.is_equal_to(quote.of(device)) for device in quote.devices)


def _describe_quoted_figure(quote: DeviceFigureQuote) -> Iterator[str]:
    field, _, unit = quote.datasheet_conversion
    if quote.number is None:
        yield f"{quote.text}:"
    elif is_quote_wrong(quote):
        names = " or ".join(device.name for device in quote.devices)
        yield f"{quote.text}: WRONG: {quote.number:g} {unit} is not {quote.figure} of {names}"
        for explanation in _explain_wrong_number(quote):
            yield f"  {explanation}"
    else:
        names = " or ".join(device.name for device in quote.devices if quote.is_equal_to(quote.of(device)))
        yield f"{quote.text}: right of {names}"
    for device in quote.devices:
        figure = f"{quote.of(device):g} {unit}{', dense' * (field == _PEAK_DATASHEET_FIELD)}"
        yield f"  {device.name}: {figure} ({device.cite_figures(field)}, {device.date}, {device.source})"


def _explain_wrong_number(quote: DeviceFigureQuote) -> Iterator[str]:
    """Yields sentences that explain a wrong quoted number. The number may belong to another figure: a peak with
    sparsity, or a figure of a different dtype or device.
    """
    for device in quote.devices:
        if quote.is_equal_to(quote.of(device, sparse=True)):
            yield f"that is the peak of {device.name} for operands with 2:4 sparsity, half of which are zeros"
        kinds_with_peak = [kind for kind, peak in device.dense.items() if quote.is_equal_to(peak / 1e12)]
        if kinds_with_peak and quote.figure not in _DATASHEET_FIGURES:
            yield f"that is the peak of {' and '.join(kinds_with_peak)} on {device.name}"
    unquoted_datasheets = [datasheet for datasheet in load_datasheets() if datasheet not in quote.devices]
    for sparse in (False, True):
        if names := [
            datasheet.name for datasheet in unquoted_datasheets if quote.is_equal_to(quote.of(datasheet, sparse))
        ]:
            yield f"that is {'sparse ' * sparse}{quote.figure} of {', '.join(names)}"
