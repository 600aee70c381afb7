"""What a run was made under."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from fp8bench.measure import environment
from fp8bench.measure.environment import command_line, gather
from fp8bench.model import Environment, Scalar
from fp8bench.model.codec import decode, encode
from fp8bench.store.asv.identity import from_facts, identify
from tests.commands import git
from tests.counts import for_each

UNKNOWN = (None, None, None)


def told(folder: Path | None = None) -> tuple[Scalar | None, ...]:
    """What gather says of a repository: commit, date, dirty."""
    facts = gather({}, "0", 1, folder=folder).facts
    return facts["commit"], facts["commit_date"], facts["dirty"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, and the working directory in it."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_clean_checkout_gives_its_commit(repository: Path) -> None:
    """Files git does not know make no difference."""
    (repository / "untracked").write_text("x")
    facts = gather({}, "0", 1)
    assert facts.get("commit") == git(repository, "rev-parse", "HEAD").strip()
    assert facts.get("dirty") is False


def test_a_changed_file_makes_it_dirty(repository: Path) -> None:
    """The commit alone does not say what ran."""
    (repository / "file").write_text("two")
    assert gather({}, "0", 1).get("dirty") is True


def test_fp8benchs_own_repository_is_what_runs_only_if_its_code_does(repository: Path) -> None:
    """What is installed may be another working tree's: such numbers are not this commit's."""
    package = Path(environment.__file__).parents[1]
    shutil.copytree(package, repository / "fp8bench", ignore=shutil.ignore_patterns("__pycache__"))
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "second")
    assert gather({}, "0", 1).get("dirty") is False
    (repository / "fp8bench" / "pipeline.py").write_text("# another pipeline.py")
    git(repository, "commit", "-q", "-a", "-m", "third")
    assert gather({}, "0", 1).get("dirty") is True


def test_the_date_is_the_authors(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asv orders a history by it; a rebase changes the committer's. A user's settings change nothing."""
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00Z")
    git(repository, "commit", "-q", "--allow-empty", "--date", "2020-02-03T04:05:06+02:00", "-m", "second\n\nbody")
    git(repository, "config", "log.showSignature", "true")
    git(repository, "config", "log.date", "relative")
    assert told() == (git(repository, "rev-parse", "HEAD").strip(), 1580695506000, False)


def test_another_folder_may_count(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A view is made of the project's repository, wherever the command was typed."""
    here = told()
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "elsewhere")
    (repository / "below").mkdir()
    assert told(other)[0] == git(other, "rev-parse", "HEAD").strip() != here[0]
    assert told(repository / "below") == here
    assert told(repository / "nowhere") == told(repository / "file") == UNKNOWN


def test_a_linked_worktree_and_a_detached_head_have_commits(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each its own."""
    first = told()
    linked = tmp_path_factory.mktemp("linked") / "tree"
    git(repository, "worktree", "add", "-q", "-b", "other", str(linked))
    git(linked, "commit", "-q", "--allow-empty", "-m", "second")
    assert told(linked)[0] == git(linked, "rev-parse", "HEAD").strip() != first[0]
    git(repository, "checkout", "-q", "--detach", "HEAD")
    assert told() == first


def test_without_a_commit_or_a_working_tree_all_are_unknown(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A bare repository has commits, but what runs there is none of them."""
    empty, bare = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("bare")
    git(empty, "init", "-q")
    git(bare, "clone", "-q", "--bare", str(repository), ".")
    assert told(empty) == told(bare) == told(repository / ".git") == UNKNOWN


def test_why_git_names_no_commit_in_a_repository_is_told(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not there, another's folder, no commit yet: outside of a repository there is nothing to tell."""

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
    assert why(outside) is None


def test_links_that_editors_leave_in_a_repository_of_fp8benchs_are_no_code(repository: Path) -> None:
    """They lead nowhere."""
    (repository / "fp8bench").mkdir()
    (repository / "fp8bench" / "__init__.py").write_text("")
    (repository / "fp8bench" / ".#view.py").symlink_to("somebody@somewhere")
    assert told()[2] is True


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_outside_a_repository_all_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, not an error and not a guess."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert told() == UNKNOWN


def test_without_git_all_are_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """git is not a dependency."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert told() == UNKNOWN


def test_the_identity_for_asv_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a result can be filed long after, or on another machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".asv-machine.json").write_text('{"box": {"machine": "box", "gpu": "NVIDIA H200"}, "version": 1}')
    facts = gather({"torch": "2.13.0"}, "0", 1).facts
    assert (facts["asv_machine"], facts["asv_gpu"]) == ("box", "NVIDIA H200")
    assert from_facts(facts) == identify()


def test_everything_is_plain_and_can_be_stored() -> None:
    """The header of a run file is made of it."""
    facts = gather({"torch": "2.13.0", "cudnn": None}, "0.1.0", 3)
    assert decode(Environment, encode(facts)) == facts
    assert (facts.get("fp8bench"), facts.get("torch"), facts.get("threads")) == ("0.1.0", "2.13.0", 3)
    assert facts.get("python") == ".".join(str(part) for part in sys.version_info[:3])
    assert facts.get("cpu_count") == os.cpu_count()
    assert facts.get("machine")
    assert facts.get("no such fact") is None


def test_variables_that_change_speed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are set, and only those of the list."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("A_SECRET", "x")
    facts = gather({}, "0", 1).facts
    assert facts["env_OMP_NUM_THREADS"] == "3"
    assert "env_MKL_NUM_THREADS" not in facts and "x" not in facts.values()


def test_a_file_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """Virtual machines show no governor."""
    assert environment._read(str(tmp_path / "nowhere")) is None
    (tmp_path / "there").write_text("powersave\n")
    assert environment._read(str(tmp_path / "there")) == "powersave"


@for_each(
    ("words", "shown"),
    [
        (["/a/fp8bench/__main__.py", "suite", "gemm"], "python -m fp8bench suite gemm"),
        (["/usr/bin/fp8bench", "suite", "gemm", "--data", "a b"], "fp8bench suite gemm --data 'a b'"),
        (["", "x"], "python x"),
        ([], ""),
    ],
)
def test_the_command_line_is_what_a_person_would_type(
    words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run can be repeated by copying it."""
    monkeypatch.setattr(sys, "argv", words)
    assert command_line() == shown


@for_each("name", ["TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "PYTORCH_TUNABLEOP_FILENAME"])
def test_what_changes_how_a_gpu_computes_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which attention kernel is asked first, what products may take as workspace, which kernels were tuned."""
    monkeypatch.setenv(name, "1")
    assert gather({}, "0", 1).get(f"env_{name}") == "1"


@for_each(
    "name",
    [
        "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "TORCH_CUDNN_SDPA_DEPRIORITIZED",
        "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "CUBLASLT_WORKSPACE_SIZE", "PYTORCH_TUNABLEOP_ENABLED",
    ],
)  # fmt: skip
def test_what_changes_a_gpus_times_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is set; what else libraries read there nobody knows."""
    monkeypatch.delenv(name, raising=False)
    assert f"env_{name}" not in gather({}, "0", 1).facts
    monkeypatch.setenv(name, "1")
    assert gather({}, "0", 1).facts[f"env_{name}"] == "1"
