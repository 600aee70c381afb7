"""The core stands without features: its tests pass in a copy from which their folder is missing."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.house.sources import ROOT

# Names of the package that belong to a feature.
_PUBLIC = {
    "advise",
    "audit",
    "audit_model",
    "duel",
    "gate",
    "hugging_face_callback",
    "lightning_callback",
    "ablate",
    "load_training",
    "resume_training",
    "sensitivity",
    "train",
    "watch",
}
# Tests of the core that run commands of features, or read files with features in them.
_BY_WORDS = (
    "tests/cli/test_completion.py",
    "tests/cli/test_help.py",
    "tests/faults/test_bad_recipes.py::test_modes_on_the_command_line",  # train and sensitivity refuse it too
    "tests/faults/test_hostile_stores.py::test_a_file_that_no_memory_holds_is_no_run",
    "tests/store/runs/test_listing.py::test_two_contents_of_one_id_are_both_refused",
    "tests/store/runs/test_listing.py::test_a_copy_with_a_later_name_is_not_the_last_run",
    "tests/test_python_calls.py",
    "tests/test_asv.py",  # asv imports all of suites/, including benchmarks of features
    "tests/test_sample_report.py",  # advice is a section of it
    "tests/test_workflows.py",
)

_OUTSIDE = {ROOT / "tests", ROOT / "suites"}


def _needs_features(path: Path) -> bool:
    # Files of suites import each other in cycles.
    reached, waiting = {path}, [path]
    while waiting:
        needs_features, helpers = _read_imports(waiting.pop())
        if needs_features:
            return True
        waiting += helpers - reached
        reached |= helpers
    return False


@cache
def _read_imports(path: Path) -> tuple[bool, frozenset[Path]]:
    """Whether a file needs features itself, and the files of tests and suites that it imports."""
    if path.relative_to(ROOT).parts[1] in ("features", "golden", "house", "browser", "gpu", "docs"):
        return True, frozenset()
    helpers: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        else:
            continue
        for name in names:
            if name.startswith("fp8bench.features") or name.removeprefix("fp8bench.") in _PUBLIC:
                return True, frozenset()
            files = [ROOT.joinpath(*part.split(".")).with_suffix(".py") for part in (name, name.rpartition(".")[0])]
            helpers |= {file for file in files if _OUTSIDE & {*file.parents} and file.is_file()}
    return False, frozenset(helpers)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_core_without_features_passes_its_tests() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short name, as tests check truncated command lines
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns("__pycache__", "build", ".fp8bench", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        shutil.rmtree(copy / "fp8bench" / "features")
        tests = [path for path in (ROOT / "tests").rglob("test_*.py") if not _needs_features(path)]
        assert len(tests) > 200
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                *(f"--deselect={name}" for name in _BY_WORDS),
                *(str(path.relative_to(ROOT)) for path in sorted(tests)),
            ],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
