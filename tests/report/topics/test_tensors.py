"""Tensors: which panels are about them, what their precisions and figures are called, in a terminal and on the page."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Measurement, Record, Status
from fp8bench.report.elements import Table, Text
from fp8bench.report.page.section import timed_panels
from fp8bench.report.panels import Panel, Result, group_into_panels
from fp8bench.report.topics.tensors import name_best_precisions, name_precision
from tests.counts import for_each
from tests.materials import Made, built, material, of_kind, part
from tests.report.tensors import left, products, tensors
from tests.runs import EMULATED, case, gemm, render_whole
from tests.told_before import Told, as_before, on_terminal


def panel(made: Made) -> Panel:
    (only_panel,) = group_into_panels(*made)
    return only_panel


def result(precision: str, *figures: Measurement, **params: int) -> Result:
    return Result(Record(case("numerics", precision, {**params}), EMULATED, Status.OK, measurements=figures), None)


def test_a_panel_is_timed_unless_its_cases_have_the_figures_of_tensors() -> None:
    """An equally named figure in a second suite is not enough."""
    assert panel(products()).is_timed and not panel(tensors("gaussian")).is_timed
    run, findings = gemm()
    first, *others = run.records
    first = replace(first, measurements=(*first.measurements, Measurement("sqnr_db", "dB", (30.0,))))
    assert panel((replace(run, records=(first, *others)), findings)).is_timed


@for_each(
    ("precision", "fmt", "words"),
    [
        ("bf16", "bf16", "bf16"),
        ("custom", "e4m3fn", "e4m3fn tensor"),
        ("custom:format=e5m2:scaling=none", "e5m2", "e5m2 none"),
        ("custom:scaling=row:scale=pow2", "e4m3fn", "e4m3fn row pow2"),
        ("custom:format=e2m1:scaling=mx", "e2m1", "e2m1 mx rceil"),
        ("custom:format=e2m1:scaling=mx:scale=floor", "e2m1", "e2m1 mx floor"),
        ("custom:format=e2m1:scaling=nvfp4", "e2m1", "e2m1 nvfp4 nearest"),
        ("custom:gradient=e5m2", "custom:gradient=e5m2", "custom:gradient=e5m2"),
        ("fp8-delayed:margin=1", "fp8-delayed:margin=1", "fp8-delayed:margin=1"),
        ("of-a-later-version", "of-a-later-version", "of-a-later-version"),
        ("custom:format=e9m9", "custom:format=e9m9", "custom:format=e9m9"),
    ],
)
def test_a_precision_has_its_format_and_its_words(precision: str, fmt: str, words: str) -> None:
    """Options give the words; recipes and unknown precisions keep their names."""
    assert name_precision(result(precision)) == (fmt, words)
    custom = result("custom")
    mapped = replace(
        custom, record=replace(custom.record, case=replace(custom.record.case, precision_map=(("a", "bf16"),)))
    )
    assert name_precision(mapped).name == "custom{a=bf16}"


@for_each(("width", "sizes"), [(40, [2, 2, 2, 1]), (60, [4, 3]), (100, [7])])
def test_many_tensors_are_as_many_tables_as_the_width_asks_for(width: int, sizes: list[int]) -> None:
    names = [f"tensor-{number}" for number in range(7)]
    text = render_whole(*tensors(*names), width=width)
    heads = [line.split()[1:] for line in text.splitlines() if line.startswith("  precision ")]
    assert [name for head in heads for name in head] == names
    assert [len(head) for head in heads] == sizes
    assert all(len(line) <= width for line in text.splitlines())


def test_times_errors_and_memory_of_tensors_are_in_no_other_section() -> None:
    """They are costs of emulation."""
    made = tensors("gaussian", "outliers")
    assert not [name for name in ("results", "speedup", "phases", "memory", "numbers") if built(name, made)]
    both = material(made, products())
    assert [timed.case.workload for _, timed in timed_panels(both)] == ["gemm"]


def with_record(made: Made, place: int, **changes: object) -> Made:
    run, findings = made
    records = list(run.records)
    records[place] = replace(records[place], **changes)  # type: ignore[arg-type]
    return replace(run, records=tuple(records)), findings


@as_before
def test_tensors() -> Told:
    two, three = tensors("gaussian", "outliers"), tensors("gaussian", "outliers", "log-normal")
    yield (
        "the best of each width, where it has several precisions",
        list(name_best_precisions(panel(tensors("gaussian")))),
    )
    yield "how often each is the best", list(name_best_precisions(panel(two)))
    records = [
        replace(one, measurements=left(90.0)) if one.case.mode.endswith("=row") and number > 12 else one
        for number, one in enumerate(three[0].records)
    ]
    yield (
        "the second best, too",
        list(name_best_precisions(panel((replace(three[0], records=tuple(records)), three[1])))),
    )
    yield "of many tensors a terminal shows the SQNR alone", on_terminal(three, "SQNR")
    failed = with_record(three, 1, status=Status.FAILED, reason="out of memory", measurements=())
    yield "a case without figures has dashes and a note", on_terminal(failed, "SQNR in", "notes")
    yield "a table has every SQNR, all other figures are folded below it", part("tensors", two)
    yield "one tensor is a table alone", part("tensors", tensors("gaussian"))
    failed = with_record(tensors("gaussian"), 1, status=Status.FAILED, reason="out of memory", measurements=())
    yield "a case that failed is a dash with its reason", of_kind(part("tensors", failed), Table)
    infinite = with_record(tensors("gaussian"), 0, measurements=left(70.0, lost=0.5))
    yield "numbers that became infinite are said", of_kind(part("tensors", infinite), Text)
