"""Finds the machine and interpreter under whose names `asv run -E existing` stores its results on this machine.

asv draws one line for each set of parameters. A result of fp8bench is on the same line as the user's asv runs only if
all parameters are equal. asv itself is not imported, because its import takes a fifth of a second and runs plugins.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fp8bench.files import parse_json, read_file
from fp8bench.model import Scalar

IdentityEntry = Mapping[str, Scalar | None]

_MACHINE_FILE_VERSION = 1  # the version of the format of ~/.asv-machine.json
_ASV_FACT_PREFIX = "asv_"  # prefix of the facts of a run that are parameters of asv
_INTERPRETER_FACT = "interpreter"  # the fact of a run that has the text of `resolve_interpreter`
_FORBIDDEN_CHARACTERS = str.maketrans(dict.fromkeys([*'<>:"/^|?*', *map(chr, range(32)), os.sep], "_"))
_MAX_NAME_LENGTH = 127  # asv replaces a longer name of an environment by a hash


class MachineInterpreter(NamedTuple):
    """A machine and a Python interpreter on it. `python` is the path by which the interpreter was called, and
    `interpreter` is the text of `resolve_interpreter` for this path.
    """

    machine: str
    python: str
    interpreter: str

    def is_same_interpreter(self, other: MachineInterpreter) -> bool:
        """Returns whether both are the same interpreter on the same machine. bin/python and bin/python3 count as the
        same interpreter.
        """
        is_same_python = self.python == other.python or self.interpreter == other.interpreter
        return self.machine == other.machine and is_same_python


@dataclass(frozen=True)
class AsvIdentity:
    """asv's parameters of a machine, with additional facts such as a GPU, and asv's name for the interpreter.

    `interpreter` is as in MachineInterpreter.
    """

    machine: IdentityEntry
    python: str
    interpreter: str = ""

    @property
    def home(self) -> MachineInterpreter:
        """Where results were measured: the machine and the interpreter, without further facts."""
        return MachineInterpreter(str(self.machine["machine"]), self.python, self.interpreter)

    @property
    def env_name(self) -> str:
        """The name of asv's environment, without characters that a file system may refuse."""
        return f"existing-py{self.python}".translate(_FORBIDDEN_CHARACTERS)

    @property
    def params(self) -> dict[str, Scalar | None]:
        """The facts that asv stores with each result. Results with different facts belong to different series."""
        return {**self.machine, "python": self.python}

    def file_name(self, commit: str) -> str:
        name = self.env_name
        if len(name) > _MAX_NAME_LENGTH:
            import hashlib

            digest = hashlib.md5(name.encode("utf-8", "surrogateescape"), usedforsecurity=False)
            name = f"env-{digest.hexdigest()}"
        return f"{commit[:8]}-{name}.json"


def find_machine_identity(stored_entry: IdentityEntry | None = None) -> AsvIdentity:
    """Returns the identity of this machine and interpreter. The facts of the machine come from the user's entry in
    ~/.asv-machine.json, otherwise from `stored_entry`, otherwise from what `asv machine --yes` would find.

    `stored_entry` is the machine.json in a store. It keeps a series together when the system is updated. An entry that
    asv could not use is ignored.
    """
    # `version` is the version of the file format, and not a fact of the machine.
    stored_facts = {name: value for name, value in (stored_entry or {}).items() if name != "version"}
    machine = (
        _select_machine_facts(_read_user_machine_entry(platform.node()))
        or _select_machine_facts(stored_facts)
        or _discover_machine()
    )
    # Keep links, like asv does: the interpreter of a virtual environment is a link.
    python = os.path.abspath(sys.executable or "python")  # noqa: PTH100 - Path.resolve would follow them
    return AsvIdentity(machine, python, resolve_interpreter(python))


def resolve_interpreter(python: str) -> str:
    """Returns a text that is the same for all paths of one interpreter: the resolved folder of the path and the
    resolved file. The folder is needed because several virtual environments often share one file. A path that leads
    to no file on this machine is returned unchanged.
    """
    if not os.path.isfile(python):  # noqa: PTH113 - is_file raises where it may not look
        return python
    return os.pathsep.join((os.path.realpath(os.path.dirname(python) or "."), os.path.realpath(python)))  # noqa: PTH120


def list_identity_facts(identity: AsvIdentity) -> dict[str, Scalar | None]:
    return {_ASV_FACT_PREFIX + name: value for name, value in identity.params.items()} | {
        _INTERPRETER_FACT: identity.interpreter
    }


def parse_machine_identity(facts: IdentityEntry) -> AsvIdentity | None:
    """Returns the identity in a run's facts, or None if the facts name no machine or no interpreter."""
    asv_facts = {
        name.removeprefix(_ASV_FACT_PREFIX): value for name, value in facts.items() if name.startswith(_ASV_FACT_PREFIX)
    }
    machine, python = _select_machine_facts(asv_facts), asv_facts.get("python")
    if machine is None or not isinstance(python, str) or not python:
        return None
    return AsvIdentity(machine, python, str(facts.get(_INTERPRETER_FACT) or resolve_interpreter(python)))


def _select_machine_facts(entry: object) -> dict[str, Scalar | None] | None:
    """Returns the facts of an entry that can be parameters of a series, or None if the entry has no valid machine
    name. Lists are left out, because asv fails on them.

    The name of the machine becomes the name of a folder. The name may come from a foreign file, so it must not lead
    outside the store.
    """
    if not isinstance(entry, Mapping):
        return None
    name = entry.get("machine")
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or os.sep in name:
        return None
    facts = {key: value for key, value in entry.items() if value is None or isinstance(value, int | float | str | bool)}
    facts.pop("python", None)  # `AsvIdentity.params` adds the interpreter under this name
    return facts


def _read_user_machine_entry(host: str) -> object:
    """Returns the entry of this host in ~/.asv-machine.json. If the file has only one entry, returns that entry."""
    try:
        entries = parse_json(read_file(Path("~/.asv-machine.json").expanduser()))
    except (OSError, ValueError, RuntimeError):
        # The file is missing, is not JSON or is nested too deeply, or the user has no home folder.
        return None
    if not isinstance(entries, dict) or entries.pop("version", None) != _MACHINE_FILE_VERSION:
        return None
    return entries.get(host, next(iter(entries.values())) if len(entries) == 1 else None)


def _discover_machine() -> dict[str, Scalar | None]:
    """Returns the facts about this machine that asv would find. Unknown facts are ''."""
    is_macos = platform.system() == "Darwin"
    return {
        "machine": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "cpu": _read_sysctl("machdep.cpu.brand_string")
        if is_macos
        else _read_named_value("/proc/cpuinfo", "model name"),
        "num_cpu": str(os.cpu_count() or ""),
        "ram": _read_sysctl("hw.memsize")
        if is_macos
        else _parse_kilobytes(_read_named_value("/proc/meminfo", "MemTotal")),
    }


def _read_named_value(path: str, name: str) -> str:
    """Returns the first value of a name in a file with lines 'name : value'. Returns '' if the name is missing."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _parse_kilobytes(size: str) -> str:
    """Converts a size such as '24 kB' to bytes. Returns the first word of a text in any other form."""
    number, _, unit = size.partition(" ")
    return str(int(number) * 1024) if number.isdecimal() and unit == "kB" else number


def _read_sysctl(name: str) -> str:
    try:
        result = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
