"""What tells the groups of a panel from one another."""

from __future__ import annotations

from fp8bench.model import Scalar
from fp8bench.report.panels import panels_of
from tests.counts import for_each
from tests.materials import shapes


@for_each(
    ("wanted", "places"),
    [
        (({"m": 16, "n": 8},), [""]),
        (({"m": 16, "n": 8}, {"m": 32, "n": 8}), ["m=16", "m=32"]),
        (({"m": 16}, {"m": 16, "cache": "cold"}), ["cache=hot", "cache=cold"]),
        (
            ({"m": 16}, {"m": 32, "values": "ones"}, {"m": 32}),
            ["m=16 values=normal", "m=32 values=ones", "m=32 values=normal"],
        ),
        (({"m": 16, "cache": "cold"}, {"m": 32, "cache": "cold"}), ["m=16", "m=32"]),
        (({"m": 16}, {"m": 16, "norm": "mlp"}), ["as usual", "norm=mlp"]),
    ],
)
def test_a_group_is_told_by_what_it_has_and_others_have_not(
    wanted: tuple[dict[str, Scalar], ...], places: list[str]
) -> None:
    """The usual value of a quiet axis, too, where another group has an unusual one."""
    run, findings = shapes(*wanted)
    (panel,) = panels_of(run, findings)
    assert [group.place for group in panel.groups] == places
