"""`fp8bench claim`: confirms or refutes sentences about low precision. `fp8bench claim check FOLDER` computes answers
in a folder again, from the claims and runs that `--keep FOLDER` stored with them, and reports which of them still hold.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fp8bench.cli import option_types as types
from fp8bench.cli.main import build_parser, import_command_module, parse_command_words
from fp8bench.cli.options import add_common_options, make_request
from fp8bench.cli.outputs import CommandResult, check_outputs
from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.errors import EXIT_BASELINE, EXIT_OK, EXIT_REGRESSION, UnknownName, UsageError
from fp8bench.features.claim.rows import ClaimsFile, load_bundled_claims, load_claims_file
from fp8bench.features.claim.values import AnswerCheckOutcome, Claim, ClaimAnswer, ClaimKind, ClaimOutcome
from fp8bench.features.claim.view import (
    render_answers,
    render_catalogue,
    render_checked_answers,
    render_claim_answer,
)
from fp8bench.features.train.values import TrainingObserver
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.interrupts import interrupt_only_once
from fp8bench.model.codec import encode
from fp8bench.plan.make import check_request

if TYPE_CHECKING:
    from fp8bench.features.claim.runs import RunRequest

EXAMPLES = (
    "fp8bench claim tf32-312-h200  # one claim of the catalogue; without a name, the list of all",
    "fp8bench claim my-claims.toml --keep evidence",
    "fp8bench claim check evidence",
)
# Options that a claim's `run` must not have: the claim or this command sets them, or they load code of the claim's
# author.
_REFUSED_OPTIONS = {
    "--device",
    "--devices",
    "--store",
    "--resume",
    "--config",
    "--dry-run",
    "--plan",
    "--cell",
    "--import",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Confirms or refutes a sentence about low precision, or explains why this machine cannot. Arithmetic and "
        "datasheets answer at once. A measured claim reuses runs of the last 7 days, or measures the missing ones."
    )
    parser.epilog = (
        "Exit codes: 0 confirmed, or --all or --published has answered; 1 refuted, or a checked answer "
        "does not hold; 2 wrong usage; 3 a run failed; 4 undecided, or a checked answer cannot be "
        "judged; 130 interrupted."
    )
    help_text = (
        "an id or sentence of the catalogue, or a claims file (.toml) and ids in it; `check FOLDER` computes the "
        "stored answers of a folder again; without it, lists the catalogue"
    )
    parser.add_argument("what", nargs="*", metavar="CLAIM", help=help_text)
    parser.add_argument("--all", action="store_true", help="answer every sentence of the catalogue")
    help_text = "compare published figures with runs on this machine: within, above, below, or other conditions"
    parser.add_argument("--published", action="store_true", help=help_text)
    parser.add_argument("--device", default="", metavar="NAME", help="the device to measure on: cpu, cuda, cuda:1")
    parser.add_argument("--cpu", action="store_const", const="cpu", dest="device", help="the same as --device cpu")
    help_text = "also write the claims, answers and runs to FOLDER, for `claim check`"
    parser.add_argument("--keep", type=types.path, metavar="FOLDER", help=help_text)
    add_common_options(parser, "--store", help="the folder that runs are read from and written to, as in suite")
    add_common_options(parser, "--json", help="print the answers as JSON instead")
    add_common_options(parser, "--md")


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    with interrupt_only_once():
        return answer(arguments, TERMINAL_JOB_OBSERVER).print_result(arguments)


def answer(arguments: argparse.Namespace, observer: JobObserver) -> CommandResult:
    """Answers the claims that were named, checks a folder of answers, or lists the catalogue."""
    if arguments.what[:1] == ["check"]:
        return _check_stored_answers(arguments)
    is_catalogue_requested = arguments.all or arguments.published
    if is_catalogue_requested and arguments.what:
        raise UsageError("--all and --published choose claims of the catalogue. Omit the names, or the option.")
    if not is_catalogue_requested and not arguments.what:
        claims = list(load_bundled_claims().claims.values())
        return CommandResult(claims, partial(render_catalogue, claims), partial(encode, claims))
    # 1. Choose the claims. Every row is checked before anything is measured.
    file, claims = _choose_claims(arguments)
    claim_answers = _answer_claims(file, claims, arguments, observer)
    # 2. Return the exit code of the worst answer. The whole catalogue always ends with 0, because many of its sentences
    # are wrong.
    exit_code = EXIT_OK if is_catalogue_requested else _exit_code(claim_answer.answer for claim_answer in claim_answers)
    values = [claim_answer.as_value() for claim_answer in claim_answers]
    page = partial(render_claim_answer, claim_answers[0])
    if len(claim_answers) > 1:
        file_name = arguments.what[0] if arguments.what and arguments.what[0].endswith(".toml") else ""
        page = partial(render_answers, claim_answers, file_name)
    return CommandResult(claim_answers, page, lambda: values, code=exit_code)


def _exit_code(outcomes: Iterable[ClaimOutcome | AnswerCheckOutcome]) -> int:
    distinct_outcomes = set(outcomes)
    if distinct_outcomes & {ClaimOutcome.REFUTED, AnswerCheckOutcome.ANSWER_FAILS}:
        return EXIT_REGRESSION
    return EXIT_BASELINE if distinct_outcomes & {ClaimOutcome.CANNOT_TELL, AnswerCheckOutcome.CANNOT_JUDGE} else EXIT_OK


def _answer_claims(
    file: ClaimsFile, claims: Sequence[Claim], arguments: argparse.Namespace, observer: JobObserver
) -> list[ClaimAnswer]:
    from fp8bench.features.claim.decide import decide_claim_answer
    from fp8bench.features.claim.folder import refuse_existing_answers, write_folder
    from fp8bench.features.claim.runs import ClaimRunSource, iterate_measured_claims

    if arguments.keep is not None:
        refuse_existing_answers(arguments.keep)
    run_requests = parse_claim_run_requests(file)
    source = ClaimRunSource(
        arguments.store, run_requests, arguments.device, observer, partial(_watch_training, observer)
    )
    source.announce_measurements(iterate_measured_claims(claims, file.claims))
    claim_answers = [decide_claim_answer(claim, file.claims, source) for claim in claims]
    if arguments.keep is not None:
        write_folder(arguments.keep, file, claim_answers, source.runs_by_claim)
        observer.note(f"claims, answers and runs are in {arguments.keep}; `fp8bench claim check {arguments.keep}`")
    return claim_answers


def _watch_training(observer: JobObserver) -> AbstractContextManager[TrainingObserver]:
    from fp8bench.features.train.progress import observe_on_terminal

    return observe_on_terminal() if observer is TERMINAL_JOB_OBSERVER else nullcontext(TrainingObserver())


def _check_stored_answers(arguments: argparse.Namespace) -> CommandResult:
    from fp8bench.features.claim.folder import check_folder

    if len(arguments.what) != 2 or arguments.all or arguments.published or arguments.keep:
        raise UsageError("claim check takes one folder that --keep FOLDER has written. Give `claim check FOLDER`.")
    folder = arguments.what[1]
    checked_answers = check_folder(Path(folder), parse_claim_run_requests)
    exit_code = _exit_code(answer.standing for answer in checked_answers)
    return CommandResult(
        checked_answers,
        partial(render_checked_answers, folder, checked_answers),
        partial(encode, checked_answers),
        code=exit_code,
    )


def _choose_claims(arguments: argparse.Namespace) -> tuple[ClaimsFile, list[Claim]]:
    """Returns a claims file, and the claims in it to answer. The file also has the claims that are parts of these."""
    names: list[str] = arguments.what
    catalogue = load_bundled_claims()
    if arguments.all or arguments.published:
        # --published selects the rows with a published figure, and --all the remaining rows.
        return catalogue, [row for row in catalogue.claims.values() if row.published == arguments.published]
    # 1. For a claims file, return all of its claims, or the named ones.
    if names[0].endswith(".toml"):
        file = load_claims_file(Path(names[0]))
        for name in names[1:]:
            if name not in file.claims:
                raise UnknownName(f"claim of {names[0]}", name, file.claims)
        return file, [file.claims[name] for name in names[1:] or file.claims]
    # 2. Otherwise, find the claims in the catalogue by id or by sentence.
    sentences: dict[str, Claim] = {}
    for row in catalogue.claims.values():
        sentences |= dict.fromkeys(map(_normalize_words, (row.id, row.sentence, *row.also)), row)
    return catalogue, [
        sentences.get(_normalize_words(name)) or _refuse_unknown_claim(name, catalogue) for name in names
    ]


def _normalize_words(sentence: str) -> str:
    return " ".join(re.findall(r"[\w.%]+", sentence.lower())).rstrip(".")


def _refuse_unknown_claim(name: str, catalogue: ClaimsFile) -> Claim:
    """Raises an error for an id or sentence that the catalogue does not have. For a sentence, the message lists the
    most similar claims of the catalogue.
    """
    requested_name_words = set(_normalize_words(name).split())

    def count_shared_words(row: Claim) -> float:
        return max(
            len(requested_name_words & set(_normalize_words(text).split())) for text in (row.sentence, *row.also)
        )

    if " " not in name.strip():
        raise UnknownName(
            "claim", name, catalogue.claims, "`fp8bench claim` lists all; the name of a file ends in .toml"
        )
    most_similar_claims = sorted(catalogue.claims.values(), key=count_shared_words, reverse=True)[:3]
    lines = "".join(f"\n  {row.id}: {row.sentence}" for row in most_similar_claims)
    raise UsageError(
        f"the catalogue does not have the sentence {name!r:.120}. Write it as a row of a claims file (docs/claims.md "
        f"has one to copy), or ask for one of the nearest by its id:{lines}"
    )


def parse_claim_run_requests(file: ClaimsFile) -> dict[str, RunRequest]:
    """Returns the run request of every measured claim in a file, by the text of its `run` key. Raises UsageError for
    a run that this version cannot measure."""
    for row in file.claims.values():
        for part in row.parts:
            subject = f"{file.name}, {row.id}: the part {part!r:.80}"
            if part not in file.claims or file.claims[part].kind is ClaimKind.ALL_OF:
                raise UsageError(f"{subject} is not a measured or arithmetic claim of the same file.")
            if file.claims[part].published:
                raise UsageError(f"{subject} compares a published figure, which is neither true nor false. Remove it.")
    rows_by_run = {row.run: row for row in file.claims.values() if row.kind is ClaimKind.MEASURED_FIGURE}
    return {run: _parse_run_text(f"{file.name}, {row.id}", run) for run, row in rows_by_run.items()}


def _parse_run_text(location: str, run_text: str) -> RunRequest:
    try:
        # 1. Split the text as a shell does.
        command_words = shlex.split(run_text)
    except ValueError as error:
        raise UsageError(f"{location}: run {run_text!r:.120} cannot be read ({error}).") from None
    # 2. Refuse other commands, and options that a claim must not have.
    if not command_words or command_words[0] not in ("suite", "train"):
        raise UsageError(f"{location}: run {run_text!r:.120} must start with suite or train, as on the command line.")
    for word in command_words:
        if word.partition("=")[0] in _REFUSED_OPTIONS or (command_words[0] == "suite" and word.endswith(".py")):
            raise UsageError(
                f"{location}: `run` cannot have {word}: the row's `device` selects a device, and claims are about "
                "suites that come with fp8bench. Remove it."
            )
    try:
        # 3. Parse the words as on the command line, which also checks them.
        arguments = parse_command_words(build_parser([command_words[0]]), command_words)
        if command_words[0] == "train":
            return cast("RunRequest", import_command_module("train").request_from(arguments))
        if arguments.suite is None:
            raise UsageError("the name of the suite is missing. Write `suite NAME`.")
        request = replace(make_request(arguments), devices=())
        check_request(request)
        return request
    except UsageError as error:
        raise UsageError(f"{location}: run {run_text!r:.200}: {error}") from None
