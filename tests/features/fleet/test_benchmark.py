"""What suites/fleet.py says of times that are given to it."""

from __future__ import annotations

import json

from suites.fleet import Timed, report, said


def test_the_makespan_beside_the_cells() -> None:
    """Four cells of 10 s, 6 of them measuring, by two workers in 22 s: 1.1 times half of their sum."""
    found = report(22.0, [Timed(10.0, 6.0)] * 4, 2, (0.5, 2.0))
    assert found["ratio"] == 1.1 and found["shortest_cell_s"] == 10.0
    assert found["overhead_a_cell_s"] == {"between_cells": 1.0, "in_its_process": 4.0}
    assert json.loads(said(found))["ratio_to_measuring_alone"] == 1.833
