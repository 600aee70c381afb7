"""The workflows of .github: held against rules, and the shell of the history's branch run against a repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import fp8bench
from tests.commands import git
from tests.counts import for_each
from tests.workflows import faults, load, name_of, steps

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".github" / "workflows"
CI, NIGHTLY, PUBLISH = FOLDER / "ci.yml", FOLDER / "gpu-nightly.yml", FOLDER / "publish.yml"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))


@for_each("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_workflow_obeys_the_rules(path: Path) -> None:
    assert faults(load(path), path.read_text()) == []


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_accepts_every_workflow() -> None:
    done = subprocess.run(["actionlint", *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_ci_does_what_readme_says() -> None:
    flow = load(CI)
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^pip install -c constraints\.txt -e .*pytest$", readme, re.MULTILINE)
    assert command in {step.get("run", "").strip() for step in steps(flow)}
    assert flow["permissions"] == {"contents": "read"} and set(flow["on"]) == {"push", "pull_request"}
    assert not any("self-hosted" in str(job["runs-on"]) for job in flow["jobs"].values())
    checkout = next(step for step in steps(flow) if "checkout" in step.get("uses", ""))
    assert checkout["with"]["persist-credentials"] == "false"
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    for job in (flow["jobs"]["test"], flow["jobs"]["package"], load(PUBLISH)["jobs"]["try"]):
        assert job["strategy"]["matrix"]["python"] == declared
    torch = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None
    for path in WORKFLOWS:
        assert set(re.findall(r"torch==(\S+)", path.read_text())) <= {torch[1]}, path.name


def test_only_a_job_without_a_script_may_publish() -> None:
    jobs = load(PUBLISH)["jobs"]
    assert jobs["publish"]["needs"] == "try" and jobs["try"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["environment"] == "pypi"
    assert not [step for step in jobs["publish"]["steps"] if "run" in step]
    assert "secrets." not in PUBLISH.read_text()


def test_a_release_knows_its_repository(tmp_path: Path) -> None:
    (tmp_path / "fp8bench").mkdir()
    for name in ("pyproject.toml", "README.md", "fp8bench/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    scripts = {name_of(step): step.get("run", "") for step in steps(load(PUBLISH))}
    environment = {
        **os.environ,
        "GITHUB_SERVER_URL": "https://forge.test",
        "GITHUB_REPOSITORY": "people/fp8bench",
        "GITHUB_REF_NAME": f"v{fp8bench.__version__}",
    }

    def run(script: str, **changed: str) -> int:
        command = ["bash", "-eo", "pipefail", "-c", script]
        return subprocess.run(command, cwd=tmp_path, env=environment | changed, check=False).returncode

    assert run(scripts["the tag is the version"]) == 0
    assert run(scripts["the tag is the version"], GITHUB_REF_NAME="v9.9.9") == 1
    assert run(scripts["the addresses of this repository"]) == 0
    home = "https://forge.test/people/fp8bench"
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Source"] == home and urls["Issues"] == f"{home}/issues"
    links = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    assert len(links) > 20 and all(link.startswith(home) for link in links)
    tag = f"v{fp8bench.__version__}"
    assert f"{home}/raw/{tag}/docs/report.png" in links and f"{home}/blob/{tag}/docs/status.md" in links


def test_nobody_elses_code_runs_at_night() -> None:
    flow = load(NIGHTLY)
    job = flow["jobs"]["nightly"]
    assert set(flow["on"]) == {"schedule", "workflow_dispatch"}
    assert job["if"] == "${{ vars.FP8BENCH_GPU != '' }}"
    assert job["runs-on"][0] == "self-hosted" and job["runs-on"][-1] == "${{ vars.FP8BENCH_GPU }}"
    assert flow["concurrency"] == {"group": "gpu-nightly-${{ vars.FP8BENCH_GPU }}", "cancel-in-progress": "false"}
    assert flow["permissions"] == {"contents": "read"} and "permissions" not in job
    writer = flow["jobs"]["history"]
    assert writer["permissions"] == {"contents": "write"} and writer["runs-on"] == "ubuntu-latest"
    assert writer["needs"] == "nightly" and "always()" in writer["if"]
    assert all(re.fullmatch(r"[\d*/,-]+( [\d*/,-]+){4}", one["cron"]) for one in flow["on"]["schedule"])


def script(name: str) -> str:
    return str(next(step["run"] for step in steps(load(NIGHTLY)) if name_of(step) == name))


def shell(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As GitHub runs `shell: bash`."""
    environment = {
        **os.environ,
        "BRANCH": "fp8bench-history",
        "GITHUB_RUN_ID": "1",
        "GITHUB_SHA": "0" * 40,
        "RUNNER_TEMP": str(folder.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )


def night(folder: Path, number: int, keep: bool = True) -> None:
    """The steps of a night that update the history; a file replaces measuring. The checkout fetches all branches."""
    git(folder, "clean", "-ffdxq")
    git(folder, "fetch", "-q", "--prune", "origin")
    done = shell(script("the history of the nights before"), folder)
    assert done.returncode == 0, done.stderr
    runs = folder / ".fp8bench" / "runs" / "box"
    runs.mkdir(parents=True, exist_ok=True)
    (runs / f"night{number}.jsonl").write_text(f"{number}\n")
    (folder / ".fp8bench" / "figures").mkdir()
    (folder / ".fp8bench" / "figures" / "cache").write_text("made again from the runs")
    assert git(folder, "status", "--porcelain") == ""
    if keep:
        done = kept(folder)
        assert done.returncode == 0, done.stderr


def kept(folder: Path) -> subprocess.CompletedProcess[str]:
    """Stores a night from a copy that cannot push; another job pushes it from a second copy."""
    origin = git(folder, "remote", "get-url", "origin").strip()
    bundle = folder / "night.bundle"
    git(folder, "remote", "set-url", "--push", "origin", "nowhere")
    bundle.unlink(missing_ok=True)
    done = shell(script("keep what was measured").replace("$RUNNER_TEMP", str(folder)), folder / ".fp8bench")
    assert done.returncode == 0, done.stderr
    lent = folder.parent / "lent"
    shutil.rmtree(lent, ignore_errors=True)
    git(folder.parent, "clone", "-q", "-b", "main", origin, str(lent))
    return shell(script("push the history").replace("$RUNNER_TEMP", str(folder)), lent)


@pytest.mark.slow
def test_each_night_adds_its_runs_to_the_branch_of_the_history(tmp_path: Path) -> None:
    origin = tmp_path / "origin.git"
    git(tmp_path, "init", "-q", "--bare", str(origin))
    first = tmp_path / "first"
    git(tmp_path, "clone", "-q", str(origin), str(first))
    (first / "code.py").write_text("pass\n")
    (first / ".gitignore").write_text(".fp8bench/\n")
    git(first, "add", ".")
    git(first, "commit", "-q", "-m", "code")
    git(first, "push", "-q", "origin", "HEAD:refs/heads/main")
    second = tmp_path / "second"
    git(tmp_path, "clone", "-q", "-b", "main", str(origin), str(second))

    night(first, 1)
    night(first, 2)
    night(second, 3, keep=False)
    night(first, 4)
    done = kept(second)
    assert done.returncode == 0, done.stderr
    names = git(origin, "ls-tree", "-r", "--name-only", "fp8bench-history").split()
    assert names == [".gitattributes", *(f"runs/box/night{number}.jsonl" for number in (1, 2, 3, 4))]
    assert git(origin, "ls-tree", "-r", "--name-only", "main").split() == [".gitignore", "code.py"]
    again = kept(second)
    assert again.returncode == 0 and "nothing was measured" in again.stdout
    assert git(origin, "rev-list", "--count", "fp8bench-history").strip() == "4"


@pytest.mark.slow
@for_each("planted", ["workflow", "link", "gone"])
def test_a_night_that_does_more_than_add_runs_is_not_pushed(planted: str, tmp_path: Path) -> None:
    """Otherwise the owner of the measuring machine could commit anything."""
    test_each_night_adds_its_runs_to_the_branch_of_the_history(tmp_path)
    folder = tmp_path / "first"
    before = git(tmp_path / "origin.git", "rev-parse", "fp8bench-history")
    night(folder, 5, keep=False)
    inside = folder / ".fp8bench"
    if planted == "workflow":
        (inside / ".github" / "workflows").mkdir(parents=True)
        (inside / ".github" / "workflows" / "own.yml").write_text("on: push\n")
        git(inside, "add", "-f", ".github")
    elif planted == "link":
        (inside / "runs" / "box" / "night6.jsonl").symlink_to("/etc/passwd")
    else:
        git(inside, "rm", "-q", "runs/box/night1.jsonl")
    done = kept(folder)
    assert done.returncode == 1 and "it is not pushed" in done.stdout
    assert git(tmp_path / "origin.git", "rev-parse", "fp8bench-history") == before


@pytest.mark.parametrize(
    ("code", "page", "warned"),
    [
        (0, "no regression", False),
        (4, "history too young: 7 nights at this level", True),
        (4, "cannot tell", False),
        (1, "history too young: 7 nights at this level", True),
    ],
)
def test_the_nightly_gate_fails_the_job_or_warns(code: int, page: str, warned: bool, tmp_path: Path) -> None:
    (script,) = (step["run"] for step in steps(load(NIGHTLY)) if name_of(step) == "gate")
    program = tmp_path / "bin" / "fp8bench"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{page}' > gate.md\nexit {code}\n")
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": "summary.md"},
    )
    assert done.returncode == code and ("::warning::" in done.stdout) == warned
    assert page in (tmp_path / "summary.md").read_text()


def test_files_that_only_github_reads_are_well_formed() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text())
        identifiers = [field["id"] for field in form["body"]]
        assert form["name"] and form["description"] and len(set(identifiers)) == len(identifiers) > 1
        assert all(field["attributes"]["label"] for field in form["body"])
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert all((ROOT / update["directory"].lstrip("/")).is_dir() for update in updates)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = " ".join(hook["entry"] for hook in local["hooks"])
    named = {word for word in entries.split() if "/" in word}
    assert named and all((ROOT / word).is_file() for word in named)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == fp8bench.__version__
