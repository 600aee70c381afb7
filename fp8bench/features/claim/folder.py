"""Reads and writes a folder of answers: the claims file, the answers, and copies of their runs. Anybody can check the
answers offline.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from fp8bench import __version__
from fp8bench.errors import Fp8benchError, StoreError, UsageError
from fp8bench.features.claim.decide import decide_claim_answer
from fp8bench.features.claim.rows import ClaimsFile, load_claims_file
from fp8bench.features.claim.runs import RunRequest, StoredRun, get_run_id, iterate_measured_claims, without_device
from fp8bench.features.claim.values import (
    AnswerCheckOutcome,
    CannotDecide,
    CheckedAnswer,
    Claim,
    ClaimAnswer,
    ClaimOutcome,
)
from fp8bench.features.train.kind import load_training
from fp8bench.files import (
    DamagedFileError,
    add_checksum,
    convert_write_errors,
    parse_json,
    read_file,
    remove_checksum,
    write_whole,
)
from fp8bench.model.codec import decode, encode
from fp8bench.store.runs.run_file import load_run

_CLAIMS_FILE, _ANSWERS_FILE, _RUNS_FOLDER = "claims.toml", "answers.json", "runs"
_SCHEMA_VERSION = 1
# Larger files are refused: fp8bench does not write them, and reading them takes too long.
_MAX_ANSWERS_BYTES = 64 << 20
_MAX_RUN_BYTES = 256 << 20


def refuse_existing_answers(folder: Path) -> None:
    """Raises UsageError if the folder already has answers, before anything is measured."""
    if (folder / _ANSWERS_FILE).exists():
        raise UsageError(f"{folder} already has answers, and files are never overwritten. Give another folder.")


def write_folder(
    folder: Path, claims: ClaimsFile, answers: Sequence[ClaimAnswer], runs_by_claim: Mapping[str, StoredRun]
) -> None:
    """Writes claims, answers and copies of their runs into a new folder. `runs_by_claim` maps the ids of claims to
    runs."""
    with convert_write_errors(folder, "Choose another --keep FOLDER."):
        (folder / _RUNS_FOLDER).mkdir(parents=True, exist_ok=True)
        digest_by_run = {}
        for run in runs_by_claim.values():
            path = folder / _RUNS_FOLDER / f"{get_run_id(run)}.jsonl"
            shutil.copyfile(run.path, path)
            digest_by_run[get_run_id(run)] = _compute_digest(path)
        content = {
            "schema": _SCHEMA_VERSION,
            "fp8bench": __version__,
            "answers": [_encode_claim_answer(answer, claims) for answer in answers],
            "runs_by_claim": {claim: get_run_id(run) for claim, run in runs_by_claim.items()},
            "digests": digest_by_run,
        }
        write_whole(folder / _CLAIMS_FILE, claims.text)
        write_whole(folder / _ANSWERS_FILE, json.dumps(add_checksum(content), indent=1) + "\n")


@dataclass(frozen=True)
class StoredClaimAnswer:
    """An answer read from answers.json, with the rows of its claim and of the claim's parts at the time of the
    answer.
    """

    row: Claim
    answer: ClaimOutcome
    value: float | None
    low: float | None
    high: float | None
    runs: tuple[str, ...]
    part_rows: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class StoredClaimAnswers:
    """The content of answers.json: the answers to the claims of a folder, the id of the run for each claim, and the
    digest of each run's file by the id of the run.
    """

    schema: int
    answers: tuple[StoredClaimAnswer, ...]
    runs_by_claim: Mapping[str, str]
    digests: Mapping[str, str]


def _encode_claim_answer(answer: ClaimAnswer, claims: ClaimsFile) -> dict[str, Any]:
    part_claims = [claims.claims[part] for part in answer.claim.parts]
    return {"row": encode(answer.claim), "part_rows": encode(part_claims), **answer.as_value()}


def check_folder(
    folder: Path, parse_questions: Callable[[ClaimsFile], Mapping[str, RunRequest]]
) -> list[CheckedAnswer]:
    """Computes every stored answer of a folder again, from the row of its claim and from its runs. Compares each with
    the stored answer.
    """
    claims = load_claims_file(folder / _CLAIMS_FILE)
    content = read_answers(folder)
    source = _StoredRuns(folder, content.runs_by_claim, content.digests, parse_questions(claims))
    checked_answers = []
    for stored in content.answers:
        try:
            answer_standing, why = _check_stored_answer(stored, claims, source)
        except Fp8benchError as error:
            answer_standing = AnswerCheckOutcome.ANSWER_FAILS
            why = str(error)
        checked_answers.append(CheckedAnswer(stored.row.id, stored.row.sentence, answer_standing, why))
    return checked_answers


def read_answers(folder: Path) -> StoredClaimAnswers:
    """Reads answers.json. Raises StoreError if the file changed after it was written."""
    path = folder / _ANSWERS_FILE
    try:
        content = parse_json(read_file(path, _MAX_ANSWERS_BYTES))
        if content["schema"] != _SCHEMA_VERSION:
            raise StoreError(f"{path} was written by another version of fp8bench. Check it with that version.")
        content_without_checksum = remove_checksum(content)
        if add_checksum(content_without_checksum) == content:
            return decode(StoredClaimAnswers, content_without_checksum)
        reason = "its checksum is missing"
    except DamagedFileError as error:
        reason = str(error)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}). `fp8bench claim ... --keep {folder}` writes it."
        ) from None
    except (ValueError, LookupError, TypeError):
        reason = "it is not a list of answers"
    raise StoreError(
        f"{path} has changed since it was written ({reason}): the answers were edited, or the file is damaged."
    )


def _check_stored_answer(
    stored: StoredClaimAnswer, claims: ClaimsFile, source: _StoredRuns
) -> tuple[AnswerCheckOutcome, str]:
    # 1. The claim and its parts must be unchanged since the answer.
    for row in (stored.row, *stored.part_rows):
        if difference := _describe_claim_edit(row, claims.claims.get(row.id)):
            part_claim_prefix = f"its part {row.id}: " if row is not stored.row else ""
            return AnswerCheckOutcome.ANSWER_FAILS, part_claim_prefix + difference
    # 2. The files of the answer's runs must exist and be unchanged. A claim that needed a run, but was not measured,
    # cannot be judged.
    for run in stored.runs:
        if change := source.describe_run_file_change(run):
            return AnswerCheckOutcome.ANSWER_FAILS, change
        if not source.find_run_path(run).exists():
            return AnswerCheckOutcome.CANNOT_JUDGE, f"the run {run} is not in the folder"
    claim = claims.claims[stored.row.id]
    if (
        stored.answer is ClaimOutcome.CANNOT_TELL
        and not stored.runs
        and any(iterate_measured_claims([claim], claims.claims))
    ):
        return AnswerCheckOutcome.CANNOT_JUDGE, "the claim was not measured"
    # 3. The answer must be the same when it is computed again from the runs in the folder.
    recomputed_answer = decide_claim_answer(claim, claims.claims, source)
    for name in ("answer", "value", "low", "high", "runs"):
        current_value = getattr(recomputed_answer, name)
        stored_value = getattr(stored, name)
        if current_value != stored_value:
            return (
                AnswerCheckOutcome.ANSWER_FAILS,
                f"{name} is {current_value} when computed again, but {stored_value} is stored",
            )
    return AnswerCheckOutcome.ANSWER_HOLDS, "computed again with the same result, bit for bit"


def _describe_claim_edit(answered_row: Claim, current_row: Claim | None) -> str:
    """Returns how the row of a claim was edited after it was answered; '' if it is unchanged."""
    if current_row is None:
        return f"its row is missing in {_CLAIMS_FILE}"
    for claim_field in fields(Claim):
        value_when_answered = encode(getattr(answered_row, claim_field.name))
        current_value = encode(getattr(current_row, claim_field.name))
        if value_when_answered != current_value:
            return (
                f"{claim_field.name} is {current_value} in {_CLAIMS_FILE}, but was {value_when_answered} when answered"
            )
    return ""


@dataclass(frozen=True)
class _StoredRuns:
    """Takes the run of each claim from the folder, so that nothing is measured."""

    folder: Path
    runs_by_claim: Mapping[str, str]
    digests: Mapping[str, str]
    questions: Mapping[str, RunRequest]
    _loaded_runs: dict[str, StoredRun] = field(default_factory=dict)

    def find_run_path(self, run: str) -> Path:
        # `.name` drops folders from the id, so that the path stays in this folder.
        return self.folder / _RUNS_FOLDER / f"{Path(run).name}.jsonl"

    def __call__(self, claim: Claim) -> StoredRun:
        """Returns the stored run of a measured claim. Raises StoreError if the run was measured by a different
        command."""
        if claim.id not in self.runs_by_claim:
            raise CannotDecide("the folder has no run of this claim")
        run_id = self.runs_by_claim[claim.id]
        if run_id not in self._loaded_runs:
            self._loaded_runs[run_id] = load_stored_run(self.find_run_path(run_id))
        run = self._loaded_runs[run_id]
        if without_device(run.request) != self.questions[claim.run]:
            raise StoreError(f"the run {run_id} was not measured by `{claim.run}`.")
        return run

    def describe_run_file_change(self, run: str) -> str:
        """Returns how the file of a run changed after the answer was made. Returns '' if it did not change or does
        not exist.
        """
        path = self.find_run_path(run)
        try:
            if self.digests.get(run) == _compute_digest(path):
                return ""
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{path.name}: it cannot be read ({error.strerror})"
        return (
            f"{path.name}: {'; '.join(_find_troubles(run, path)) or 'its bytes have changed since the answer was made'}"
        )


def _find_troubles(run_id: str, path: Path) -> Iterator[str]:
    """Yields what is wrong with the file of a run that has changed: it may hold a different run, broken lines, or too
    few lines.
    """
    try:
        run = load_stored_run(path)
    except StoreError as error:
        yield f"it cannot be read ({error})"
        return
    if get_run_id(run) != run_id:
        yield f"it holds the run {get_run_id(run)}, so runs were exchanged"
    yield from run.troubles


def load_stored_run(path: Path) -> StoredRun:
    """Reads a file that holds a run or a training."""
    try:
        first_line = read_file(path, _MAX_RUN_BYTES).partition(b"\n")[0]
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}).") from None
    # Only the first line of a training has this key.
    return load_training(path) if b'"training":' in first_line else load_run(path)


def _compute_digest(path: Path) -> str:
    return sha256(read_file(path, _MAX_RUN_BYTES)).hexdigest()
