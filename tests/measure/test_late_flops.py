"""Steps that know that they are timed: after all slots their states are asked what they multiply, and what they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Say
from tests.counts import sampled
from tests.own_suites import forgotten

SUITE = """
from torch.utils._python_dispatch import _get_current_dispatch_mode
import torch
from fp8bench.suites import Axis, Work, Workload, one_of, workloads

HOWS = ("clock", "count", "mode", "mode_half", "mode_dropped", "count_mode", "no_training", "turns", "draws")

@workloads.register("knowing")
class Knowing(Workload):
    name = "knowing"
    summary = "less than all of its products, once it knows that it is timed"

    def axes(self, facts):
        return (Axis("how", "by what it knows", ("honest",), one_of("honest", *HOWS)),)

    def work(self, params):
        return Work(2.0 * self.size(params["how"]) ** 3)

    def size(self, how):
        return 384 if how == "mode_dropped" else 64

    def prepare(self, setup):
        torch.manual_seed(0)
        how = setup.case.param("how")
        size = self.size(how)
        return {"x": torch.randn(size, size), "w": torch.randn(size, size) / size, "steps": 0, "how": how,
                "lies": setup.case.precision != "fp32", "y": None}

    def step(self, state, phase):
        state["steps"] += 1
        how, x, w = state["how"], state["x"], state["w"]
        looked_at = _get_current_dispatch_mode() is not None
        known = {"clock": type(phase).__name__ == "PhaseStampClock", "count": state["steps"] > 6,
                 "count_mode": state["steps"] > 20 and not looked_at}.get(how, not looked_at)
        lies = state["lies"] and known
        with phase.gemm:
            if how == "mode_dropped":
                x[: 1 if lies else None] @ w
            elif how == "no_training":
                y = x @ w
                if not lies:
                    w.sub_(y, alpha=1e-6)
            elif how == "turns":
                state["y"] = (x if state["steps"] % 3 else x * 2) @ w
            elif how == "draws":
                state["y"] = torch.rand(64, 64) @ w
            elif lies and how in ("clock", "count", "mode_half"):
                state["y"] = x[:32] @ w
            elif not lies or how == "honest" or state["y"] is None:
                state["y"] = x @ w
"""


LOOKED_AT = ["mode", "mode_half", "mode_dropped", "count_mode", "no_training"]


@pytest.fixture
def said(fp8bench: Say, store: Path, monkeypatch: pytest.MonkeyPatch, short_slots: None) -> Any:
    """The record of the liar, by what it can observe."""
    monkeypatch.setenv("FP8BENCH_TAPE", "recorded")
    here = store.absolute().parent
    (here / "knowing_suite.py").write_text(SUITE)

    def record(how: str) -> Any:
        with forgotten(here):
            code, out, err = fp8bench(
                "suite",
                "./knowing_suite.py",
                "--dtypes",
                "fp32,bf16",
                "--set",
                f"how={how}",
                "--rounds",
                "12",
                "--no-isolation",
                "--json",
            )
        records = json.loads(out)["records"] if out else []
        assert code == 0, (err, [(record["status"], record["reason"], record["detail"]) for record in records])
        reference, own = records
        assert not {"no-work", "work-mismatch"} & set(reference["finding"]["labels"]), "the honest twin"
        return own

    return record


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("clock", "the suite declares 524 kFLOP a step, its operators do 262 kFLOP"),
        ("count", "a timed step does 262 kFLOP, an untimed step 524 kFLOP"),
    ],
)
def test_a_step_that_does_less_once_it_is_timed(how: str, told: str, said: Any) -> None:
    own = said(how)
    assert dict(own["finding"]["label_reasons"])["work-mismatch"] == told
    assert own["late_flops"] == 262_144 and own["finding"]["verdict"] == "cannot tell"


@pytest.mark.parametrize("how", sampled({"mode", "count_mode"}, LOOKED_AT))
def test_a_step_that_works_only_while_it_is_observed(how: str, said: Any) -> None:
    own = said(how)
    size = 384 if how == "mode_dropped" else 64
    assert own["late_flops"] == own["tape"]["phases"][0]["flops"] == 2 * size**3
    assert own["effect"]["changes"] is False and own["finding"]["verdict"] == "cannot tell"
    assert " when it is timed" in dict(own["finding"]["label_reasons"])["no-work"]


@pytest.mark.parametrize("how", ["honest", "turns", "draws"])
def test_honest_steps_have_no_remark(how: str, said: Any) -> None:
    own = said(how)
    assert not {"no-work", "work-mismatch"} & set(own["finding"]["labels"]) and own["late_flops"] == 524_288
