"""Types of values, and that one field with `option` is a flag, a key of config files and a keyword of calls."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fp8bench.cli.calls import accept_request_fields, request_fields
from fp8bench.cli.config_file import read_config
from fp8bench.cli.main import Parser
from fp8bench.cli.option_types import parse_sessions, path, precision_map
from fp8bench.cli.options import add_request_options
from fp8bench.errors import UsageError
from fp8bench.model import Request
from fp8bench.model.request import HOW_TO_MEASURE, check_request_fields, list_request_options, option, whole_number
from tests.counts import for_each


def test_a_precision_map_is_words_or_a_file_of_them(tmp_path: Path) -> None:
    file = tmp_path / "map.txt"
    file.write_text("# what stays high\nhead=bf16\n\nblocks.0=bf16, blocks.1.mlp=fp8-delayed:history=16  # the last\n")
    said = (("head", "bf16"), ("blocks.0", "bf16"), ("blocks.1.mlp", "fp8-delayed:history=16"))
    assert precision_map(str(file)) == said
    assert precision_map("head=bf16,blocks.0=bf16,blocks.1.mlp=fp8-delayed:history=16") == said


@for_each(
    ("content", "words"),
    [(b"", "not of the form"), (b"head", "not of the form"), (b"a=b\na=c", "twice"), (b"\xff=b", "cannot be read")],
)
def test_a_file_that_is_no_map_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "map.txt"
    file.write_bytes(content)
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        precision_map(str(file))


@for_each(("text", "expected"), [("3", (3, 0.0)), ("3@10m", (3, 600.0)), ("2@90s", (2, 90.0))])
def test_sessions_and_the_pause_between_them(text: str, expected: tuple[int, float]) -> None:
    assert parse_sessions(text) == expected


@for_each("text", ["0", "3@", "@10m", "3@soon", "x"])
def test_what_is_no_number_of_sessions(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_sessions(text)


@for_each("text", ["s3://bucket/store", "gs://bucket", "file:///tmp/x"])
def test_an_address_is_no_path(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is an address"):
        path(text)


@for_each("text", ["s3:", "a/b:/c", "./s3://bucket", "C:/x"])
def test_what_only_looks_like_one_is_a_path(text: str) -> None:
    assert path(text) == Path(text)


@dataclass(frozen=True)
class More(Request):
    """A request with one more field, and nothing else changed."""

    cool_down: int | None = option(None, whole_number(1, 600), "seconds to wait between two groups", "SECONDS")

    def __post_init__(self) -> None:
        check_request_fields(self, {name: option.rule for name, option in list_request_options(More).items()})


@pytest.fixture
def parser() -> Parser:
    parser = Parser(prog="fp8bench suite")
    add_request_options(parser.add_argument_group(HOW_TO_MEASURE), More)
    return parser


def test_it_is_an_option_with_its_help_and_limits(parser: Parser) -> None:
    assert parser.parse_args(["--cool-down", "5"]).cool_down == 5 and parser.parse_args([]).cool_down is None
    assert "--cool-down SECONDS" in (text := parser.format_help()) and "seconds to wait between two groups" in text
    with pytest.raises(UsageError, match="--cool-down: expected a whole number from 1 to 600, got '0'"):
        parser.parse_args(["--cool-down", "0"])


def test_it_is_a_key_of_a_file_of_options(parser: Parser, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("cool-down: 7\n")
    assert read_config(file, parser) == {"cool_down": 7}


def test_it_is_a_keyword_of_a_call() -> None:
    @accept_request_fields(More)
    def run(suite: str, **options: Any) -> More:
        return More(suite, **request_fields(More, options))

    assert run("gemm", cool_down=9).cool_down == 9 and run("gemm").cool_down is None
    assert inspect.signature(run).parameters["cool_down"].default is None
    with pytest.raises(UsageError, match="unknown argument of run 'cool_dwn'"):
        run("gemm", cool_dwn=9)


def test_it_is_checked_whoever_asks() -> None:
    with pytest.raises(UsageError, match="cool_down must be a whole number from 1 to 600, got 601"):
        More("gemm", cool_down=601)
