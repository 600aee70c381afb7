"""The door: words on a command line to a request, and a run to text on stdout.

What `--help`, a bare `list` and bad usage need is imported at the top and is light; the rest is imported by the
command that needs it, so that a mistyped name costs a tenth of a second and not two.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from fp8bench.arguments import build_parser, commands_of, meant_by, parse
from fp8bench.environment import command_line
from fp8bench.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    Fp8benchError,
    NotKept,
    UnknownName,
    UsageError,
)
from fp8bench.export_commands import tell_exports
from fp8bench.interrupts import ends_are_interrupts, only_once
from fp8bench.model import Request, Run
from fp8bench.outputs import check_outputs, how_to_resume, print_run
from fp8bench.plan import check_names, files_of
from fp8bench.registry import devices, import_user_modules, precisions, workloads
from fp8bench.streams import complain, make_usable, say, silence

_BESIDE_RESUME = {
    "--resume", "--store", "--json", "--csv", "--html", "--md", "--csv-wide", "--open", "--no-report", "--tensorboard",
    "--wandb",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    make_usable()
    try:
        with ends_are_interrupts():
            return _dispatch(words)
    except Fp8benchError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence()  # the reader of our output has left
        return EXIT_OK


def _dispatch(words: list[str]) -> int:
    commands = {
        "suite": _suite, "list": _list, "doctor": _doctor, "show": _show, "report": _report, "history": _history,
        "compare": _compare, "duel": _duel, "gate": _gate, "lint-shapes": _lint_shapes, "sensitivity": _sensitivity,
        "selftest": _selftest,
    }  # fmt: skip
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise UnknownName("command", words[0], commands)
    parser = build_parser()
    arguments = parse(parser, words)
    if getattr(arguments, "config", None) is not None:
        from fp8bench.config import with_config

        arguments = with_config(parser, commands_of(parser)[arguments.command], words, arguments.config)
        for sentence in arguments.unused:
            complain(sentence)
    arguments.words = words
    if arguments.command is None or getattr(arguments, "history_command", "") is None:
        meant_by(parser, arguments).print_help()
        return EXIT_OK
    code = commands[arguments.command](arguments)
    say("")
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
        return _resume(arguments.words, arguments)
    if arguments.suite is None:
        raise UsageError(f"no suite was named. Give one of {', '.join(workloads.names())}, all, or a .py file.")
    request = Request(
        suite=arguments.suite, dtypes=arguments.dtypes, devices=arguments.devices, reference=arguments.reference,
        axes=tuple(axes.items()), precision_map=arguments.precision_map, data=arguments.data, quick=arguments.quick,
        budget=arguments.budget, rounds=arguments.rounds, seed=arguments.seed, threads=arguments.threads,
        imports=(*arguments.imports, *files_of(arguments.suite)), isolation=arguments.isolation,
        case_timeout=arguments.case_timeout, grid=arguments.grid,
        trace=None if arguments.trace is None else str(arguments.trace),
        static_scales=arguments.static_scales, refresh_scales=arguments.refresh_scales,
        saturation_bound=arguments.saturation_bound, energy=arguments.energy,
        max_batch=arguments.max_batch, memory_limit=arguments.memory_limit,
    )  # fmt: skip
    _import(request.imports)
    check_names(request)
    return _plan(request, arguments.store) if arguments.dry_run else _measure(request, arguments)


def _plan(request: Request, store: Path) -> int:
    from fp8bench.pipeline import plan_only
    from fp8bench.report.text import render_plan

    plan, facts = plan_only(request, store)
    say(render_plan(plan, facts) + "\n")
    return EXIT_OK


def _measure(request: Request, arguments: argparse.Namespace) -> int:
    from fp8bench.pipeline import execute
    from fp8bench.report.progress import progress

    with only_once():
        with _kept_or_shown(arguments), progress(sys.stderr, os.environ) as observer:
            run = execute(request, arguments.store, observer, command_line())
        _tell_how_to_go_on(run)
    return _ended(run, arguments)


def _resume(words: Sequence[str], arguments: argparse.Namespace) -> int:
    """Go on with a run; what was asked stands in its file, so that nothing may be asked anew."""
    from fp8bench.history.runs import find_run
    from fp8bench.pipeline import resume
    from fp8bench.report.progress import progress

    _check_alone(words, arguments)
    _search_here()
    path = find_run(arguments.resume, arguments.store)
    with only_once():
        with _kept_or_shown(arguments), progress(sys.stderr, os.environ) as observer:
            resumed, run = resume(path, arguments.store, observer, command_line())
        _tell_how_to_go_on(run)
    if resumed:
        return _ended(run, arguments)
    complain(f"run {run.id} is finished; nothing was missing")
    print_run(run, arguments)
    return EXIT_OK if tell_exports(run, arguments) else EXIT_INTERRUPTED


@contextmanager
def _kept_or_shown(arguments: argparse.Namespace) -> Iterator[None]:
    """What the store did not take is printed at least."""
    try:
        yield
    except NotKept as error:
        print_run(cast(Run, error.run), arguments)
        raise


def _check_alone(words: Sequence[str], arguments: argparse.Namespace) -> None:
    """--resume takes what to measure, and how, from the run."""
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    others = [word for word in options if word not in _BESIDE_RESUME]
    if arguments.suite is not None:
        others.insert(0, arguments.suite)
    if others:
        raise UsageError(
            f"--resume takes what to measure, and how, from the run, and {others[0]} was given too. Leave it out; "
            "--store and what says where it is printed go with it."
        )


def _tell_how_to_go_on(run: Run) -> None:
    """Said before the table, which may be cut off by another interrupt."""
    if not run.finished:
        complain(f"interrupted; what was finished is kept in {run.path}. To do the rest: {how_to_resume(run)}")


def _ended(run: Run, arguments: argparse.Namespace) -> int:
    """Print a run that was measured, say what it did to the history, write its report; returns the exit code."""
    code = (EXIT_OK if run.ok else EXIT_FAILED) if run.finished else EXIT_INTERRUPTED
    try:
        print_run(run, arguments)
    except KeyboardInterrupt:  # it cuts the table short, and nothing else
        code = EXIT_INTERRUPTED
    finally:  # nor is a stdout that takes nothing a reason for a hole in the history
        told = _tell_history(run, arguments.store) and _tell_report(run, arguments)
        told = told and (not run.finished or tell_exports(run, arguments))
    return code if told else EXIT_INTERRUPTED


def _tell_history(run: Run, store: Path) -> bool:
    """Bring asv's view up to date and say so; False where that was interrupted."""
    from fp8bench.history.runs import store_of
    from fp8bench.index.opening import keep_figures
    from fp8bench.view import update_view

    try:
        store = store_of(Path(run.path)) or store
        complain(update_view(run, store))
        keep_figures(store, Path(run.path))
    except KeyboardInterrupt:
        complain(
            f"history: interrupted while asv's view was brought up to date; the run is kept in {run.path}, and "
            "`fp8bench history rebuild` makes the view again"
        )
        return False
    return True


def _tell_report(run: Run, arguments: argparse.Namespace) -> bool:
    """Write the report of a run; False where that was interrupted. Who has interrupted the run waits for nothing."""
    if not arguments.report or not run.finished:
        return True
    from fp8bench.report_commands import tell_report

    return tell_report(run, arguments)


def _report(arguments: argparse.Namespace) -> int:
    from fp8bench.report_commands import report

    return report(arguments)


def _list(arguments: argparse.Namespace) -> int:
    files = files_of(arguments.what or "")
    imports = (*arguments.imports, *files)
    _import(imports)
    kinds = {"suites": workloads.names(), "dtypes": precisions.names(), "devices": devices.names()}
    if arguments.what is None:
        say("".join(f"{kind}: {', '.join(names)}\n" for kind, names in kinds.items()))
        return EXIT_OK
    if not files and arguments.what not in (*kinds, *kinds["suites"]):
        raise UnknownName("thing to list", arguments.what, [*kinds, *kinds["suites"]])
    from fp8bench.doctor import listing

    say("\n".join(listing(arguments.what, imports)) + "\n")
    return EXIT_OK


def _doctor(arguments: argparse.Namespace) -> int:
    from fp8bench.doctor import examine

    say("\n".join(examine(arguments.calibrate)) + "\n")
    return EXIT_OK


def _show(arguments: argparse.Namespace) -> int:
    from fp8bench.dueling.keeping import find_duel
    from fp8bench.history.runs import load_named

    check_outputs(arguments)
    duelled = find_duel(arguments.run, arguments.store)
    if duelled is not None:
        return _show_duel(duelled, arguments)
    run = load_named(arguments.run, arguments.store)
    print_run(run, arguments)
    return EXIT_OK if tell_exports(run, arguments) else EXIT_INTERRUPTED


def _show_duel(path: Path, arguments: argparse.Namespace) -> int:
    from fp8bench.duel_commands import show_again

    show_again(path, arguments)
    return EXIT_OK


def _compare(arguments: argparse.Namespace) -> int:
    from fp8bench.compare_commands import compare_sides

    return compare_sides(arguments)


def _gate(arguments: argparse.Namespace) -> int:
    from fp8bench.gate_commands import gate

    _search_here()  # what is measured again may be the user's
    _import(arguments.imports)
    with only_once():
        return gate(arguments)


def _duel(arguments: argparse.Namespace) -> int:
    from fp8bench.duel_commands import duel

    _import((*arguments.imports, *files_of(arguments.suite)))
    with only_once():
        return duel(arguments)


def _history(arguments: argparse.Namespace) -> int:
    from fp8bench.history_commands import run_command

    _import(arguments.imports)
    return run_command(arguments)


def _sensitivity(arguments: argparse.Namespace) -> int:
    from fp8bench.sensitivity_commands import sensitivity

    _import(arguments.imports)
    with only_once():
        return sensitivity(arguments)


def _lint_shapes(arguments: argparse.Namespace) -> int:
    from fp8bench.lint_commands import lint_shapes

    return lint_shapes(arguments)


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
