"""Prints stored runs, trainings, duels, fleets and values, and compares words, figures and pages with stored documents.

All was measured once, in slots of microseconds, by the commands that the files name. `stores/gpu`, `stores/history` and
the training 8964265c stand in for a GPU, many commits and six seeds; the duel d8d9cff0 was killed. Read each
difference. After a deliberate change `python -m tests.golden.test_golden [NAME ...]` rewrites the named documents, by
default all and those of tests/told_before.py, and prints each change once with its documents
(tests/golden/documents.py).
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fp8bench
from fp8bench.analysis import stats
from fp8bench.analysis.tapes import CaseTape
from fp8bench.cli.main import build_parser, main, subparsers_by_name
from fp8bench.features.audit.values import AuditReport
from fp8bench.features.sensitivity.study import SensitivityStudy
from fp8bench.jobs.tape import read_tapes
from fp8bench.model import DeviceFacts
from fp8bench.model.codec import decode
from fp8bench.model.promises import ModeConformity
from fp8bench.store.runs.run_file import load_run
from tests.facts import CPU, H200
from tests.golden.documents import changes, load, save
from tests.golden.normal_forms import normal, of_files, of_frame
from tests.told_before import MADE, find_made_tests
from tests.trainings import FakeLab

HERE = Path(__file__).resolve().parent
STORES, VALUES, TEXTS, OWN = HERE / "stores", HERE / "values", HERE / "texts", HERE / "own"
AGAIN = "python -m tests.golden.test_golden"


@dataclass(frozen=True)
class Document:
    """Words of a command that prints the document or writes a file of its name; `&&` separates commands.

    `frame` creates one from the Python interface. `value` is a stored measurement that replaces measuring. The working
    directory has a copy of a store, the terminal `width` columns.
    """

    words: str
    store: str = "runs"
    value: str = ""
    width: int = 100


RUNS = {
    "gemm": "8b215bef", "transformer": "4ab2f1d9", "numerics": "e35e6c3d", "attention": "e12db2de",
    "optimizer": "41840d37", "cold": "b3603db3", "grid": "f410f5d8", "static": "f05aca8f", "sweep": "7ba197f1",
    "failing": "828ea02c", "interrupted": "b818081e", "sustained": "14325fab", "collectives": "691ae371",
    "collective": "b3f6e72b", "parallel": "503e8537", "profile": "9f3fa731", "batches": "4e2f5c23",
    "ceilings": "88120f05", "suites": "91f72032",
}  # fmt: skip
ON_GPU = {"gpu": "9a000001", "gpu-sweep": "9a000002", "gpu-clean": "9a000003"}
TRAININGS = {
    "training": "1199c4a7",
    "ranks-training": "48643ba9",
    "judged-training": "8964265c",
    "cut-training": "9f004d9f",
}
DUELS = {"duel": "d8d9759e", "quick-duel": "ad2e50fa", "cut-duel": "d8d9cff0"}
AUDITS = ("pass", "fail", "model", "layers")
SERIES = "'gemm.Gemm.track_time(bf16, 512)'"
# Every run and training in these views; some also in others, which have the same fields for all runs.
FORMATS = {".txt": "show {id}", ".md": "report {id} --md {name}", ".csv": "show {id} --csv -"}
IN_JSON = ("gemm", "failing", "collective", "gpu-clean", "judged-training", "cut-training", "quick-duel")


def _of_runs() -> Iterator[tuple[str, Document]]:
    for store, kept in (("runs", RUNS), ("gpu", ON_GPU), ("runs", TRAININGS)):
        for name, key in kept.items():
            for ending, words in FORMATS.items():
                yield name + ending, Document(words.format(id=key, name=name + ending), store)
    for name, key in DUELS.items():
        yield f"{name}.txt", Document(f"show {key}")
    for name, key in (RUNS | ON_GPU | TRAININGS | DUELS).items():
        store = "gpu" if name in ON_GPU else "runs"
        if name in IN_JSON:
            yield f"{name}.json", Document(f"show {key} --json", store)
        if name in RUNS | ON_GPU:
            yield f"{name}-all.txt", Document(f"show {key} --all", store)


def _of_helps() -> Iterator[tuple[str, Document]]:
    yield "help.txt", Document("--help")
    for name, command in subparsers_by_name(build_parser()).items():
        yield f"help-{name}.txt", Document(f"{name} --help{'-all' if command.first_options else ''}")
        for command_name in subparsers_by_name(command):
            yield f"help-{name}-{command_name}.txt", Document(f"{name} {command_name} --help")


def _of_audits() -> Iterator[tuple[str, Document]]:
    for name in AUDITS:
        value = f"audit-{name}"
        yield f"{value}.txt", Document("audit net.py:make --explain", value=value)
        yield f"{value}.json", Document("audit net.py:make --json", value=value)
        yield f"{value}.md", Document(f"audit net.py:make --md {value}.md", value=value)


# Runs of earlier versions, whose requests lack later fields: gemm at two commits, one with failed cases, and that of
# reports/sample.
OLD, NEW, FAILING, SAMPLE = "97a62823", "c1fdadfa", "de0b9da3", "a95c7ff0"
_STORED = {
    "old.txt": f"show {OLD}", "old.csv": f"show {OLD} --csv -", "old.json": f"show {OLD} --json",
    "failing.txt": f"show {FAILING}", "failing-all.txt": f"show {FAILING} --all",
    "failing.csv": f"show {FAILING} --csv -", "sample.txt": f"show {SAMPLE}", "sample-all.txt": f"show {SAMPLE} --all",
    "resumed.txt": f"suite --resume {SAMPLE}", "compared.txt": f"compare {OLD} {NEW}",
    "compared.csv": f"compare {OLD} {NEW} --csv -", "compared.md": f"compare {OLD} {NEW} --md stored-compared.md",
    "gate.txt": f"gate {OLD} {NEW} --no-rerun", "gate.xml": f"gate {OLD} {NEW} --no-rerun --junit stored-gate.xml",
    "runs.txt": "history list --runs", "series.txt": "history list", "one-series.txt": f"history show {SERIES}",
    "rebuilt.txt": "history rebuild",
    **{f"asv-{commit}.json": f"history rebuild && cp .fp8bench/asv/*/box/{commit}-*.json stored-asv-{commit}.json"
       for commit in ("359f21c3", "7eccd2d9")},
    **{f"{name}.md": f"report {run} --md stored-{name}.md"
       for name, run in (("old", OLD), ("failing", FAILING), ("sample", SAMPLE))},
}  # fmt: skip
STORED = {f"stored-{name}": Document(words, "stored") for name, words in _STORED.items()}
DOCUMENTS = dict(_of_runs()) | dict(_of_helps()) | dict(_of_audits()) | STORED | {
    # Other views of runs.
    "gemm-60.txt": Document("show 8b215bef --all", width=60),
    "gpu-60.txt": Document("show 9a000001 --all --explain", "gpu", width=60),
    "gpu-answer-60.txt": Document("show 9a000001 --explain", "gpu", width=60),
    **{f"gemm-{part}.txt": Document(f"show 8b215bef --{part}") for part in ("memory", "data", "numbers", "notes")},
    "gpu-energy.txt": Document("show 9a000001 --energy", "gpu"),
    "gemm-energy.txt": Document("show 8b215bef --energy"),
    "gemm-explained.txt": Document("show 8b215bef --all --explain"),
    "training-60.txt": Document("show 1199c4a7 --explain", width=60),
    "duel-explained.txt": Document("show d8d9759e --explain"),
    "two.md": Document("report 8b215bef 41840d37 --md two.md"),
    "transformer-tape.txt": Document("show 4ab2f1d9 --tape --explain"),
    "transformer-tape.csv": Document("show 4ab2f1d9 --tape --csv -"),
    "transformer-tape.json": Document("show 4ab2f1d9 --tape --json"),
    "gpu-tape.txt": Document("show 9a000001 --tape", "gpu"),
    "transformer-shares.txt": Document("show 4ab2f1d9 --shares"),
    "transformer-shares.csv": Document("show 4ab2f1d9 --shares --csv -"),
    "profile-shares.txt": Document("show 9f3fa731 --shares --explain"),
    "gpu-shares.txt": Document("show 9a000001 --shares", "gpu"),
    "gpu-shares.json": Document("show 9a000001 --shares --json", "gpu"),
    "gpu-boards.txt": Document("show 9a000001 --log tensorboard:boards && files boards", "gpu"),
    "training-boards.txt": Document("show 8964265c --log tensorboard:boards && files boards"),
    # Comparisons of two or many runs, and plans.
    "compared.txt": Document("compare 8b215bef b818081e --explain"),
    "compared.csv": Document("compare 8b215bef b818081e --csv -"),
    "compared.json": Document("compare 8b215bef b818081e --json"),
    "compared.md": Document("compare 8b215bef b818081e --md compared.md"),
    "compared-nothing.txt": Document("compare 8b215bef 41840d37"),
    "compared-trainings.txt": Document("compare 1199c4a7 9f004d9f"),
    "failed-training.txt": Document("train --resume 8964265c --fail-on worse,inconclusive,alarm"),
    "compared-commits.txt": Document("compare 0000000b 0000000c", "history"),
    "gate.txt": Document("gate 8b215bef b818081e --no-rerun --explain"),
    "gate-commits.txt": Document("gate 0000000b 0000000c --no-rerun", "history"),
    "gate-commits.md": Document("gate 0000000b 0000000c --no-rerun --md gate-commits.md", "history"),
    "gate-commits.xml": Document("gate 0000000b 0000000c --no-rerun --junit gate-commits.xml", "history"),
    "gate-thresholds.txt": Document("gate 0000000b 0000000c --no-rerun --thresholds thresholds.yaml", "history"),
    "gate-duel.txt": Document("gate --duel d8d9759e --no-rerun --explain"),
    "gate-duel.xml": Document("gate --duel d8d9759e --no-rerun --junit gate-duel.xml"),
    "gate-cut-duel.txt": Document("gate --duel d8d9cff0 --no-rerun"),
    "gate-quick-duel.md": Document("gate --duel ad2e50fa --no-rerun --md gate-quick-duel.md"),
    "gate-history.txt": Document("gate --history --no-rerun --explain", "history"),
    "gate-history.xml": Document("gate --history --no-rerun --junit gate-history.xml", "history"),
    "advice.txt": Document("advise 9a000001 --explain", "gpu"),
    "advice.md": Document("advise 9a000001 --md advice.md", "gpu"),
    "advice.json": Document("advise 9a000001 --json", "gpu"),
    "advice-training.txt": Document("advise 4ab2f1d9 --training 1199c4a7 --least 5"),
    "advice-profile.txt": Document("advise 9f3fa731"),
    "advice-profile-all.txt": Document("advise 9f3fa731 --all"),
    "advice-all.txt": Document("advise 9a000001 --all", "gpu"),
    "advice-map.txt": Document("advise 9f3fa731 --write-map map.txt"),
    # A store's history.
    "runs.txt": Document("history list --runs"),
    "series.txt": Document("history list --explain", "history"),
    "series.md": Document("history list bf16 --md series.md", "history"),
    "one-series.txt": Document(f"history show {SERIES} --explain", "history"),
    "one-series.md": Document(f"history show {SERIES} --md one-series.md", "history"),
    "regressions.txt": Document("history regressions --all --explain", "history"),
    "regressions.json": Document("history regressions --json", "history"),
    "regressions.md": Document("history regressions --md regressions.md", "history"),
    "acknowledged.txt": Document(
        f"history ack {SERIES} --because 'checks for NaN now' && history regressions --all && "
        f"history ack {SERIES} --undo && history regressions", "history"
    ),
    "verified.txt": Document("history verify", "history"),
    "verified-runs.txt": Document("history verify"),
    "rebuilt.txt": Document("history rebuild", "history"),
    "history.md": Document("report 00000640 --md history.md", "history"),
    # Fleets.
    "fleet-status.txt": Document("fleet status plan.json --explain", "fleet"),
    "fleet-status.json": Document("fleet status plan.json --json", "fleet"),
    "fleet.txt": Document("fleet report plan.json --machines alpha,beta,delta --explain", "fleet"),
    "fleet.csv": Document("fleet report .fp8bench --csv -", "fleet"),
    "fleet.json": Document("fleet report .fp8bench --json", "fleet"),
    "fleet.md": Document("fleet report .fp8bench --md fleet.md", "fleet"),
    # Commands that measure, with stored measurements.
    "conform.txt": Document("conform --explain", value="conform"),
    "conform-all.txt": Document("conform --all", value="conform"),
    "conform.json": Document("conform --json", value="conform"),
    "sensitivity.txt": Document("sensitivity --explain", value="sensitivity-kinds"),
    "sensitivity.csv": Document("sensitivity --csv -", value="sensitivity-kinds"),
    "sensitivity.json": Document("sensitivity --json", value="sensitivity-kinds"),
    "sensitivity-profile.txt": Document("sensitivity net.py:make", value="sensitivity-layers"),
    "plan.txt": Document("suite gemm,attention --dtypes bf16,fp8,mxfp8 --dry-run", value="devices"),
    "training-plan.txt": Document(
        "train --dtypes bf16,fp8-delayed --sweep history=1,16 --data text.txt --dry-run", value="lab"
    ),
    "tape.txt": Document("tape transformer --dtypes bf16,fp8 --explain", value="tape"),
    "doctor.txt": Document("doctor", value="doctor"),
    "list.txt": Document("list"),
    "list-suites.txt": Document("list suites"),
    "list-dtypes.txt": Document("list dtypes", value="devices"),
    "list-dtype.txt": Document("list dtypes fp8-delayed", value="devices"),
    "list-backends.txt": Document("list backends", value="devices"),
    "list-devices.txt": Document("list devices", value="devices"),
    "list-axes.txt": Document(
        "&& ".join(f"list {name} " for name in ("gemm", "transformer", "attention", "conv", "optimizer", "data")),
        value="devices",
    ),
    # Commands that do not measure.
    "lint.txt": Document("lint-shapes gpt2"),
    "lint.json": Document("lint-shapes gpt2 --dtypes fp8,mxfp8 --devices h100,b200 --json"),
    "parallel-plan.txt": Document(
        "plan-parallel llama3-8b --gpus 8 --topology h100.yaml --dtype fp8 --explain"
    ),
    "parallel-plan.csv": Document("plan-parallel llama3-8b --gpus 8 --topology h100.yaml --csv -"),
    "parallel-plan.json": Document("plan-parallel llama3-8b --gpus 2 --topology h100.yaml --json"),
    "refused.txt": Document(
        "suite nosuch && show nosuch && compare 8b215bef 8b215bef && gate && report 1199c4a7 8b215bef && "
        "show 8b215bef --shares && fleet status nosuch.json && advise && show last --josn"
    ),
    # The Python interface.
    "frame-results.txt": Document("frame load 4ab2f1d9 results"),
    "notebook.txt": Document("notebook 8b215bef"),
    "notebook-gpu.txt": Document("notebook 9a000001", "gpu"),
}  # fmt: skip


class Pretended:
    """A worker that knows two devices, and nothing else."""

    def __init__(self, *words: object, **more: object) -> None:
        pass

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def close(self) -> None:
        pass

    def software(self) -> dict[str, str]:
        return {"torch": CPU.torch}

    def with_time_limit(self, seconds: float) -> Pretended:
        return self

    def backend(self, name: str) -> str:
        return ""

    def probe(self) -> tuple[DeviceFacts, ...]:
        return CPU, H200


@contextlib.contextmanager
def answered(value: str) -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for place, answer in _answers(value):
            patches.enter_context(mock.patch(place, answer))
        yield


def _answers(value: str) -> Iterator[tuple[str, Callable[..., object] | type]]:
    kind = value.partition("-")[0]
    if kind == "devices":
        yield "fp8bench.jobs.doctor.ProcessWorker", Pretended
        yield "fp8bench.pipeline.ProcessWorker", Pretended
        return
    if kind == "lab":
        Path("text.txt").write_text("every token is a byte of this text. " * 4000)
        yield "fp8bench.features.train.run.ProcessWorker", lambda *words, **more: FakeLab()
        return
    if kind == "doctor":
        yield from _of_the_doctor()
        return
    if kind == "tape":
        known = read_tapes(load_run(next(Path(".fp8bench").rglob("*-4ab2f1d9.jsonl"))))
        yield "fp8bench.jobs.tape.record_tapes", lambda *words: [_shorter(taped) for taped in known]
        return
    if not kind:
        return
    plain = json.loads((VALUES / f"{value}.json").read_text())
    if kind == "sensitivity":
        study = decode(SensitivityStudy, plain)
        yield "fp8bench.features.sensitivity.job.run_study", lambda *words: study
        yield "fp8bench.features.sensitivity.job.store_study", lambda *words: study
        return
    facts = decode(DeviceFacts, plain["device"])
    if kind == "audit":
        audit = decode(AuditReport, plain["audit"])
        yield "fp8bench.features.audit.command.audit", lambda *words: (facts, audit)
    else:
        modes = [decode(ModeConformity, mode) for mode in plain["modes"]]
        yield "fp8bench.features.conform.command.compare_precisions", lambda *words: (facts, modes)


def _of_the_doctor() -> Iterator[tuple[str, Callable[..., object] | type]]:
    environment = load_run(next(Path(".fp8bench").rglob("*-8b215bef.jsonl"))).environment
    yield "fp8bench.jobs.doctor.ProcessWorker", Pretended
    yield "fp8bench.jobs.doctor.gather", lambda *words, **named: environment
    yield "fp8bench.jobs.doctor.open_meter", contextlib.nullcontext
    yield "fp8bench.jobs.doctor.format_device_lines", lambda meter: ["energy    none: nobody looked"]
    yield "fp8bench.jobs.doctor.describe_driver", lambda: "NVML says: there is no driver"
    # The units of this processor differ from those of the next.
    yield "fp8bench.jobs.device_units._describe_cpu", lambda cpuinfo: "AMX bf16, AVX512-BF16, AVX512-VNNI (int8)"


def _shorter(taped: CaseTape) -> CaseTape:
    """Without the first operators, as if a change had removed them."""
    return taped if taped.tape is None else replace(taped, tape=replace(taped.tape, operators=taped.tape.operators[3:]))


@contextlib.contextmanager
def a_place(folder: Path, document: Document) -> Iterator[None]:
    """A working directory outside any repository, with a copy of a store and no home."""
    if document.store != "none":
        shutil.copytree(STORES / document.store, folder / ".fp8bench")
    if document.store == "stored":
        sample = folder / ".fp8bench" / "runs" / "vm" / f"20261126T063842.925Z-08bd5754-{SAMPLE}.jsonl"
        sample.parent.mkdir()
        shutil.copy(HERE.parents[1] / "reports" / "sample" / "run.jsonl", sample)
    for path in folder.rglob("*.jsonl"):
        begun = re.match(r"(\d{8}T\d{6})", path.name)  # clocks of a shared store are compared by file times
        when = datetime.strptime(begun[1] if begun else "20261124T120000", "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
        os.utime(path, (when.timestamp() + 2, when.timestamp() + 2))
    for path in OWN.iterdir():
        shutil.copy(path, folder)
    facts = {
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "COLUMNS": str(document.width),
        "NO_COLOR": "1",
        "HOME": str(folder),
        "LANGUAGE": "C",
        "FP8BENCH_QUANTISERS": "eager",
        "FP8BENCH_CEILINGS": "off",
        "FP8BENCH_TAPE": "off",
        "FP8BENCH_WARM_UP": "off",
    }
    path = mock.patch.object(sys, "path", list(sys.path))
    with contextlib.chdir(folder), mock.patch.dict(os.environ, facts), path, answered(document.value):
        yield


def told(words: Sequence[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main(words)
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
    said = f"on stderr:\n{err.getvalue()}" if err.getvalue() else ""
    return out.getvalue() + said + (f"exit code {code}\n" if code else "")


def made(words: Sequence[str]) -> str:
    match words:
        case ["frame", function, source, name]:
            frame = getattr(getattr(fp8bench, function)(source), name)
            return of_frame(frame)
        case ["notebook", run]:
            found: Any = fp8bench.load(run)
            names = [f"{name}: {finding.verdict}" for name, finding in fp8bench.findings(found).items()]
            return "\n".join([found._repr_html_().replace("><", ">\n<"), *names, fp8bench.table(found)])
        case ["files", folder]:
            return of_files(Path(folder))
        case ["cp", source, name]:
            (path,) = Path().glob(source)
            shutil.copy(path, name)
            return ""
    return told(words)


def document_of(name: str) -> str:
    """The document as rendered now, in its stored form."""
    document = DOCUMENTS[name]
    with tempfile.TemporaryDirectory() as made_for_it, a_place(Path(made_for_it).resolve(), document):
        said = "".join(made(shlex.split(words)) for words in document.words.split("&&"))
        text = Path(name).read_text(encoding="utf-8") if Path(name).exists() else said
        return normal(name, text.replace(str(Path.cwd()), "HERE"))


_NEWER_HELP = sys.version_info >= (3, 13)  # argparse formats options differently


@functools.cache
def expected_in(file: str) -> dict[str, str]:
    return load(TEXTS / file)


def file_of(name: str) -> str:
    """Few files, so that a sentence in many documents changes few of them."""
    if name.startswith("help"):
        return "help.txt"
    if name.endswith((".csv", ".json", ".xml")) or re.match(r"frame-|.*-boards", name):
        return "data.txt"
    return "trainings.txt" if re.search("training|duel|histories", name) else "runs.txt"


@pytest.fixture(scope="module", autouse=True)
def _a_case_is_resampled_once() -> Iterator[None]:
    """Caches resampling: documents show the same few runs, of more cases than a command line caches."""
    with mock.patch.object(stats, "_resample_segments", functools.cache(stats._resample_segments.__wrapped__)):
        yield


# A page takes as long as ten tables, so only two runs have theirs by default.
SLOW = {f"{name}.md" for name in RUNS if name not in ("gemm", "failing")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in DOCUMENTS]
)
def test_documents_equal_the_stored_ones(name: str) -> None:
    if name.startswith("help") and _NEWER_HELP:
        pytest.skip("help is laid out by this Python's argparse; what is expected is that of 3.11 and 3.12")
    expected, now = expected_in(file_of(name)).get(name, ""), document_of(name)
    if now != expected:
        lines = difflib.unified_diff(expected.splitlines(), now.splitlines(), "expected", "now", lineterm="", n=1)
        pytest.fail("\n".join([f"{name} differs; read how. If all of it is wanted: {AGAIN} {name}", *lines]), False)


def test_every_document_is_stored_and_no_other() -> None:
    assert {path.name for path in TEXTS.iterdir()} == {*map(file_of, DOCUMENTS), MADE.name}
    for file in set(map(file_of, DOCUMENTS)):
        assert list(expected_in(file)) == [name for name in DOCUMENTS if file_of(name) == file], file


def expected_or_nothing(file: str) -> dict[str, str]:
    try:
        return load(TEXTS / file)
    except (KeyError, IndexError):  # its references lead nowhere: unresolved merge conflict
        return {}


def write_again(names: Sequence[str]) -> None:
    written = {name: document_of(name) for name in names or DOCUMENTS}
    for file in sorted(set(map(file_of, written))):
        before = expected_or_nothing(file)
        now = {name: written.get(name, before.get(name, "")) for name in DOCUMENTS if file_of(name) == file}
        save(TEXTS / file, now)
        print(changes(before, now), end="")
    if not names:
        before = load(MADE)
        MADE.unlink(missing_ok=True)
        environment = dict(os.environ, FP8BENCH_TOLD="write")
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *find_made_tests()]
        subprocess.run(command, env=environment, check=True)
        print(changes(before, load(MADE)), end="")


if __name__ == "__main__":
    write_again(sys.argv[1:])
