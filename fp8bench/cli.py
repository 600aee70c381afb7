"""The door: words on a command line to a request, and a run to text on stdout.

What `--help`, a bare `list` and bad usage need is imported at the top and is light; the rest is imported by the
command that needs it, so that a mistyped name costs a tenth of a second and not two.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8bench.arguments import build_parser
from fp8bench.environment import command_line
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Fp8benchError, UnknownName, UsageError
from fp8bench.model import Request
from fp8bench.plan import check_names
from fp8bench.registry import devices, import_user_modules, precisions, workloads


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
