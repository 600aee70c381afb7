"""`fp8bench duel`: two interpreters or two revisions, measured in the same rounds."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fp8bench.analysis.two_sides import LEAST_ROUNDS
from fp8bench.codec import SCHEMA, encode
from fp8bench.comparing.figures import TIME
from fp8bench.corpus import Corpus, prepare_corpus
from fp8bench.dueling.corner import Corner, corner, refresh
from fp8bench.dueling.duel import Duel, Side
from fp8bench.dueling.keeping import DuelWriter, load_duel, start_duel
from fp8bench.dueling.measuring import Contest, Referee, contest
from fp8bench.dueling.opening import Question, Ready, Sides, opened
from fp8bench.dueling.progress import DuelProgress
from fp8bench.dueling.text import render
from fp8bench.dueling.verdicts import comparisons
from fp8bench.environment import command_line, gather
from fp8bench.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REGRESSION,
    Fp8benchError,
    StoreError,
    UsageError,
)
from fp8bench.history.writing import check_store
from fp8bench.interrupts import held_back, ignored
from fp8bench.measure.limits import Limits
from fp8bench.measure.quantisers import quantisers_for
from fp8bench.measure.raw import Settings
from fp8bench.measure.stopping import CEILING_SECONDS, QUICK_ROUNDS, StoppingRule
from fp8bench.model import Direction, Environment, Request
from fp8bench.outputs import in_color
from fp8bench.plan import check_names, files_of, reads_corpus, suites_of
from fp8bench.registry import user_module
from fp8bench.streams import complain, say

_SITTINGS, _QUICK_SITTINGS = 4, 1
_SITTING_SECONDS = 2.5
_LEAST_ROUNDS = 10


@dataclass(frozen=True)
class Meeting:
    """Both sides with their workers started."""

    sides: Sides
    corners: tuple[Corner, Corner]
    cases: tuple[str, ...]
    sittings: int


def duel(arguments: argparse.Namespace) -> int:
    """Measure, keep, tell. An interrupt ends it early: what was finished is kept and told."""
    request = _request(arguments)
    question = Question(
        arguments.python_a, arguments.python_b, arguments.against, arguments.against_self, arguments.sittings
    )
    fought = fight(question, request, arguments.store)
    show(fought, arguments.json)
    return exit_code(fought)


def fight(question: Question, request: Request, store: Path, only: Collection[str] = ()) -> Duel:
    """Measure both sides and keep what they come to; of the cases with the ids in `only`, if there are any."""
    check_names(request)
    why_eager = quantisers_for(request.quick, os.environ).why_eager
    check_store(store)
    corpus = prepare_corpus(request.data, store / "data") if reads_corpus(request) else None
    start, progress = time.monotonic(), DuelProgress(sys.stderr, os.environ)
    sittings = question.sittings or (_QUICK_SITTINGS if request.quick else _SITTINGS)
    progress.starts()
    try:
        with opened(question, request.imports) as sides, _met(sides, request, corpus, why_eager, sittings) as meeting:
            kept = tuple(name for name in meeting.cases if not only or name in only)
            if not kept:
                raise UsageError(f"the sides would not measure {next(iter(only))}, which was asked for.")
            return _fought(replace(meeting, cases=kept), request, store, progress, start)
    finally:
        progress.close()


def show(found: Duel, as_json: bool) -> None:
    """Print a duel."""
    if as_json:
        document = {"schema": SCHEMA, **encode(found), "comparisons": encode(comparisons(found))}
        say(json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")
    else:
        say(render(found, in_color()) + "\n")


def show_again(path: Path, arguments: argparse.Namespace) -> None:
    """Print a duel of the store, as far as it is printed in that way."""
    given = {"--csv": arguments.csv, "--tensorboard": arguments.tensorboard, "--wandb": arguments.wandb}
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{path.stem} is a duel, which {option} does not go with. Leave it out, or use --json.")
    show(load_duel(path), arguments.json)


def exit_code(found: Duel) -> int:
    """130 interrupted, 3 nothing measured or a case failed, 1 something is slower, 0 fine; the first that fits."""
    if not found.finished:
        return EXIT_INTERRUPTED
    if not found.ok:
        return EXIT_FAILED
    slower = any(one.metric == TIME and one.direction is Direction.WORSE for one in comparisons(found))
    return EXIT_REGRESSION if slower else EXIT_OK


def _request(arguments: argparse.Namespace) -> Request:
    axes: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.axes:
        axes[name] = (*axes.get(name, ()), *values)
    return Request(
        suite=arguments.suite, dtypes=arguments.dtypes, devices=arguments.devices, axes=tuple(axes.items()),
        data=arguments.data, quick=arguments.quick, budget=arguments.budget, rounds=arguments.rounds,
        seed=arguments.seed, threads=arguments.threads, imports=(*arguments.imports, *files_of(arguments.suite)),
        case_timeout=arguments.case_timeout,
    )  # fmt: skip


@contextmanager
def _met(sides: Sides, request: Request, corpus: Corpus | None, why_eager: str, sittings: int) -> Iterator[Meeting]:
    """All workers started, both sides planned, and what they have in common."""
    with ExitStack() as stack:
        corners = []
        for ready in (sides.before, sides.after):
            settings = Settings(request.threads, request.seed, ready.imports, corpus.path if corpus else None)
            corners.append(stack.enter_context(corner(ready.start, settings, why_eager)))
        identity, names = corpus.identity if corpus else None, suites_of(request)
        for one in corners:
            one.meet(request, names, identity)
        cases = tuple(name for name in corners[0].cases if name in corners[1].cases)
        if not cases:
            raise UsageError(
                f"the sides have no case in common: A would measure {next(iter(corners[0].cases))}, and B "
                f"{next(iter(corners[1].cases))}. Name --devices that both have."
            )
        notes = (*sides.notes, *_alone(corners[0], corners[1]), *_alone(corners[1], corners[0]))
        yield Meeting(replace(sides, notes=notes), (corners[0], corners[1]), cases, sittings)


def _alone(own: Corner, other: Corner) -> Iterator[str]:
    """A note on the cases that one side would measure and the other has not."""
    names = [name for name in own.cases if name not in other.cases]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"only side {own.name} has {names[0]}{more}: not compared"


def _fought(meeting: Meeting, request: Request, store: Path, progress: DuelProgress, start: float) -> Duel:
    """The duel as far as it came, each sitting of a case kept as soon as it is over."""
    begun = _begun(meeting, request)
    writer = start_duel(begun, store)
    begun = replace(begun, path=str(writer.path))
    contests = [contest(case, meeting.corners) for case in meeting.cases]
    try:
        _check_origins(meeting)
        for note in meeting.sides.notes:
            writer.note(note)
        _sittings(meeting, request, contests, writer, progress, start)
        for note in _idle(meeting):
            writer.note(note)
        writer.finish("finished")
    except KeyboardInterrupt:
        with ignored():
            progress.close()
            with contextlib.suppress(StoreError):  # without an end line a duel is unfinished, too
                writer.finish("interrupted")
            complain(f"interrupted; what was finished is kept in {writer.path}")
    except Fp8benchError as error:
        progress.close()
        bouts = tuple(one.bout for one in contests if one.sittings)
        if bouts:  # what the store did not take, or what was measured before a side was lost for good
            show(replace(begun, bouts=bouts, troubles=(str(error),)), as_json=False)
        else:
            writer.path.unlink(missing_ok=True)
        raise
    finally:
        writer.close()
    with ignored():
        return load_duel(writer.path)


def _sittings(
    meeting: Meeting, request: Request, contests: Sequence[Contest], writer: DuelWriter, progress: DuelProgress,
    start: float,
) -> None:  # fmt: skip
    """Every case once in each sitting; errors and memory in the first."""
    referee = Referee(meeting.corners, request.seed, progress, Limits(request.case_timeout))
    for number in range(meeting.sittings):
        progress.starts()
        began = time.monotonic()
        refresh(meeting.corners, request.seed, number)
        # Half of the first sitting's workers were there. Those to come take their time out of the budget too.
        starting = (time.monotonic() - began) * (1 if number else 2) * (meeting.sittings - 1 - number)
        for place, one in enumerate(contests):
            progress.sits(number, meeting.sittings, place, len(contests))
            alive, left = one.alive, (meeting.sittings - number) * len(contests) - place
            if alive:
                referee.sit(one, number, _rule(request, _share(request.budget, start - starting, left)))
            if one.alive and number == 0:
                _check_origins(meeting)  # more of the user's code may have been imported by now
                referee.look(one)
            with held_back():
                _keep(writer, one, number, alive)


def _keep(writer: DuelWriter, one: Contest, number: int, sat: bool) -> None:
    """Write down what a sitting came to: the case with all there is of it, or one more sitting."""
    if number == 0 or (sat and not one.alive):
        writer.bout(one.bout)
    elif sat:
        writer.sitting(one.bout.after.case.id, one.sittings[-1])


def _share(budget: float | None, start: float, left: int) -> float | None:
    """One sitting's part of what is left of a budget that began to run at `start`, in seconds."""
    return None if budget is None else max(0.0, budget - (time.monotonic() - start)) / left


def _rule(request: Request, share: float | None) -> StoppingRule:
    """When a case has sat long enough. Nobody looks before: whether a side is slower is asked of all sittings."""
    most = math.inf if share is None else share
    if request.rounds is not None:
        return StoppingRule(fixed=request.rounds, ceiling=most, whole=True)
    if request.quick:
        return StoppingRule(fixed=QUICK_ROUNDS, ceiling=min(most, CEILING_SECONDS), whole=True)
    if share is not None:
        return StoppingRule(least=LEAST_ROUNDS, budget=share, ceiling=share, whole=True)
    return StoppingRule(least=_LEAST_ROUNDS, budget=_SITTING_SECONDS, ceiling=CEILING_SECONDS)


def _begun(meeting: Meeting, request: Request) -> Duel:
    before, after = (
        _side(ready, one, request)
        for ready, one in zip((meeting.sides.before, meeting.sides.after), meeting.corners, strict=True)
    )
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Duel(secrets.token_hex(4), started, command_line(), request, before, after, meeting.cases, meeting.sittings)


def _side(ready: Ready, one: Corner, request: Request) -> Side:
    """A side with what was found out about it. What the worker says of itself wins over what holds here."""
    worker = one.workers[0]
    # Their digest is that of the files this process has imported, which are this tree's.
    imports = request.imports if ready.imports == request.imports else ()
    here = gather(worker.software(), str(worker.greeting["fp8bench"]), request.threads, imports, folder=ready.tree)
    environment = Environment({**here.facts, **worker.greeting})
    return Side(ready.start.name, ready.title, ready.start.python, ready.commit, environment, one.devices)


def _check_origins(meeting: Meeting) -> None:
    """Raise UsageError where side A has loaded code of this tree: then it is no duel with the revision."""
    before, after = meeting.sides.before, meeting.sides.after
    if before.tree is None or after.tree is None:
        return
    first = meeting.corners[0].workers[0]
    alien = set(first.modules_under(after.tree)) - set(first.modules_under(before.tree)) - _shared(before.imports)
    if alien:
        raise UsageError(
            f"side A has loaded {', '.join(sorted(alien)[:5])} from this tree and not from that of {before.title}: "
            "what is installed there wins over PYTHONPATH. Uninstall the package, or install it with `pip install -e`."
        )


def _idle(meeting: Meeting) -> Iterator[str]:
    """A note where nothing of the repository was loaded, so that the sides cannot have differed."""
    after = meeting.sides.after
    if after.tree is None:
        return
    loaded = set(meeting.corners[1].workers[0].modules_under(after.tree)) - _shared(meeting.sides.before.imports)
    if not loaded:
        yield (
            "neither side loaded any code of this repository, so that nothing but noise was measured: --import MODULE "
            "names what uses it"
        )


def _shared(imports: Sequence[str]) -> set[str]:
    """The modules of files that side A runs as given."""
    return {user_module(name) for name in imports if name.endswith(".py")}
