"""Names of files for whatever words, and folders that can be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.errors import UsageError
from fp8bench.model import Case
from fp8bench.paths import check_folder, name_of, safe

WORDS = st.text(max_size=60)


def test_plain_cases_have_plain_names() -> None:
    assert (
        name_of(Case("gemm", (("m", 64), ("product", "forward")), "bf16", "cpu"))
        == "gemm-m=64,product=forward-cpu-bf16"
    )
    assert name_of(Case("data", (), "fp8", "cuda:1")).startswith("data-cuda1-fp8")


def test_what_is_lost_is_made_up_for() -> None:
    """By a digest of all of it."""
    long = Case("gemm", tuple((f"parameter{number}", number) for number in range(20)), "bf16", "cpu")
    assert len(name_of(long)) < 200 and name_of(long).startswith("gemm-parameter0=0,") and "-cpu-bf16-" in name_of(long)
    mapped = Case("gemm", (), "fp8", "cpu", (("mlp", "bf16"),))
    assert name_of(mapped).startswith("gemm-cpu-fp8_mlp=bf16_-")
    names = {
        safe(text) for text in ("a/b", "a_b", "A_b", "a\nb", "a b", "é", "ü", "..", ".", "-", "", "x" * 300, "x" * 301)
    }
    assert len(names) == 13


@given(WORDS, WORDS, WORDS, WORDS)
@settings(max_examples=200, deadline=None)
def test_any_words_are_one_part_of_a_path(workload: str, name: str, value: str, precision: str) -> None:
    """Of ASCII, not too long for any file system, never one that leads out of its folder or is hidden."""
    for found in (name_of(Case(workload, ((name, value),), precision, "cpu")), safe(value) or "_"):
        assert Path(found).name == found and found not in (".", "..") and found[0] not in ".-" and len(found) < 200
        assert found.isascii() and found.isprintable() and not set(found) & set('/\\:*?"<>| ')


@given(WORDS, WORDS)
@settings(max_examples=200, deadline=None)
def test_different_words_have_different_names(one: str, other: str) -> None:
    """Also where a file system does not tell A from a."""
    assert (safe(one).lower() == safe(other).lower()) == (one == other)


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_folder("--trace", tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/below", "zero\0byte", "x" * 300])
def test_a_folder_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    """With the option, the folder and the reason."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--trace '.* cannot be written \(.+\)\. Give a folder"):
        check_folder("--trace", tmp_path / name)
