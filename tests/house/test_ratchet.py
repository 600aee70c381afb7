"""No room grows heavier and no command gets options without a reason in ratchet.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8bench.cli.main import build_parser
from tests.house.ratchet import (
    FIGURES,
    count_parts,
    find_excess,
    lower,
    lower_limits,
    measure,
    options_of,
    read_limits,
)

MODULE = '''"""A docstring is a node, but no statement."""

import os
from ast import parse, walk

pairs = [(a, b) for a in walk(parse("1")) for b in os.environ]
plain = [a for a in pairs]  # fmt: skip
deep = [[b for b in a] for a in pairs]
'''


def limits_of(raised: list[dict[str, Any]], nodes: float = 100, options: int = 3) -> dict[str, Any]:
    return {"rooms": [["fp8bench/a", nodes, 9.5, 2, 7, 0]], "options": {"suite": options}, "raised": raised}


def weights_of(nodes: float, options: int = 3) -> dict[str, dict[str, float]]:
    figures = dict(zip(FIGURES, (nodes, 9.5, 2, 7, 0), strict=True))
    return {"fp8bench/a": figures, "suite": {"options": options}}


RAISED = {"room": "fp8bench/a", "nodes": 100, "reason": "The reason."}


@pytest.mark.slow
def test_no_figure_is_above_its_limit() -> None:
    limits = read_limits()
    assert all(entry["reason"].strip().endswith(".") for entry in limits.get("raised", [])), "a raise lacks its reason"
    excess = find_excess(limits, measure())
    advice = "make it lighter, or add a [[raised]] entry with the reason to tests/house/ratchet.toml"
    assert not excess, "\n".join([advice, *excess])


def test_a_module_is_counted_as_by_hand() -> None:
    counts = count_parts(MODULE)
    assert (counts["statements"], counts["nested"], counts["imported"], counts["skips"]) == (5, 2, 3, 1)
    assert count_parts("a = b + 1")["nodes"] == 9


def test_excess_is_found_in_rooms_commands_and_new_rooms() -> None:
    assert find_excess(limits_of([]), weights_of(100)) == []
    assert find_excess(limits_of([]), weights_of(200)) == ["fp8bench/a: nodes is 200, at most 100 allowed"]
    assert find_excess(limits_of([]), weights_of(100, options=4)) == ["suite: options is 4, at most 3 allowed"]
    assert find_excess(limits_of([]), weights_of(100) | {"fp8bench/b": {"nodes": 100}}) == [
        "fp8bench/b: nodes is 100, at most 0 allowed"
    ]


def test_a_reason_raises_a_limit_once() -> None:
    assert find_excess(limits_of([RAISED]), weights_of(200)) == []
    assert find_excess(limits_of([RAISED]), weights_of(300)) == ["fp8bench/a: nodes is 300, at most 200 allowed"]


def test_lowering_follows_what_fell_and_nothing_that_rose() -> None:
    assert lower(limits_of([]), weights_of(50, options=2))["fp8bench/a"]["nodes"] == 50
    assert lower(limits_of([]), weights_of(900, options=9)) == weights_of(100)
    # With 100 of its nodes raised, a room of 150 would have 50 without them.
    assert lower(limits_of([RAISED]), weights_of(150))["fp8bench/a"]["nodes"] == 50


def test_a_file_of_limits_is_rewritten_and_an_empty_table_gets_the_figures_of_today(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    entry = '[[raised]]\nroom = "fp8bench/a"\nnodes = 100\nreason = "The reason."\n'
    path.write_text(f"rooms = []\n\n{entry}")
    lower_limits(path, "# A comment.\n", FIGURES, weights_of(100))
    assert read_limits(path) == limits_of([RAISED]) and path.read_text().startswith("# A comment.\n")
    lower_limits(path, "", FIGURES, weights_of(400, options=2))
    assert read_limits(path) == limits_of([RAISED], options=2)


def test_options_of_subcommands_are_counted() -> None:
    assert options_of(build_parser({"history"})) > options_of(build_parser({"list"})) == 1
