"""Rules for every file of the repository, those not committed yet included."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.sources import ROOT

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|farm)/")
# Files of stores and users are opened by files.open_file, which never blocks on a pipe. These modules read only this
# machine's or fp8bench's files.
OPENS = re.compile(r"""\.read_(?:bytes|text)\(|\.open\("(?:rb|ab|r\+b|a\+b)\"""")
OTHERS = (
    "plan/corpus.py",
    "store/asv/identity.py",
    "jobs/topology.py",
    "jobs/device_units.py",
    "features/infer/job.py",
    "features/init/command.py",
    "features/init/source.py",
)
LATER = re.compile(r"\b(?:TO" + "DO|FIX" + "ME)\\b")


@pytest.fixture(scope="module")
def files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout, to know which files are the repository's")
    # safe.directory: in containers the checkout often belongs to a different user.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [ROOT / name for name in done.stdout.split("\0") if name]
    return [path for path in found if path.is_file()]


def offenders(files: list[Path], pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def test_files_hold_no_paths_of_one_machine_and_nothing_is_left_for_later(files: list[Path]) -> None:
    """Unfinished work belongs in ARCHITECTURE.md or an issue, with its reason; a helper is next to its caller."""
    assert Path(__file__).resolve() in files
    assert not offenders(files, MACHINE_PATH) + offenders(files, LATER)
    assert not [path for path in files if path.stem in {"utils", "util", "helpers", "misc"}]


def test_files_of_a_store_or_a_user_are_opened_in_one_way() -> None:
    package = ROOT / "fp8bench"
    opening = set()
    for room in ("store", "plan", "jobs", "features", "cli"):
        for path in (package / room).rglob("*.py"):
            if OPENS.search(path.read_text()):
                opening.add(str(path.relative_to(package)))
    assert opening == set(OTHERS)
