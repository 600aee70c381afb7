"""advise from words to tables, files and exit codes; what a check measures, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.cli.option_types import precision_map
from fp8bench.errors import StoreError, UsageError
from fp8bench.features.advise import job as advise
from fp8bench.features.advise.decide import advised
from fp8bench.features.advise.job import checkable, checked, checks_of, keep_checks, load_checks
from fp8bench.features.advise.values import Advice, AdviceKind, Checked, Ground
from fp8bench.features.sensitivity.job import keep_study
from fp8bench.model import Environment, Interval, Level, Request, Run
from fp8bench.protocols import SilentObserver
from tests.advised import FP8, NANO, basis, group, run
from tests.commands import Say
from tests.counts import for_each
from tests.features.advise.test_advice import study
from tests.kept import keep


def test_a_run_and_its_studies(store: Path, fp8bench: Say) -> None:
    """A route comes with a map that --precision-map takes."""
    keep(run(group(fp8=FP8)), store)
    code, _, err = fp8bench("advise", "last", "--write-map", "map.txt")
    assert code == 2 and "no layer of the run" in err and not Path("map.txt").exists()
    keep_study(study(0.1, 0.005), store)
    (store / "sensitivity" / "torn.json").write_text("{")
    code, out, _ = fp8bench("advise", "last", "--write-map", "map.txt", "--md", "advice.md")
    assert code == 0 and "torn.jsonisnostudy" in "".join(out.split()) and "--precision-map map.txt" in out
    assert precision_map("map.txt") == (("head", "bf16"),)
    assert "Does this device multiply in it? | ▲ yes |" in Path("advice.md").read_text()


def test_commands_that_measure_more_need_the_store_of_the_run(store: Path, tmp_path: Path, fp8bench: Say) -> None:
    for where in (store, tmp_path / "elsewhere"):
        keep(run(group(fp8=FP8)), where)
        _, out, _ = fp8bench("advise", "last", "--store", str(where))
        assert ("add --store" in " ".join(out.split())) == (where != store)


@for_each(
    ("words", "error"),
    [
        ([], "no run was named"),
        (["last"], "no runs"),
        (["--score", "last"], "leave the run"),
        (["last", "--least", "100"], "a percentage"),
        (["last", "--check", "0"], "a whole number from 1"),
        (["last", "--write-map", "."], "it is a directory"),
        *((["last", f"--price={word}"], "no price of an hour") for word in ("free", "0", "-1/h", "inf")),
    ],
)
def test_bad_words(words: list[str], error: str, store: Path, fp8bench: Say) -> None:
    code, _, err = fp8bench("advise", *words)
    assert code == 2 and error in err


def test_another_run_answers_only_from_the_same_machine(store: Path, fp8bench: Say) -> None:
    first = run(group(fp8=FP8))
    keep(replace(first, id="aaaa"), store)
    other = replace(first, id="bbbb", started="2026-01-05T13:00:00Z", environment=Environment({"machine": "another"}))
    keep(other, store)
    code, _, err = fp8bench("advise", "aaaa", "--beside", "bbbb")
    assert code == 2 and "its machine is another" in err
    assert fp8bench("advise", "aaaa", "--beside", "aaaa")[0] == 0


def test_a_price_without_a_training(store: Path, fp8bench: Say) -> None:
    """The table says what is missing."""
    keep(run(group(fp8=FP8)), store)
    code, out, _ = fp8bench("advise", "last", "--price", "2.50/h")
    assert code == 0 and "no training was named (--training)" in out
    (cost,) = json.loads(fp8bench("advise", "last", "--price", "2.5", "--json")[1])["costs"]
    assert (cost["mode"], cost["time"], cost["money"]) == ("fp8", None, None)
    assert not json.loads(fp8bench("advise", "last", "--json")[1])["costs"]
    code, _, err = fp8bench("advise", "last", "--training", "last")
    assert code == 2 and "no training 'last'" in err


@pytest.mark.slow
@pytest.mark.usefixtures("short_slots")
def test_what_is_predicted_is_measured(store: Path, fp8bench: Say) -> None:
    """bf16 against fp32 on this processor: whatever came of it is kept beside the prediction, and scored."""
    words = ("suite", "gemm", "--dtypes", "fp32,bf16", "--set", "shape=512", "--rounds", "24", "--no-report")
    assert fp8bench(*words)[0] == 0
    code, out, _ = fp8bench("advise", "last", "--check", "1", "--json")
    if code == 2:
        pytest.skip("the machine was too busy for a verdict on the first run")
    (check,) = json.loads(out)["checked"]
    found, troubles = load_checks(store)
    assert not troubles and len(found) == 1 and check["run"] == found[0].run != found[0].advised
    assert (code == 3) == (found[0].measured is None) and bool(found[0].why) == (found[0].measured is None)
    code, out, _ = fp8bench("advise", "--score", "--json")
    score = json.loads(out)
    assert code == 0 and score["checks"] == (found[0].hit is not None) and score["hits"] == (found[0].hit is True)


ADVICE = Advice(
    "step", AdviceKind.ADOPT, "bf16", "fp32", "adopt bf16", ("gemm[m=64]@cpu",), "--dtypes fp32,bf16",
    gain=Interval(1.5, 1.4, 1.6, 0.99), case="gemm[m=64]@cpu/bf16", grounds=(Ground("gemm[m=64]@cpu/bf16", "1.5x"),),
)  # fmt: skip
CHECKED = Checked(
    ADVICE, "0a", "0b", "2026-01-05T12:00:00+00:00", Interval(1.45, 1.4, 1.5, 0.99), under=(("torch", "2"),)
)


def test_what_is_kept_is_read(tmp_path: Path) -> None:
    """By when it was; a line that was cut off, or is of a later version, is left out and said."""
    later = replace(CHECKED, when="2026-01-06", measured=None, why="it was throttled")
    keep_checks(tmp_path, [later])
    with checks_of(tmp_path).open("a") as file:
        file.write('{"version": 1, "checked": {"adv\n{"version": 9}\n{"version": 1}\n{"version": 1, "che')
    keep_checks(tmp_path, [CHECKED, CHECKED])
    found, troubles = load_checks(tmp_path)
    assert found == (CHECKED, later) and [trouble.split()[1] for trouble in troubles] == ["2", "3", "4", "5"]
    assert [check.hit for check in found] == [True, None]


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    """And where nothing can be written, that is said."""
    assert load_checks(tmp_path) == ((), [])
    with pytest.raises(StoreError, match="cannot be written"):
        keep_checks(tmp_path / "nowhere", [CHECKED])
    checks_of(tmp_path).mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        load_checks(tmp_path)


def test_a_hit_lies_within_what_was_predicted() -> None:
    for point, hit in ((1.39, False), (1.4, True), (1.6, True), (1.61, False)):
        assert replace(CHECKED, measured=Interval(point, 1.0, 2.0, 0.99)).hit is hit
    assert replace(CHECKED, advice=replace(ADVICE, gain=None)).hit is None


def again(records: list[Any], **changes: object) -> Run:
    return replace(run(records), id="again", **changes)  # type: ignore[arg-type]


def test_the_same_group_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hit where the second run says the same; none where it says something else; no figure where it has none."""
    asked: list[Collection[str]] = []
    answers = iter([group(fp8=FP8), group(fp8={**FP8, "cast": 2000}), group(fp8=FP8, level=Level.EMULATED)])

    def measured(run: Run, cases: Collection[str], *more: object) -> Run:
        asked.append(cases)
        return again(next(answers))

    monkeypatch.setattr(advise, "measure_again", measured)
    known = basis(group(fp8=FP8))
    found = advised(known)
    for _ in range(3):
        checked(known, found, 3, tmp_path, SilentObserver())
    assert asked == [{found.advice[0].case}] * 3
    kept, troubles = load_checks(tmp_path)
    assert not troubles and [check.hit for check in kept] == [True, False, None]
    assert kept[0].run == "again" and kept[0].advised == known.run.id and kept[2].why


def test_a_route_is_measured_with_its_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run of its own: the suite, modes and device of the case, and its values where the request had several."""
    asked: list[Request] = []
    lead, case = group(fp8=FP8)
    mapped = replace(case, case=replace(case.case, precision_map=(("head", "bf16"),)))

    def executed(request: Request, *more: object, **others: object) -> Run:
        asked.append(request)
        return again([lead, mapped])

    monkeypatch.setattr(advise, "execute", executed)
    known = basis([lead, case], studies=(study(0.1, 0.005),))
    axes = (("batch", ("1", "8")), ("attention", ("auto",)))
    request = Request("gemm,transformer", ("fp32", "bf16", "fp8"), axes=axes)
    known = replace(known, run=replace(known.run, request=request))
    found = advised(known)
    found = replace(found, advice=tuple(advice for advice in found.advice if advice.kind is AdviceKind.ROUTE))
    (check,) = checked(known, found, 3, tmp_path, SilentObserver())
    (request,) = asked
    assert (request.suite, request.dtypes, request.devices) == ("transformer", ("bf16", "fp8"), ("cuda:0",))
    assert request.axes == (("batch", ("8",)), ("attention", ("auto",)))
    assert request.precision_map == (("head", "bf16"),) and check.measured is not None and check.hit


def test_an_interrupted_check_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "measure_again", lambda *_: again(group(fp8=FP8), finished=False))
    known = basis(group({**NANO, "batch": 1}, fp8=FP8), group(fp8=FP8))
    with pytest.raises(KeyboardInterrupt):
        checked(known, advised(known), 3, tmp_path, SilentObserver())
    assert len(load_checks(tmp_path)[0]) == 1


def test_emulations_and_schedules_are_not_checked(tmp_path: Path) -> None:
    known = basis(group(fp8=FP8, level=Level.EMULATED))
    with pytest.raises(UsageError, match="nothing to check"):
        checked(known, advised(known), 3, tmp_path, SilentObserver())
    (adopted,) = checkable(advised(basis(group(fp8=FP8))).advice)
    assert not checkable([replace(adopted, kind=AdviceKind.SCHEDULE)])
