"""Steps that know that they are timed: what they multiply is asked for with the clock, after all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Say
from tests.own_suites import forgotten

SUITE = """
from fp8bench.suites import Axis, Work, Workload, one_of, workloads

@workloads.register("knowing")
class Knowing(Workload):
    name = "knowing"
    summary = "half of its products, once it knows that it is timed"

    def axes(self, facts):
        return (Axis("how", "by what it knows", ("honest",), one_of("honest", "clock", "count")),)

    def work(self, params):
        return Work(2.0 * 64 ** 3)

    def prepare(self, setup):
        import torch

        torch.manual_seed(0)
        return {"x": torch.randn(64, 64), "w": torch.randn(64, 64), "steps": 0, "how": setup.case.param("how"),
                "lies": setup.case.precision != "fp32"}

    def step(self, state, phase):
        state["steps"] += 1
        known = {"clock": type(phase).__name__ == "PhaseClock", "count": state["steps"] > 6, "honest": False}
        rows = 32 if state["lies"] and known[state["how"]] else 64
        with phase.gemm:
            state["y"] = state["x"][:rows] @ state["w"]
"""


@pytest.mark.usefixtures("short_slots")
@pytest.mark.parametrize(("how", "lies"), [("honest", False), ("clock", True), ("count", True)])
def test_a_step_that_does_less_once_it_is_timed(
    how: str, lies: bool, fp8bench: Say, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8BENCH_TAPE", "recorded")
    here = store.absolute().parent
    (here / "knowing_suite.py").write_text(SUITE)
    with forgotten(here):
        code, out, err = fp8bench(
            "suite", "./knowing_suite.py", "--dtypes", "fp32,bf16", "--set", f"how={how}", "--rounds", "12",
            "--no-isolation", "--json",
        )  # fmt: skip
    assert code == 0, err
    own = json.loads(out)["records"][1]
    reason = dict(own["finding"]["label_reasons"]).get("work-mismatch", "")
    told = "a step with the clock does 262 kFLOP, one that is not timed 524 kFLOP"
    assert reason == (told if lies else "") and own["late_flops"] == (262_144 if lies else 524_288)
    assert (own["finding"]["verdict"] == "unsure") or not lies
