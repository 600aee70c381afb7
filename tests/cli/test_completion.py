"""Each shell loads the script that `fp8bench completion` prints, and completes partial words."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import Say

shtab = pytest.importorskip("shtab")

# Typed text, and its completions in each shell.
BEGUN = {
    "fp8bench sui": "suite",
    "fp8bench history regr": "regressions",
    "fp8bench suite --static": "--static-scales",
    "fp8bench duel suite gemm --against-s": "--against-self",
    "fp8bench suite transf": "transformer",
    "fp8bench train --dtypes fp8,bf1": "fp8,bf16",
    "fp8bench sensitivity --dtype nvf": "nvfp4",
    "fp8bench train --optimizer-states fp8": "fp8lm",
    "fp8bench suite gemm --config night": "nightly.yaml",
}
IN_BASH = """
source {script}
words=({line})
COMP_WORDS=("${{words[@]}}") COMP_CWORD=$((${{#words[@]}} - 1))
"$(complete -p fp8bench | sed 's/.* -F \\([^ ]*\\) .*/\\1/')"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch) -> Path:
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nightly.yaml").touch()
    code, out, err = fp8bench("completion", shell)
    assert (code, err) == (0, "")
    (tmp_path / shell).write_text(out)
    return tmp_path / shell


def said(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash(script: Path) -> None:
    for line, expected in BEGUN.items():
        assert said("bash", "--norc", "-c", IN_BASH.format(script=script, line=line)) == [expected], line
    every = said("bash", "--norc", "-c", IN_BASH.format(script=script, line="fp8bench history ''"))
    assert {"list", "ack", "verify"} <= set(every)


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh(script: Path) -> None:
    """In an interactive zsh, the only place where zsh completes."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "dumb", "COLUMNS": "200"}
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        answer(
            terminal,
            f"PS1=ready; autoload -Uz compinit; compinit -u -D; eval \"$(cat {script})\"; echo do'ne'\n",
            "done",
        )
        for line, expected in BEGUN.items():
            whole = f"{line.rpartition(' ')[0]} {expected}"
            assert whole in answer(terminal, f"{line}\t", whole)
            answer(terminal, "\x15echo ne'xt'\n", "next")
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def answer(terminal: int, typed: str, until: str) -> str:
    os.write(terminal, typed.encode())
    shown, read, end = "", b"", time.monotonic() + 240
    while until not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            read += os.read(terminal, 65536)  # may start or end inside a character, or be a terminal control sequence
            shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\b]", "", read.decode(errors="replace"))
    return shown


def test_without_shtab(fp8bench: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = fp8bench("completion", "bash")
    assert (code, out) == (2, "") and "pip install shtab" in err
    assert fp8bench("completion", "csh")[0] == 2
