"""Rules for GitHub workflows: they read a file and return a sentence per fault.

They cover what actionlint does not, and what GitHub would report only in a real nightly run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fp8bench.cli.main import build_parser, parse_command_words
from fp8bench.errors import UsageError

Flow = dict[str, Any]
_PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
_OF_SHELL = {"[", "echo", "exit", "exit;", "fi", "for", "done", "grep"}
_ENDS_A_COMMAND = {"|", "||", "&&", ";", "then", "else", "fi", "do", "done"}


def load(path: Path) -> Flow:
    """A workflow as texts: in YAML 1.1 the key `on` would be true."""
    found = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    assert isinstance(found, dict)
    return found


def faults(flow: Flow, text: str) -> list[str]:
    """Everything that is wrong with a workflow."""
    return [
        *_timeouts(flow),
        *_permissions(flow),
        *_uses(flow, text),
        *_shell(flow),
        *_commands(flow),
    ]


def steps(flow: Flow) -> Iterator[dict[str, Any]]:
    """All steps of all jobs, in order."""
    for job in flow.get("jobs", {}).values():
        yield from job.get("steps", [])


def name_of(step: dict[str, Any]) -> str:
    return str(step.get("name") or step.get("uses") or step.get("run", ""))[:60]


def _timeouts(flow: Flow) -> Iterator[str]:
    for name, job in flow.get("jobs", {}).items():
        if not str(job.get("timeout-minutes", "")).isdecimal():
            yield f"job {name} has no timeout-minutes: a hang would hold its runner for six hours"


def _permissions(flow: Flow) -> Iterator[str]:
    given = flow.get("permissions")
    if not isinstance(given, dict) or not given or not set(given.values()) <= {"read", "write", "none"}:
        yield "permissions are to be named one by one: what is not named is then none"
    for name, job in flow.get("jobs", {}).items():
        own = job.get("permissions", given)
        if own == {"contents": "read"}:
            for step in job.get("steps", []):
                if "checkout@" in step.get("uses", "") and step.get("with", {}).get("persist-credentials") != "false":
                    yield f"job {name}: its checkout leaves a token on the disk (persist-credentials: false)"
            continue
        if "self-hosted" in str(job.get("runs-on")):
            yield f"job {name} may write, and runs on a machine that lasts"
        programs = {words[0] for words in _words(job) if words[0] not in _OF_SHELL and "='" not in words[0]}
        if programs - {"git"}:
            yield f"job {name} may write, and runs {', '.join(sorted(programs - {'git'}))}"


def _words(job: dict[str, Any]) -> Iterator[list[str]]:
    """The commands of a job's scripts, if they begin a line or a condition."""
    for step in job.get("steps", []):
        for line in step.get("run", "").splitlines():
            words = re.sub(r"^\s*(((if|then|else|do)\b|!|\w+=\$\()\s*)*", "", line).split()
            if words:
                yield words


def _uses(flow: Flow, text: str) -> Iterator[str]:
    for step in steps(flow):
        used = step.get("uses")
        if used is None:
            continue
        if not _PINNED.fullmatch(used):
            yield f"{used} is not pinned to a commit: a tag may be moved"
        elif not re.search(re.escape(used) + r" # v\d+\.\d+\.\d+\n", text):
            yield f"{used} has no comment with its version"


def _shell(flow: Flow) -> Iterator[str]:
    for step in steps(flow):
        script = step.get("run")
        if script is None:
            continue
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"step {name_of(step)}: {done.stderr.strip()}"
        if _EXPRESSION.search(script):
            yield f"step {name_of(step)}: an expression within a script is code of whoever sets it; use env"
    shell = flow.get("defaults", {}).get("run", {}).get("shell")
    if shell != "bash" and any("|" in step.get("run", "") for step in steps(flow)):
        yield "without `shell: bash` a failure before a pipe is lost (no pipefail)"


def _commands(flow: Flow) -> Iterator[str]:
    """Every fp8bench command line is accepted by its parser."""
    for words in commands(flow, "fp8bench"):
        try:
            found = parse_command_words(build_parser(), words)
        except UsageError as error:
            yield f"fp8bench {' '.join(words)}: {error}"
            continue
        if found.command is None:
            yield f"fp8bench {' '.join(words)}: no command"


def commands(flow: Flow, program: str) -> Iterator[list[str]]:
    """The arguments of every call of a program in the workflow's scripts; variables are not expanded."""
    for step in steps(flow):
        for line in step.get("run", "").replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            while program in words:
                words = words[words.index(program) + 1 :]
                end = next((place for place, word in enumerate(words) if word in _ENDS_A_COMMAND), len(words))
                yield words[:end]
