"""Suites of a few lines that are not what they say, through a real worker: each is told, and what is honest is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fp8bench import pipeline
from fp8bench.analysis.findings import findings
from fp8bench.measure.ceilings import VARIABLE
from fp8bench.measure.passes import TAPE_VARIABLE as TAPE
from fp8bench.model import Case, Label, Products, Request, Run, Verdict
from fp8bench.user_code import import_user_modules
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.facts import CPU
from tests.fakes import Listener
from tests.own_suites import forgotten

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
        cast = arithmetic.cast(carried[0], Role.INPUT), arithmetic.cast(carried[1], Role.WEIGHT)
        return lambda: arithmetic.product(*cast, arithmetic.carrier)

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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, told: Listener) -> Iterator[Run]:
    """In three precisions, a few rounds each."""
    folder = tmp_path_factory.mktemp("claims")
    file = folder / "claims.py"
    file.write_text(SUITE)
    with forgotten(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "measured")
        patch.setenv(TAPE, "recorded")
        patch.setattr(pipeline, "CEILING_SECONDS", 0.8)
        import_user_modules([str(file)])
        request = Request(
            "claims", ("fp32", *LOW), ("cpu",), axes=(("how", HOWS),), rounds=8, imports=(str(file),), energy=False
        )
        yield pipeline.execute(request, folder / "store", told, "a test")


def reasons(run: Run, how: str) -> dict[str, dict[Label, str]]:
    """By precision, the labels for claims with what is said of each."""
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
    """With what it claims and what the machine did; a reference that claims so takes all verdicts away."""
    for found in reasons(run, "boasts").values():
        assert list(found) == [Label.ABOVE_CEILING, Label.WORK_MISMATCH]
        assert found[Label.WORK_MISMATCH] == "it declares 524 MFLOP a step, its operators do 524 kFLOP"
        assert (
            found[Label.ABOVE_CEILING].startswith("claims ") and "this machine multiplied" in found[Label.ABOVE_CEILING]
        )
    (bf16,) = (one for one in findings(run).values() if one.case.param("how") == "boasts" and one.case.mode == "bf16")
    assert bf16.verdict is Verdict.UNSURE and Label.ABOVE_CEILING in bf16.hard and "claims" in bf16.why


def test_work_that_is_skipped_while_it_is_timed_is_above_the_ceiling(run: Run) -> None:
    """Nothing is declared: the tape has counted a product, and the calls that are timed hand over nothing."""
    for found in reasons(run, "lazy").values():
        assert (
            found[Label.ABOVE_CEILING].startswith("gemm did ")
            and " by the tape, this machine" in found[Label.ABOVE_CEILING]
        )


def test_a_suite_that_ignores_its_precision_is_not_in_it(run: Run) -> None:
    """The reference is what it says."""
    found = reasons(run, "deaf")
    assert found.pop("fp32") == {}
    assert {mode: one[Label.FALLBACK] for mode, one in found.items()} == {
        mode: f"1 product, of float32: none has an operand of {mode}'s formats" for mode in LOW
    }


def test_a_result_kept_in_the_carrier_is_no_fp8(run: Run) -> None:
    """bf16 is what it says, there."""
    found = reasons(run, "keeps")
    assert found["bf16"] == {} and "of bfloat16: none" in found["fp8"][Label.FALLBACK]


def test_the_errors_of_the_reference_are_not_those_of_a_low_precision(run: Run) -> None:
    found = reasons(run, "repeats")
    assert found.pop("fp32") == {}
    assert found == {mode: {Label.FALLBACK: "some_error exactly fp32's"} for mode in LOW}


@for_each(("how", "said"), [("exact", ("0.0e+00", "0.0e+00")), ("boasts_numbers", ("1.0e-06", "1.0e-05"))])
def test_errors_that_its_products_cannot_have_are_told(how: str, said: tuple[str, str], run: Run) -> None:
    """The products are what they say, so that it is a doubt; errors that are larger than these are believed."""
    found = reasons(run, how)
    assert found.pop("fp32") == {}
    rounds = {"bf16": "1.5e-03", "fp8": "2.4e-02"}
    assert found == {
        mode: {
            Label.FALLBACK: f"its error() says some_error {told}: too little, for {mode} rounds each value by about "
            f"{rounds[mode]}"
        }
        for mode, told in zip(LOW, said, strict=True)
    }
    assert all(Label.FALLBACK not in one.hard for one in findings(run).values() if one.case.param("how") == how)


def test_the_machine_is_measured_once_and_it_is_said(run: Run, told: Listener) -> None:
    """And kept in the store, with each case's own bound in its record."""
    doing = "measuring what this machine can do, once"
    assert [one for one in told.told if one[1] == doing] == [("fp32", doing, 0.0)]
    assert all(record.ceiling and record.ceiling.flops and record.ceiling.bytes for record in run.records)


@for_each(
    ("how", "precision", "products"),
    [
        ("deaf", "fp32", Products(1, None, ("float32",), 1)),
        ("deaf", "tf32", Products(1, False, ("float32",), 1)),
        ("honest", "tf32", Products(1, True, ("float32",), 2)),
        ("honest", "fp8:scale=pow2", Products(1, True, ("float32",), 3)),
        ("by_hand", "fp8", Products(1, True, ("bfloat16",), 1)),
        ("by_hand", "nvfp4", Products(1, False, ("bfloat16",), 1)),
        ("adds", "fp8", Products(0, False, (), 1)),
    ],
)
def test_what_a_step_runs(how: str, precision: str, products: Products, run: Run, bench: Bench) -> None:
    """Of fp8 that a suite rounds by itself, and of a suite without products; nobody knows formats of fp32."""
    found = bench.products(Case("claims", (("how", how), ("n", 64)), precision, "cpu"), CPU)
    assert replace(found, given=()) == products


def test_a_step_that_takes_no_longer_for_more_work_is_told(run: Run) -> None:
    """The larger size, in every precision; not where time grows."""
    found = findings(run)
    flat = {
        (one.case.param("how"), one.case.param("n")): dict(one.label_reasons)[Label.FLAT_TIME]
        for one in found.values()
        if Label.FLAT_TIME in one.labels
    }
    assert list(flat) == [("shrinks", 384)]
    assert " for 113 MFLOP, " in flat["shrinks", 384] and flat["shrinks", 384].endswith(" for 14.2 MFLOP")
