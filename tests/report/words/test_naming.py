"""What a report calls its groups, and what is said of a run as a whole, and of one whose header is lost."""

from __future__ import annotations

from dataclasses import replace

from fp8bench.model import Ceiling, Environment, Plan, Resumption, Run, Scalar, Tape
from fp8bench.report.panels import panels_of
from fp8bench.report.words.naming import (
    commit_of,
    counts,
    devices_of,
    fact,
    listed,
    many,
    missing_of,
    notes_of,
    setting_of,
    shortened,
    sizes,
    suites_of,
    when,
)
from tests.counts import for_each
from tests.materials import shapes
from tests.runs import case, gemm, run_of, samples, transformer


def test_a_group_is_called_what_tells_it_from_its_neighbours() -> None:
    (panel,) = panels_of(*gemm())
    assert [setting_of(group) for group in panel.groups] == [
        "m=256 n=256 k=256", "m=512 n=512 k=512", "m=1 n=2048 k=2048",
    ]  # fmt: skip


def test_a_group_that_is_alone_is_called_by_its_sizes() -> None:
    (panel,) = panels_of(*transformer())
    assert setting_of(panel.groups[0]) == "layers=4 width=256 heads=4 context=256 batch=4"


def test_sizes_are_numbers_alone() -> None:
    """A choice is none, and neither is yes or no."""
    assert sizes(case("mlp", "bf16", {"tokens": 256, "rate": 0.5, "gated": True, "pass": "training"})) == (
        "tokens=256 rate=0.5"
    )
    assert sizes(case("mlp", "bf16", {})) == ""


def test_listed() -> None:
    assert [listed([]), listed(["a"]), listed(["a", "b"]), listed(list("abcde")), listed(list("abcdefg"))] == [
        "", "a", "a and b", "a, b, c, d and e", "a, b, c, d and 3 more",
    ]  # fmt: skip


def under(**facts: Scalar | None) -> Run:
    return run_of([], environment=Environment(facts))


def test_suites_and_devices() -> None:
    run, _ = gemm()
    assert suites_of(run) == ("gemm",) and devices_of(run) == ("AMD EPYC 7B13",)
    assert devices_of(replace(run, devices=())) == ("cpu",)
    planned = replace(run, records=())
    assert suites_of(planned) == ("gemm",) and suites_of(replace(planned, plan=Plan(()))) == ()


@for_each(
    ("facts", "text"),
    [
        ({"commit": "0a1b2c3d4e5f", "dirty": False}, "0a1b2c3d"),
        ({"commit": "0a1b2c3d4e5f", "dirty": True}, "0a1b2c3d with uncommitted changes"),
        ({"commit": None, "dirty": None}, ""),
        ({}, ""),
    ],
)
def test_commit(facts: dict[str, Scalar | None], text: str) -> None:
    assert commit_of(under(**facts)) == text


def test_a_fact_is_text() -> None:
    assert fact(under(threads=1, smt=None), "threads") == "1"
    assert fact(under(smt=None), "smt") == "" == fact(under(), "smt")


@for_each(
    ("started", "text"),
    [
        ("2026-01-05T12:00:59Z", "2026-01-05 12:00 UTC"),
        ("2026-01-05T12:00:00+02:00", "2026-01-05 10:00 UTC"),
        ("2026-01-05T12:00:00", "2026-01-05 12:00 UTC"),
        ("once", "once"),
        ("", ""),
    ],
)
def test_when(started: str, text: str) -> None:
    assert when(replace(under(), started=started)) == text


def test_counts() -> None:
    assert counts(gemm()[0]) == "8 measured, 3 skipped, 1 failed"
    assert counts(transformer()[0]) == "3 measured"
    assert counts(under()) == "none"


def test_many() -> None:
    assert (many(0, "case"), many(1, "case"), many(12, "case")) == ("0 cases", "1 case", "12 cases")


def test_shortened() -> None:
    assert shortened(" a\n b ", 3) == "a b" and shortened("abcdef", 5) == "ab..." and shortened("", 5) == ""


def test_notes() -> None:
    run = replace(
        transformer()[0], resumptions=(Resumption("2026-01-06", "", Environment({})),), notes=("beside another",)
    )
    assert notes_of(run) == [*run.plan.notes, "it was resumed at 2026-01-06", "beside another"]


def test_missing() -> None:
    run, _ = gemm()
    assert missing_of(run) == ""
    cut = replace(run, records=run.records[:4])
    assert missing_of(cut) == f"8 of 12 cases have no record: lines are broken or gone; --resume {run.id} measures them"
    early = missing_of(replace(cut, finished=False))
    assert early == f"stopped early: 8 of 12 cases have no record; --resume {run.id} measures them"


def test_a_quick_look_says_what_nobody_checked() -> None:
    """Declared work that no tape has counted, and how much of it the machine can do; of some cases how many."""
    run, _ = shapes({"m": 1, "n": 1, "k": 1})
    timed = tuple(replace(one, timing=samples(("gemm",), (10,))) for one in run.records)
    run = replace(run, records=timed, request=replace(run.request, quick=True))
    ceilings = "ceilings (`fp8bench doctor --ceilings` measures them)"
    assert notes_of(run)[-1] == f"not checked, because of --quick: declared work (--tape counts it), {ceilings}"
    some = (replace(timed[0], tape=Tape(), ceiling=Ceiling(1e12, 1e12)), *timed[1:])
    assert notes_of(replace(run, records=some))[-1].endswith(
        f"declared work (--tape counts it) of 2 of 3 cases, {ceilings} of 2 of 3 cases"
    )
    checked = tuple(replace(one, tape=Tape(), ceiling=Ceiling(1e12, 1e12)) for one in timed)
    assert not any("not checked" in note for note in notes_of(replace(run, records=checked)))
    assert not any("not checked" in note for note in notes_of(replace(run, request=replace(run.request, quick=False))))
