"""The door: words on a command line to a request, and a run to text on stdout.

What `--help`, a bare `list` and bad usage need is imported at the top and is light; the rest is imported by the
command that needs it, so that a mistyped name costs a tenth of a second and not two.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fp8bench.arguments import DEFAULT_STORE, build_parser, commands_of
from fp8bench.environment import command_line
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Fp8benchError, NotKept, UnknownName, UsageError
from fp8bench.model import Request, Run
from fp8bench.plan import check_names, files_of
from fp8bench.registry import devices, import_user_modules, precisions, workloads

_BESIDE_RESUME = {"command", "resume", "store", "json", "csv"}


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
    if getattr(arguments, "config", None) is not None:
        from fp8bench.config import with_config

        arguments = with_config(parser, commands_of(parser)[arguments.command], words, arguments.config)
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
    _check_outputs(arguments)
    if arguments.resume is not None:
        return _resume(arguments)
    if arguments.suite is None:
        raise UsageError(f"no suite was named. Give one of {', '.join(workloads.names())}, all, or a .py file.")
    request = Request(
        suite=arguments.suite, dtypes=arguments.dtypes, devices=arguments.devices, reference=arguments.reference,
        axes=tuple(axes.items()), precision_map=arguments.precision_map, data=arguments.data, quick=arguments.quick,
        budget=arguments.budget, rounds=arguments.rounds, seed=arguments.seed, threads=arguments.threads,
        imports=(*arguments.imports, *files_of(arguments.suite)), isolation=arguments.isolation,
        case_timeout=arguments.case_timeout,
    )  # fmt: skip
    _allow_imports_from_here(request.imports)
    check_names(request)
    return _plan(request, arguments.store) if arguments.dry_run else _measure(request, arguments)


def _plan(request: Request, store: Path) -> int:
    from fp8bench.pipeline import plan_only
    from fp8bench.report.text import render_plan

    plan, facts = plan_only(request, store)
    print(render_plan(plan, facts))
    return EXIT_OK


def _measure(request: Request, arguments: argparse.Namespace) -> int:
    from fp8bench.pipeline import execute
    from fp8bench.report.progress import progress

    with progress(sys.stderr, os.environ) as observer:
        try:
            run = execute(request, arguments.store, observer, command_line())
        except NotKept as error:
            _print(cast(Run, error.run), arguments)
            raise
    return _ended(run, arguments)


def _resume(arguments: argparse.Namespace) -> int:
    """Go on with a run; what was asked stands in its file, so that nothing may be asked anew."""
    from fp8bench.history.runs import find_run
    from fp8bench.pipeline import resume
    from fp8bench.report.progress import progress

    _check_alone(arguments)
    path = find_run(arguments.resume, arguments.store)
    with progress(sys.stderr, os.environ) as observer:
        try:
            resumed, run = resume(path, arguments.store, observer, command_line())
        except NotKept as error:
            _print(cast(Run, error.run), arguments)
            raise
    if not resumed:
        print(f"fp8bench: run {run.id} is finished: nothing is missing", file=sys.stderr)
    return _ended(run, arguments)


def _check_alone(arguments: argparse.Namespace) -> None:
    """--resume takes what to measure, and how, from the run."""
    plain = vars(build_parser().parse_args(["suite"]))
    for name, value in vars(arguments).items():
        if name not in _BESIDE_RESUME and value != plain.get(name):
            raise UsageError(
                f"--resume takes what to measure and how from the run, and {name.replace('_', '-')} was given too. "
                "Leave it out; --store, --json and --csv go with it."
            )


def _ended(run: Run, arguments: argparse.Namespace) -> int:
    """Print a run that was measured; returns the exit code."""
    _print(run, arguments)
    if not run.finished:
        again = f"fp8bench suite --resume {run.id}"
        if arguments.store != Path(DEFAULT_STORE):
            again += f" --store {shlex.quote(str(arguments.store))}"
        print(
            f"fp8bench: interrupted; what was finished is kept in {run.path}. To do the rest: {again}", file=sys.stderr
        )
        return EXIT_INTERRUPTED
    return EXIT_OK if run.ok else EXIT_FAILED


def _check_outputs(arguments: argparse.Namespace) -> None:
    """What is wrong with --json and --csv is said before anything is measured."""
    if arguments.json and arguments.csv == "-":
        raise UsageError("--json and --csv - would both print on stdout. Give --csv a file, or leave one out.")
    if getattr(arguments, "dry_run", False) and (arguments.json or arguments.csv is not None):
        raise UsageError("--dry-run measures nothing, so that there is nothing for --json or --csv. Leave one out.")
    if arguments.csv not in (None, "-"):
        path = Path(arguments.csv)
        try:
            if path.is_dir():
                raise IsADirectoryError(21, "it is a directory")
            with path.open("a", encoding="utf-8"):
                pass
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"--csv {arguments.csv} cannot be written ({why}). Give a file, or '-'.") from None


def _print(run: Run, arguments: argparse.Namespace) -> None:
    """The run on stdout as asked for, and as CSV where that goes to a file."""
    from fp8bench.pipeline import findings

    found = findings(run)
    if arguments.csv is not None:
        from fp8bench.report.csv_text import render as csv_of

        rows = csv_of(run, found)
        if arguments.csv == "-":
            sys.stdout.write(rows)
            return
        try:
            Path(arguments.csv).write_text(rows, encoding="utf-8")
        except OSError as error:
            print(f"fp8bench: --csv {arguments.csv} could not be written: {error.strerror}", file=sys.stderr)
    if arguments.json:
        from fp8bench.report.json_text import render as json_of

        print(json_of(run, found))
        return
    from fp8bench.report.text import render

    print(render(run, found, color=_color()))


def _color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _list(arguments: argparse.Namespace) -> int:
    files = files_of(arguments.what or "")
    imports = (*arguments.imports, *files)
    _allow_imports_from_here(imports)
    kinds = {"suites": workloads.names(), "dtypes": precisions.names(), "devices": devices.names()}
    if arguments.what is None:
        for kind, names in kinds.items():
            print(f"{kind}: {', '.join(names)}")
        return EXIT_OK
    if not files and arguments.what not in (*kinds, *kinds["suites"]):
        raise UnknownName("thing to list", arguments.what, [*kinds, *kinds["suites"]])
    from fp8bench.doctor import listing

    print("\n".join(listing(arguments.what, imports)))
    return EXIT_OK


def _doctor(arguments: argparse.Namespace) -> int:
    from fp8bench.doctor import examine

    print("\n".join(examine(arguments.calibrate)))
    return EXIT_OK


def _show(arguments: argparse.Namespace) -> int:
    from fp8bench.history.runs import find_run, load_run

    _check_outputs(arguments)
    _print(load_run(find_run(arguments.run, arguments.store)), arguments)
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
