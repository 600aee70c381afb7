"""The door: words on a command line to a request, and a run to text on stdout.

What `--help`, a bare `list` and bad usage need is imported at the top and is light; the rest is imported by the
command that needs it, so that a mistyped name costs a tenth of a second and not two.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fp8bench import __version__
from fp8bench.environment import command_line
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Fp8benchError, UnknownName, UsageError
from fp8bench.model import Request
from fp8bench.plan import check_names
from fp8bench.registry import devices, import_user_modules, precisions, workloads

DEFAULT_STORE = ".fp8bench"


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
    return message[:1].lower() + message[1:].rstrip(".") + "."


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """All option words of a parser and its commands."""
    words = {word for action in parser._actions for word in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words |= {word for command in action.choices.values() for word in _options(command)}
    return words


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
    show = commands.add_parser("show", help="print a stored run", allow_abbrev=False)
    show.add_argument("run", metavar="RUN", help="an id, a file's stem, a path, or 'last'")
    show.add_argument("--store", type=Path, default=Path(DEFAULT_STORE), metavar="DIR", help="as in suite")
    selftest = commands.add_parser("selftest", help="check the harness itself", allow_abbrev=False)
    selftest.add_argument("--power", action="store_true", help="how often verdicts are right, on planted slow-downs")
    selftest.add_argument("--trials", type=_whole("--trials"), metavar="N", help="trials an operation, with --power; default 20")
    selftest.add_argument("--operation", action="append", metavar="NAME", help="small, medium or step, with --power; default all")
    selftest.add_argument("--json", type=Path, metavar="PATH", help="with --power, also write the figures there")
    return parser


def _add_suite(suite: argparse.ArgumentParser) -> None:
    add = suite.add_argument
    add("suite", metavar="NAME", help="a suite; `fp8bench list` names them")
    add("--dtypes", type=_words("--dtypes"), default=(), metavar="A,B", help="precisions to measure; default fp32,bf16,fp8")
    add("--devices", type=_words("--devices"), default=(), metavar="A,B", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    add("--reference", metavar="DTYPE", help="what the others are held against; default the highest precision")
    add("--set", dest="axes", action="append", default=[], type=_axis, metavar="AXIS=A,B", help="values of an axis; `fp8bench list NAME` names the axes")
    add("--precision-map", type=_layers, default=(), metavar="KIND=DTYPE,...",
        help="layer kinds that take another precision than the case's; the reference stays pure")  # fmt: skip
    add("--data", metavar="FILE", help="text to train on; default Python's own sources")
    add("--quick", action="store_true", help="a few rounds, to see that it runs")
    add("--budget", type=_seconds, metavar="SECONDS", help="time for the whole run; default about 10 s a group")
    add("--rounds", type=_whole("--rounds"), metavar="N", help="exactly so many rounds, no early stop")
    add("--seed", type=_whole("--seed", 0), default=0, metavar="N", help="for data, weights and order; default 0")
    add("--threads", type=_whole("--threads"), default=1, metavar="N", help="CPU threads of torch; default 1")
    add("--dry-run", action="store_true", help="print the plan, measure nothing")
    add("--store", type=Path, default=Path(DEFAULT_STORE), metavar="DIR", help=f"where runs are kept; default {DEFAULT_STORE}")
    add("--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="module or .py file that registers workloads, precisions or devices of your own")  # fmt: skip
    add("--no-isolation", dest="isolation", action="store_false", help="measure in this process, without a worker")


def _words(option: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(","))
        if not all(words):
            raise argparse.ArgumentTypeError(f"{text!r} has an empty name; give names with commas between, like a,b")
        return words

    parse.__name__ = option
    return parse


def _axis(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, values = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form AXIS=VALUE,VALUE")
    return name, _words("--set")(values)


def _layers(text: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple(tuple(part.strip() for part in one.split("=")) for one in text.split(","))
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KIND=DTYPE,KIND=DTYPE")
    if len({pair[0] for pair in pairs}) != len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} names a layer kind twice")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _whole(option: str, low: int = 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text[:20]) < 1 << 31):
            raise argparse.ArgumentTypeError(f"expected a whole number from {low}, got {text!r}")
        return int(text)

    parse.__name__ = option
    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except Fp8benchError as error:
        print(f"fp8bench: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fp8bench: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; point stdout elsewhere so that the interpreter's last flush is quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _dispatch(words: list[str]) -> int:
    commands = {"suite": _suite, "list": _list, "doctor": _doctor, "show": _show, "selftest": _selftest}
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise UnknownName("command", words[0], commands)
    parser = build_parser()
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.print_help()
        return EXIT_OK
    code = commands[arguments.command](arguments)
    sys.stdout.flush()
    return code


def _allow_imports_from_here(imports: Sequence[str]) -> None:
    # The script `fp8bench` does not have the working directory on its path, `python -m fp8bench` does.
    here = str(Path.cwd())
    if imports and "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    import_user_modules(imports)


def _suite(arguments: argparse.Namespace) -> int:
    axes: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.axes:
        axes[name] = (*axes.get(name, ()), *values)
    request = Request(
        suite=arguments.suite, dtypes=arguments.dtypes, devices=arguments.devices, reference=arguments.reference,
        axes=tuple(axes.items()), precision_map=arguments.precision_map, data=arguments.data, quick=arguments.quick,
        budget=arguments.budget, rounds=arguments.rounds, seed=arguments.seed, threads=arguments.threads,
        imports=tuple(arguments.imports), isolation=arguments.isolation,
    )  # fmt: skip
    _allow_imports_from_here(request.imports)
    check_names(request)
    return _plan(request, arguments.store) if arguments.dry_run else _measure(request, arguments.store)


def _plan(request: Request, store: Path) -> int:
    from fp8bench.pipeline import plan_only
    from fp8bench.report.text import render_plan

    plan, facts = plan_only(request, store)
    print(render_plan(plan, facts))
    return EXIT_OK


def _measure(request: Request, store: Path) -> int:
    from fp8bench.pipeline import execute, findings
    from fp8bench.report.progress import progress
    from fp8bench.report.text import render

    with progress(sys.stderr, os.environ) as observer:
        run = execute(request, store, observer, command_line())
    print(render(run, findings(run), color=_color()))
    if not run.finished:
        print(f"fp8bench: interrupted; what was finished is kept in {run.path}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_OK if run.ok else EXIT_FAILED


def _color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _list(arguments: argparse.Namespace) -> int:
    _allow_imports_from_here(arguments.imports)
    kinds = {"suites": workloads.names(), "dtypes": precisions.names(), "devices": devices.names()}
    if arguments.what is None:
        for kind, names in kinds.items():
            print(f"{kind}: {', '.join(names)}")
        return EXIT_OK
    if arguments.what not in (*kinds, *kinds["suites"]):
        raise UnknownName("thing to list", arguments.what, [*kinds, *kinds["suites"]])
    from fp8bench.doctor import listing

    print("\n".join(listing(arguments.what, tuple(arguments.imports))))
    return EXIT_OK


def _doctor(arguments: argparse.Namespace) -> int:
    from fp8bench.doctor import examine

    print("\n".join(examine(arguments.calibrate)))
    return EXIT_OK


def _show(arguments: argparse.Namespace) -> int:
    from fp8bench.history.runs import find_run, load_run
    from fp8bench.pipeline import findings
    from fp8bench.report.text import render

    run = load_run(find_run(arguments.run, arguments.store))
    print(render(run, findings(run), color=_color()))
    return EXIT_OK


def _selftest(arguments: argparse.Namespace) -> int:
    options = (("--trials", arguments.trials), ("--operation", arguments.operation), ("--json", arguments.json))
    for option, given in options:
        if given is not None and not arguments.power:
            raise UsageError(f"{option} goes with --power, which was not given. Add --power, or leave {option} out.")
    if arguments.power:
        from fp8bench.selftest.power import OPERATIONS
        from fp8bench.selftest.report import run_power

        chosen = arguments.operation or OPERATIONS
        for name in chosen:
            if name not in OPERATIONS:
                raise UnknownName("operation", name, OPERATIONS)
        return run_power(arguments.trials or 20, arguments.json, chosen)
    from fp8bench.selftest.report import run_checks

    return run_checks()
