"""A suite whose steps take longer for their place in the round, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Say
from tests.own_suites import forgotten

# Steps are long enough to run once a slot, and all states run as often: who has run more often than any is the first.
SUITE = """
from collections import Counter
from fp8bench.suites import Axis, Work, Workload, whole_number, workloads

turns = Counter()

@workloads.register("shared")
class Shared(Workload):
    name = "shared"
    summary = "adds up, more than once where it is the first of its round"

    def axes(self, facts):
        return (Axis("pays", "how many times the first of a round works", ("1", "3"), whole_number(low=1)),)

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        return (setup.case.param("pays"), object())

    def step(self, state, phase):
        others = max((count for one, count in turns.items() if one != state and one[0] == state[0]), default=0)
        turns[state] += 1
        with phase.gemm:
            for _ in range(state[0] if turns[state] > others else 1):
                sum(range(1_000_000))
"""


@pytest.mark.slow
def test_the_first_of_a_round_is_told(fp8bench: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its size, by label, for all cases of its group; places are kept with slots."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared.py").write_text(SUITE)
    with forgotten(tmp_path):
        code, out, _ = fp8bench("suite", "./shared.py", "--rounds", "24", "--dtypes", "fp32,bf16", "--json")
    assert code == 0
    records = json.loads(out)["records"]
    told: dict[int, list[str]] = {}
    for record in records:
        params, found = dict(record["case"]["params"]), record["finding"]
        told.setdefault(params["pays"], []).append(dict(found["label_reasons"]).get("position", ""))
        places = [slot["place"] for slot in record["timing"]["slots"]]
        assert [places.count(place) for place in range(3)] == [8, 8, 8]
    assert len(told[3]) == 2 and all(one.startswith("the first of its round takes +") for one in told[3])
    assert told[1] != told[3]
