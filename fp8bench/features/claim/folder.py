"""A folder of answers: the claims file, the answers, and the runs behind them, which a stranger can check offline."""

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
from fp8bench.features.claim.decide import answer_claim
from fp8bench.features.claim.rows import ClaimsFile, load_claims
from fp8bench.features.claim.runs import NotHere, Question, StoredRun, measured_parts, without_device
from fp8bench.features.claim.values import Answer, CheckedAnswer, Claim, ClaimAnswer, Standing
from fp8bench.features.train.kind import load_training
from fp8bench.files import Damaged, keeping, read_file, seal, unseal, write_whole
from fp8bench.model import Run
from fp8bench.model.codec import decode, encode
from fp8bench.store.runs.run_file import load_run

_CLAIMS, _ANSWERS, _RUNS = "claims.toml", "answers.json", "runs"
_SCHEMA = 1
# fp8bench never writes larger files, and they take too long to read.
_LARGEST_ANSWERS = 64 << 20
_LARGEST_RUN = 256 << 20


def refuse_answers(folder: Path) -> None:
    """Raises UsageError for a folder that already has answers, before anything is measured."""
    if (folder / _ANSWERS).exists():
        raise UsageError(f"{folder} already has answers, and files are never overwritten. Give another folder.")


def write_folder(
    folder: Path, claims: ClaimsFile, answers: Sequence[ClaimAnswer], runs_by_claim: Mapping[str, StoredRun]
) -> None:
    """Writes claims, answers and copies of the runs into a new folder; `runs_by_claim` has the runs by id of claim."""
    with keeping(folder, "Choose another --keep FOLDER."):
        (folder / _RUNS).mkdir(parents=True, exist_ok=True)
        digests = {}
        for run in runs_by_claim.values():
            path = folder / _RUNS / f"{_id_of(run)}.jsonl"
            shutil.copyfile(run.path, path)
            digests[_id_of(run)] = _digest(path)
        content = {
            "schema": _SCHEMA,
            "fp8bench": __version__,
            "answers": [_stored_value(answer, claims) for answer in answers],
            "runs_by_claim": {claim: _id_of(run) for claim, run in runs_by_claim.items()},
            "digests": digests,
        }
        write_whole(folder / _CLAIMS, claims.text)
        write_whole(folder / _ANSWERS, json.dumps(seal(content), indent=1) + "\n")


@dataclass(frozen=True)
class StoredAnswer:
    """An answer as answers.json has it, with the rows of the claim and of its parts at that time."""

    row: Claim
    answer: Answer
    value: float | None
    low: float | None
    high: float | None
    runs: tuple[str, ...]
    part_rows: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class StoredAnswers:
    """The content of answers.json."""

    schema: int
    answers: tuple[StoredAnswer, ...]
    runs_by_claim: Mapping[str, str]
    digests: Mapping[str, str]


def _stored_value(answer: ClaimAnswer, claims: ClaimsFile) -> dict[str, Any]:
    parts = [claims.claims[part] for part in answer.claim.parts]
    return {"row": encode(answer.claim), "part_rows": encode(parts), **answer.as_value()}


def check_folder(folder: Path, find_questions: Callable[[ClaimsFile], Mapping[str, Question]]) -> list[CheckedAnswer]:
    """Computes every answer of a folder again from its row and its runs."""
    claims = load_claims(folder / _CLAIMS)
    content = read_answers(folder)
    source = _StoredRuns(folder, content.runs_by_claim, content.digests, find_questions(claims))
    checked = []
    for stored in content.answers:
        try:
            standing, why = _check_answer(stored, claims, source)
        except Fp8benchError as error:
            standing, why = Standing.FAILS, str(error)
        checked.append(CheckedAnswer(stored.row.id, stored.row.sentence, standing, why))
    return checked


def read_answers(folder: Path) -> StoredAnswers:
    """Reads answers.json. Raises StoreError if it has changed since it was written."""
    path = folder / _ANSWERS
    try:
        content = json.loads(read_file(path, _LARGEST_ANSWERS))
        if content["schema"] != _SCHEMA:
            raise StoreError(f"{path} was written by another version of fp8bench. Check it with that version.")
        plain = unseal(content)
        if seal(plain) == content:
            return decode(StoredAnswers, plain)
        reason = "its checksum is missing"
    except Damaged as error:
        reason = str(error)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}). `fp8bench claim ... --keep {folder}` writes it."
        ) from None
    except (ValueError, LookupError, TypeError, RecursionError):
        reason = "it does not have the form of answers"
    raise StoreError(f"{path} has changed since it was written ({reason}): answers were edited, or bytes flipped.")


def _check_answer(stored: StoredAnswer, claims: ClaimsFile, source: _StoredRuns) -> tuple[Standing, str]:
    # 1. The row is the one that was answered, and so are the rows of its parts.
    for row in (stored.row, *stored.part_rows):
        if difference := _describe_edit(row, claims.claims.get(row.id)):
            part = f"its part {row.id}: " if row is not stored.row else ""
            return Standing.FAILS, part + difference
    # 2. Its runs are there, unchanged. An answer without a run is computed from the row, unless a device was missing.
    for run in stored.runs:
        if trouble := source.why_changed(run):
            return Standing.FAILS, trouble
        if not source.path_of(run).exists():
            return Standing.UNKNOWN, f"the run {run} is not in the folder"
    claim = claims.claims[stored.row.id]
    if stored.answer is Answer.CANNOT_TELL and not stored.runs and any(measured_parts([claim], claims.claims)):
        return Standing.UNKNOWN, "no run was measured for it"
    # 3. The same answer follows from them.
    recomputed = answer_claim(claim, claims.claims, source)
    for name in ("answer", "value", "low", "high", "runs"):
        current, previous = getattr(recomputed, name), getattr(stored, name)
        if current != previous:
            return Standing.FAILS, f"{name} is {current} when computed again, and {previous} was stored"
    return Standing.HOLDS, "computed again, bit for bit"


def _describe_edit(answered: Claim, current: Claim | None) -> str:
    """Returns how a row differs from the one that was answered, '' if it does not."""
    if current is None:
        return f"its row is gone from {_CLAIMS}"
    for part in fields(Claim):
        before, now = encode(getattr(answered, part.name)), encode(getattr(current, part.name))
        if before != now:
            return f"{part.name} is {now} in {_CLAIMS}, and {before} was answered"
    return ""


@dataclass(frozen=True)
class _StoredRuns:
    """Gives the runs of a folder to claims, in place of measuring."""

    folder: Path
    runs_by_claim: Mapping[str, str]
    digests: Mapping[str, str]
    questions: Mapping[str, Question]
    _loaded: dict[str, StoredRun] = field(default_factory=dict)

    def path_of(self, run: str) -> Path:
        return self.folder / _RUNS / f"{Path(run).name}.jsonl"

    def __call__(self, claim: Claim) -> StoredRun:
        """Returns the run of a measured claim. Raises StoreError if a different command made it."""
        if claim.id not in self.runs_by_claim:
            raise NotHere("the folder has no run for it", "")
        run_id = self.runs_by_claim[claim.id]
        if run_id not in self._loaded:
            self._loaded[run_id] = load_stored(self.path_of(run_id))
        run = self._loaded[run_id]
        if without_device(run.request) != self.questions[claim.run]:
            raise StoreError(f"the run {run_id} is not one of `{claim.run}`.")
        return run

    def why_changed(self, run: str) -> str:
        """Returns what has happened to a run's file since it was answered from; '' for nothing, or without a file."""
        path = self.path_of(run)
        try:
            if self.digests.get(run) == _digest(path):
                return ""
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{path.name}: it cannot be read ({error.strerror})"
        return f"{path.name}: {'; '.join(_troubles(run, path)) or 'its bytes are not those that were answered from'}"


def _troubles(run_id: str, path: Path) -> Iterator[str]:
    """Yields what is wrong with a changed file: another run in its place, broken lines, and lines that are gone."""
    try:
        run = load_stored(path)
    except StoreError as error:
        yield f"it cannot be read ({error})"
        return
    if _id_of(run) != run_id:
        yield f"it holds the run {_id_of(run)}: runs were swapped"
    yield from run.troubles


def load_stored(path: Path) -> StoredRun:
    """Reads a run or a training, whichever the file holds."""
    try:
        first = read_file(path, _LARGEST_RUN).partition(b"\n")[0]
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}).") from None
    return load_training(path) if b'"training":' in first else load_run(path)


def _id_of(run: StoredRun) -> str:
    return run.id if isinstance(run, Run) else run.training.id


def _digest(path: Path) -> str:
    return sha256(read_file(path, _LARGEST_RUN)).hexdigest()
