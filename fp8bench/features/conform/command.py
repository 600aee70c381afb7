"""`fp8bench conform`: compares native casts and products with their emulation, bit by bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from fp8bench import units
from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import check_outputs, tell
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_FAILED, EXIT_OK, EXIT_REGRESSION, UsageError, WorkerError
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker
from fp8bench.measure.limits import COMPILE_SECONDS
from fp8bench.model import DeviceFacts, Level
from fp8bench.model.codec import encode
from fp8bench.model.promises import Conformity, Difference, ModeConformity
from fp8bench.model.raw import Settings
from fp8bench.plan.make import find_device
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Page, Part, Text, TextList, Tone
from fp8bench.report.words.naming import join_words

_LEGEND = (
    "order: every element is the sum of the same products in a different order; conforms",
    "units: every element is what this GPU's units give, which sum in fewer bits than float32 has; conforms",
    "short-sums: this GPU's units are unknown, and no error is larger than that of sums kept in 14 bits; conforms",
    "rounding: every element is a neighbour of the exact result, but not always the nearest one",
    "overflow: values beyond the largest number become different ones (NaN, infinity, the largest number)",
    "layout: rows, columns or an operand are misplaced; scale: results are multiplied by a wrong factor",
    "accumulation: sums seem to be kept in fewer bits than the recipe's option accumulator",
    "unexplained: none of these kinds explains all elements that differ",
    "at most: the largest difference in steps of the result's dtype; for casts, of their format",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs every cast and product of each precision on the same operands with the device's kernels and "
        "with the emulation, and explains the elements that differ. Times nothing."
    )
    parser.epilog = (
        "Exit codes: 0 all are equal, up to the order of sums; 1 something differs; 2 wrong usage; 3 the "
        "device supports none of the precisions."
    )
    add_common_options(parser, "--dtypes", help="the precisions to compare; default all that the device supports")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add_common_options(parser, "--seed", help="the seed of the random operands; default 0")
    add_common_options(parser, "--import", help="as in suite")
    add_common_options(parser, "--all", "--explain")
    add_common_options(parser, "--json", help="print all results as JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    facts, modes = compare_precisions(
        arguments.dtypes, arguments.device, arguments.seed, tuple(arguments.imports), TERMINAL_JOB_OBSERVER
    )
    all_conform = all(mode.conforms for mode in modes)
    values = [{**encode(mode), "conforms": mode.conforms} for mode in modes]
    document = {"device": encode(facts), "conforms": all_conform, "modes": values}
    tell(arguments, partial(render_page, facts, modes, arguments.all), lambda: document)
    if not all_conform:
        return EXIT_REGRESSION
    # If no mode was compared, conformity is unknown, which has a separate exit code.
    return EXIT_OK if any(mode.is_compared for mode in modes) else EXIT_FAILED


def compare_precisions(
    dtypes: Sequence[str], device: str | None, seed: int, imports: tuple[str, ...], observer: JobObserver
) -> tuple[DeviceFacts, list[ModeConformity]]:
    """Compares native and emulated results of each precision on the device. By default, these are all precisions that
    the device supports, including those that it emulates.
    """
    requested_names = list(dict.fromkeys(precisions.find_canonical_name(word) for word in dtypes))
    with ProcessWorker(Settings(seed=seed, imports=imports)) as worker:
        facts = find_device(device or "", worker.probe())
        support_by_precision = {
            name: precisions.get(name).support(facts) for name in requested_names or precisions.names()
        }
        # 1. Find the precisions that the device supports.
        supported_precisions = {
            name: support for name, support in support_by_precision.items() if support.level is not Level.REFUSED
        }
        if not supported_precisions:
            reasons = "; ".join(f"{name}: {support.reason}" for name, support in support_by_precision.items())
            raise UsageError(
                f"{facts.key} supports none of these ({reasons}). Give other --dtypes, or another --device."
            )
        mode_conformities: list[ModeConformity] = []
        # 2. Compare each precision separately, with a time limit that includes compiling.
        with observer.counting() as tell:
            for name, support in supported_precisions.items():
                tell(len(mode_conformities), len(supported_precisions), "precisions", name)
                mode = precisions.get(name).mode
                try:
                    mode_results = worker.with_time_limit(COMPILE_SECONDS).conform(name, facts)
                except WorkerError as error:  # other precisions may still work
                    mode_results = (Conformity(mode, "all of it", "", why=str(error)),)
                    # A failed kernel may have broken the device for this process.
                    worker.restart()
                mode_conformities.append(ModeConformity(mode, support, mode_results))
    return facts, mode_conformities


def render_page(facts: DeviceFacts, conformities: Sequence[ModeConformity], everything: bool = False) -> Page:
    """Renders the verdict, a row for each precision, the results that differ, and why casts or products were not
    compared. Without `everything`, the page only counts acceptable differences, and only names emulated precisions that
    conform.
    """
    # The verdict covers all modes, including those that the page does not show.
    all_conform = all(mode.conforms for mode in conformities)
    parts = [Part("verdict", "", (Text(_describe_verdict(conformities), Tone.GOOD if all_conform else Tone.BAD),))]
    conforming_emulated_modes = [
        mode for mode in conformities if mode.conforms and mode.support.is_emulated and not everything
    ]
    if rows := [mode for mode in conformities if mode not in conforming_emulated_modes]:
        parts.append(Part("modes", "", (table("modes", "", _MODE_COLUMNS, rows),)))
    if equal_modes := [_describe_mode(mode) for mode in conforming_emulated_modes if mode.is_compared]:
        names = join_words(equal_modes, 20)
        text = f"emulated on this device, with the same results as torch's kernels: {names}"
        parts.append(Part("emulated", "", (Text(text),)))
    # By default, only faults are shown: another order of summation is not a fault.
    shown_difference_kinds = (
        [kind for kind in Difference if kind is not Difference.NONE] if everything else _NONCONFORMING_DIFFERENCES
    )
    shown_cases: list[Conformity] = []
    for mode in conformities:
        shown_cases += [case for case in mode.found if case.difference in shown_difference_kinds]
    if shown_cases:
        caption = "results that differ in some bits"
        parts.append(Part("differences", "", (table("differences", caption, _DIFFERENCE_COLUMNS, shown_cases),)))
    if skipped := list(_list_skip_reasons(conformities)):
        parts.append(Part("undone", "not compared on this device", (TextList(tuple(map(Text, skipped))),)))
    title = f"native against emulated on {facts.key} ({facts.name}, torch {facts.torch})"
    return Page(title, "", tuple(parts), _LEGEND)


def _list_skip_reasons(conformities: Sequence[ModeConformity]) -> Iterator[str]:
    """Yields a line for each reason why casts or products were not compared, such as 'mxfp4, mxfp8 and nvfp4, 3 casts
    and products: ...'.
    """
    cases_by_reason: dict[str, list[Conformity]] = {}
    for mode in conformities:
        for case in mode.found:
            if case.difference is None:
                cases_by_reason.setdefault(case.why, []).append(case)
    for reason, members in cases_by_reason.items():
        mode_names = join_words((member.mode for member in members), 20)
        yield f"{mode_names}, {len({member.what for member in members})} casts and products: {reason}"


def _choose_tone(conforms: bool) -> Tone:
    return Tone.PLAIN if conforms else Tone.BAD


def _count_cases(kinds: Sequence[Difference | None], mode: ModeConformity) -> str:
    """Counts the casts and products of a mode whose difference from the emulation is one of `kinds`. In `kinds`, None
    stands for those that were not compared."""
    count = sum(case.difference in kinds for case in mode.found)
    return str(count) if count else units.NONE


_NONCONFORMING_DIFFERENCES = [kind for kind in Difference if not kind.conforms]
_HARDWARE_UNIT_DIFFERENCES = [Difference.UNITS, Difference.SHORT_SUMS]
_MODE_COLUMNS: tuple[Col[ModeConformity], ...] = (
    Col("precision", "mode"),
    Col("here", "support.level.value"),
    Col("compared", partial(_count_cases, list(Difference)), number=True),
    Col("same bits", partial(_count_cases, [Difference.NONE]), number=True),
    Col("order", partial(_count_cases, [Difference.ORDER]), number=True),
    Col("units", partial(_count_cases, _HARDWARE_UNIT_DIFFERENCES), number=True),
    Col(
        "wrong",
        partial(_count_cases, _NONCONFORMING_DIFFERENCES),
        number=True,
        tone=lambda mode: _choose_tone(mode.conforms),
    ),
    Col("not done", partial(_count_cases, [None]), number=True),
)


def _format_first_difference(row: Conformity) -> str:
    assert row.first is not None
    index_text = ",".join(map(str, row.first.place))
    return f"[{index_text}] {row.first.native:.6g}, emulated {row.first.emulated:.6g}"


_DIFFERENCE_COLUMNS: tuple[Col[Conformity], ...] = (
    Col("precision", "mode"),
    Col("what", "what"),
    Col("shape", "shape"),
    Col(
        "difference",
        lambda row: str(row.difference),
        tone=lambda row: _choose_tone(row.difference not in _NONCONFORMING_DIFFERENCES),
    ),
    Col("differ", lambda row: f"{units.whole(row.count)} of {units.whole(row.total)}", number=True),
    Col("at most", lambda row: units.format_significant_digits(row.largest), number=True),
    Col("first", _format_first_difference),
    Col("why", "why", below=True),
)


def _describe_verdict(conformities: Sequence[ModeConformity]) -> str:
    nonconforming_modes = [mode.mode for mode in conformities if not mode.conforms]
    compared_mode_names = [_describe_mode(mode) for mode in conformities if mode.is_compared]
    if nonconforming_modes:
        return f"results differ from the emulation: {join_words(nonconforming_modes)}"
    if not compared_mode_names:
        return "nothing could be compared"
    return (
        f"{join_words(compared_mode_names, 20)}: kernels and emulation give the same results, up to the order of sums"
    )


def _describe_mode(mode: ModeConformity) -> str:
    """Returns the name of a mode, with '(in part)' if some of its casts and products could not be compared."""
    return f"{mode.mode} (in part)" if any(case.difference is None for case in mode.found) else mode.mode
