"""Outputs shown in pages equal those of the commands (blocks.py)."""

from __future__ import annotations

import pytest

from tests.counts import for_each
from tests.docs.blocks import BLOCKS, Block, Project, missing_from, missing_head, renewed, shape_of

AGAIN = "run `python -m tests.docs.blocks`, and read the diff"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("project"))


def marks_of(block: Block) -> tuple[pytest.MarkDecorator, ...]:
    if not block.is_quick:
        return (pytest.mark.nightly,)
    return (pytest.mark.slow,) if block.words[0] == "doctor" else ()  # takes seconds


@pytest.mark.parametrize("block", [pytest.param(one, marks=marks_of(one), id=one.name) for one in BLOCKS])
def test_a_page_shows_what_the_command_prints(block: Block, project: Project) -> None:
    """Word for word; for measured output, line by line by first words."""
    printed = project.printed(block)
    missing = missing_from(printed, block.shown) if block.is_quick else missing_head(printed, block.shown)
    assert missing == "", f"{missing}\nis not in\n{printed}\n{AGAIN}"


@for_each(
    ("one", "other"),
    [
        ("bf16  slower  0.0402x, could be 0.0398x", "bf16 perhaps slower 1.2x, could\n  be 1x"),
        ("cpu: AMD EPYC (23.5 GiB)", "cpu: Intel(R) Xeon(R) Processor (120 GiB)"),
        ("fp32  reference  370 us  2.1e-07  768 KiB", "fp32 reference 1.2 ms 0 1.0 MiB"),
        ("fp8bench show 78f4cf69 --all", "fp8bench show b684b9fb --all"),
    ],
)
def test_figures_runs_machines_and_folds_may_differ(one: str, other: str) -> None:
    assert shape_of(one) == shape_of(other)


@for_each(
    ("shown", "missing"),
    [
        (["one 1", "two 2"], ""),
        (["...", "two 3", "  ...", "four 4"], ""),
        (["one 1", "three 3"], "one N three N"),
        (["four 4", "...", "one 1"], "one N"),
        (["one fp8"], "one fp8"),
    ],
)
def test_other_words_another_order_and_lines_left_out_without_dots_are_seen(shown: list[str], missing: str) -> None:
    assert missing_from("one 1\ntwo 2\nthree 3\nfour 4\n", shown) == missing


def test_of_a_measurement_lines_are_compared_by_their_first_words() -> None:
    """In order, with other lines allowed between; a wrapped line counts once."""
    long = f"  how sure: {'it is ' * 15}".rstrip()
    printed = f"bf16  slower 2x\n  accuracy: 3% off\nfp8  faster\n{long}\n    could be\n"
    assert missing_head(printed, ["bf16  faster 3x", "...", "fp8  slower", long, "    or not"]) == ""
    assert missing_head(printed, ["fp8  slower", "bf16  faster"]) == "bf16"
    assert missing_head(printed, ["bf16  faster", "  memory: 2 B"]) == "memory:"


def test_a_block_written_again_keeps_its_dots_and_its_ends() -> None:
    printed = "title\none 1.5\nnew\ntwo 2\nrest\nlast 9\nend\n"
    assert renewed(printed, ["one 1", "too 1", "...", "last 3"]) == ["one 1", "new", "two 2", "...", "last 3"]
    assert renewed(printed, ["...", "lost 3", "..."]) == ["...", "last 9", "..."]
