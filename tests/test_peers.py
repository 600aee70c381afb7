"""The comparison with other tools: what is planted, how answers are judged, and one tool run at its smallest."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from suites import peers


def test_an_answer_is_a_ratio_and_a_direction() -> None:
    samples = {name: [1.0, 2.0, 3.0] for name in (peers.UNPLANTED, *peers.PLANTED)}
    samples |= {"slower_5": [4.0, 4.0, 9.0], "slower_1": [1.0, 1.0, 9.0]}
    answers = peers.judge(samples, lambda name: name != "same")
    assert answers["slower_5"] == (2.0, "slower") and answers["slower_1"] == (0.5, "faster")
    assert answers["same"] == (1.0, "") and answers["slower_2_5"] == (1.0, "faster")


def test_what_is_planted_grows_with_its_share_and_changes_no_result(tmp_path: Path) -> None:
    assert peers.plant(tmp_path, 64) > 0
    spec = importlib.util.spec_from_file_location("planted", tmp_path / "planted.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, w = module.inputs("cpu", 0)
    for name in peers.PLANTED:
        assert getattr(module, name)(x, w).equal(module.product(x, w)), name
    turns = [int(count) for count in re.findall(r"repeat\(None, (\d+)\)", (tmp_path / "planted.py").read_text())]
    assert turns[0] == 0 and turns == sorted(turns) and turns[3] == pytest.approx(5 * turns[1], abs=3)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["asv", "torch.utils.benchmark"])
def test_a_tool_gives_an_answer_for_each_function(tool: str, tmp_path: Path) -> None:
    peers.plant(tmp_path, 32)
    answers = peers.TOOLS[tool][1](tmp_path, 0.01)
    assert answers.keys() == peers.PLANTED.keys()
    assert all(ratio > 0 and word in ("slower", "faster", "") for ratio, word in answers.values())
