"""`fp8bench gate`: judges a comparison of stored runs, a duel or the history, and ends with an exit code for a build.

A duel measures two versions of the code in the same rounds. A thresholds file maps suites, or patterns of cases, to
patterns of figures. Each of these patterns has thresholds:

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
from fp8bench.cli.config_file import read_config, read_config_mapping
from fp8bench.cli.options import add_common_options, make_request
from fp8bench.cli.outputs import CommandResult, check_output_files, stdout_format, write_outputs
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.cli.streams import say, write_sentence_to_stderr
from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.features.duel.sides import DuelQuestion
from fp8bench.features.duel.values import NoCommonCases
from fp8bench.features.gate.thresholds import ThresholdRule, ThresholdRules, check_rules
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.environment import command_line
from fp8bench.measure.interrupts import interrupt_only_once
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
    source_option_group = parser.add_argument_group("what is judged")
    source_option_group.add_argument(
        "sides", nargs="*", metavar="A B", help="the old and the new side: runs, commits or stores, as in `compare`"
    )
    source_option_group.add_argument(
        "--duel", metavar="DUEL", help="judge a stored duel: an id, a name, a path, or 'last'"
    )
    source_option_group.add_argument(
        "--against",
        metavar="REV",
        help="duel the working tree with commit REV, and judge that; --config selects the cases",
    )
    source_option_group.add_argument(
        "--config", type=types.path, dest="asked", metavar="FILE", help="a file of options, as for `suite --config`"
    )
    source_option_group.add_argument(
        "--history", action="store_true", help="judge the steps in the store's history that are not acknowledged"
    )
    add_common_options(source_option_group, "--store", help="the store of runs and duels, as in `suite`")
    add_common_options(source_option_group, "--import", help="module or .py file of your suites, for the history")
    judging_option_group = parser.add_argument_group("how")
    judging_option_group.add_argument(
        "--thresholds",
        type=types.path,
        metavar="FILE",
        help="YAML: the largest tolerated increase by suite, case and figure; default 5%% of a time, 2%% of memory",
    )
    judging_option_group.add_argument(
        "--no-rerun",
        dest="rerun",
        action="store_false",
        help="measure nothing again: a suspected regression of 10%% or more fails without confirmation",
    )
    output_argument_group = parser.add_argument_group("where")
    output_argument_group.add_argument(
        "--junit", type=types.path, metavar="PATH", help="also write the verdict to PATH as JUnit XML"
    )
    add_common_options(output_argument_group, "--md", help="also write the verdict to PATH as Markdown")
    output_argument_group.add_argument(
        "--comment",
        type=types.path,
        metavar="PATH",
        help="duel: also write a comment for a pull request to PATH, 25 lines that begin with one of seven outcomes",
    )
    add_common_options(output_argument_group, "--explain")


def run(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    try:
        with interrupt_only_once():
            result = answer(arguments, TERMINAL_JOB_OBSERVER)
    # A pull request gets its comment even if the measurement failed.
    except Fp8benchError as error:
        if arguments.comment is not None:
            from fp8bench.features.gate.view import DuelReview, ReviewStatus, render_comment

            is_mismatch = isinstance(error, NoCommonCases)
            status = ReviewStatus.RECIPE_MISMATCH if is_mismatch else ReviewStatus.INFRASTRUCTURE_ERROR
            text = render_comment(DuelReview(status, (str(error),)), None, None, command_line())
            arguments.comment.write_text(text, encoding="utf-8", errors="backslashreplace")
        raise
    with write_outputs(result.files):
        say(render(result.page(), *stdout_format(arguments.explain)))
    return result.code


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    from fp8bench.features.gate.history import compare_history
    from fp8bench.features.gate.stored_runs import compare_stored_sides, duel_revision, judge_comparisons, load_duel
    from fp8bench.features.gate.view import (
        CODE_AND_TEXT_BY_STATUS,
        render_comment,
        render_junit,
        render_page,
        review_duel,
    )

    # 1. Read the thresholds before anything is measured.
    _check_options(arguments)
    rules = read_threshold_rules(arguments.thresholds) if arguments.thresholds is not None else ()
    # 2. Choose the measurements to judge.
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
        source = compare_stored_sides(side_a, side_b, arguments.store, observer)
    # 3. Judge the figures. Suspected figures are measured again before the gate fails.
    for note in check_rules(rules, (*source.comparisons, *source.unchanged_figures), str(arguments.thresholds)):
        observer.note(note)
    verdict = judge_comparisons(source, rules, arguments.rerun, observer)
    # 4. Write the comment on a pull request. The exit code is then that of the review.
    exit_code = verdict.exit_code
    text = ""
    if arguments.comment is not None and source.duel is not None:
        duel_review = review_duel(verdict, source.duel)
        exit_code = CODE_AND_TEXT_BY_STATUS[duel_review.status][0]
        text = render_comment(duel_review, verdict, source.duel, command_line())
        observer.note(f"{arguments.comment} says: {duel_review.headline} (exit code {exit_code})")
    files = {
        "--junit": (arguments.junit, render_junit(verdict)),
        "--md": (arguments.md, markdown.render(render_page(verdict))),
        "--comment": (arguments.comment, text),
    }
    return CommandResult(verdict, partial(render_page, verdict), partial(encode, verdict), code=exit_code, files=files)


def _check_options(arguments: argparse.Namespace) -> None:
    is_given_by_source = {
        "A B": arguments.sides,
        "--duel": arguments.duel is not None,
        "--history": arguments.history,
        "--against": arguments.against is not None,
    }
    # Require exactly one set of measurements. With two, it would be unclear which one is judged.
    option_names = " and ".join(name for name, is_given in is_given_by_source.items() if is_given)
    if option_names not in is_given_by_source:
        subject = f"{option_names} were" if option_names else "nothing was"
        raise UsageError(f"{subject} given to judge. Give two sides A B, or --duel DUEL, --history, or --against REV.")
    if arguments.sides and len(arguments.sides) != 2:
        count = len(arguments.sides)
        raise UsageError(f"{count} side{'s were' if count != 1 else ' was'} given. Give two: the old and the new one.")
    if (arguments.against is None) != (arguments.asked is None):
        raise UsageError("--against REV and --config FILE only work together. Give both, or neither.")
    if arguments.comment is not None and arguments.against is None and arguments.duel is None:
        raise UsageError("--comment only works for duels. Give --against REV with --config FILE, or --duel DUEL.")
    check_output_files({f"--{name}": getattr(arguments, name) for name in ("comment", "junit", "md")})


# Options of `suite` that change nothing in a duel.
_OPTIONS_WITHOUT_EFFECT_ON_DUELS = {
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
    # The file has the options of `suite`, so that one file serves `suite` and `gate`.
    command = argparse.ArgumentParser()
    suite.add(command)
    values = read_config(file, command)
    ignored_options = [
        name
        for name in values
        if name in _OPTIONS_WITHOUT_EFFECT_ON_DUELS and values[name] != command.get_default(name)
    ]
    # The file's values become the defaults of the options, so an empty command line yields them.
    command.set_defaults(**values)
    arguments = command.parse_args([])
    if arguments.suite is None:
        raise UsageError(f"{file} names no suite. Add the line `suite: NAME`.")
    request = make_request(arguments)
    import_user_modules(request.imports)
    # Name the options without effect, so that nobody expects a figure that a duel does not measure.
    for name in ignored_options:
        write_sentence_to_stderr(f"{file}: {name} has no effect on a duel")
    return request, arguments.sessions.runs if "sessions" in values else None


_THRESHOLDS_SYNTAX = (
    "thresholds, in lines like `PATTERN: {FIGURE: {relative: 5%, smallest: 10 us}}`, or `FIGURE: ignore`"
)
_NUMBER_WITH_UNIT = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.]\S*)?")
_UNIT_FACTORS = units.list_typable_units()
_MAX_RELATIVE_THRESHOLD = 100.0


def read_threshold_rules(file: Path) -> ThresholdRules:
    """Returns the rules of a thresholds file, in the order of the file. The first rule that matches a figure applies to
    it.
    """
    rules = []
    for case, figures in read_config_mapping("--thresholds", file, _THRESHOLDS_SYNTAX).items():
        if not case:
            raise UsageError(f"{file}: an empty pattern fits nothing. Give a suite, or '*' for all cases.")
        for metric, raw_threshold in _require_mapping(file, case, figures).items():
            rules.append(_parse_threshold_rule(file, case, metric, raw_threshold))
    return tuple(rules)


def _require_mapping(file: Path, name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return value
    raise UsageError(f"{file}: {name}: expected {_THRESHOLDS_SYNTAX}, got {value!r:.80}.")


def _parse_threshold_rule(file: Path, case: str, metric: str, rule_value: Any) -> ThresholdRule:
    rule_location_text = f"{file}: {case}: {metric}"
    if not metric:
        raise UsageError(f"{rule_location_text}: an empty pattern fits nothing. Name a figure, or '*' for all.")
    if rule_value == "ignore":
        return ThresholdRule(case, metric, ignored=True, place=str(file))
    relative_threshold: float | None = None
    smallest_absolute_change: float | None = None
    unit = ""
    for name, value in _require_mapping(file, f"{case}: {metric}", rule_value).items():
        if name == "relative":
            relative_threshold = _parse_relative_threshold(rule_location_text, value)
        elif name == "smallest":
            smallest_absolute_change, unit = _parse_smallest_change(rule_location_text, value)
        else:
            raise UsageError(f"{rule_location_text}: unknown key {name!r}. Known: relative, smallest.")
    return ThresholdRule(case, metric, relative_threshold, smallest_absolute_change, unit, place=str(file))


def _parse_relative_threshold(location: str, value: Any) -> float:
    """Parses a relative threshold like '5%' or '0.05'. Rejects a bare 5: it would be 500%, but most likely 5% is
    meant.
    """
    number, unit = _parse_number(location, value, "a share, like 5% or 0.05")
    relative_threshold = number / 100 if unit == "%" else number
    if (
        unit not in ("", "%")
        or not 0 <= relative_threshold <= _MAX_RELATIVE_THRESHOLD
        or (not unit and relative_threshold >= 1)
    ):
        percent_hint = f" {number:g} without a sign would be {100 * number:g}%; write {number:g}%." if not unit else ""
        raise UsageError(
            f"{location}: relative: expected a non-negative share, like 5% or 0.05, got {value!r}.{percent_hint}"
        )
    return relative_threshold


def _parse_smallest_change(location: str, value: Any) -> tuple[float, str]:
    number, unit = _parse_number(location, value, "a number, with a unit or in the unit of the figure")
    if unit not in _UNIT_FACTORS:
        accepted_unit_names = ", ".join(name for name in _UNIT_FACTORS if name)
        raise UsageError(f"{location}: smallest: unknown unit {unit!r:.40}. Known: {accepted_unit_names}, or none.")
    factor, base = _UNIT_FACTORS[unit]
    return number * factor, base


def _parse_number(location: str, value: Any, expected_text: str) -> tuple[float, str]:
    match = _NUMBER_WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or not math.isfinite(float(match[1])):
        raise UsageError(f"{location}: expected {expected_text}, got {value!r:.80}.")
    return float(match[1]), match[2] or ""
