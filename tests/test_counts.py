"""A table of values in one test hides no row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.counts import for_each, paired

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


def test_one_that_fails_is_raised_as_it_is() -> None:
    @for_each("text, base", [("x", 10), ("ff", 16)], ids=["none", "one"])
    def no_number(text: str, base: int) -> None:
        with pytest.raises(ValueError, match="invalid"):
            int(text, base)

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE") as caught:
        no_number()
    assert caught.value.__notes__ == ["in the row 'one'"]


def test_rows_that_are_skipped_hide_no_failure() -> None:
    @for_each("number", [0, 1, 2])
    def some(number: int) -> None:
        if number < 2:
            pytest.skip("too few")

    with pytest.raises(pytest.skip.Exception, match="too few"):
        some()


@for_each("number", [1, 2])
@for_each("word", ["a", "b"])
def test_each_row_has_a_folder_and_patches_of_its_own(
    number: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [*tmp_path.iterdir()] and len(SEEN) != 99
    (tmp_path / word).write_text(str(number))
    monkeypatch.setattr("tests.test_counts.SEEN", [0] * 99)


def test_what_may_be_slow_and_what_is_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="rows with marks"):
        for_each("number", [pytest.param(1, marks=pytest.mark.slow)])
    with pytest.raises(AssertionError, match="without rows"):
        for_each("number", [])


def test_pairs_hold_all_of_both() -> None:
    rows = paired("abcd", [1, 2, 3], ("a", 2))
    unasked = [row.values for row in rows if not row.marks]
    assert len(rows) == 12 and ("a", 2) in unasked and len(unasked) == 5
    assert {one for one, _ in unasked} == {*"abcd"} and {one for _, one in unasked} == {1, 2, 3}
