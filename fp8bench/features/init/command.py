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

EXAMPLES = ("fp8bench init", "fp8bench suite --config fp8bench.yaml --quick  # run the written suite")
_CONFIG_FILE, _SUITE_FILE, _WORKFLOW_FILE = "fp8bench.yaml", "fp8bench_suite.py", ".github/workflows/fp8bench.yml"
# git must ignore the store: it changes with every run, so a commit would never contain its own measurement.
_STORE_IGNORE_PATTERN = ".fp8bench/"
_NEXT_STEPS_TEXT = f"""Try it:             fp8bench suite --config {_CONFIG_FILE} --quick
Put your code into: {_SUITE_FILE}
Hold it against a commit, as {_WORKFLOW_FILE} does for pull requests:
                    fp8bench gate --against HEAD~1 --config {_CONFIG_FILE} --comment comment.md
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Writes {_CONFIG_FILE} (five options), {_SUITE_FILE} (a workload that runs) and "
        f"{_WORKFLOW_FILE} (base against head of each pull request), and has git ignore the store. "
        "Never overwrites files."
    )
    parser.epilog = "Exit codes: 0 written, 2 wrong usage, or one of the files exists already."
    parser.add_argument(
        "folder",
        nargs="?",
        type=types.path,
        default=Path(),
        metavar="DIR",
        help="the folder to write to; default the current one",
    )
    install_help = (
        "what pip installs in the workflow: git+https://HOST/OWNER/fp8bench@COMMIT, a path in the "
        "project, or a version; "
        "default the source of this fp8bench; if a build cannot reach it, you are asked once"
    )
    parser.add_argument("--install", metavar="WHAT", help=install_help)


def run(arguments: argparse.Namespace) -> int:
    template_by_file = {_CONFIG_FILE: "config", _SUITE_FILE: "workload", _WORKFLOW_FILE: "workflow"}
    # 1. Check all files before the first one is written.
    for file in (arguments.folder / name for name in template_by_file):
        if file.exists() or file.is_symlink():
            raise UsageError(
                f"{file} exists already, and init never overwrites files. Move it, or give another folder."
            )
    # 2. Choose what builds install.
    source = arguments.install or find_source() or _ask_for_install_source()
    fp8bench_requirement = source or f"fp8bench=={__version__}"
    # 3. Write the files. Quoted as JSON, the requirement is valid YAML.
    for name, template in template_by_file.items():
        text = Path(__file__).with_name(f"{template}.txt").read_text(encoding="utf-8")
        _write_file(arguments.folder / name, text.replace("{install}", json.dumps(fp8bench_requirement)), "x")
    # 4. Make git ignore the store.
    ignore_file = arguments.folder / ".gitignore"
    ignore_file_text = ignore_file.read_text(encoding="utf-8", errors="replace") if ignore_file.is_file() else ""
    if _STORE_IGNORE_PATTERN not in ignore_file_text.split():
        line_break = "\n" if ignore_file_text and not ignore_file_text.endswith("\n") else ""
        _write_file(ignore_file, f"{line_break}{_STORE_IGNORE_PATTERN}\n", "a")
    # 5. Print the next steps, and why builds may be unable to install fp8bench.
    is_current_folder = arguments.folder.resolve() == Path.cwd()
    change_folder_hint = "" if is_current_folder else f"Go there:           cd {shlex.quote(str(arguments.folder))}\n"
    say(f"\n{change_folder_hint}{_NEXT_STEPS_TEXT}Builds install:     {fp8bench_requirement}\n")
    if problem := _find_install_problem(source, arguments.folder):
        say(
            f"Before you push:    {problem}.\n"
            f"                    Write after FP8BENCH: in {_WORKFLOW_FILE}\n"
            "                    git+https://HOST/OWNER/fp8bench@COMMIT, or a path in this project: ./wheels/NAME.whl\n"
        )
    return EXIT_OK


def _ask_for_install_source() -> str:
    """Asks the user once where to install fp8bench from. Returns '' if nobody answers."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return ""
    say("This fp8bench was installed from a folder of this machine, which a CI build cannot reach. Which source\n")
    say("should it use: git+https://HOST/OWNER/fp8bench@COMMIT, or a path in this project? Enter decides later: ")
    return sys.stdin.readline().strip()


def _find_install_problem(source: str, folder: Path) -> str:
    """Returns why another machine may be unable to install fp8bench from this source; '' if it can."""
    if not source:
        return "this fp8bench was installed from a folder of this machine, and may be in no package index"
    is_path = "/" in source and not types.is_url(source.removeprefix("git+"))
    if not is_path or " @ " in source:
        return ""
    if Path(source).is_absolute():
        return f"a CI build has no {source}"
    return "" if (folder / source).exists() else f"this project has no {source}"


def _write_file(file: Path, text: str, mode: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open(mode, encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise UsageError(f"{file} cannot be written ({error.strerror}). Give a writable folder.") from None
    say(f"{file}\n")
