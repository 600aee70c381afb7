"""States with different inputs and handicapped references, through a real worker; honest ones have no label."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8bench.analysis.findings import findings
from fp8bench.model import Finding, GivenTensors, Label, Verdict
from fp8bench.plan.resolve import CEILINGS_VARIABLE as VARIABLE
from fp8bench.plan.resolve import TAPE_VARIABLE as TAPE
from fp8bench.worker import products
from fp8bench.worker.products import StepInputSums
from tests.counts import for_each
from tests.own_suites import suite_run

pytestmark = pytest.mark.usefixtures("short_slots")

SUITE = """
import time

import torch

from fp8bench.suites import Axis, Work, Workload, workloads


@workloads.register("handicaps")
class Handicaps(Workload):
    name = "handicaps"
    summary = "a product whose fp32 is handicapped"

    def axes(self, facts):
        return (Axis("how", "by what", ("honest",), str),)

    def work(self, params):
        return Work(2.0 * 64 ** 3)

    def prepare(self, setup):
        how = setup.case.param("how") if setup.case.precision == "fp32" else "honest"
        random = torch.Generator().manual_seed(1 if how == "seed" else 0)
        x, w = (torch.randn(64, 64, generator=random) for _ in range(2))
        x[:32] *= {"zeros": 0.0, "subnormal": 1e-41}.get(how, 1.0)
        carrier = setup.arithmetic.carrier
        return {"x": x.to(carrier), "w": w.to(carrier), "room": torch.empty(64, 64, dtype=carrier), "how": how}

    def step(self, state, phase):
        x, how = state["x"], state["how"]
        if how == "sleep":
            time.sleep(2e-3)
        with phase.gemm:
            for _ in range({"copies": 10, "copy": 1}.get(how, 0)):
                x = x.clone()
            rows = range(64) if how == "rows" else ()
            state["y"] = [x[n:n + 1] @ state["w"] for n in rows] or torch.mm(x, state["w"], out=state["room"])
"""
SOFT = {
    "copies": (Label.HANDICAP, "fp32 moves 7.7 times the numbers that this case moves"),
    "copy": (Label.HANDICAP, "fp32 moves 40% of its numbers in copies that this case does not make"),
    "rows": (Label.HANDICAP, "fp32 moves 22.0 times the numbers that this case moves"),
    "seed": (Label.OTHER_INPUTS, "inputs have the magnitude of fp32's, but different numbers"),
}
HARD = {
    "sleep": (Label.HANDICAP, "fp32 sleeps "),
    "subnormal": (Label.OTHER_INPUTS, "25% of fp32's numbers in 64 x 64 are subnormal, this case has 0%"),
    "zeros": (Label.OTHER_INPUTS, "the root mean square of fp32's 64 x 64 is 0.8"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Finding]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "off")
        patch.setenv(TAPE, "recorded")
        asked = {"axes": (("how", ("honest", *SOFT, *HARD)),), "rounds": 8, "energy": False}
        with suite_run(tmp_path_factory, SUITE, "handicaps", ("fp32", "bf16"), **asked) as run:
            yield {(str(finding.case.param("how")), finding.case.mode): finding for finding in findings(run).values()}


def told(finding: Finding) -> list[tuple[Label, str]]:
    return [reason for reason in finding.label_reasons if reason[0] in (Label.HANDICAP, Label.OTHER_INPUTS)]


@pytest.mark.slow
def test_what_is_honest_has_no_label(found: dict[tuple[str, str], Finding]) -> None:
    assert told(found["honest", "bf16"]) == []
    assert all(told(finding) == [] for (_, mode), finding in found.items() if mode == "fp32")


@pytest.mark.slow
@for_each("how", [*SOFT, *HARD])
def test_a_handicap_is_labelled(how: str, found: dict[tuple[str, str], Finding]) -> None:
    finding = found[how, "bf16"]
    label, why = (SOFT | HARD)[how]
    (own, reason), *others = told(finding)
    assert own is label and reason.startswith(why)
    assert not others or how == "subnormal"  # whose results are subnormal too
    assert (label in finding.hard) == (how in HARD) and (finding.verdict is Verdict.UNSURE or how in SOFT)


def summed(state: Any, step: Any = lambda: None) -> tuple[GivenTensors, ...]:
    looked = StepInputSums(state)
    step()
    return looked.sum_inputs()


def test_what_a_step_writes_is_not_given_to_it() -> None:
    """Unless it is trained; uninitialised memory may hold anything."""
    x, y, room, weight = torch.ones(4, 4), torch.ones(2, 2), torch.empty(8), torch.nn.Parameter(torch.ones(1, 9))
    weight.grad = torch.ones(1, 9)

    def step() -> None:
        room.fill_(1.0)
        with torch.no_grad():
            weight.sub_(1.0)
            assert weight.grad is not None
            weight.grad.zero_()

    wanted = (
        GivenTensors((4, 4), 1, 16.0, 16.0),
        GivenTensors((1, 9), 1, 9.0, 9.0),
        GivenTensors((2, 2), 1, 4.0, 4.0),
    )
    assert summed([x, y, room, weight, torch.ones(64, 1).expand(64, 64)], step) == wanted
    past_torch = torch.ones(16)
    assert summed([past_torch], lambda: past_torch.numpy().fill(2.0)) == ()


@for_each(("dtype", "count"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.float64, 0)])
def test_subnormals_are_those_of_the_dtype(dtype: torch.dtype, count: int) -> None:
    (found,) = summed([torch.tensor([1e-39, -2e-39, 0.0, 1.0]).to(dtype)])
    assert found.subnormals == count and found.tensors == 1
    (half,) = summed([torch.tensor([1e-6, 1.0], dtype=torch.float16)])
    assert half.subnormals == 0


def test_what_is_not_finite_or_takes_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert summed([torch.tensor([1.0, float("-inf")]), torch.zeros(3, dtype=torch.int64)]) == ()
    monkeypatch.setattr(products, "READ_SECONDS", 0.0)
    assert summed([torch.ones(4)]) == ()
