"""`fp8bench claim`: answers whether sentences about low precision are true, and checks stored answers."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fp8bench.cli import option_types as types
from fp8bench.cli.main import build_parser, command_module, parse
from fp8bench.cli.options import add_common, request_of
from fp8bench.cli.outputs import CommandResult, check_outputs
from fp8bench.cli.progress import TERMINAL
from fp8bench.errors import EXIT_BASELINE, EXIT_OK, EXIT_REGRESSION, UnknownName, UsageError
from fp8bench.features.claim.rows import ClaimsFile, load_catalogue, load_claims
from fp8bench.features.claim.values import Answer, Claim, ClaimAnswer, ClaimKind, Standing
from fp8bench.features.claim.view import (
    page_of_answer,
    page_of_answers,
    page_of_catalogue,
    page_of_check,
)
from fp8bench.features.train.values import TrainingObserver
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.interrupts import only_once
from fp8bench.model.codec import encode
from fp8bench.plan.make import check_names

if TYPE_CHECKING:
    from fp8bench.features.claim.runs import Question

EXAMPLES = (
    "fp8bench claim tf32-312-h200  # a sentence of the catalogue; without a name: all of them",
    "fp8bench claim my-claims.toml --keep evidence",
    "fp8bench claim check evidence",
)
# Options that a row or this command already gives, or that would load code of whoever wrote the row.
_REFUSED = {"--device", "--devices", "--store", "--resume", "--config", "--dry-run", "--plan", "--cell", "--import"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Confirms or refutes a sentence about low precision, or explains why this machine cannot. Arithmetic and "
        "datasheets answer at once. A measured claim reuses runs of the last 7 days, or measures what is missing."
    )
    parser.epilog = (
        "Exit codes: 0 confirmed, or all answers of --all or --published were given; 1 refuted, or a checked answer "
        "does not hold; 2 wrong usage; 3 a run failed; 4 cannot tell here, or cannot be judged; 130 interrupted."
    )
    words = (
        "an id or a sentence of the catalogue, or a claims file (.toml) and ids in it; or check FOLDER: compute the "
        "stored answers of a folder again; nothing: list the catalogue"
    )
    parser.add_argument("what", nargs="*", metavar="CLAIM", help=words)
    parser.add_argument("--all", action="store_true", help="answer every sentence of the catalogue")
    words = "compare published figures with runs here: within, above, below, or other conditions"
    parser.add_argument("--published", action="store_true", help=words)
    parser.add_argument("--device", default="", metavar="NAME", help="where to measure: cpu, cuda, cuda:1")
    parser.add_argument("--cpu", action="store_const", const="cpu", dest="device", help="the same as --device cpu")
    words = "also write the claims, the answers and the runs there, for `claim check`"
    parser.add_argument("--keep", type=types.path, metavar="FOLDER", help=words)
    add_common(parser, "--store", help="where runs are looked for and kept, as in suite")
    add_common(parser, "--json", help="print the answers as JSON instead")
    add_common(parser, "--md")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    with only_once():
        return answer(arguments, TERMINAL).print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    """Answers claims, checks a folder, or lists the catalogue."""
    if arguments.what[:1] == ["check"]:
        return _check(arguments)
    several = arguments.all or arguments.published
    if several and arguments.what:
        raise UsageError("--all and --published choose claims of the catalogue. Leave the names out, or the option.")
    if not several and not arguments.what:
        claims = list(load_catalogue().claims.values())
        return CommandResult(claims, partial(page_of_catalogue, claims), partial(encode, claims))
    # 1. Choose the claims; every row is checked before anything is measured.
    chosen = _choose(arguments)
    answers = _answer_claims(chosen, arguments, observer)
    # 2. The exit code is the worst answer's, unless the whole catalogue was asked, of which many sentences are wrong.
    code = EXIT_OK if several else _exit_code(answered.answer for answered in answers)
    values = [answered.as_value() for answered in answers]
    if len(answers) == 1:
        return CommandResult(answers, partial(page_of_answer, answers[0]), lambda: values, code=code)
    return CommandResult(answers, partial(page_of_answers, answers), lambda: values, code=code)


def _exit_code(outcomes: Iterable[Answer | Standing]) -> int:
    distinct = set(outcomes)
    if distinct & {Answer.REFUTED, Standing.FAILS}:
        return EXIT_REGRESSION
    return EXIT_BASELINE if distinct & {Answer.CANNOT_TELL, Standing.UNKNOWN} else EXIT_OK


def _answer_claims(chosen: _Chosen, arguments: argparse.Namespace, observer: JobObserver) -> list[ClaimAnswer]:
    from fp8bench.features.claim.decide import answer_claim
    from fp8bench.features.claim.folder import refuse_answers, write_folder
    from fp8bench.features.claim.runs import RunSource, measured_parts

    if arguments.keep is not None:
        refuse_answers(arguments.keep)
    claims = chosen.file.claims
    source = RunSource(
        arguments.store, questions_of(chosen.file), arguments.device, observer, partial(_watch_training, observer)
    )
    source.announce(measured_parts(chosen.claims, claims))
    answers = [answer_claim(claim, claims, source) for claim in chosen.claims]
    if arguments.keep is not None:
        write_folder(arguments.keep, chosen.file, answers, source.runs_by_claim)
        observer.note(f"claims, answers and runs are in {arguments.keep}; `fp8bench claim check {arguments.keep}`")
    return answers


def _watch_training(observer: JobObserver) -> AbstractContextManager[TrainingObserver]:
    from fp8bench.features.train.progress import on_terminal

    return on_terminal() if observer is TERMINAL else nullcontext(TrainingObserver())


def _check(arguments: argparse.Namespace) -> CommandResult:
    from fp8bench.features.claim.folder import check_folder

    if len(arguments.what) != 2 or arguments.all or arguments.published or arguments.keep:
        raise UsageError("claim check takes one folder, which --keep FOLDER has written. Give `claim check FOLDER`.")
    folder = arguments.what[1]
    checked = check_folder(Path(folder), questions_of)
    code = _exit_code(checked_answer.standing for checked_answer in checked)
    return CommandResult(checked, partial(page_of_check, folder, checked), partial(encode, checked), code=code)


@dataclass(frozen=True)
class _Chosen:
    """The claims to answer, and the file that they and their parts are in."""

    file: ClaimsFile
    claims: Sequence[Claim]


def _choose(arguments: argparse.Namespace) -> _Chosen:
    words: list[str] = arguments.what
    catalogue = load_catalogue()
    if arguments.all or arguments.published:
        rows = catalogue.claims.values()
        return _Chosen(catalogue, [row for row in rows if row.published == arguments.published])
    # 1. A file, whole or some of its ids.
    if words[0].endswith(".toml"):
        file = load_claims(Path(words[0]))
        for name in words[1:]:
            if name not in file.claims:
                raise UnknownName(f"claim of {words[0]}", name, file.claims)
        return _Chosen(file, [file.claims[name] for name in words[1:] or file.claims])
    # 2. Ids or sentences of the catalogue.
    sentences: dict[str, Claim] = {}
    for row in catalogue.claims.values():
        sentences |= dict.fromkeys(map(_plain, (row.id, row.sentence, *row.also)), row)
    return _Chosen(catalogue, [sentences.get(_plain(name)) or _refuse(name, catalogue) for name in words])


def _plain(sentence: str) -> str:
    return " ".join(re.findall(r"[\w.%]+", sentence.lower())).rstrip(".")


def _refuse(name: str, catalogue: ClaimsFile) -> Claim:
    """Raises for a sentence that the catalogue does not have, with those nearest to it; never answers a similar one."""
    asked = set(_plain(name).split())

    def nearness(row: Claim) -> float:
        return max(len(asked & set(_plain(text).split())) for text in (row.sentence, *row.also))

    if " " not in name.strip():
        raise UnknownName("claim", name, catalogue.claims, "`fp8bench claim` lists them, a file ends in .toml")
    near = sorted(catalogue.claims.values(), key=nearness, reverse=True)[:3]
    lines = "".join(f"\n  {row.id}: {row.sentence}" for row in near)
    raise UsageError(
        f"the catalogue does not have the sentence {name!r:.120}. Write it as a row of a claims file (docs/claims.md "
        f"has one to copy), or ask for one of the nearest by its id:{lines}"
    )


def questions_of(file: ClaimsFile) -> dict[str, Question]:
    """Parses the run of every measured claim of a file. Raises UsageError for one that this version cannot run."""
    runs: Mapping[str, Claim] = {row.run: row for row in file.claims.values() if row.kind is ClaimKind.MEASURED}
    for row in file.claims.values():
        for part in row.parts:
            if part not in file.claims or file.claims[part].kind is ClaimKind.ALL_OF:
                raise UsageError(f"{file.name}, {row.id}: the part {part!r:.80} is not another claim of the same file.")
            if file.claims[part].published:
                raise UsageError(
                    f"{file.name}, {row.id}: the part {part!r:.80} compares a published figure, which is "
                    "neither true nor false. Remove it."
                )
    return {words: _question(f"{file.name}, {row.id}", words) for words, row in runs.items()}


def _question(place: str, words: str) -> Question:
    try:
        typed = shlex.split(words)
    except ValueError as error:
        raise UsageError(f"{place}: run {words!r:.120} cannot be read ({error}).") from None
    if not typed or typed[0] not in ("suite", "train"):
        raise UsageError(f"{place}: run {words!r:.120} has to begin with suite or train, as on the command line.")
    for word in typed:
        if word.partition("=")[0] in _REFUSED or (typed[0] == "suite" and word.endswith(".py")):
            raise UsageError(
                f"{place}: `run` cannot have {word}: the row's `device` selects a device, and claims are about "
                "suites that come with fp8bench. Remove it."
            )
    try:
        arguments = parse(build_parser([typed[0]]), typed)
        if typed[0] == "train":
            return cast("Question", command_module("train").request_from(arguments))
        if arguments.suite is None:
            raise UsageError("no suite is named. Write `suite NAME`.")
        request = replace(request_of(arguments), devices=())
        check_names(request)
        return request
    except UsageError as error:
        raise UsageError(f"{place}: run {words!r:.200}: {error}") from None
