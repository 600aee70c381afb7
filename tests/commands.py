"""fp8bench and git as a person runs them; the fixture `fp8bench` runs a command line in this process."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = (sys.executable, "-W", "error", "-m", "fp8bench")
Say = Callable[..., tuple[int, str, str]]


def environment(**more: str) -> dict[str, str]:
    """That of a process that is to find this checkout, with more variables."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def unfolded(err: str) -> str:
    """What was said on stderr, each sentence in one line, as where there is no terminal that it would have to fit."""
    return re.sub(r"\n {4}", " ", err)


def only_sentence(err: str) -> str:
    """The one sentence on stderr, without the command line that may stand below it to be pasted."""
    sentence, *pasted = unfolded(err).splitlines()
    assert all(line.startswith("  fp8bench ") for line in pasted) and len(pasted) <= 1, err
    return sentence


def unfolding(fp8bench: Say, *command: str) -> Say:
    """A command, run with more words; what it says on stderr is unfolded."""

    def say(*words: str) -> tuple[int, str, str]:
        code, out, err = fp8bench(*command, *words)
        return code, out, unfolded(err)

    return say


def session(fp8bench: Say, *typed: str) -> str:
    """Command lines without their first word, with what each prints, what it says on stderr and its exit code."""
    told = []
    for line in typed:
        code, out, err = fp8bench(*shlex.split(line))
        said = "".join(f"! {sentence}\n" for sentence in unfolded(err).splitlines())
        shown = line.replace("\0", "\\0")
        told.append(f"$ fp8bench {shown}\n{out}{said}{f'exit code {code}' if code else ''}".rstrip("\n"))
    return "\n".join(told)


def git(folder: Path, *words: str) -> str:
    """What git says; it must work. Of nobody's settings, so that no name is asked for and nothing is signed."""
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def complaints(err: str) -> str:
    """What stderr says beside how far a command has come, where it takes longer, and where its page is."""
    told = re.sub(r"fp8bench: \d+/\d+ [^\n]*? after .*?(\n|$|(?=fp8bench: ))", "", err)
    return re.sub(r"fp8bench: report: [^\n]*report\.html(\n|$)", "", told)
