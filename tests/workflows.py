"""What must hold of a workflow of GitHub's: rules that read its file and say what is wrong, a sentence each.

They are those of actionlint that matter here, and the house's own: whoever changes a workflow without GitHub at hand
learns from these what GitHub would only tell at night.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fp8bench.cli.main import build_parser, parse
from fp8bench.errors import UsageError

Flow = dict[str, Any]
WORKFLOW_KEYS = {"name", "on", "permissions", "concurrency", "defaults", "env", "jobs"}
JOB_KEYS = {"name", "if", "needs", "runs-on", "timeout-minutes", "strategy", "env", "steps", "permissions"}
STEP_KEYS = {
    "name", "id", "if", "uses", "with", "run", "env", "timeout-minutes", "working-directory", "shell",
    "continue-on-error",
}  # fmt: skip
# Events that start other people's code, or in whose name it could be started.
OF_STRANGERS = {"pull_request", "pull_request_target", "workflow_run", "issue_comment", "fork", "pull_request_review"}
CONTEXTS = {"github", "vars", "inputs", "matrix", "steps", "env", "runner", "needs"}
FUNCTIONS = {"always", "cancelled", "failure", "success"}
_PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}")
_NAME = re.compile(r"'[^']*'|([A-Za-z_][\w-]*)(\.[\w.*-]+)?(\()?")
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
        *_shape(flow),
        *_permissions(flow),
        *_uses(flow, text),
        *_shell(flow),
        *_expressions(flow),
        *_commands(flow),
    ]


def steps(flow: Flow) -> Iterator[dict[str, Any]]:
    """All steps of all jobs, in order."""
    for job in flow.get("jobs", {}).values():
        yield from job.get("steps", [])


def name_of(step: dict[str, Any]) -> str:
    return str(step.get("name") or step.get("uses") or step.get("run", ""))[:60]


def _shape(flow: Flow) -> Iterator[str]:
    yield from (f"unknown key {key!r}" for key in set(flow) - WORKFLOW_KEYS)
    yield from (f"the key {key!r} is missing" for key in {"name", "on", "permissions", "jobs"} - set(flow))
    for name, job in flow.get("jobs", {}).items():
        yield from (f"job {name}: unknown key {key!r}" for key in set(job) - JOB_KEYS)
        if not str(job.get("timeout-minutes", "")).isdecimal():
            yield f"job {name} has no timeout-minutes: a hang would hold its runner for six hours"
        yield from (f"job {name} lacks {key}" for key in ("runs-on", "steps") if not job.get(key))
        ids = [step["id"] for step in job.get("steps", []) if "id" in step]
        yield from (f"job {name}: two steps are called {one}" for one in set(ids) if ids.count(one) > 1)
    for step in steps(flow):
        yield from (f"step {name_of(step)}: unknown key {key!r}" for key in set(step) - STEP_KEYS)
        if ("run" in step) == ("uses" in step):
            yield f"step {name_of(step)} must have one of run and uses"


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
    """The commands of a job's scripts, as far as they begin a line or a condition."""
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


def _expressions(flow: Flow) -> Iterator[str]:
    known = {step["id"] for step in steps(flow) if "id" in step}
    for text in _texts(flow):
        if text.count("${{") != len(_EXPRESSION.findall(text)):
            yield f"an expression is not closed: {text!r}"
        for inside in _EXPRESSION.findall(text):
            for name, path, call in (found.groups() for found in _NAME.finditer(inside)):
                if name is None:
                    continue
                if call and name not in FUNCTIONS:
                    yield f"unknown function {name!r} in {text!r}"
                elif not call and name not in CONTEXTS:
                    yield f"unknown context {name!r} in {text!r}"
                elif name == "steps" and path.split(".")[1] not in known:
                    yield f"no step has the id {path.split('.')[1]!r}, which {text!r} asks for"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    else:
        yield str(value)


def _commands(flow: Flow) -> Iterator[str]:
    """Every command line of fp8bench's is one that its own parser takes."""
    for words in commands(flow, "fp8bench"):
        try:
            found = parse(build_parser(), words)
        except UsageError as error:
            yield f"fp8bench {' '.join(words)}: {error}"
            continue
        if found.command is None:
            yield f"fp8bench {' '.join(words)}: no command"


def commands(flow: Flow, program: str) -> Iterator[list[str]]:
    """The arguments of every call of a program in the workflow's scripts; a variable stands for itself."""
    for step in steps(flow):
        for line in step.get("run", "").replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            while program in words:
                words = words[words.index(program) + 1 :]
                end = next((place for place, word in enumerate(words) if word in _ENDS_A_COMMAND), len(words))
                yield words[:end]
