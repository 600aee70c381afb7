"""Each document of what is made of runs by hand has its test (tests/told_before.py)."""

from __future__ import annotations

from tests.golden.documents import load
from tests.told_before import MADE, find_made_tests


def test_no_document_is_left_over() -> None:
    names = [test.rpartition("::test_")[2] for test in find_made_tests()]
    assert sorted(names) == list(load(MADE))
