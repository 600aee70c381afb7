"""What a word of the command line may be."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from fp8bench.cli.option_types import path, precision_map


def test_a_precision_map_is_words_or_a_file_of_them(tmp_path: Path) -> None:
    """A line each, or several with commas; remarks and empty lines say nothing."""
    file = tmp_path / "map.txt"
    file.write_text("# what stays high\nhead=bf16\n\nblocks.0=bf16, blocks.1.mlp=fp8-delayed:history=16  # the last\n")
    said = (("head", "bf16"), ("blocks.0", "bf16"), ("blocks.1.mlp", "fp8-delayed:history=16"))
    assert precision_map(str(file)) == said
    assert precision_map("head=bf16,blocks.0=bf16,blocks.1.mlp=fp8-delayed:history=16") == said


@pytest.mark.parametrize(("content", "words"), [(b"", "not of the form"), (b"head", "not of the form"),
                                                (b"a=b\na=c", "twice"), (b"\xff=b", "cannot be read")])  # fmt: skip
def test_a_file_that_is_no_map_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "map.txt"
    file.write_bytes(content)
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        precision_map(str(file))


@pytest.mark.parametrize("text", ["s3://bucket/store", "gs://bucket", "file:///tmp/x"])
def test_an_address_is_no_path(text: str) -> None:
    """It would be a folder that is called `s3:`."""
    with pytest.raises(argparse.ArgumentTypeError, match="is an address"):
        path(text)


@pytest.mark.parametrize("text", ["s3:", "a/b:/c", "./s3://bucket", "C:/x"])
def test_what_only_looks_like_one_is_a_path(text: str) -> None:
    assert path(text) == Path(text)
