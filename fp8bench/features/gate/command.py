"""`fp8bench gate`: judges a comparison, a duel or the history, and ends with an exit code for a build.

A file of thresholds has suites or patterns of cases; below each are patterns of figures, with thresholds:

gemm:
  time: {relative: 3%, smallest: 20 us}
  "*_error": ignore
"transformer*fp8*":
  peak_memory: {relative: 1%, smallest: 4 MiB}
"""

from __future__ import annotations

import argparse
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.commands import suite
from fp8bench.cli.config_file import read_config, read_mapping
from fp8bench.cli.options import add_common, request_of
from fp8bench.cli.outputs import CommandResult, check_files, stdout_look, write_outputs
from fp8bench.cli.progress import TERMINAL
from fp8bench.cli.streams import complain, say
from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.features.duel.sides import DuelQuestion
from fp8bench.features.duel.values import NothingInCommon
from fp8bench.features.gate.thresholds import Rules, ThresholdRule, check_rules
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.environment import command_line
from fp8bench.measure.interrupts import only_once
from fp8bench.model import Request
from fp8bench.model.codec import encode
from fp8bench.report.page import markdown
from fp8bench.report.terminal.layout import render
from fp8bench.user_code import import_user_modules

EXAMPLES = (
    "fp8bench gate HEAD~1 HEAD",
    "fp8bench gate --history --junit gate.xml",
    "fp8bench gate --against main --config fp8bench.yaml --comment comment.md",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Judges a comparison, a duel or the history by thresholds. Measures suspected regressions again, in fresh "
        "processes, before it reports them. Where it could not have seen a regression, it does not pass."
    )
    parser.epilog = (
        "Exit codes: 0 fine, 1 a regression, 2 wrong usage, 3 nothing was measured or a case failed, 4 something is "
        "suspected, the gate cannot tell whether a time became slower by its threshold, or the baseline is missing or "
        "does not compare, 130 interrupted. With --comment 1 is also quality blocked, 3 an infrastructure error, 4 a "
        "recipe mismatch."
    )
    judged = parser.add_argument_group("what is judged")
    judged.add_argument(
        "sides", nargs="*", metavar="A B", help="the old and the new side: runs, commits or stores, as in compare"
    )
    judged.add_argument("--duel", metavar="DUEL", help="a stored duel instead: an id, a file's stem, a path, or 'last'")
    judged.add_argument(
        "--against", metavar="REV", help="duel this tree with that commit instead; --config selects the cases"
    )
    judged.add_argument(
        "--config", type=types.path, dest="asked", metavar="FILE", help="a file of options, as of suite --config"
    )
    judged.add_argument(
        "--history", action="store_true", help="the steps in the store's history instead, those not acknowledged"
    )
    add_common(judged, "--store", help="where they are, as in suite")
    add_common(judged, "--import", help="module or .py file of your suites, for the history")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--thresholds",
        type=types.path,
        metavar="FILE",
        help="YAML: how much worse is too much, by suite, case and figure; default 5%% of a time, 2%% of memory",
    )
    how.add_argument(
        "--no-rerun",
        dest="rerun",
        action="store_false",
        help="measure nothing: a suspected regression of 10%% or more fails unconfirmed",
    )
    where = parser.add_argument_group("where")
    where.add_argument("--junit", type=types.path, metavar="PATH", help="also write it there as JUnit XML")
    add_common(where, "--md", help="also write it to PATH as Markdown")
    where.add_argument(
        "--comment",
        type=types.path,
        metavar="PATH",
        help="duel: also write a comment for a pull request to PATH, 25 lines that begin with one of seven outcomes",
    )
    add_common(where, "--explain")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)  # before anything is written
    try:
        with only_once():
            result = answer(arguments, TERMINAL)
    # A pull request gets its comment even if nothing could be measured.
    except Fp8benchError as error:
        if arguments.comment is not None:
            from fp8bench.features.gate.view import Review, ReviewStatus, comment

            apart = isinstance(error, NothingInCommon)
            status = ReviewStatus.MISMATCH if apart else ReviewStatus.INFRASTRUCTURE
            text = comment(Review(status, (str(error),)), None, None, command_line())
            arguments.comment.write_text(text, encoding="utf-8", errors="backslashreplace")
        raise
    with write_outputs(result.files):
        say(render(result.page(), *stdout_look(arguments.explain)))
    return result.code


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.gate.history import compare_history
    from fp8bench.features.gate.stored_runs import compare_sides, duel_revision, judge_source, load_duel
    from fp8bench.features.gate.view import WORDS, as_junit, comment, page_of, review

    # 1. Thresholds are read before anything is measured.
    _check(arguments)
    rules = read_rules(arguments.thresholds) if arguments.thresholds is not None else ()
    # 2. Choose the source of the numbers.
    if arguments.against is not None:
        request, sessions = _read_request(arguments.asked)
        question = DuelQuestion(against=arguments.against, sessions=sessions)
        source = duel_revision(question, request, arguments.store, observer)
    elif arguments.duel is not None:
        source = load_duel(arguments.duel, arguments.store, observer)
    elif arguments.history:
        source = compare_history(arguments.store, observer)
    else:
        side_a, side_b = arguments.sides
        source = compare_sides(side_a, side_b, arguments.store, observer)
    # 3. Judge; suspects are re-measured before anything fails.
    for note in check_rules(rules, (*source.comparisons, *source.unchanged), str(arguments.thresholds)):
        observer.note(note)
    verdict = judge_source(source, rules, arguments.rerun, observer)
    # 4. A comment on a pull request addresses authors, and has a separate exit code.
    code, text = verdict.exit_code, ""
    if arguments.comment is not None and source.duel is not None:
        reviewed = review(verdict, source.duel)
        code, text = WORDS[reviewed.status][0], comment(reviewed, verdict, source.duel, command_line())
        observer.note(f"{arguments.comment} says: {reviewed.headline} (exit code {code})")
    files = {
        "--junit": (arguments.junit, as_junit(verdict)),
        "--md": (arguments.md, markdown.render(page_of(verdict))),
        "--comment": (arguments.comment, text),
    }
    return CommandResult(verdict, partial(page_of, verdict), partial(encode, verdict), code=code, files=files)


def _check(arguments: argparse.Namespace) -> None:
    sources_given = {
        "A B": arguments.sides,
        "--duel": arguments.duel is not None,
        "--history": arguments.history,
        "--against": arguments.against is not None,
    }
    # Exactly one source: two would need a rule of precedence.
    sources = " and ".join(name for name, is_given in sources_given.items() if is_given)
    if sources not in sources_given:
        words = f"{sources} were" if sources else "nothing was"
        raise UsageError(f"{words} given to judge. Give two sides A B, or --duel DUEL, --history, or --against REV.")
    if arguments.sides and len(arguments.sides) != 2:
        count = len(arguments.sides)
        raise UsageError(f"{count} side{'s were' if count != 1 else ' was'} given. Give two: the old and the new one.")
    if (arguments.against is None) != (arguments.asked is None):
        raise UsageError("--against REV and --config FILE only work together. Give both, or neither.")
    if arguments.comment is not None and arguments.against is None and arguments.duel is None:
        raise UsageError("--comment only works for duels. Give --against REV with --config FILE, or --duel DUEL.")
    check_files({f"--{name}": getattr(arguments, name) for name in ("comment", "junit", "md")})


# Options of a suite that have no effect on a duel.
_NOT_OF_A_DUEL = {
    "energy",
    "energy_of",
    "sustained",
    "shares",
    "tape",
    "trace",
    "memory_limit",
    "isolation",
}


def _read_request(file: Path) -> tuple[Request, int | None]:
    # Options of `suite`, so that one file serves both.
    command = argparse.ArgumentParser()
    suite.add(command)
    values = read_config(file, command)
    idle = [name for name in values if name in _NOT_OF_A_DUEL and values[name] != command.get_default(name)]
    command.set_defaults(**values)
    arguments = command.parse_args([])
    if arguments.suite is None:
        raise UsageError(f"{file} names no suite. Add the line `suite: NAME`.")
    request = request_of(arguments)
    import_user_modules(request.imports)
    # Name ignored options: nobody should wait for an energy that a duel does not measure.
    for name in idle:
        complain(f"{file}: {name} has no effect on a duel")
    return request, arguments.sessions.runs if "sessions" in values else None


_FORM = "thresholds, in lines like `PATTERN: {FIGURE: {relative: 5%, smallest: 10 us}}`, or `FIGURE: ignore`"
_NUMBER = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.]\S*)?")
_UNITS = units.typed_units()
_LARGEST = 100.0


def read_rules(file: Path) -> Rules:
    """Returns the rules in the file's order."""
    rules: list[ThresholdRule] = []
    # The order of the file is that of precedence.
    for case, figures in read_mapping("--thresholds", file, _FORM).items():
        if not case:
            raise UsageError(f"{file}: an empty pattern fits nothing. Give a suite, or '*' for all cases.")
        for metric, bounds in _mapping(file, case, figures).items():
            rules.append(_rule(file, case, metric, bounds))
    return tuple(rules)


def _mapping(file: Path, name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return value
    raise UsageError(f"{file}: {name}: expected {_FORM}, got {value!r:.80}.")


def _rule(file: Path, case: str, metric: str, value_given: Any) -> ThresholdRule:
    where = f"{file}: {case}: {metric}"
    if not metric:
        raise UsageError(f"{where}: an empty pattern fits nothing. Name a figure, or '*' for all.")
    if value_given == "ignore":
        return ThresholdRule(case, metric, ignored=True, place=str(file))
    relative: float | None = None
    smallest: float | None = None
    unit = ""
    for name, value in _mapping(file, f"{case}: {metric}", value_given).items():
        if name == "relative":
            relative = _share(where, value)
        elif name == "smallest":
            smallest, unit = _amount(where, value)
        else:
            raise UsageError(f"{where}: unknown key {name!r}. Known: relative, smallest.")
    return ThresholdRule(case, metric, relative, smallest, unit, place=str(file))


def _share(where: str, value: Any) -> float:
    """Parses '5%' or '0.05'; a bare 5 is most likely meant as percent, and is rejected."""
    number, unit = _parse_number(where, value, "a share, like 5% or 0.05")
    share = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 <= share <= _LARGEST or (not unit and share >= 1):
        percent = f" {number:g} without a sign would be {100 * number:g}%; write {number:g}%." if not unit else ""
        raise UsageError(f"{where}: relative: expected a share from 0, like 5% or 0.05, got {value!r}.{percent}")
    return share


def _amount(where: str, value: Any) -> tuple[float, str]:
    number, unit = _parse_number(where, value, "a number, with a unit or in the figure's own")
    if unit not in _UNITS:
        units_listed = ", ".join(name for name in _UNITS if name)
        raise UsageError(f"{where}: smallest: unknown unit {unit!r:.40}. Known: {units_listed}, or none.")
    factor, base = _UNITS[unit]
    return number * factor, base


def _parse_number(where: str, value: Any, expected: str) -> tuple[float, str]:
    number = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    if number is None or not math.isfinite(float(number[1])):
        raise UsageError(f"{where}: expected {expected}, got {value!r:.80}.")
    return float(number[1]), number[2] or ""
