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
    """The environment of a process that imports this checkout, with extra variables."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def unfolded(err: str) -> str:
    """stderr with each wrapped sentence on one line, as without a terminal."""
    return re.sub(r"\n {4}", " ", err)


def only_sentence(err: str) -> str:
    """The only sentence on stderr, without a command line that follows for pasting."""
    sentence, *pasted = unfolded(err).splitlines()
    assert all(line.startswith("  fp8bench ") for line in pasted) and len(pasted) <= 1, err
    return sentence


def unfolding(fp8bench: Say, *command: str) -> Say:
    """Runs a command with extra words and unwraps the sentences of its stderr."""

    def say(*words: str) -> tuple[int, str, str]:
        code, out, err = fp8bench(*command, *words)
        return code, out, unfolded(err)

    return say


def session(fp8bench: Say, *typed: str) -> str:
    """A transcript of command lines (without their first word) with stdout, stderr and exit code."""
    told = []
    for line in typed:
        code, out, err = fp8bench(*shlex.split(line))
        said = "".join(f"! {sentence}\n" for sentence in unfolded(err).splitlines())
        shown = line.replace("\0", "\\0")
        told.append(f"$ fp8bench {shown}\n{out}{said}{f'exit code {code}' if code else ''}".rstrip("\n"))
    return "\n".join(told)


def git(folder: Path, *words: str) -> str:
    """Output of a git command, which must succeed.

    Ignores user settings: no identity is needed and nothing is signed.
    """
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def complaints(err: str) -> str:
    """stderr without progress lines, remarks on duration, and the page's path."""
    told = re.sub(r"fp8bench: \d+/\d+ [^\n]*? after .*?(\n|$|(?=fp8bench: ))", "", err)
    return re.sub(r"fp8bench: report: [^\n]*report\.html(\n|$)", "", told)
