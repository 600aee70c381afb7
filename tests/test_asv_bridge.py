"""asv's door, without asv: what a suite class is refused for, where its project lies, and what its readers give."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from asv import util

from fp8bench import asv_bridge
from fp8bench.asv_bridge import CaseFailed, find_project, find_store, parse_asv_options
from fp8bench.errors import Fp8benchError, ImportFailed, NotKept, UnknownName, UsageError
from fp8bench.jobs import asv as asv_measuring
from fp8bench.jobs.asv import measure_for_asv
from fp8bench.model import Environment, Record, Request, Run, Scalar, Status
from fp8bench.protocols import SilentObserver
from fp8bench.registry import workloads
from fp8bench.store.series import make_series
from tests.counts import for_each
from tests.facts import CPU
from tests.fakes import steady
from tests.kept import keep
from tests.own_suites import adding_up, forgotten
from tests.runs import NATIVE, case, error, run_of

ROOT = Path(__file__).resolve().parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MACHINE = {"asv_machine": "box", "asv_python": "/venv/bin/python3"}
GEMM = """
from fp8bench import asv_bridge

class Gemm(asv_bridge.Suite):
    workload = "gemm"

    def setup_cache(self):
        return self.measure()
"""
MINE = adding_up("mine", 10, history='Grid(cpu={"n": ("10",)}, gpu={"n": ("20",)}, dtypes=("bf16",))')


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty project. Registrations by its files are removed afterwards."""
    root = tmp_path / "project"
    (root / "sheds").mkdir(parents=True)
    (root / "sheds" / "__init__.py").touch()
    (root / "asv.conf.json").write_text("{}")
    monkeypatch.syspath_prepend(str(root))
    with forgotten(root):
        yield root


def suite(project: Path, content: str, name: str = "gemm") -> ModuleType:
    """Writes a suite file of that name and imports it as asv does."""
    path = project / "sheds" / Path(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    importlib.invalidate_caches()
    return importlib.import_module(f"sheds.{name}")


def test_a_suite_class_is_what_asv_looks_for(project: Path) -> None:
    made = suite(project, GEMM).Gemm
    series = make_series(workloads.get("gemm"), None)
    assert made.params == [list(values) for values in series[0].params]
    assert made.param_names == ["dtype", "shape"] and made.version == series[0].version
    tracks = {name: value for name, value in vars(made).items() if name.startswith("track_")}
    assert set(tracks) == {f"track_{tracked.metric}" for tracked in series}
    for tracked in series:
        track = tracks[f"track_{tracked.metric}"]
        assert (track.unit, track.__module__) == (tracked.unit, "sheds.gemm")
        assert (track.__name__, track.__qualname__) == (f"track_{tracked.metric}", f"Gemm.track_{tracked.metric}")


SHARED = "import sheds.shared\n" + GEMM.replace(
    "    def setup_cache(self):\n        return self.measure()\n", "    setup_cache = sheds.shared.setup_cache\n"
)
REFUSED: dict[str, tuple[str, str, type[Exception], str]] = {
    "another's cache": ("gemm", SHARED, UsageError, "gemm.Gemm does not define setup_cache in its own file"),
    "no function": ("gemm", GEMM[: GEMM.index("    def")] + "    setup_cache = 7", UsageError, "define setup_cache"),
    "no workload": ("gemm", GEMM.replace('workload = "gemm"', ""), UsageError, "Gemm names no workload. Write"),
    "a number": ("gemm", GEMM.replace('"gemm"', "7"), UsageError, "Gemm names no workload. Write workload = 'NAME'"),
    "unknown": ("gem", GEMM.replace("Gemm", "Gem").replace("gemm", "gem"), UnknownName, "Did you mean 'gemm'?"),
    "another file": ("products", GEMM, UsageError, "Call the file gemm.py and the class Gemm"),
    "another class": ("gemm", GEMM.replace("Gemm", "GEMM"), UsageError, "gemm.GEMM is of workload 'gemm': its runs"),
    "a file further down": ("more.gemm", GEMM, UsageError, "more.gemm.Gemm is of workload 'gemm'"),
    "hidden": ("_planted", GEMM.replace("Gemm", "Planted").replace("gemm", "_planted"), UsageError,
               "the suite '_planted' declares no grid with a history"),
    "no such import": ("gemm", GEMM.replace('"gemm"\n', '"gemm"\n    imports = ("mine.py",)\n'), ImportFailed,
                       "no such file"),
    "a grid that cannot be followed": (
        "mine", GEMM.replace("Gemm", "Mine").replace('"gemm"\n', '"mine"\n    imports = ("broken.py",)\n'), UsageError,
        "the grid that suite 'mine' declares cannot be tracked: its dtypes are none"),
}  # fmt: skip


def test_a_class_without_a_cache_is_given_one_of_its_file(project: Path) -> None:
    bare = GEMM[: GEMM.index("    def")]
    made = suite(project, bare).Gemm, suite(project, bare.replace("Gemm", "Mlp").replace("gemm", "mlp"), "mlp").Mlp
    caches = [vars(one)["setup_cache"] for one in made]
    assert [(cache.__module__, cache.__qualname__, cache.timeout) for cache in caches] == [
        ("sheds.gemm", "Gemm.setup_cache", 3600),
        ("sheds.mlp", "Mlp.setup_cache", 3600),
    ]


@pytest.mark.parametrize("reason", REFUSED)
def test_a_class_that_asv_would_misread_is_refused(reason: str, project: Path) -> None:
    name, content, kind, sentence = REFUSED[reason]
    (project / "sheds" / "shared.py").write_text("def setup_cache(self):\n    return self.measure()\n")
    (project / "broken.py").write_text(MINE.replace('("bf16",)', "()"))
    (project / "sheds" / "more").mkdir()
    (project / "sheds" / "more" / "__init__.py").touch()
    with pytest.raises(kind) as caught:
        suite(project, content, name)
    assert sentence in str(caught.value)


def test_a_class_between_cannot_hide_a_missing_cache(project: Path) -> None:
    """All classes that inherit a cache would get the first one's numbers."""
    middle = GEMM + "\n\nclass More(Gemm):\n    workload = 'gemm'\n"
    with pytest.raises(UsageError, match=r"gemm\.More is of workload 'gemm'"):
        suite(project, middle)
    again = "import sheds.gemm\n\nclass Gemm(sheds.gemm.Gemm):\n    pass\n"
    suite(project, GEMM)
    with pytest.raises(UsageError, match="Call the file"):
        suite(project, again, "gemm_again")


def test_a_users_own_workload_is_imported_from_the_projects_root(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (project / "my_work.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    content = GEMM.replace("Gemm", "Mine").replace('"gemm"\n', '"mine"\n    imports = ("my_work.py", "math")\n')
    made = suite(project, content, "mine").Mine
    assert made.params == [["bf16"], [10, 20]] and made.param_names == ["dtype", "n"]
    assert {name for name in vars(made) if name.startswith("track_")} == {
        "track_time",
        "track_mean_time",
        "track_relative_time",
        "track_relative_mean_time",
        "track_peak_memory",
        "track_energy",
        "track_flops",
        "track_moved_bytes",
        "track_launches",
    }
    assert asv_bridge._make_imports_absolute(made) == (str(project / "my_work.py"), "math")


CELL = ("bf16", "512")
MEASURED = {
    "gemm.Gemm.track_time": {CELL: ("samples", [1.0, 2.0]), ("fp32", "512"): ("failed", "out of memory")},
    "gemm.Gemm.track_relative_time": {CELL: ("none", "it is the reference")},
}


def test_readers_give_samples_or_nothing_or_fail(project: Path) -> None:
    """asv computes statistics from samples, and shows NaN as not applicable and an exception as failed."""
    gemm = suite(project, GEMM).Gemm()
    assert gemm.track_time(MEASURED, *CELL) == {"samples": [1.0, 2.0], "number": 1}
    assert math.isnan(gemm.track_relative_time(MEASURED, *CELL))
    assert math.isnan(gemm.track_time(MEASURED, "bf16", "4096"))
    with pytest.raises(CaseFailed, match="out of memory"):
        gemm.track_time(MEASURED, "fp32", "512")
    with pytest.raises(CaseFailed, match="product_error is not a finite number"):
        gemm.track_product_error({"gemm.Gemm.track_product_error": {CELL: ("samples", [math.inf])}}, *CELL)


def test_each_class_reads_and_measures_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def measured(*words: Any) -> dict[str, Any]:
        asked.append(words)
        return {}

    monkeypatch.setattr(asv_measuring, "measure_for_asv", measured)
    monkeypatch.setattr(asv_bridge, "read_asv_arguments", lambda: ("asv", "run", "-q", "--set-commit-hash", "HEAD"))
    (project / "asv.conf.json").write_text('{"results_dir": "kept/asv/results"}')
    mlp = GEMM.replace("Gemm", "Mlp").replace("gemm", "mlp")
    ranks = GEMM.replace("Gemm", "Collective").replace("gemm", "collective")
    made = (suite(project, GEMM).Gemm(), suite(project, mlp, "mlp").Mlp())
    for one in (*made, suite(project, ranks, "collective").Collective()):
        assert one.setup_cache() == {}
    sizes = {"gemm": None, "mlp": None, "collective": 2}
    for (request, store, root, _, *told), (name, size) in zip(asked, sizes.items(), strict=True):
        assert request == Request(name, quick=True, grid=True, ranks=size)
        assert (store, root, told) == (project / "kept", project, ["HEAD"])
    monkeypatch.setattr(asv_bridge, "read_asv_arguments", lambda: ("asv", "run", "--append-samples"))
    with pytest.raises(UsageError, match="Leave --append-samples out"):
        made[0].measure()


def test_the_project_is_where_the_configuration_lies(project: Path, tmp_path: Path) -> None:
    file = project / "sheds" / "gemm.py"
    assert find_project(file) == project
    (project / "sheds" / "asv.conf.json").touch()
    assert find_project(file) == project / "sheds"
    assert find_project(tmp_path / "a" / "b" / "c.py") == tmp_path / "a"


CONFIGURATIONS = {
    "plain": '{"version": 1, "results_dir": "kept/asv/results"}',
    "comments": '// "results_dir": "a/asv/results"\n{/* "results_dir": "b/asv/results" */ "version": 1, // it\'s "c\n'
    '"show_commit_url": "https://host/commit/", "results_dir": "kept/asv/results"}',
    "trailing comma": '{"version": 1, "results_dir": "kept/asv/results",}',
    "bare key": "{version: 1, results_dir: 'kept/asv/results'}",
    "wide": '{"version": 1, "results_dir"\n  :\n  "./kept//asv/results/"}',
    "in a text": '{"version": 1, "project": "results_dir", "results_dir": "kept/asv/results"}',
    "elsewhere": '{"version": 1, "results_dir": "/kept/asv/results"}',
    "above": '{"version": 1, "results_dir": "../kept/asv/results"}',
    "another shape": '{"version": 1, "results_dir": "results"}',
    "commented away": '{"version": 1, // "results_dir": "kept/asv/results"\n}',
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_store_is_the_one_that_asv_shows(name: str, project: Path) -> None:
    path = project / "asv.conf.json"
    path.write_text(CONFIGURATIONS[name])
    results = project / util.load_json(str(path), 1, js_comments=True).get("results_dir", "results")
    store = results.parent.parent if results.parts[-2:] == ("asv", "results") else project / ".fp8bench"
    assert find_store(project) == store
    assert ("kept" in store.parts) == ("kept" in CONFIGURATIONS[name] and name != "commented away")


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"results_dir": 7}', "\0", None])
def test_a_configuration_that_is_none_leads_to_the_default_store(content: str | None, project: Path) -> None:
    path = project / "asv.conf.json"
    path.unlink() if content is None else path.write_text(content)
    assert find_store(project) == project / ".fp8bench"
    path.write_bytes(b"\xff\xfe")
    assert find_store(project) == project / ".fp8bench"


@for_each(
    ("words", "quick", "append", "commit"),
    [
        ("run --quick", True, False, ""),
        ("run -q", True, False, ""),
        ("run --qui", True, False, ""),
        ("run -nq -E x", True, False, ""),
        ("run --bench quick", False, False, ""),
        ("run -bgemm_q", False, False, ""),
        ("", False, False, ""),
        ("run --append-samples", False, True, ""),
        ("run --append -q", True, True, ""),
        ("run -a rounds=2", False, False, ""),
        ("run --attribute x=1", False, False, ""),
        ("run --set-commit-hash 0123", False, False, "0123"),
        ("run --set 0123", False, False, "0123"),
        ("run --set-commit-hash=0123 -q", True, False, "0123"),
        ("run --set-commit-hash", False, False, ""),
    ],
)
def test_asvs_options_as_its_parser_takes_them(words: str, quick: bool, append: bool, commit: str) -> None:
    given = ["/venv/bin/python3", "/venv/bin/asv", *words.split()]
    assert parse_asv_options(given) == (quick, append, commit)


ASK = (
    "from fp8bench.asv_bridge import parse_asv_options, read_asv_arguments; "
    "print(parse_asv_options(read_asv_arguments())[0])"
)
START = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {program!r}]))"


@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="command lines of other processes are in /proc only"
)
@pytest.mark.parametrize(
    ("command", "quick", "between"),
    [
        ("asv run --quick", "True", 0),
        ("asv run", "False", 1),
        ("other run --quick", "False", 0),
        ("-W error -X utf8 -m asv run -q", "True", 1),
    ],
)
def test_the_asv_that_started_a_process_is_asked(command: str, quick: str, between: int, tmp_path: Path) -> None:
    program = ASK
    for _ in range(between):
        program = START.format(program=program)
    for name in ("asv", "asv.py", "other"):
        (tmp_path / name).write_text(START.format(program=program))
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.stdout.strip(), done.stderr) == (quick, "")


def test_a_suite_file_is_light(record_property: Callable[[str, object], None]) -> None:
    """asv imports it in a process for every metric of every combination."""
    program = (
        "import os, sys\nimport suites.gemm\n"
        "print([heavy for heavy in ('torch', 'numpy', 'pandas', 'matplotlib', 'asv') if heavy in sys.modules])\n"
        "print(sum(os.times()[:2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    heavy, seconds = done.stdout.splitlines()
    record_property("cpu_seconds", float(seconds))
    assert heavy == "[]"


SHAPE: dict[str, Scalar] = {"m": 512, "n": 512, "k": 512, "product": "forward", "operands": "cast"}
TIME = "gemm.Gemm.track_time"


def record(milliseconds: int, **changes: Any) -> Record:
    """gemm's bf16 case, of one round."""
    made = Record(case("gemm", "bf16", dict(SHAPE)), NATIVE, Status.OK, timing=steady(milliseconds * 1_000_000, 1))
    return replace(made, **{"measurements": (error("product_error", 0.5),), **changes})


def a_run(name: str, *records: Record, quick: bool = False, **facts: Any) -> Run:
    """A run of a commit on a machine; its id encodes the time."""
    environment = Environment({"machine": "box", "commit": COMMIT, "dirty": False, **MACHINE, **facts})
    return run_of(
        list(records),
        id=name,
        started=f"2026-01-0{name[-1]}T12:00:00.000+00:00",
        environment=environment,
        devices=(CPU,),
        request=Request("gemm", quick=quick, grid=True),
        origin="asv",
    )


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The samples of gemm's bf16 time that asv gets after measuring `own`, with the runs `others` in the store."""

    def ask(own: Run | BaseException, *others: Run, series: str = TIME, **told: Any) -> Any:
        for one in others:
            keep(one, tmp_path)

        def execute(request: Request, store: Path, *_: Any, origin: str, folder: Path) -> Run:
            assert (store, origin, folder) == (tmp_path, "asv", ROOT)
            if isinstance(own, BaseException):
                raise own
            return keep(own, store)

        monkeypatch.setattr(asv_measuring, "execute", execute)
        found = measure_for_asv(Request("gemm"), tmp_path, ROOT, SilentObserver(), **told)
        return found[series].get(CELL)

    return ask


def lost(name: str, status: Status, reason: str) -> Run:
    """A run whose case failed."""
    return a_run(name, record(1, status=status, reason=reason))


GIVEN: dict[str, tuple[Run, list[Run], list[float]]] = {
    "whichever door runs came in by": (
        a_run("run3", record(4)), [replace(a_run("run1", record(2)), origin="suite"), a_run("run2", record(3))],
        [0.002, 0.003, 0.004],
    ),
    "a quick run replaces nothing": (a_run("run2", record(9), quick=True), [a_run("run1", record(2))], [0.002]),
    "a quick run alone": (a_run("run1", record(8), quick=True), [], [0.008]),
    "of another commit": (a_run("run2", record(3)), [a_run("run1", record(2), commit="f" * 40)], [0.003]),
    "of changed files": (a_run("run2", record(3)), [a_run("run1", record(2), dirty=True)], [0.003]),
    "of another machine": (a_run("run2", record(3)), [a_run("run1", record(2), asv_machine="other")], [0.003]),
    "of another Python": (a_run("run2", record(3)), [a_run("run1", record(2), asv_python="/other/python3")], [0.003]),
    "changed files are measured alone": (a_run("run2", record(3), dirty=True), [a_run("run1", record(2))], [0.003]),
    "other software": (a_run("run2", record(3), torch="2.13.0"), [a_run("run1", record(2), torch="2.12.0")], [0.003]),
    "a skipped case keeps what was": (lost("run4", Status.SKIPPED, "no kernel"), [a_run("run3", record(2))], [0.002]),
}  # fmt: skip


@pytest.mark.parametrize("what", GIVEN)
def test_a_commit_is_all_its_runs(what: str, asked: Callable[..., Any]) -> None:
    own, others, expected = GIVEN[what]
    kind, numbers = asked(own, *others)
    assert kind == "samples" and json.loads(json.dumps(numbers)) == numbers == expected  # asv writes them as JSON


def test_changed_files_are_not_saved_under_a_commit(asked: Callable[..., Any]) -> None:
    dirty = a_run("run2", record(3), dirty=True)
    kind, why = asked(dirty, asv_commit=COMMIT)
    assert (kind, why) == ("failed", "the files differ from commit 01234567, so these are not its numbers")
    clean = a_run("run1", record(2))
    assert asked(replace(dirty, id="run3"), clean, asv_commit=COMMIT) == ("samples", [0.002])
    relative = asked(replace(dirty, id="run4"), asv_commit=COMMIT, series="gemm.Gemm.track_relative_time")
    assert relative == ("none", "")


def test_what_is_checked_out_is_not_saved_under_another_commit(
    asked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "f" * 40
    known = {"HEAD": COMMIT, "HEAD~1": other}
    monkeypatch.setattr(asv_measuring, "find_commit", lambda word, folder: known.get(word))
    kind, why = asked(a_run("run2", record(3)), asv_commit="HEAD~1")
    assert kind == "failed" and why.startswith(
        "asv saves results as commit ffffffff, but commit 01234567 is checked out"
    )
    before = a_run("run1", record(2), commit=other)
    assert asked(a_run("run3", record(4)), before, asv_commit="HEAD~1") == ("samples", [0.002])
    assert asked(a_run("run4", record(4)), asv_commit="HEAD") == ("samples", [0.003, 0.004, 0.004])
    assert asked(a_run("run5", record(5)), asv_commit="lost") == ("samples", [0.003, 0.004, 0.004, 0.005])


def test_what_has_no_number_says_why(asked: Callable[..., Any]) -> None:
    assert asked(lost("run1", Status.SKIPPED, "no kernel")) == ("none", "no kernel")
    assert asked(a_run("run2", record(1)), series="gemm.Gemm.track_relative_time") == ("none", "")
    failing = lost("run3", Status.FAILED, "out of memory, even alone")
    assert asked(failing) == ("failed", "out of memory, even alone")


def test_an_interrupt_goes_on_to_asv(asked: Callable[..., Any]) -> None:
    unfinished = a_run("run1", record(1))

    with pytest.raises(KeyboardInterrupt):
        asked(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        asked(NotKept("not finished", replace(unfinished, finished=False)))


def test_a_store_that_fails_does_not_lose_what_was_measured(asked: Callable[..., Any]) -> None:
    run = replace(a_run("run1", record(7)), finished=False, troubles=("no room left.",))
    assert asked(NotKept("no room left.", run)) == ("samples", [0.007])
    with pytest.raises(Fp8benchError, match=r"asv cannot track the suite gemm: no room left\."):
        asked(NotKept("no room left.", replace(run, records=())))


def test_a_run_of_nothing_that_is_followed_fails(asked: Callable[..., Any]) -> None:
    """Otherwise every metric would fail with a KeyError."""
    elsewhere = record(1, case=case("gemm", "bf16", {**SHAPE, "m": 256}))
    with pytest.raises(Fp8benchError, match="none of its cases was begun"):
        asked(a_run("run1", elsewhere))
