"""A table of values in one test hides no row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.counts import for_each

SEEN: list[int] = []


@for_each("number", [1, 2, 3, 4])
def of_numbers(number: int) -> None:
    SEEN.append(number)
    assert number % 2, "even"


def test_all_rows_run_and_those_that_fail_are_named() -> None:
    with pytest.raises(BaseExceptionGroup, match="2 of 4 rows") as caught:
        of_numbers()
    assert SEEN == [1, 2, 3, 4]
    assert [one.__notes__ for one in caught.value.exceptions] == [
        ["in the row {'number': 2}"],
        ["in the row {'number': 4}"],
    ]


@for_each("number", [1, 2])
@for_each("word", ["a", "b"])
def test_each_row_has_a_separate_folder_and_patches(
    number: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [*tmp_path.iterdir()] and len(SEEN) != 99
    (tmp_path / word).write_text(str(number))
    monkeypatch.setattr("tests.test_counts.SEEN", [0] * 99)
