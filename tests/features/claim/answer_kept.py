"""Answers the claims of the folders in reports/ again from their kept runs, and writes the table of docs/claims.md.

Run it after a change of the catalogue or of a figure's definition: `python -m tests.features.claim.answer_kept`
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fp8bench.cli.progress import SILENT
from fp8bench.features.claim.command import parse_claim_run_requests
from fp8bench.features.claim.decide import decide_claim_answer
from fp8bench.features.claim.folder import StoredClaimAnswer, load_stored_run, read_answers, write_folder
from fp8bench.features.claim.rows import ClaimsFile, load_bundled_claims, load_claims_file
from fp8bench.features.claim.runs import ClaimRunSource, StoredRun, without_device
from fp8bench.features.claim.values import Claim, ClaimAnswer
from fp8bench.features.claim.view import format_figure
from fp8bench.features.train.values import TrainingObserver
from tests.commands import ROOT

CPU = ROOT / "reports" / "claims_cpu"
H200 = ROOT / "reports" / "gpu_h200_202611"
PAGE = ROOT / "docs" / "claims.md"
HEADING = "|sentence|source|answer|figure|\n|---|---|---|---|\n"


def answer_again(folder: Path, file: ClaimsFile, claims: Sequence[Claim]) -> list[ClaimAnswer]:
    """Answers claims from the folder's runs, which are found by their requests, and replaces its answers."""
    questions = parse_claim_run_requests(file)
    stored = [load_stored_run(path) for path in sorted((folder / "runs").glob("*.jsonl"))]
    without_gpu = ClaimRunSource(folder, questions, "cpu", SILENT, TrainingObserver)  # type: ignore[arg-type]
    runs = {}

    def find_run(claim: Claim) -> StoredRun:
        for run in stored:
            if without_device(run.request) == questions[claim.run]:
                return runs.setdefault(claim.id, run)
        return without_gpu(claim)  # raises NotHere, as on the machine without a GPU that answered it

    answers = [decide_claim_answer(claim, file.claims, find_run) for claim in claims]
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), file, answers, runs)
        for path in Path(name).glob("*.*"):
            shutil.copyfile(path, folder / path.name)
    return answers


def unpublished(file: ClaimsFile) -> list[Claim]:
    return [claim for claim in file.claims.values() if not claim.published]


def table_of(answers: Sequence[StoredClaimAnswer]) -> str:
    """Returns the table of docs/claims.md, and the addresses of its sources."""
    text = HEADING
    sources = {}
    for answer in answers:
        claim = answer.row
        figure = "-" if answer.value is None else format_figure(answer.value, claim.unit)
        text += f"|{claim.sentence}|[{claim.source.key}]|{answer.answer}|{figure}|\n"
        sources[claim.source.key] = claim.source.address.removeprefix("docs/")
    return text + "\n" + "".join(f"[{key}]: {address}\n" for key, address in sources.items())


if __name__ == "__main__":
    answer_again(H200, (h200 := load_claims_file(H200 / "claims.toml")), list(h200.claims.values()))
    answer_again(CPU, (catalogue := load_bundled_claims()), unpublished(catalogue))
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(HEADING)] + table_of(read_answers(CPU).answers))
