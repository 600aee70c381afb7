"""The machine and interpreter under whose names `asv run -E existing` files its results here.

asv draws one line for each set of parameters, so a result of fp8bench is on the line of the user's asv runs only if
every value is the same. asv is not imported: that takes a fifth of a second and runs plugins.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fp8bench.files import read_file
from fp8bench.model import Scalar

Entry = Mapping[str, Scalar | None]

_FORMAT = 1  # the version of asv's machine files
_PREFIX = "asv_"  # before the names of asv's parameters among a run's facts
_INTERPRETER = "interpreter"  # the name of that fact
_REPLACED = str.maketrans(dict.fromkeys([*'<>:"/^|?*', *map(chr, range(32)), os.sep], "_"))
_LONGEST_NAME = 127  # asv hashes the name of an environment that has more characters


class Home(NamedTuple):
    """A machine and an interpreter: the path that it was called by, and `interpreter`, which is the same for all its
    paths."""

    machine: str
    python: str
    interpreter: str

    def is_same(self, other: Home) -> bool:
        """Whether both are one: bin/python and bin/python3 are."""
        same_python = self.python == other.python or self.interpreter == other.interpreter
        return self.machine == other.machine and same_python


@dataclass(frozen=True)
class Identity:
    """asv's parameters of a machine, with other facts of its entry, as a GPU, and asv's name for the interpreter.

    `interpreter` is the same for all paths of the interpreter.
    """

    machine: Entry
    python: str
    interpreter: str = ""

    @property
    def home(self) -> Home:
        return Home(str(self.machine["machine"]), self.python, self.interpreter)

    @property
    def env_name(self) -> str:
        """The name of asv's environment, without characters that some file system refuses."""
        return f"existing-py{self.python}".translate(_REPLACED)

    @property
    def params(self) -> dict[str, Scalar | None]:
        """The facts that asv stores with each result, and that distinguish series."""
        return {**self.machine, "python": self.python}

    def file_name(self, commit: str) -> str:
        name = self.env_name
        if len(name) > _LONGEST_NAME:
            import hashlib

            digest = hashlib.md5(name.encode("utf-8", "surrogateescape"), usedforsecurity=False)
            name = f"env-{digest.hexdigest()}"
        return f"{commit[:8]}-{name}.json"


def identify(known: Entry | None = None) -> Identity:
    """Returns this machine and interpreter: the user's entry for asv, else `known`, else what `asv machine --yes`
    finds.

    `known` is a store's machine.json, which keeps a series whole when the system is updated. An entry that asv could
    not use is ignored.
    """
    stored = {name: value for name, value in (known or {}).items() if name != "version"}  # which is the file's
    machine = _usable(_entry_of_user(platform.node())) or _usable(stored) or _discover_machine()
    # As asv does it: links stay, because a virtual environment's interpreter is one.
    python = os.path.abspath(sys.executable or "python")  # noqa: PTH100 - Path.resolve would follow them
    return Identity(machine, python, resolve_interpreter(python))


def resolve_interpreter(python: str) -> str:
    """Returns what all paths of an interpreter have in common: its file, and the folder from which it is called.

    The folder counts because virtual environments often share one interpreter file. A path
    that leads to no file here is returned. Runs name the interpreter themselves; this serves older runs, and paths in
    asv's files, in acknowledgements and in what people type.
    """
    try:
        if os.path.isfile(python):  # noqa: PTH113 - is_file raises where it may not look
            return os.pathsep.join((os.path.realpath(os.path.dirname(python) or "."), os.path.realpath(python)))  # noqa: PTH120
    except ValueError:
        pass
    return python


def as_facts(identity: Identity) -> dict[str, Scalar | None]:
    return {_PREFIX + name: value for name, value in identity.params.items()} | {_INTERPRETER: identity.interpreter}


def from_facts(facts: Entry) -> Identity | None:
    """Returns the identity that a run was measured under; None where its facts name no machine or interpreter."""
    values = {name.removeprefix(_PREFIX): value for name, value in facts.items() if name.startswith(_PREFIX)}
    machine, python = _usable(values), values.get("python")
    if machine is None or not isinstance(python, str) or not python:
        return None
    return Identity(machine, python, str(facts.get(_INTERPRETER) or resolve_interpreter(python)))


def _usable(entry: object) -> dict[str, Scalar | None] | None:
    """Returns the facts that can be parameters of a series (asv fails on lists); None without a machine's name.

    The name becomes a folder and may come from somebody else's file, so it must not lead elsewhere.
    """
    if not isinstance(entry, Mapping):
        return None
    name = entry.get("machine")
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or os.sep in name:
        return None
    facts = {key: value for key, value in entry.items() if value is None or isinstance(value, int | float | str | bool)}
    facts.pop("python", None)  # asv's name of the interpreter replaces it
    return facts


def _entry_of_user(host: str) -> object:
    """Returns the entry of this host in ~/.asv-machine.json; a single entry is taken whatever its name."""
    try:
        entries = json.loads(read_file(Path("~/.asv-machine.json").expanduser()))
    except (OSError, ValueError, RuntimeError):  # no such file, no JSON, no home or JSON without a bottom
        return None
    if not isinstance(entries, dict) or entries.pop("version", None) != _FORMAT:
        return None
    return entries.get(host, next(iter(entries.values())) if len(entries) == 1 else None)


def _discover_machine() -> dict[str, Scalar | None]:
    """Returns the facts that asv discovers; '' for unknown ones."""
    mac = platform.system() == "Darwin"
    return {
        "machine": platform.node(),
        "os": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "cpu": _sysctl("machdep.cpu.brand_string") if mac else _line("/proc/cpuinfo", "model name"),
        "num_cpu": str(os.cpu_count() or ""),
        "ram": _sysctl("hw.memsize") if mac else _bytes(_line("/proc/meminfo", "MemTotal")),
    }


def _line(path: str, name: str) -> str:
    """Returns the first value of a name in a file of 'name : value' lines."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _bytes(size: str) -> str:
    """Returns '24 kB' as bytes; other texts unchanged."""
    number, _, unit = size.partition(" ")
    return str(int(number) * 1024) if number.isdecimal() and unit == "kB" else number


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
