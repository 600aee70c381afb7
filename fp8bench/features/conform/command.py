"""`fp8bench conform`: compares native casts and products with their emulation, bit by bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from fp8bench import units
from fp8bench.cli.options import add_common
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_FAILED, EXIT_OK, EXIT_REGRESSION, UsageError, WorkerError
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.model import DeviceFacts, Level
from fp8bench.model.codec import encode
from fp8bench.model.promises import Conformity, Difference, ModeConformity
from fp8bench.model.raw import Settings
from fp8bench.plan.make import device_named
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Items, Page, Part, Text, Tone
from fp8bench.report.words.naming import join_words

_LEGEND = (
    "order: every element is the sum of the same products in a different order; it conforms",
    "units: every element is what this GPU's units give, which sum in fewer bits than float32 has; it conforms",
    "short-sums: the same where nobody knows this GPU's units: no further off than sums of 14 bits; it conforms",
    "rounding: each is a neighbour of the exact result, but not always the nearest one",
    "overflow: what lies beyond the largest number becomes something else (NaN, infinity, the largest)",
    "layout: rows, columns or a whole operand are misplaced; scale: a factor that should not be there",
    "accumulation: sums as if kept in fewer bits than the recipe's option accumulator",
    "unexplained: none of these explains all elements that differ",
    "at most: the largest distance, in numbers of the result's dtype; in casts, of their format",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs every cast and product of each precision on the same operands with the device's kernels and "
        "with the emulation, and explains the elements that differ. Times nothing."
    )
    parser.epilog = (
        "Exit codes: 0 all are equal, up to the order of sums; 1 something differs; 2 wrong usage; 3 the "
        "device supports none."
    )
    add_common(parser, "--dtypes", help="precisions; default all that the device supports")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add_common(parser, "--seed", help="for the operands; default 0")
    add_common(parser, "--import", help="as in suite")
    add_common(parser, "--all", "--explain")
    add_common(parser, "--json", help="print all of it as JSON instead of the tables")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    facts, modes = conformity(arguments.dtypes, arguments.device, arguments.seed, tuple(arguments.imports), TERMINAL)
    conforms = all(mode.conforms for mode in modes)
    values = [{**encode(mode), "conforms": mode.conforms} for mode in modes]
    document = {"device": encode(facts), "conforms": conforms, "modes": values}
    tell(arguments, partial(page_of, facts, modes, arguments.all), lambda: document)
    # An empty comparison proves nothing, and has a separate exit code.
    if not conforms:
        return EXIT_REGRESSION
    return EXIT_OK if any(mode.is_compared for mode in modes) else EXIT_FAILED


def conformity(
    dtypes: Sequence[str], device: str | None, seed: int, imports: tuple[str, ...], observer: JobObserver
) -> tuple[DeviceFacts, list[ModeConformity]]:
    """Compares each precision on the device; by default all that it supports, emulated ones included."""
    named = list(dict.fromkeys(precisions.canonical(word) for word in dtypes))
    with ProcessWorker(Settings(seed=seed, imports=imports)) as worker:
        facts = device_named(device or "", worker.probe())
        supports = {name: precisions.get(name).support(facts) for name in named or precisions.names()}
        # 1. Find what the device supports.
        able = {name: support for name, support in supports.items() if support.level is not Level.REFUSED}
        if not able:
            reasons = "; ".join(f"{name}: {support.reason}" for name, support in supports.items())
            raise UsageError(
                f"{facts.key} supports none of these ({reasons}). Give other --dtypes, or another --device."
            )
        conformities: list[ModeConformity] = []
        # 2. Check one precision after the other, each with time to compile.
        with observer.counting() as tell:
            for name, support in able.items():
                tell(len(conformities), len(able), "precisions", name)
                mode = precisions.get(name).mode
                try:
                    conformed = worker.within(COMPILE_SECONDS).conform(name, facts)
                except WorkerError as error:  # other precisions may still work
                    conformed = (Conformity(mode, "all of it", "", why=str(error)),)
                    # A failed kernel may have broken the device for this process.
                    worker.restart()
                conformities.append(ModeConformity(mode, support, conformed))
    return facts, conformities


def page_of(facts: DeviceFacts, conformities: Sequence[ModeConformity], everything: bool = False) -> Page:
    """Shows the verdict, a row for each precision, differences, and what was skipped and why.

    Unless `everything`, acceptable differences are only counted, and conforming emulated precisions only named.
    """
    # The verdict is about all modes, shown or not.
    good = all(mode.conforms for mode in conformities)
    parts = [Part("verdict", "", (Text(_verdict(conformities), Tone.GOOD if good else Tone.BAD),))]
    emulated = [mode for mode in conformities if mode.conforms and mode.support.is_emulated and not everything]
    if rows := [mode for mode in conformities if mode not in emulated]:
        parts.append(Part("modes", "", (table("modes", "", _MODES, rows),)))
    if same := [_describe_mode(mode) for mode in emulated if mode.is_compared]:
        words = f"emulated here, and torch's kernels give the same: {join_words(same, 20)}"
        parts.append(Part("emulated", "", (Text(words),)))
    # By default only what does not conform is shown: another summation order is not a fault.
    listed_kinds = [kind for kind in Difference if kind is not Difference.NONE] if everything else _WRONG
    shown: list[Conformity] = []
    for mode in conformities:
        shown += [case for case in mode.found if case.difference in listed_kinds]
    if shown:
        caption = "what is not the same bit by bit"
        parts.append(Part("differences", "", (table("differences", caption, _DIFFERENCES, shown),)))
    if undone := list(_undone(conformities)):
        parts.append(Part("undone", "not done here", (Items(tuple(map(Text, undone))),)))
    title = f"native against emulated on {facts.key} ({facts.name}, torch {facts.torch})"
    return Page(title, "", tuple(parts), _LEGEND)


def _undone(conformities: Sequence[ModeConformity]) -> Iterator[str]:
    """Yields a line for each reason, like 'mxfp4, mxfp8 and nvfp4, 3 casts and products: ...'."""
    by_reason: dict[str, list[Conformity]] = {}
    for mode in conformities:
        for case in mode.found:
            if case.difference is None:
                by_reason.setdefault(case.why, []).append(case)
    for reason, members in by_reason.items():
        modes = join_words((member.mode for member in members), 20)
        yield f"{modes}, {len({member.what for member in members})} casts and products: {reason}"


def _tone(conforms: bool) -> Tone:
    return Tone.PLAIN if conforms else Tone.BAD


def _count(cases: Sequence[Conformity], *kinds: Difference | None) -> str:
    count = sum(case.difference in kinds for case in cases)
    return str(count) if count else units.NONE


_WRONG = [kind for kind in Difference if not kind.conforms]
_MODES: tuple[Col[ModeConformity], ...] = (
    Col("precision", lambda mode: mode.mode),
    Col("here", lambda mode: mode.support.level.value),
    Col("compared", lambda mode: _count(mode.found, *Difference), number=True),
    Col("same bits", lambda mode: _count(mode.found, Difference.NONE), number=True),
    Col("order", lambda mode: _count(mode.found, Difference.ORDER), number=True),
    Col("units", lambda mode: _count(mode.found, Difference.UNITS, Difference.SHORT_SUMS), number=True),
    Col("not the same", lambda mode: _count(mode.found, *_WRONG), True, tone=lambda mode: _tone(mode.conforms)),
    Col("not done", lambda mode: _count(mode.found, None), number=True),
)


def _first(row: Conformity) -> str:
    assert row.first is not None
    place = ",".join(map(str, row.first.place))
    return f"[{place}] {row.first.native:.6g}, emulated {row.first.emulated:.6g}"


_DIFFERENCES: tuple[Col[Conformity], ...] = (
    Col("precision", lambda row: row.mode),
    Col("what", lambda row: row.what),
    Col("shape", lambda row: row.shape),
    Col("difference", lambda row: str(row.difference), tone=lambda row: _tone(row.difference not in _WRONG)),
    Col("differ", lambda row: f"{units.whole(row.count)} of {units.whole(row.total)}", number=True),
    Col("at most", lambda row: units.significant(row.largest), number=True),
    Col("first", _first),
    Col("why", lambda row: row.why, below=True),
)


def _verdict(conformities: Sequence[ModeConformity]) -> str:
    different = [mode.mode for mode in conformities if not mode.conforms]
    compared = [_describe_mode(mode) for mode in conformities if mode.is_compared]
    if different:
        return f"not what the emulation gives: {join_words(different)}"
    if not compared:
        return "nothing could be compared"
    return f"{join_words(compared, 20)}: the emulation gives what the kernels give, up to the order of sums"


def _describe_mode(mode: ModeConformity) -> str:
    """Returns the name, with a remark if some of its casts and products could not be compared."""
    return f"{mode.mode} (in part)" if any(case.difference is None for case in mode.found) else mode.mode
