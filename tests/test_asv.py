"""Both interfaces share one history: real asv commands in a new repository with a separate home.

All steps run once, in order (`story`), because each takes seconds; the tests check what each step left.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from asv import results as asv_results
from asv import runner as asv_runner

from fp8bench.model import Run
from fp8bench.model.stopping import QUICK_ROUNDS
from fp8bench.plan.corpus import default_corpus_identity
from fp8bench.registry import workloads
from fp8bench.store.asv.files import load_benchmarks
from fp8bench.store.asv.view import asv_results_folder, define_series
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from fp8bench.store.series import make_series
from tests.counts import NIGHTLY, for_each
from tests.histories import FOLLOWED

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
ASV = [str(BIN / "asv")] if (BIN / "asv").exists() else [sys.executable, "-m", "asv"]
WHOLE = 24  # enough rounds not to be hasty
PATIENCE = 300.0
# Three workloads of a millisecond (shorter ones fill files with calls). The error of each is in its name.
MY_WORK = """
from fp8bench.suites import Axis, Grid, Work, Workload, whole_number, workloads


class Counting(Workload):
    summary = "adds up whole numbers"
    history = Grid(cpu={"n": ("50000",)}, gpu={"n": ("90000",)}, dtypes=("fp32", "bf16"), errors=("size_error",))

    def axes(self, facts):
        return (Axis("n", "how many", ("50000",), whole_number()),)

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        return setup.case.param("n")

    def step(self, state, phase):
        with phase.gemm:
            sum(range(state))

    def error(self, setup):
        return {"size_error": self.wrong}


@workloads.register("adding")
class Adding(Counting):
    name, wrong = "adding", 0.25


@workloads.register("taking")
class Taking(Counting):
    name, wrong = "taking", 0.75


@workloads.register("leaving")
class Leaving(Counting):
    name, wrong = "leaving", 0.5
"""
SUITE = '''
"""The suite {name} as benchmarks for asv."""

from fp8bench import asv_bridge


class {title}(asv_bridge.Suite):
    workload = "{name}"
    imports = ("my_work.py",)

    def setup_cache(self):
        return self.measure()
'''
# Each combination costs asv a process, so there are no more than the tests need.
FIRST = r"adding.*track_time\('fp32'|(adding|taking).*track_size_error\(.*50000"
SECOND = r"(adding|taking).*track_time\('fp32', 50000"
FP32, BF16 = ("'fp32'", "50000"), ("'bf16'", "50000")


@dataclass
class Place:
    """A repository with suites, and how commands are run in it."""

    root: Path
    home: Path
    said: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """A separate home, no GPU, and this checkout's fp8bench in all processes, including asv's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASV_", "GIT_"))}
        of_git = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        packages = {"PYTHONPATH": str(ROOT), "ASV_PYTHONPATH": str(ROOT)}
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        return {**kept, **of_git, **packages, **hidden, "HOME": str(self.home), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *command: str, expected: int = 0) -> str:
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == expected, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def git(self, *words: str) -> str:
        return self.run("git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words).strip()

    def commit(self, date: str) -> str:
        """Commits all files; returns the hash."""
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x", "--date", date)
        return self.git("rev-parse", "HEAD")

    def asv(self, *words: str, expected: int = 0) -> str:
        return self.run(*ASV, *words, expected=expected)

    def fp8bench(self, *words: str) -> str:
        """Runs fp8bench with another name of the interpreter than asv uses."""
        return self.run(str(other_python()), "-m", "fp8bench", *words)

    @property
    def results(self) -> Path:
        return asv_results_folder(self.root / ".fp8bench")

    def files(self, commit: str) -> list[Path]:
        """asv's results files of a commit."""
        return sorted(self.results.glob(f"*/{commit[:8]}-*.json"))

    def snapshot(self, commit: str) -> Snapshot:
        (path,) = self.files(commit)
        loaded = asv_results.Results.load(str(path))
        content = json.loads(path.read_text())
        runs = [load_run(path) for path in run_files(self.root / ".fp8bench")]
        own = sorted((run for run in runs if run.environment.get("commit") == commit), key=lambda run: run.started)
        return Snapshot(loaded, load_benchmarks(self.results / "benchmarks.json"), content, own)


@dataclass(frozen=True)
class Snapshot:
    """A commit's results as asv loads them, the benchmarks, the file itself, and the runs."""

    loaded: Any
    benchmarks: Mapping[str, Any]
    file: Mapping[str, Any]
    runs: list[Run]

    def _at(self, name: str, cell: tuple[str, ...], values: Any) -> Any:
        params = self.loaded.get_result_params(name)
        return dict(zip(itertools.product(*params), values, strict=True))[cell]

    def value(self, name: str, cell: tuple[str, ...]) -> Any:
        return self._at(name, cell, self.loaded.get_result_value(name, self.loaded.get_result_params(name)))

    def repeat(self, name: str, cell: tuple[str, ...] = FP32) -> Any:
        """The number of samples behind a figure."""
        params = self.loaded.get_result_params(name)
        stats = self._at(name, cell, self.loaded.get_result_stats(name, params))
        return None if stats is None else stats["repeat"]


def other_python() -> Path:
    """A name of this interpreter that the command asv does not have."""
    script = BIN / "asv"
    named = script.read_text(errors="replace").partition("\n")[0].removeprefix("#!").strip() if script.exists() else ""
    names = ["python", "python3", f"python3.{sys.version_info[1]}"]
    known = [BIN / name for name in names if (BIN / name).exists()]
    return next((path for path in known if str(path) != (named or sys.executable)), Path(sys.executable))


@dataclass
class Story:
    """Two commits, and the files after each step."""

    place: Place
    commits: list[str] = field(default_factory=list)
    steps: dict[str, Snapshot] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)


def make_place(folder: Path) -> Place:
    """A repository with this project's configuration, its suite of products, and two user suites."""
    place = Place(folder / "project", folder / "home")
    place.home.mkdir()
    (place.root / "suites").mkdir(parents=True)
    for name in ("asv.conf.json", "suites/__init__.py", "suites/gemm.py"):
        shutil.copy(ROOT / name, place.root / name)
    for name in ("adding", "taking"):
        (place.root / "suites" / f"{name}.py").write_text(SUITE.format(name=name, title=name.capitalize()))
    (place.root / "my_work.py").write_text(MY_WORK)
    (place.root / ".gitignore").write_text(".fp8bench\n__pycache__\n")
    place.git("init", "-q", "-b", "main")
    return place


@pytest.fixture(scope="module", params=NIGHTLY)
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Everything that takes long, once, in order."""
    story = Story(make_place(tmp_path_factory.mktemp("asv")))
    place = story.place
    first = place.commit("2026-01-05T12:00:00+00:00")
    story.commits.append(first)
    place.asv("machine", "--yes")
    place.asv("check", "-E", "existing")

    def keep(step: str, said: str, commit: str = first) -> None:
        story.said[step] = said
        story.steps[step] = place.snapshot(commit)

    def suite(suites: str, *words: str) -> str:
        return place.fp8bench("suite", suites, "--import", "./my_work.py", "--grid", *words)

    quick_asv = ("run", "-E", "existing", "--set-commit-hash", first, "--quick", "--bench", FIRST)
    keep("quick asv", place.asv(*quick_asv))
    keep("whole suite", suite("adding,leaving", "--rounds", str(WHOLE)))

    (place.root / "README").write_text("more\n")
    second = place.commit("2026-01-06T12:00:00+00:00")
    story.commits.append(second)
    keep("second suite", suite("adding", "--rounds", str(WHOLE)), second)
    asv = ("run", "--python=same", "--set-commit-hash", second, "--quick")
    keep("second asv", place.asv(*asv, "--record-samples", "--bench", SECOND), second)
    story.said["publish"] = place.asv("publish")
    return story


def test_asv_measures_a_suite_once_and_keeps_the_run(story: Story) -> None:
    step = story.steps["quick asv"]
    assert [(run.origin, run.request.suite) for run in step.runs] == [("asv", "adding"), ("asv", "taking")]
    for run in step.runs:
        assert run.request.quick and run.request.grid and run.finished and run.ok and not run.environment.get("dirty")
        assert run.environment.get("commit") == story.commits[0]
    assert step.repeat("adding.Adding.track_time") == QUICK_ROUNDS


def test_two_suite_files_never_share_a_cache(story: Story) -> None:
    """Their text is equal line by line, and asv identifies caches by module and line."""
    step = story.steps["quick asv"]
    adding = "adding.Adding.track_size_error"
    taking = "taking.Taking.track_size_error"
    keys = [step.benchmarks[name]["setup_cache_key"].split(":") for name in (adding, taking)]
    assert [module for module, _ in keys] == ["adding", "taking"] and keys[0][1] == keys[1][1]
    for cell in (FP32, BF16):
        assert (step.value(adding, cell), step.value(taking, cell)) == (0.25, 0.75)


ONE_CACHE = """
def setup_cache(self):
    return self.measure()

for name in ("gemm", "mlp"):
    members = {"workload": name, "setup_cache": setup_cache, "__module__": __name__}
    globals()[name.capitalize()] = type(name.capitalize(), (asv_bridge.Suite,), members)
"""


def test_the_trap_of_shared_caches_is_closed(tmp_path: Path) -> None:
    """Otherwise asv would silently give the second class the first one's numbers."""
    place = make_place(tmp_path)
    (place.root / "suites" / "gemm.py").write_text(f"from fp8bench import asv_bridge\n{ONE_CACHE}")
    done = discover(place.root / "suites", place)
    assert done.returncode and "is of workload 'mlp': its runs are stored under the name" in done.stdout + done.stderr


def test_a_suite_run_joins_what_asv_measured(story: Story) -> None:
    before = story.steps["quick asv"]
    after = story.steps["whole suite"]
    assert len(story.place.files(story.commits[0])) == 1
    assert after.repeat("adding.Adding.track_time") == WHOLE != before.repeat("adding.Adding.track_time")
    assert {key: after.file[key] for key in ("params", "env_name", "python", "date", "commit_hash")} == {
        key: before.file[key] for key in ("params", "env_name", "python", "date", "commit_hash")
    }
    assert re.search(r"history: 4 cases of commit [0-9a-f]{8} in the history", story.said["whole suite"])
    # The other suite's figures remain asv's.
    for cell in (FP32, BF16):
        name = "taking.Taking.track_size_error"
        assert after.value(name, cell) == before.value(name, cell) and after.repeat(name, cell) == 1


def test_the_doors_have_two_names_for_the_interpreter() -> None:
    """With only one name the previous test would show less."""
    if str(other_python()) == sys.executable and not (BIN / "asv").exists():
        pytest.skip("this environment has one name for its interpreter")
    assert other_python().samefile(sys.executable)


@for_each("commit", [0, 1])
def test_the_runs_alone_give_what_asv_has(commit: int, story: Story, tmp_path: Path) -> None:
    place = story.place
    before = story.place.snapshot(story.commits[commit])
    store = tmp_path / "store"
    shutil.copytree(place.root / ".fp8bench" / "runs", store / "runs")
    place.fp8bench("history", "rebuild", "--store", str(store), "--import", "./my_work.py")
    (path,) = asv_results_folder(store).glob(f"*/{story.commits[commit][:8]}-*.json")
    content = json.loads(path.read_text())
    assert {key: content[key] for key in ("params", "env_name", "python", "date")} == {
        key: before.file[key] for key in ("params", "env_name", "python", "date")
    }
    after = Snapshot(asv_results.Results.load(str(path)), {}, content, [])
    times = {"adding.Adding.track_time", "taking.Taking.track_time"}
    # asv reads only the requested figures, although all were measured; the next suite run adds the others.
    for name in times if commit else set(before.file["results"]):
        for cell in itertools.product(*before.loaded.get_result_params(name)):
            if not math.isnan(before.value(name, cell)):
                assert after.value(name, cell) == before.value(name, cell)
                assert after.repeat(name, cell) == before.repeat(name, cell)


def html(story: Story, *parts: str) -> Any:
    return json.loads((story.place.root / ".fp8bench" / "asv" / "html" / Path(*parts)).read_text())


def test_publish_draws_one_line_through_both_commits(story: Story) -> None:
    """A second graph would mean a second machine or Python."""
    assert "Couldn't" not in story.said["publish"] and "warning" not in story.said["publish"].lower()
    folder = story.place.root / ".fp8bench" / "asv" / "html" / "graphs"
    drawn = [path for path in folder.rglob("adding.Adding.track_time.json") if "summary" not in path.parts]
    assert len(drawn) == 1
    points = json.loads(drawn[0].read_text())
    assert len(points) == 2
    index = html(story, "index.json")
    assert len(index["graph_param_list"]) == 1
    first, second = (story.steps[name] for name in ("whole suite", "second asv"))
    for step, (_, values) in zip((first, second), points, strict=True):
        cells = list(itertools.product(*step.loaded.get_result_params("adding.Adding.track_time")))
        assert values[cells.index(FP32)] == pytest.approx(step.value("adding.Adding.track_time", FP32), rel=1e-3)


def discover(suites: Path, place: Place) -> subprocess.CompletedProcess[str]:
    """Runs asv's discovery in a separate process and folder, as asv does. The list is in result.json."""
    place.home.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, asv_runner.BENCHMARK_RUN_SCRIPT, "discover", str(suites), str(place.home / "result.json")],
        cwd=place.home,
        env=place.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def discovered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """asv's discovery of this project's suites."""
    folder = tmp_path_factory.mktemp("discovery")
    place = Place(folder, folder / "home")
    done = discover(ROOT / "suites", place)
    assert done.returncode == 0, done.stdout + done.stderr
    return {benchmark["name"]: benchmark for benchmark in json.loads((place.home / "result.json").read_text())}


@pytest.mark.slow
@for_each("name", FOLLOWED)
def test_asv_discovers_what_the_view_defines(name: str, discovered: dict[str, Any], tmp_path: Path) -> None:
    """Otherwise an `asv run` would hide a suite run's figures."""
    workload = workloads.get(name)
    define_series(tmp_path, make_series(workload, default_corpus_identity() if workload.uses_corpus else None), [])
    ours = load_benchmarks(tmp_path / "benchmarks.json")
    theirs = {key: benchmark for key, benchmark in discovered.items() if key.partition(".")[0] == name}
    assert theirs.keys() == ours.keys()
    for key, benchmark in theirs.items():
        for word in ("name", "type", "unit", "params", "param_names", "version"):
            assert benchmark[word] == ours[key][word], (key, word)
    keys = {finding["setup_cache_key"] for finding in theirs.values()}
    assert len(keys) == 1 and next(iter(keys)).startswith(f"{name}:")
    assert all(finding["setup_cache_timeout"] >= 600 for finding in theirs.values())


@pytest.mark.slow
def test_asv_discovers_nothing_twice(discovered: dict[str, Any]) -> None:
    modules = {name.partition(".")[0] for name in discovered}
    assert modules == {*FOLLOWED, "harness"}
    assert len({finding["setup_cache_key"] for finding in discovered.values() if "setup_cache_key" in finding}) == len(
        FOLLOWED
    )
