"""Suites that do not compute what they declare, in a real worker: each is labelled, and honest ones are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.measure import ceilings
from fp8bench.model import Case, Label, Products, Run, Verdict
from fp8bench.plan.resolve import CEILINGS_VARIABLE as VARIABLE
from fp8bench.plan.resolve import TAPE_VARIABLE as TAPE
from fp8bench.worker.bench import Bench
from tests.counts import SLOW, for_each
from tests.facts import CPU
from tests.fakes import Listener
from tests.own_suites import suite_file, suite_run

pytestmark = pytest.mark.usefixtures("short_slots")

SUITE = """
import itertools

import torch

from fp8bench.suites import Axis, Operand, Role, Work, Workload, workloads


@workloads.register("claims")
class Claims(Workload):
    name = "claims"
    summary = "products that are not what they seem"

    def axes(self, facts):
        return (Axis("how", "what is wrong", ("honest",), str),)

    def expand(self, params):
        sizes = (192, 384) if params["how"] in ("grows", "shrinks") else (64,)
        return tuple((("how", params["how"]), ("n", n)) for n in sizes)

    def work(self, params):
        how = params["how"]
        flops = 2.0 * params["n"] ** 3 * (1000 if how == "boasts" else 1)
        return Work(flops=0.0 if how == "lazy" else flops)

    def prepare(self, setup):
        random = torch.Generator().manual_seed(0)
        how, arithmetic, n = setup.case.param("how"), setup.arithmetic, setup.case.param("n")
        n = 192 * 384 // n if how == "shrinks" else n
        a, b = (torch.randn(n, n, generator=random) for _ in range(2))
        if how == "deaf":
            return lambda: a @ b
        carried = a.to(arithmetic.carrier), b.to(arithmetic.carrier)
        if how == "keeps":
            return lambda: carried[0] @ carried[1]
        if how == "adds":
            return lambda: carried[0] + carried[1]
        if how == "by_hand":
            low = [(one * 50).to(torch.float8_e4m3fn).to(torch.bfloat16) / 8 for one in carried]
            return lambda: low[0] @ low[1]
        if how == "lazy":
            a, calls = torch.randn(512, 512, generator=random), itertools.count()
            return lambda: a @ a if next(calls) < 3 else None

        def cast():
            return arithmetic.cast(carried[0], Role.INPUT), arithmetic.cast(carried[1], Role.WEIGHT)

        before = cast() if how == "boasts" else None
        return lambda: arithmetic.product(*(before or cast()), arithmetic.carrier)

    def step(self, state, phase):
        with phase.gemm:
            state()

    def error(self, setup):
        own = {"fp32": 1e-7, "bf16": 1e-3}.get(setup.case.precision, 0.01)
        told = {"repeats": 0.25, "exact": 0.0 if own > 1e-7 else own, "boasts_numbers": own * 1e-3}
        return {"some_error": told.get(setup.case.param("how"), own)}
"""
HOWS = ("boasts", "deaf", "keeps", "repeats", "exact", "boasts_numbers", "grows", "shrinks", "lazy")
CLAIMS = (Label.ABOVE_CEILING, Label.WORK_MISMATCH, Label.FALLBACK)
LOW = ("bf16", "fp8")


@pytest.fixture(scope="module")
def told() -> Listener:
    return Listener()


@pytest.fixture(scope="module", params=SLOW)
def run(tmp_path_factory: pytest.TempPathFactory, told: Listener) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "measured")
        patch.setenv(TAPE, "recorded")
        patch.setattr(ceilings, "CEILING_SECONDS", 1.5)
        patch.setattr(ceilings, "RUNS_PER_RATE", 3)  # one alone may coincide with another program's time slice
        asked = {"axes": (("how", HOWS),), "rounds": 8, "energy": False}
        with suite_run(tmp_path_factory, SUITE, "claims", ("fp32", *LOW), told, **asked) as run:
            yield run


def reasons(run: Run, how: str) -> dict[str, dict[Label, str]]:
    found = findings(run)
    return {
        record.case.precision: {
            label: reason for label, reason in found[record.case.id].label_reasons if label in CLAIMS
        }
        for record in run.records
        if record.case.param("how") == how
    }


def test_what_is_honest_has_no_label(run: Run) -> None:
    assert reasons(run, "grows") == {mode: {} for mode in ("fp32", *LOW)}


def test_ten_times_the_work_in_no_time_is_above_the_ceiling(run: Run) -> None:
    for found in reasons(run, "boasts").values():
        assert list(found) == [Label.ABOVE_CEILING, Label.WORK_MISMATCH]
        assert found[Label.WORK_MISMATCH] == "the suite declares 524 MFLOP a step, its operators do 524 kFLOP"
        above = found[Label.ABOVE_CEILING]
        assert above.startswith("claims ") and "this machine multiplied" in above
    (bf16,) = (one for one in findings(run).values() if one.case.param("how") == "boasts" and one.case.mode == "bf16")
    assert bf16.verdict is Verdict.UNSURE and Label.ABOVE_CEILING in bf16.hard and "claims" in bf16.why


def test_work_that_is_skipped_while_it_is_timed_is_above_the_ceiling(run: Run) -> None:
    for found in reasons(run, "lazy").values():
        above = found[Label.ABOVE_CEILING]
        assert above.startswith("gemm multiplied ") and " as recorded, but this machine" in above


def test_a_suite_that_ignores_its_precision_is_labelled(run: Run) -> None:
    ignored, kept, repeated = (reasons(run, how) for how in ("deaf", "keeps", "repeats"))
    assert ignored.pop("fp32") == repeated.pop("fp32") == {}
    assert kept["bf16"][Label.WORK_MISMATCH].startswith(
        "its products read a weight that was cast to bf16 during prepar"
    )
    assert {mode: told[Label.FALLBACK] for mode, told in ignored.items()} == {
        mode: f"1 product, of float32: none has an operand of {mode}'s formats" for mode in LOW
    }
    assert "of bfloat16: none" in kept["fp8"][Label.FALLBACK]
    assert repeated == {mode: {Label.FALLBACK: "some_error equal to fp32's to the last bit"} for mode in LOW}


@for_each(("how", "said"), [("exact", ("0.0e+00", "0.0e+00")), ("boasts_numbers", ("1.0e-06", "1.0e-05"))])
def test_errors_that_its_products_cannot_have_are_labelled(how: str, said: tuple[str, str], run: Run) -> None:
    found = reasons(run, how)
    assert found.pop("fp32") == {}
    rounds = {"bf16": "1.5e-03", "fp8": "2.4e-02"}
    assert found == {
        mode: {
            Label.FALLBACK: f"its error() reports some_error {told}, which is too little: {mode} rounds each value "
            f"by about {rounds[mode]}"
        }
        for mode, told in zip(LOW, said, strict=True)
    }
    assert all(Label.FALLBACK not in one.hard for one in findings(run).values() if one.case.param("how") == how)


def test_the_machine_is_measured_once_and_it_is_said(run: Run, told: Listener) -> None:
    doing = "measuring what this machine can do, once a week"
    assert [one for one in told.told if one[1] == doing] == [("fp32", doing, 0.0)]
    assert all(record.ceiling and record.ceiling.flops and record.ceiling.bytes for record in run.records)


@for_each(
    ("how", "precision", "products"),
    [
        ("deaf", "fp32", Products(1, None, ("float32",), 1)),
        ("deaf", "tf32", Products(1, False, ("float32",), 1)),
        ("honest", "tf32", Products(1, True, ("float32",), 46)),
        ("honest", "fp8:scale=pow2", Products(1, True, ("float32",), 9)),
        ("by_hand", "fp8", Products(1, True, ("bfloat16",), 1)),
        ("by_hand", "nvfp4", Products(1, False, ("bfloat16",), 1)),
        ("adds", "fp8", Products(0, False, (), 1)),
    ],
)
def test_what_a_step_runs(how: str, precision: str, products: Products, tmp_path: Path, bench: Bench) -> None:
    with suite_file(tmp_path, SUITE):
        found = bench.products(Case("claims", (("how", how), ("n", 64)), precision, "cpu"), CPU)
    assert replace(found, given=()) == products


def test_a_step_that_takes_no_longer_for_more_work_is_labelled(run: Run) -> None:
    found = findings(run)
    flat = {
        (finding.case.param("how"), finding.case.param("n")): dict(finding.label_reasons)[Label.FLAT_TIME]
        for finding in found.values()
        if Label.FLAT_TIME in finding.labels
    }
    assert list(flat) == [("shrinks", 384)]
    assert " for 113 MFLOP, " in flat["shrinks", 384] and flat["shrinks", 384].endswith(" for 14.2 MFLOP")
