"""The grammar of the command line, and bad usage as one sentence."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fp8bench import __version__
from fp8bench import argument_types as types
from fp8bench.errors import UnknownName, UsageError
from fp8bench.history_arguments import add_history

DEFAULT_STORE = ".fp8bench"
DEFAULT_PROJECT = "fp8bench"
MOST_THREADS = 1024
MOST_BATCHES = 100_000


class Parser(argparse.ArgumentParser):
    """argparse that answers bad usage with one sentence and the nearest known word."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{_nearest(self, message)} See `{self.prog} --help`.")


def _nearest(parser: argparse.ArgumentParser, message: str) -> str:
    given = re.match(r"unrecognized arguments: (\S+)", message)
    if given:
        known = sorted(_options(parser))
        near = difflib.get_close_matches(given[1].partition("=")[0], known, n=1)
        return f"unknown argument {given[1]!r}." + (f" Did you mean {near[0]}?" if near else "")
    command = re.match(r"argument COMMAND: invalid choice: (['\"])(.*)\1 \(choose from ", message, re.DOTALL)
    if command:
        # A word behind an option that belongs to the command looks like a command itself.
        return f"{UnknownName('command', command[2][:80], commands_of(parser))} Options stand behind the command."
    return message[:1].lower() + message[1:].rstrip(".") + "."


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """All option words of a parser and its commands."""
    words = {word for action in parser._actions for word in action.option_strings}
    return words.union(*(_options(command) for command in commands_of(parser).values()))


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: command for action in found for name, command in action.choices.items()}


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """The words as arguments; a word too many is told by the command that it was given to."""
    arguments, others = parser.parse_known_args(words)
    if others:
        meant_by(parser, arguments).error(f"unrecognized arguments: {others[0]}")
    return arguments


def meant_by(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the command that was given, or of what its command is missing from."""
    for name in (arguments.command, getattr(arguments, "history_command", None)):
        parser = commands_of(parser)[name] if name is not None else parser
    return parser


def build_parser() -> Parser:
    """The whole command line; tests freeze its set of options."""
    parser = Parser(
        prog="fp8bench", allow_abbrev=False,
        description="Does low precision pay here, what does it cost in numbers, and can you believe it?",
        epilog="Begin with: fp8bench suite transformer --dtypes fp8,bf16",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fp8bench {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _add_suite(
        commands.add_parser(
            "suite", help="measure a suite", allow_abbrev=False,
            epilog="Exit codes: 0 fine, 2 wrong usage, 3 a case failed or nothing was measured, 130 interrupted.",
        )
    )  # fmt: skip
    listing = commands.add_parser("list", help="what there is to choose from", allow_abbrev=False)
    listing.add_argument("what", nargs="?", metavar="WHAT", help="suites, dtypes, devices, or a suite (its axes)")
    listing.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help="as in suite")
    doctor = commands.add_parser("doctor", help="what this machine can do, and what not and why", allow_abbrev=False)
    doctor.add_argument("--calibrate", action="store_true", help="measure what the harness itself costs")
    show = commands.add_parser("show", help="print a stored run or duel", allow_abbrev=False)
    show.add_argument(
        "run", metavar="RUN", help="an id, a file's stem, a path, or 'last'; a duel's too, but for 'last'"
    )
    show.add_argument("--store", type=types.path, default=Path(DEFAULT_STORE), metavar="DIR", help="as in suite")
    _add_outputs(show)
    _add_exports(show)
    report = commands.add_parser(
        "report", help="the report of stored runs, side by side if several", allow_abbrev=False
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="ids, files' stems, paths, or 'last'")
    report.add_argument("--store", type=types.path, default=Path(DEFAULT_STORE), metavar="DIR", help="as in suite")
    _add_pages(report)
    _add_compare(commands)
    _add_gate(commands)
    _add_duel(commands)
    words = "runs and numbers over time, and asv's view"
    add_history(commands.add_parser("history", help=words, allow_abbrev=False), Path(DEFAULT_STORE))
    _add_lint(
        commands.add_parser(
            "lint-shapes", help="which products native FP8, MX and NVFP4 refuse or pad, by device", allow_abbrev=False,
            description="Which products of linear layers native FP8, MX and NVFP4 would refuse on each class of "
            "devices, why, and what padding would cost. Needs no device, and measures nothing.",
            epilog="Exit codes: 0 every product fits as it is on some of the devices, in every mode; 2 wrong usage; 3 "
            "some product fits on none.",
        )
    )  # fmt: skip
    _add_sensitivity(
        commands.add_parser(
            "sensitivity", help="which layers suffer most in low precision, and a map that keeps the loss",
            allow_abbrev=False,
            description="Trains the transformer with one layer at a time in low precision and the rest in the "
            "reference, then looks for a precision map that keeps the loss, and runs every map that it tries.",
            epilog="Exit codes: 0 fine, 2 wrong usage, 3 the reference's own training failed, 130 interrupted.",
        )
    )  # fmt: skip
    _add_selftest(commands.add_parser("selftest", help="check the harness itself", allow_abbrev=False))
    return parser


def _add_suite(suite: argparse.ArgumentParser) -> None:
    words = "a suite, several with commas, all, or a .py file with suites of your own; `fp8bench list` names them"
    suite.add_argument("suite", nargs="?", metavar="NAME", help=words)
    _add_what(suite.add_argument_group("what to measure"))
    _add_how(suite.add_argument_group("how"))
    _add_where(suite.add_argument_group("where"))


def _add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    words = "precisions; default fp32,bf16,fp8"
    add("--dtypes", type=types.words("--dtypes"), default=(), metavar="A,B", help=words)
    words = "cpu, cuda, cuda:1; default the first GPU, else cpu"
    add("--devices", type=types.words("--devices"), default=(), metavar="A,B", help=words)
    add("--reference", metavar="DTYPE", help="what the others are held against; default the highest precision")
    words = "values of an axis; `fp8bench list NAME` names the axes of a suite"
    add("--set", dest="axes", action="append", default=[], type=types.axis, metavar="AXIS=A,B", help=words)
    add(
        "--grid",
        action="store_true",
        help="the cases whose history is kept, as `asv run` measures them; --set has the last word",
    )
    words = (
        "layers that take another precision than the case's: a kind (mlp), a name (blocks.0.mlp.up) or the front part "
        "of names (blocks.0); the reference stays pure"
    )
    add("--precision-map", type=types.layers, default=(), metavar="LAYER=DTYPE,...", help=words)
    words = "scales from data, where a tensor has one float32 scale: from N untimed steps, then fixed"
    add("--static-scales", type=types.whole("--static-scales", high=MOST_BATCHES), metavar="N", help=words)
    words = "renew the scales from data in every M-th step"
    add("--refresh-scales", type=types.whole("--refresh-scales"), metavar="M", help=words)
    words = "renew a tensor's scale from data whenever more than so many percent of its values would saturate"
    add("--saturation-bound", type=types.percent, metavar="PERCENT", help=words)
    add("--data", metavar="FILE", help="text to train on; default Python's own sources")
    words = "module or .py file that registers workloads, precisions or devices of your own"
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help=words)


def _add_how(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--quick", action="store_true", help="a few rounds, to see that it runs")
    add("--budget", type=types.seconds, metavar="SECONDS", help="time for the whole run; default about 10 s a group")
    add("--rounds", type=types.whole("--rounds"), metavar="N", help="exactly so many rounds, no early stop")
    add("--seed", type=types.whole("--seed", 0), default=0, metavar="N", help="for data, weights and order; default 0")
    add(
        "--threads",
        type=types.whole("--threads", high=MOST_THREADS),
        default=1,
        metavar="N",
        help="CPU threads of torch; default 1",
    )
    add("--dry-run", action="store_true", help="print the plan, measure nothing")
    words = "the most that preparing a case or one slot of it may take; default 60 or far more than its work needs"
    add("--case-timeout", type=types.seconds, metavar="SECONDS", help=words)
    words = "also record a few steps of each case there, untimed: traces for Perfetto and for TensorBoard's profiler"
    add("--trace", type=types.path, metavar="DIR", help=words)
    words = "measure no energy; else it is where a device can tell it, in windows of a second or more a case"
    add("--no-energy", dest="energy", action="store_false", help=words)
    words = "also look for the largest batch that fits into memory, per precision, by running it and the next one"
    add("--max-batch", action="store_true", help=words)
    words = "what --max-batch has to fit into, like 2GiB; on a GPU default its own end, on a CPU there is no default"
    add("--memory-limit", type=types.size, metavar="SIZE", help=words)
    add("--no-isolation", dest="isolation", action="store_false", help="measure in this process, without a worker")


def _add_where(group: argparse._ArgumentGroup) -> None:
    words = f"where runs are kept; default {DEFAULT_STORE}"
    group.add_argument("--store", type=types.path, default=Path(DEFAULT_STORE), metavar="DIR", help=words)
    words = "options in YAML, by their names without dashes, and suite: NAME; the command line wins"
    group.add_argument("--config", type=types.path, metavar="FILE", help=words)
    words = "go on with a run that was cut off: only what it lacks is measured"
    group.add_argument("--resume", metavar="RUN", help=words)
    _add_outputs(group)
    _add_pages(group)
    words = "write no report; `fp8bench report RUN` does it later"
    group.add_argument("--no-report", dest="report", action="store_false", help=words)
    _add_exports(group)


def _add_outputs(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="print the run as JSON, all samples and verdicts, instead of the table")
    words = "also write tidy rows there, one a case, phase and metric; '-' prints them instead of the table"
    add("--csv", metavar="PATH", help=words)


def _add_pages(group: argparse._ActionsContainer) -> None:
    """Where the report goes beside the store."""
    add = group.add_argument
    add("--html", type=types.path, metavar="PATH", help="also write the report there, one file that loads nothing")
    add("--md", type=types.path, metavar="PATH", help="also write it there as Markdown")
    add("--csv-wide", action="store_true", help="CSV with one row a case and a column a figure, instead of tidy rows")
    add("--open", action="store_true", help="show the report in the browser")


def _add_exports(group: argparse._ActionsContainer) -> None:
    """Programs that draw curves over runs."""
    add = group.add_argument
    words = "also write the figures there as TensorBoard's scalars, a point a run"
    add("--tensorboard", type=types.path, metavar="DIR", help=words)
    words = f"also send figures and report to Weights & Biases; default project {DEFAULT_PROJECT}"
    add("--wandb", nargs="?", const=DEFAULT_PROJECT, metavar="PROJECT", help=words)


def _add_compare(commands: argparse._SubParsersAction[Parser]) -> None:
    compare = commands.add_parser(
        "compare", help="two runs, commits or stores, figure by figure", allow_abbrev=False,
        description="Holds what was measured at two times, or of two commits, against each other: every case and "
        "figure that both have. `fp8bench gate` judges what this tells.",
        epilog="Exit codes: 0 told, whatever it says; 2 wrong usage, or there is no such run.",
    )  # fmt: skip
    add = compare.add_argument
    words = "runs (ids, files' stems, paths, 'last'), a commit, or a store's folder; several with commas count as one"
    add("before", metavar="A", help=words)
    add("after", metavar="B", help="the same; ratios are of B over A")
    add("--store", type=types.path, default=Path(DEFAULT_STORE), metavar="DIR", help="where A and B are, as in suite")
    add("--json", action="store_true", help="print the comparison as JSON instead of the table")
    words = "also write it there as rows, one a figure; '-' prints them instead of the table"
    add("--csv", metavar="PATH", help=words)
    add("--md", type=types.path, metavar="PATH", help="also write it there as Markdown")


def _add_gate(commands: argparse._SubParsersAction[Parser]) -> None:
    gate = commands.add_parser(
        "gate", help="fail a build where something has become worse", allow_abbrev=False,
        description="Judges a comparison, a duel or the history by thresholds, and measures what it suspects once "
        "more, in a fresh process, before it says so.",
        epilog="Exit codes: 0 fine, 1 a regression, 2 wrong usage, 3 nothing was measured or a case failed, 4 the "
        "baseline is missing or does not compare, 130 interrupted.",
    )  # fmt: skip
    add = gate.add_argument_group("what is judged").add_argument
    words = "what was, and what is: runs, commits or stores, as in compare"
    add("sides", nargs="*", metavar="A B", help=words)
    add("--duel", metavar="DUEL", help="a stored duel instead: an id, a file's stem, a path, or 'last'")
    add("--history", action="store_true", help="the steps in the store's history instead, those not acknowledged")
    add("--store", type=types.path, default=Path(DEFAULT_STORE), metavar="DIR", help="where they are, as in suite")
    words = "module or .py file of suites of your own, for the history"
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help=words)
    add = gate.add_argument_group("how").add_argument
    words = "YAML: how much worse is too much, by suite, case and figure; default 5%% of a time, 2%% of memory"
    add("--thresholds", type=types.path, metavar="FILE", help=words)
    words = "measure nothing: what is suspected of 10%% or more fails unconfirmed"
    add("--no-rerun", dest="rerun", action="store_false", help=words)
    add = gate.add_argument_group("where").add_argument
    add("--junit", type=types.path, metavar="PATH", help="also write it there as JUnit XML")
    words = "also write it there as Markdown; in a GitHub job it is under the job's summary anyway"
    add("--md", type=types.path, metavar="PATH", help=words)
    words = "also write what was measured there, as github-action-benchmark's customSmallerIsBetter"
    add("--benchmark-json", type=types.path, metavar="PATH", help=words)


def _add_duel(commands: argparse._SubParsersAction[Parser]) -> None:
    duel = commands.add_parser(
        "duel", help="two interpreters or two revisions, in the same rounds", allow_abbrev=False,
        description="Measures every case on two sides in the same rounds, B (what is) against A (what was): two "
        "interpreters with a torch each, or two revisions of your code or of fp8bench. A side that is not given is "
        "what runs here. Finds changes of 2-3% that runs at different times cannot tell from noise.",
        epilog="Exit codes: 0 nothing is slower, 1 something is, 2 wrong usage, 3 a case failed or nothing was "
        "measured, 130 interrupted.",
    )  # fmt: skip
    duel.add_argument("door", metavar="suite", choices=("suite",), help="the word suite, and then its name")
    words = "a suite, several with commas, all, or a .py file with suites of your own"
    duel.add_argument("suite", metavar="NAME", help=words)
    add = duel.add_argument_group("the sides").add_argument
    add(
        "--python-a",
        metavar="PYTHON",
        help="side A's Python, or the folder of its virtual environment; default this one",
    )
    add("--python-b", metavar="PYTHON", help="side B's; default this one")
    words = "side A runs the code of that commit of this repository, from a working tree made for the duel; B this tree"
    add("--against", metavar="REV", help=words)
    words = "side A runs the workers of that commit of fp8bench, where fp8bench runs from a checkout of its repository"
    add("--against-self", metavar="REV", help=words)
    add = duel.add_argument_group("what to measure, as in suite").add_argument
    add("--dtypes", type=types.words("--dtypes"), default=(), metavar="A,B", help="precisions; default fp32,bf16,fp8")
    words = "cpu, cuda, cuda:1; default the first GPU, else cpu"
    add("--devices", type=types.words("--devices"), default=(), metavar="A,B", help=words)
    words = "values of an axis; `fp8bench list NAME` names the axes of a suite"
    add("--set", dest="axes", action="append", default=[], type=types.axis, metavar="AXIS=A,B", help=words)
    add("--data", metavar="FILE", help="text to train on; default Python's own sources")
    words = "module or .py file that registers workloads, precisions or devices of your own"
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help=words)
    add = duel.add_argument_group("how, as in suite").add_argument
    words = "how often every case sits, with fresh processes each time; default 4, and 3 are the least for an interval"
    add("--sittings", type=types.whole("--sittings", high=100), metavar="N", help=words)
    add("--quick", action="store_true", help="one sitting of a few rounds, to see that it runs")
    add("--budget", type=types.seconds, metavar="SECONDS", help="time for the whole duel; default about 10 s a case")
    add("--rounds", type=types.whole("--rounds"), metavar="N", help="exactly so many rounds a sitting")
    add("--seed", type=types.whole("--seed", 0), default=0, metavar="N", help="for data, weights and order; default 0")
    words = "CPU threads of torch in each worker; default 1"
    add("--threads", type=types.whole("--threads", high=MOST_THREADS), default=1, metavar="N", help=words)
    words = "the most that preparing a case or one slot of it may take; default 60 or far more than its work needs"
    add("--case-timeout", type=types.seconds, metavar="SECONDS", help=words)
    words = f"where duels are kept, below duels/; default {DEFAULT_STORE}"
    add("--store", type=types.path, default=Path(DEFAULT_STORE), metavar="DIR", help=words)
    add(
        "--json", action="store_true", help="print the duel as JSON, all samples and comparisons, instead of the tables"
    )


def _add_lint(lint: argparse.ArgumentParser) -> None:
    add = lint.add_argument
    add("--model", metavar="NAME", help="gpt2, llama3-8b, llama3-70b, deepseek-v3, or a size of the suite transformer")
    words = "layers instead: lines of MxNxK and a name, CSV, or a YAML list; M tokens, N features out, K in"
    add("--shapes", type=types.path, metavar="FILE", help=words)
    words = "rows of a model's activations; default 8192, or what a step of a transformer has"
    add("--tokens", type=types.whole("--tokens"), metavar="N", help=words)
    words = "forward, input-gradient, weight-gradient; default all three of every layer"
    add("--products", type=types.words("--products"), default=(), metavar="A,B", help=words)
    words = "modes, as in suite; default those of fp8, fp8-rowwise, fp8-block, mxfp8, mxfp4 and nvfp4 that a device has"
    add("--dtypes", type=types.words("--dtypes"), default=(), metavar="A,B", help=words)
    words = "classes: a100, l40s, h100, b200, rtx5090, mi300x, mi350x, cpu (or hopper, sm90, gfx950, ...); default all"
    add("--devices", type=types.words("--devices"), default=(), metavar="A,B", help=words)
    add("--json", action="store_true", help="print the findings as JSON instead")
    words = "also write them there as rows, one a product, mode and device; '-' prints them instead"
    add("--csv", metavar="PATH", help=words)


def _add_sensitivity(sensitivity: argparse.ArgumentParser) -> None:
    add = sensitivity.add_argument
    add("--size", default="nano", metavar="NAME", help="the model, as in suite transformer; default nano")
    add("--dtype", default="fp8", metavar="DTYPE", help="the low precision; default fp8")
    add("--reference", default="bf16", metavar="DTYPE", help="the precision of the rest; default bf16")
    add("--by", choices=("layer", "kind"), default="layer", help="what is low at a time; default layer")
    words = "training steps of every run; default 50"
    add("--steps", type=types.whole("--steps", high=MOST_BATCHES), default=50, metavar="N", help=words)
    words = "the largest loss gap that a suggested map may have; default 1"
    add("--tolerance", type=types.percent, default=1.0, metavar="PERCENT", help=words)
    add("--seed", type=types.whole("--seed", 0), default=0, metavar="N", help="for data and weights; default 0")
    words = "CPU threads of torch; default 1"
    add("--threads", type=types.whole("--threads", high=MOST_THREADS), default=1, metavar="N", help=words)
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add("--data", metavar="FILE", help="text to train on; default Python's own sources")
    add("--import", dest="imports", action="append", default=[], metavar="MODULE", help="as in suite")
    words = "the most that one training may take; default far more than its work needs"
    add("--case-timeout", type=types.seconds, metavar="SECONDS", help=words)
    add("--no-isolation", dest="isolation", action="store_false", help="train in this process, without a worker")
    add("--store", type=types.path, default=Path(DEFAULT_STORE), metavar="DIR", help="as in suite")
    add("--json", action="store_true", help="print all of it as JSON instead of the tables, every loss included")
    words = "also write the runs there as rows; '-' prints them instead of the tables"
    add("--csv", metavar="PATH", help=words)


def _add_selftest(selftest: argparse.ArgumentParser) -> None:
    add = selftest.add_argument
    add("--power", action="store_true", help="how often verdicts are right, on planted slow-downs")
    add("--trials", type=types.whole("--trials"), metavar="N", help="trials an operation, with --power; default 20")
    add("--operation", action="append", metavar="NAME", help="small, medium or step, with --power; default all")
    add("--json", type=types.path, metavar="PATH", help="with --power, also write the figures there")
