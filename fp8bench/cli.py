"""The door: words on a command line to a request, and a run to text on stdout.

What `--help`, a bare `list` and bad usage need is imported at the top and is light; the rest is imported by the
command that needs it, so that a mistyped name costs a tenth of a second and not two.
"""

from __future__ import annotations

import argparse
import io
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
from fp8bench.outputs import check_outputs, print_run
from fp8bench.plan import check_names, files_of
from fp8bench.registry import devices, import_user_modules, precisions, workloads

_BESIDE_RESUME = {"command", "resume", "store", "json", "csv"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a file's name need not be text, and must still be printable
            stream.reconfigure(errors="backslashreplace")
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


def _search_here() -> None:
    # The script `fp8bench` does not have the working directory on its path, `python -m fp8bench` does.
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def _import(modules: Sequence[str]) -> None:
    if modules:
        _search_here()
    import_user_modules(modules)


def _suite(arguments: argparse.Namespace) -> int:
    axes: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.axes:
        axes[name] = (*axes.get(name, ()), *values)
    check_outputs(arguments)
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
    _import(request.imports)
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
            print_run(cast(Run, error.run), arguments)
            raise
    return _ended(run, arguments)


def _resume(arguments: argparse.Namespace) -> int:
    """Go on with a run; what was asked stands in its file, so that nothing may be asked anew."""
    from fp8bench.history.runs import find_run
    from fp8bench.pipeline import resume
    from fp8bench.report.progress import progress

    _check_alone(arguments)
    _search_here()
    path = find_run(arguments.resume, arguments.store)
    with progress(sys.stderr, os.environ) as observer:
        try:
            resumed, run = resume(path, arguments.store, observer, command_line())
        except NotKept as error:
            print_run(cast(Run, error.run), arguments)
            raise
    if resumed:
        return _ended(run, arguments)
    print_run(run, arguments)
    print(f"fp8bench: run {run.id} is finished; nothing was missing", file=sys.stderr)
    return EXIT_OK


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
    print_run(run, arguments)
    if not run.finished:
        again = f"fp8bench suite --resume {run.id}"
        if arguments.store != Path(DEFAULT_STORE):
            again += f" --store {shlex.quote(str(arguments.store))}"
        print(
            f"fp8bench: interrupted; what was finished is kept in {run.path}. To do the rest: {again}", file=sys.stderr
        )
        return EXIT_INTERRUPTED
    return EXIT_OK if run.ok else EXIT_FAILED


def _list(arguments: argparse.Namespace) -> int:
    files = files_of(arguments.what or "")
    imports = (*arguments.imports, *files)
    _import(imports)
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

    check_outputs(arguments)
    print_run(load_run(find_run(arguments.run, arguments.store)), arguments)
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
