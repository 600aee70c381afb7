"""A suite with hot, cold and rotating caches, end to end: measured, printed, stored and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Say
from tests.own_suites import forgotten

# 4 MiB, within a last-level cache, and with few rotating states.
SUITE = """
from fp8bench.suites import Work, Workload, workloads

@workloads.register("summing")
class Summing(Workload):
    name = "summing"
    summary = "adds up a tensor"

    def axes(self, facts):
        return ()

    def work(self, params):
        return Work(bytes=float(4 << 20))

    def prepare(self, setup):
        import torch

        return {"values": torch.ones(1 << 20), "sum": None}

    def step(self, state, phase):
        with phase.elementwise:
            state["sum"] = state["values"].sum()
"""
ASKED = ("--set", "cache=hot,cold,rotating", "--rounds", "3", "--dtypes", "fp32", "--no-energy")


@pytest.mark.slow
def test_what_a_cache_held_is_in_the_row(fp8bench: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "summing.py").write_text(SUITE)
    with forgotten(tmp_path):
        code, out, _ = fp8bench("suite", "./summing.py", *ASKED, "--json")
        run = json.loads(out)
        hot, *others = run["records"]
        assert code == 0 and [dict(one["case"]["params"]) for one in run["records"]] == [
            {},
            {"cache": "cold"},
            {"cache": "rotating"},
        ]
        size = run["devices"][0]["cache_bytes"]
        assert hot["status"] == "ok" and hot["rotation"] is None
        if not size:
            assert {one["status"] for one in others} == {"skipped"}
            assert all("the size of the last-level cache of cpu is unknown" in one["reason"] for one in others)
            return
        cold, rotating = others
        assert cold["rotation"] is None and {len(slot["calls_ns"]) <= 4 for slot in cold["timing"]["slots"]} == {True}
        taken = rotating["rotation"]
        assert taken["states"] >= 2 and (taken["state_bytes"] - (4 << 20)) in range(64)
        assert (taken["states"] - 1) * taken["state_bytes"] <= 2 * size <= 256 * taken["state_bytes"] + size
        _, text, _ = fp8bench("show", run["id"], "--notes")
        assert "was overwritten twice" in " ".join(text.split())
        assert f"{taken['states']} states of 4.00 MiB" in " ".join(text.split())
        lines = Path(run["path"]).read_bytes().splitlines(keepends=True)
        Path(run["path"]).write_bytes(b"".join(lines[:3]))  # its header, and two of its three records
        code, _, why = fp8bench("suite", "--resume", run["id"])
        assert code == 0, why
        again = json.loads(fp8bench("show", run["id"], "--json")[1])["records"]
        assert [one["case"] for one in again] == [one["case"] for one in run["records"]]
        assert again[1]["timing"] == cold["timing"] and again[2]["timing"] != rotating["timing"]
