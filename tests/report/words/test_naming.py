"""What a report calls its groups."""

from __future__ import annotations

from fp8bench.report.panels import panels_of
from fp8bench.report.words.naming import listed, setting_of, sizes
from tests.runs import case, gemm, transformer


def test_a_group_is_called_what_tells_it_from_its_neighbours() -> None:
    (panel,) = panels_of(*gemm())
    assert [setting_of(panel, group) for group in panel.groups] == [
        "m=256 n=256 k=256", "m=512 n=512 k=512", "m=1 n=2048 k=2048",
    ]  # fmt: skip


def test_a_group_that_is_alone_is_called_by_its_sizes() -> None:
    (panel,) = panels_of(*transformer())
    assert setting_of(panel, panel.groups[0]) == "layers=4 width=256 heads=4 context=256 batch=4"


def test_sizes_are_numbers_alone() -> None:
    """A choice is none, and neither is yes or no."""
    assert sizes(case("mlp", "bf16", {"tokens": 256, "rate": 0.5, "gated": True, "pass": "training"})) == (
        "tokens=256 rate=0.5"
    )
    assert sizes(case("mlp", "bf16", {})) == ""


def test_listed() -> None:
    assert [listed([]), listed(["a"]), listed(["a", "b"]), listed(list("abcde")), listed(list("abcdefg"))] == [
        "", "a", "a and b", "a, b, c, d and e", "a, b, c, d and 3 more",
    ]  # fmt: skip
