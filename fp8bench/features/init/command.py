"""`fp8bench init`: writes the files that measure your project, locally and for every pull request."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from fp8bench import __version__
from fp8bench.cli import option_types as types
from fp8bench.cli.streams import say
from fp8bench.errors import EXIT_OK, UsageError
from fp8bench.features.init.source import find_source

EXAMPLES = ("fp8bench init", "fp8bench suite --config fp8bench.yaml --quick  # what it has written runs")
_CONFIG, _SUITE, _WORKFLOW = "fp8bench.yaml", "fp8bench_suite.py", ".github/workflows/fp8bench.yml"
# A committed store would change with each run, so no commit would ever be the measured one.
_IGNORED = ".fp8bench/"
_NEXT = f"""Try it:             fp8bench suite --config {_CONFIG} --quick
Put your code into: {_SUITE}
Hold it against a commit, as {_WORKFLOW} does for pull requests:
                    fp8bench gate --against HEAD~1 --config {_CONFIG} --comment comment.md
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Writes {_CONFIG} (five options), {_SUITE} (a workload that runs) and "
        f"{_WORKFLOW} (base against head of each pull request), and has git ignore the store. Never overwrites files."
    )
    parser.epilog = "Exit codes: 0 written, 2 wrong usage, or one of the files is there already."
    parser.add_argument("folder", nargs="?", type=types.path, default=Path(), metavar="DIR", help="where; default here")
    words = (
        "what the workflow's pip installs: git+https://HOST/OWNER/fp8bench@COMMIT, a path in the project, a version; "
        "default what this fp8bench was installed from, asked once if a build cannot reach that"
    )
    parser.add_argument("--install", metavar="WHAT", help=words)


def run(arguments: argparse.Namespace) -> int:
    files = {name: arguments.folder / name for name in (_CONFIG, _SUITE, _WORKFLOW)}
    for file in files.values():
        if file.exists() or file.is_symlink():
            raise UsageError(
                f"{file} exists already, and init never overwrites files. Move it, or give another folder."
            )
    source = arguments.install or find_source() or _ask_for_source()
    installed = source or f"fp8bench=={__version__}"
    workflow = _template("workflow").replace("{install}", json.dumps(installed))
    for file, text in zip(files.values(), (_template("config"), _template("workload"), workflow), strict=True):
        _write(file, text, "x")
    ignore = arguments.folder / ".gitignore"
    known = ignore.read_text(encoding="utf-8", errors="replace") if ignore.is_file() else ""
    if _IGNORED not in known.split():
        begins = "\n" if known and not known.endswith("\n") else ""
        _write(ignore, f"{begins}{_IGNORED}\n", "a")
    here = arguments.folder.resolve() == Path.cwd()
    go_there = "" if here else f"Go there:           cd {shlex.quote(str(arguments.folder))}\n"
    say(f"\n{go_there}{_NEXT}Builds install:     {installed}\n")
    if problem := _install_problem(source, arguments.folder):
        say(
            f"Before you push:    {problem}.\n"
            f"                    Write after FP8BENCH: in {_WORKFLOW}\n"
            "                    git+https://HOST/OWNER/fp8bench@COMMIT, or a path in this project: ./wheels/NAME.whl\n"
        )
    return EXIT_OK


def _ask_for_source() -> str:
    """Asks the user once; returns '' if nobody answers."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return ""
    say("This fp8bench is from a folder of this machine, which a build elsewhere cannot reach. What shall be\n")
    say("installed there: git+https://HOST/OWNER/fp8bench@COMMIT, or a path in this project? Enter decides it later: ")
    return sys.stdin.readline().strip()


def _install_problem(source: str, folder: Path) -> str:
    """Returns why another machine may not be able to install the source; '' if it can."""
    if not source:
        return "this fp8bench is from a folder of this machine, and perhaps in no index"
    is_path = "/" in source and not types.is_address(source.removeprefix("git+"))
    if not is_path or " @ " in source:
        return ""
    if Path(source).is_absolute():
        return f"a build elsewhere has no {source}"
    return "" if (folder / source).exists() else f"this project has no {source}"


def _write(file: Path, text: str, mode: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open(mode, encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror}). Give a folder that takes files.") from None
    say(f"{file}\n")


def _template(name: str) -> str:
    return Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
