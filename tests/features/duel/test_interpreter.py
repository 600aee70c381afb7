"""Which words name a Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.duel import sides as module
from fp8bench.features.duel.sides import interpreter


def program(folder: Path, text: str) -> str:
    """A shell script that stands where a Python should."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_path_a_name_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are kept: a virtual environment's Python is one, and would be another one without."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    link = tmp_path / "env" / "bin" / "python"
    link.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    for word in (str(link), "env/bin/python", "env", str(tmp_path / "env")):
        assert interpreter(word, "--python-a") == str(link)
    monkeypatch.setenv("PATH", str(link.parent))
    assert interpreter("python", "--python-a") == str(link)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("echo hello", "is no Python that runs: asked for its version, it ended with status 0 and said 'hello'"),
        ("echo no such thing >&2; exit 3", "it ended with status 3 and said 'no such thing'"),
        ("exit 0", "said 'nothing'"),
        ("echo python 3.10.4", "is Python 3.10.4, and fp8bench needs 3.11 or newer there too"),
        ("echo python 2.7.18", "is Python 2.7.18"),
        ("kill -9 $$", "status -9"),
        ("sleep 30", "did not say within 0.5 s which Python it is, and was ended"),
    ],
)
def test_what_is_none_is_said_in_one_sentence(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it did, and the option that named it."""
    if "sleep" in text:
        monkeypatch.setattr(module, "_SECONDS", 0.5)
    with pytest.raises(UsageError, match="--python-b") as raised:
        interpreter(program(tmp_path, text), "--python-b")
    assert sentence in str(raised.value)


@pytest.mark.parametrize("word", ["", "no-such-python", "/nowhere/python", "."])
def test_no_program(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a folder without a bin/python."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is no program. Give a Python's name or path"):
        interpreter(word, "--python-a")


def test_a_file_that_nobody_can_run(tmp_path: Path) -> None:
    """It is executable and of no kind that the system knows."""
    path = tmp_path / "python"
    path.write_bytes(b"\x00\x01")
    path.chmod(0o755)
    with pytest.raises(UsageError, match=r"cannot be run \(Exec format error\)"):
        interpreter(str(path), "--python-a")
