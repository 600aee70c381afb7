"""How --help begins: commands with their verbs, valid examples, the dozen main options; --help-all has all."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from fp8bench.cli.main import COMMAND_HELP_VERBS, COMMANDS, Parser, build_parser, main, subparsers_by_name
from tests.counts import for_each

# A command with more options groups them.
FEW = 16


def every_parser(parser: argparse.ArgumentParser, name: str = "") -> dict[str, argparse.ArgumentParser]:
    parsers = {name: parser}
    for word, command in subparsers_by_name(parser).items():
        parsers |= every_parser(command, f"{name} {word}".strip())
    return parsers


def helped(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    code: object = None
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert not code
    return capsys.readouterr().out


def test_every_command_stands_under_one_verb(capsys: pytest.CaptureFixture[str]) -> None:
    sections = re.split(r"^(\w+):\n", helped("--help", capsys=capsys), flags=re.MULTILINE)
    listed = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert list(listed) == [*COMMAND_HELP_VERBS, "options"]
    names = [line.split()[0] for verb in COMMAND_HELP_VERBS for line in listed[verb].strip().splitlines()]
    assert sorted(names) == sorted(COMMANDS)
    assert all(line.strip().count(".") == 0 for verb in COMMAND_HELP_VERBS for line in listed[verb].splitlines())


@for_each("name", COMMANDS)
def test_many_options_are_a_dozen_at_first(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = subparsers_by_name(build_parser((name,)))[name]
    assert isinstance(command, Parser)
    listed = (action for action in command._actions if action.help != argparse.SUPPRESS)
    words = {word for action in listed for word in action.option_strings}
    first = command.first_options.split()
    assert bool(first) == (len(words) > FEW) and len(first) <= 14 and set(first) <= words
    text = helped(name, "--help", capsys=capsys)
    shown = {word for word in words if re.search(rf"^  [^#\n]*{word}\b(?!-)", text, re.MULTILINE)}
    if first:
        every = helped(name, "--help-all", capsys=capsys)
        assert set(first) <= shown and len(shown) <= len(first) + 4 < len(words)
        assert all(re.search(rf"^  (-\w, )?{word}\b|, {word}\b", every, re.MULTILINE) for word in words - {"-h"})
    else:
        assert shown == words


def test_examples_are_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mxfp4.map").write_text("mlp=mxfp4")
    parsers = [parser for parser in every_parser(build_parser()).values() if isinstance(parser, Parser)]
    lines = [line for parser in parsers for line in parser.examples if "$(" not in line]
    assert len(lines) > 12
    whole = build_parser()
    for line in lines:
        words = shlex.split(line.partition(">")[0], comments=True)
        assert words.pop(0) == "fp8bench" and whole.parse_args(words).command


def test_every_option_says_what_it_does_and_examples_stand_where_they_are_many() -> None:
    """Wording of `--help` is compared in tests/golden."""
    for name, parser in every_parser(build_parser()).items():
        others = (action for action in parser._actions if not isinstance(action, argparse._SubParsersAction))
        assert all(action.help for action in others), name
        assert isinstance(parser, Parser) and (parser.examples or not parser.first_options), name


@for_each("words", [(), ("doctor",), ("history", "list"), ("fleet", "status"), ("compare",)])
def test_all_options_are_shown_where_help_shows_them_already(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert helped(*words, "--help-all", capsys=capsys) == helped(*words, "--help", capsys=capsys)
