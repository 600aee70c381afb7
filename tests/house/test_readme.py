"""Commands in pages and help work: README's two commands, every command line and option, the tested versions."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from fp8bench.cli.main import COMMANDS, Parser, build_parser, import_command_module, subparsers_by_name
from tests.counts import for_each
from tests.house.sources import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "reports").rglob("*.md")),
]
INSTALL = "pip install -c constraints.txt . && python -m fp8bench suite transformer --dtypes fp8,bf16"
TEST = "pip install -c constraints.txt -e '.[dev]' && pytest"
BLOCK = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SHELL = {"", "sh", "bash", "shell", "console"}
COMMAND = re.compile(r"(?:^|&&|\|\||;) *(?:\w+=\S* +)*(?:python3? -m +)?fp8bench(?= |$)")
REDIRECT = re.compile(r"\s\d?[<>]+&?\s*\S+")
SETTING = re.compile(r"\w+=")


def code_lines(page: Path) -> list[str]:
    """The lines of a page's shell blocks without prompts; a backslash joins a line to the next.

    In a block with prompts, lines without one are output.
    """
    lines: list[str] = []
    for _, language, block in BLOCK.findall(page.read_text()):
        if language not in SHELL:
            continue
        block_lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        prompted = [line.removeprefix("$ ") for line in block_lines if line.startswith("$ ")]
        lines += prompted or block_lines
    return lines


def command_lines(line: str) -> list[list[str]]:
    lexer = shlex.shlex(REDIRECT.sub(" ", line), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    calls: list[list[str]] = [[]]
    for token in lexer:
        if set(token) <= set("|&;"):
            calls.append([])
        elif calls[-1] or not SETTING.match(token):
            calls[-1].append(token)
    plain = [call[1:] for call in calls if call[:1] == ["fp8bench"]]
    return plain + [call[3:] for call in calls if call[1:3] == ["-m", "fp8bench"]]


def shown_lines() -> Iterator[tuple[str, str]]:
    """Each line of a page or of a command's help that shows a command, with its place."""
    for page in PAGES:
        for line in code_lines(page):
            if COMMAND.search(line):
                yield str(page.relative_to(ROOT)), line
    for name in COMMANDS:
        for line in getattr(import_command_module(name), "EXAMPLES", ()):
            yield f"help of {name}", line


SHOWN = []
for place, line in shown_lines():
    SHOWN += [pytest.param(words, id=f"{place}: {shlex.join(words)}") for words in command_lines(line)]
# Options of asv, pytest-benchmark and `python -m suites.verdicts`, which pages name without the command.
OTHER_OPTIONS = {"--set-commit-hash", "--asv", "--trained", "--benchmark-compare-fail"}


def test_the_two_commands_stand_in_the_readme() -> None:
    lines = code_lines(ROOT / "README.md")
    assert INSTALL in lines
    assert TEST in lines
    assert [line for line in lines if "&& pytest" in line] == [TEST], ".ci/run takes the first such line"


@functools.cache
def parser() -> Parser:
    return build_parser()


def parsed(arguments: list[str]) -> object:
    """Exit code of parsing; 0 also for --help, where the parser exits."""
    try:
        parser().parse_args(arguments)
    except SystemExit as end:
        return end.code
    return 0


@for_each("arguments", SHOWN)
def test_command_lines_parse(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mxfp4.map").write_text("head=bf16\n")  # written by the line before
    assert parsed(arguments) == 0, capsys.readouterr().err


def options_of(command: argparse.ArgumentParser) -> set[str]:
    options = set(chain.from_iterable(action.option_strings for action in command._actions))
    return options.union(*(options_of(inner) for inner in subparsers_by_name(command).values()))


@for_each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_sentences_exist(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", BLOCK.sub("", page.read_text()))
    own = (span for span in spans if span.partition(" ")[0] in ("fp8bench", *COMMANDS) or span.startswith("--"))
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "\n".join(own)))
    assert not named - options_of(parser()) - OTHER_OPTIONS


def test_command_lines_are_found() -> None:
    assert command_lines(INSTALL) == [["suite", "transformer", "--dtypes", "fp8,bf16"]]
    assert command_lines("CUDA_VISIBLE_DEVICES=0 fp8bench list # all") == [["list"]]
    assert command_lines("fp8bench report last > report.txt 2>&1") == [["report", "last"]]
    assert command_lines("fp8bench list | head; python3 -m fp8bench doctor") == [["list"], ["doctor"]]
    assert not COMMAND.search("fp8bench-like words, fp8bench.run(), or import fp8bench")
    assert SHOWN


def constraints() -> dict[str, Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = [Requirement(line) for line in lines if line]
    assert len(pins) == len({canonicalize_name(pin.name) for pin in pins}), "one line a package"
    return {canonicalize_name(pin.name): pin for pin in pins}


def pinned(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def test_constraints_are_exact_and_public() -> None:
    for pin in constraints().values():
        assert pinned(pin).local is None, pin
        assert not pin.extras and pin.url is None


def test_constraints_satisfy_the_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [Requirement(text) for text in (*project["dependencies"], *extras["test"])]
    optional = [Requirement(text) for text in chain.from_iterable(extras.values())]
    pins = constraints()
    for requirement in needed:
        assert canonicalize_name(requirement.name) in pins, f"{requirement.name} is not pinned"
    for requirement in (*needed, *optional):
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is not None:
            assert requirement.specifier.contains(pinned(pin)), f"{pin} is outside {requirement}"
    assert "triton" not in pins, "torch's CUDA wheels demand a triton of their own: no install with -c would succeed"


def test_locks_are_the_tested_set_with_hashes() -> None:
    """`tox -e lock` creates them; run it after changing constraints.txt or a dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = constraints()
    for name, needed in (
        ("build", project["dependency-groups"]["build"]),
        ("run", [*project["project"]["dependencies"], *project["dependency-groups"]["torch-needs"]]),
    ):
        text = (ROOT / "locks" / f"{name}.txt").read_text()
        entries = re.findall(
            r"^(\S+)==(\S+)((?: ;.*)? \\(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+)", text, re.MULTILINE
        )
        assert len(entries) == len(re.findall(r"^\w", text, re.MULTILINE)), "every package has its hashes"
        locked = {canonicalize_name(package): Version(version) for package, version, _ in entries}
        assert {canonicalize_name(Requirement(line).name) for line in needed} - {"torch"} <= locked.keys()
        assert {package: pinned(pins[package]) for package in locked if package in pins}.items() <= locked.items()


def anchors(page: Path) -> set[str]:
    """The fragments that links may have, as GitHub derives them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@for_each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!\w+://)([^)#]*)#?([^)]*)\)", page.read_text())
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    missing = [path for path, anchor in targets if not path.exists() or (anchor and anchor not in anchors(path))]
    assert not missing


def test_the_readme_is_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 85
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert not pages - set(re.findall(r"\]\(docs/([\w-]+\.md)", readme)), "every page is linked"
