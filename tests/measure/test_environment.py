"""The conditions of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fp8bench.measure import environment
from fp8bench.measure.environment import gather
from fp8bench.model import Scalar
from fp8bench.model.raw import QUANTISERS_VARIABLE
from tests.commands import git
from tests.counts import for_each

UNKNOWN = (None, None, None)


def told(folder: Path | None = None) -> tuple[Scalar | None, ...]:
    """Commit, date and dirty flag that gather reports for a repository."""
    facts = gather({}, "0", 1, folder=folder).facts
    return facts["commit"], facts["commit_date"], facts["dirty"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit as the working directory."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_changed_files_make_a_checkout_dirty(repository: Path) -> None:
    (repository / "untracked").write_text("x")
    commit, _, dirty = told()
    assert (commit, dirty) == (git(repository, "rev-parse", "HEAD").strip(), False)
    (repository / "file").write_text("two")
    assert told()[2] is True


def test_another_working_tree_of_fp8bench_makes_a_run_dirty(repository: Path) -> None:
    (repository / "fp8bench").mkdir()
    (repository / "fp8bench" / "__init__.py").write_text("")
    (repository / "fp8bench" / ".#view.py").symlink_to("somebody@somewhere")  # dangling, as editors leave them
    assert told()[2] is True
    shutil.rmtree(repository / "fp8bench")
    package = Path(environment.__file__).parents[1]
    shutil.copytree(package, repository / "fp8bench", ignore=shutil.ignore_patterns("__pycache__"))
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "second")
    assert told()[2] is False
    (repository / "fp8bench" / "pipeline.py").write_text("# another pipeline.py")
    git(repository, "commit", "-q", "-a", "-m", "third")
    assert told()[2] is True


def test_the_date_of_a_commit_is_the_author_date(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asv orders a history by it; a rebase changes the committer's date. A user's settings have no effect."""
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    git(repository, "commit", "-q", "--allow-empty", "--date", "2020-02-03T04:05:06+02:00", "-m", "second\n\nbody")
    git(repository, "config", "log.showSignature", "true")
    git(repository, "config", "log.date", "relative")
    assert told() == (git(repository, "rev-parse", "HEAD").strip(), 1580695506000, False)


def test_the_commit_is_that_of_the_given_folder(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A view belongs to the project's repository, wherever the command runs.

    A bare repository has commits, but the running code is not one of them.
    """
    here = told()
    other, linked, empty, bare = (tmp_path_factory.mktemp(name) for name in ("other", "linked", "empty", "bare"))
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "elsewhere")
    git(repository, "worktree", "add", "-q", "-b", "other", str(linked))
    git(linked, "commit", "-q", "--allow-empty", "-m", "second")
    for folder in (other, linked):
        assert told(folder)[0] == git(folder, "rev-parse", "HEAD").strip() != here[0]
    (repository / "below").mkdir()
    git(repository, "checkout", "-q", "--detach", "HEAD")
    assert told(repository / "below") == told() == here
    git(empty, "init", "-q")
    git(bare, "clone", "-q", "--bare", str(repository), ".")
    for folder in (empty, bare, repository / ".git", repository / "nowhere", repository / "file"):
        assert told(folder) == UNKNOWN


def test_a_repository_without_a_commit_has_a_reason(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:

    def why(folder: Path) -> Scalar | None:
        return gather({}, "0", 1, folder=folder).get("commit_unknown")

    empty, outside = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("outside")
    git(empty, "init", "-q")
    (outside / ".git").mkdir()
    assert why(empty) == "it has no commit yet" and why(repository) is None is why(outside)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert str(why(repository)).startswith("detected dubious ownership in repository at ")
    monkeypatch.setenv("PATH", str(outside))
    assert why(repository) == "git cannot be run: No such file or directory"
    shutil.rmtree(outside / ".git")
    assert why(outside) is None and told(repository) == told(outside) == UNKNOWN, "git is not a dependency"


def test_variables_that_change_speed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "OMP_NUM_THREADS",
        "CUDA_LAUNCH_BLOCKING",
        "PYTORCH_ALLOC_CONF",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED",
        "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
        "CUBLASLT_WORKSPACE_SIZE",
        "PYTORCH_TUNABLEOP_ENABLED",
        "PYTORCH_TUNABLEOP_FILENAME",
        QUANTISERS_VARIABLE,
    ]
    for name in names:
        monkeypatch.setenv(name, "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("A_SECRET", "x")
    facts = gather({}, "0", 1).facts
    assert {facts[f"env_{name}"] for name in names} == {"3"}
    assert "env_MKL_NUM_THREADS" not in facts and "x" not in facts.values()
    for name in names:
        monkeypatch.delenv(name)
    assert not any(f"env_{name}" in gather({}, "0", 1).facts for name in names)


@for_each(
    ("texts", "cores"),
    [
        (["cpu  100 0 50 800 10 0 0 5 7 0\ncpu0 1\n", "cpu  105 0 52 802 10 0 0 6 9 0\ncpu0 2\n"], 0.8),
        (["cpu  1 0 1 8 0 0 0 0\n", "cpu  1 0 1 18 0 0 0 0\n"], 0.0),
        ([None, None], None),
    ],
)
def test_cores_that_other_processes_use_are_measured(
    monkeypatch: pytest.MonkeyPatch, texts: list[str | None], cores: float | None
) -> None:
    looks = iter(texts)
    monkeypatch.setattr(environment, "_read_file", lambda path: next(looks) if path == "/proc/stat" else None)
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 1)
    assert gather({}, "1", 1).facts["busy_cores"] == cores
