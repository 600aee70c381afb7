"""Who asv would say this is: machine and interpreter under which `asv run -E existing` files its results here.

asv draws one series for each set of parameters, so a result that fp8bench files lands in the series of the user's own
asv runs only if every value is the same. asv itself is not imported: that costs a fifth of a second and runs plugins.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fp8bench.model import Scalar

Entry = Mapping[str, Scalar | None]

_FORMAT = 1  # of asv's machine files
_PREFIX = "asv_"  # of the facts
_INTERPRETER = "interpreter"  # the fact
_REPLACED = str.maketrans(dict.fromkeys([*'<>:"/^|?*', *map(chr, range(32)), os.sep], "_"))
_LONGEST_NAME = 127  # characters of an environment's name that asv still puts into the name of a file
_LAUNCHER_BYTES = 8192  # of a script, which are enough for its interpreter's path
# How uv's launchers that may be moved write the folder they lie in: "$(dirname -- "$(realpath -- "$0")")"/
_OWN_FOLDER = re.compile(r'"\$\(.*"\$0".*\)"(?=/)')


class Home(NamedTuple):
    """A machine and an interpreter, by the name it was called, and what all its names have in common."""

    machine: str
    python: str
    interpreter: str

    def is_same(self, other: Home) -> bool:
        """Whether both are one, by whatever name the interpreter was called: bin/python and bin/python3 are."""
        alike = self.python == other.python or self.interpreter == other.interpreter
        return self.machine == other.machine and alike


@dataclass(frozen=True)
class Identity:
    """asv's parameters of a machine (and what else its entry says, a GPU say), and its name for the interpreter.

    `interpreter` is the same by whatever name the interpreter was called.
    """

    machine: Entry
    python: str
    interpreter: str = ""

    @property
    def home(self) -> Home:
        return Home(str(self.machine["machine"]), self.python, self.interpreter)

    @property
    def env_name(self) -> str:
        """The name of the environment; asv replaces what some file system refuses."""
        return f"existing-py{self.python}".translate(_REPLACED)

    @property
    def params(self) -> dict[str, Scalar | None]:
        """What asv stores with each result, and tells series apart by."""
        return {**self.machine, "python": self.python}

    def file_name(self, commit: str) -> str:
        name = self.env_name
        if len(name) > _LONGEST_NAME:
            import hashlib

            digest = hashlib.md5(name.encode("utf-8", "surrogateescape"), usedforsecurity=False)
            name = f"env-{digest.hexdigest()}"
        return f"{commit[:8]}-{name}.json"


def identify(known: Entry | None = None) -> Identity:
    """This machine and interpreter: the user's entry for asv, else `known`, else what `asv machine --yes` would find.

    `known` is the machine.json of a store, which keeps a series whole when the system is updated. An entry that asv
    could not use is ignored.
    """
    stored = {name: value for name, value in (known or {}).items() if name != "version"}  # which is the file's
    machine = _usable(_entry_of_user(platform.node())) or _usable(stored) or _found()
    python = named_by_asv(sys.executable or "python")
    return Identity(machine, python, resolved(python))


def resolved(python: str) -> str:
    """What all names of an interpreter have in common: its file, and the folder from which it is called.

    The folder counts because a virtual environment is known by it: those of two environments often are the same file.
    A path that leads to no file here stands for itself. Runs say what it was where they were made; this is for older
    ones, and for what asv's files, acknowledgements and people name.
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
    """The identity a run was measured under; None where its facts name no machine or no interpreter."""
    values = {name.removeprefix(_PREFIX): value for name, value in facts.items() if name.startswith(_PREFIX)}
    machine, python = _usable(values), values.get("python")
    if machine is None or not isinstance(python, str) or not python:
        return None
    return Identity(machine, python, str(facts.get(_INTERPRETER) or resolved(python)))


def _usable(entry: object) -> dict[str, Scalar | None] | None:
    """What can be a parameter of a series: `asv publish` fails on lists. None without a machine's name.

    The name becomes a folder, and facts come from files that others wrote: it leads nowhere else.
    """
    if not isinstance(entry, Mapping):
        return None
    name = entry.get("machine")
    if not isinstance(name, str) or name in ("", ".", "..") or "\0" in name or os.sep in name:
        return None
    kept = {key: value for key, value in entry.items() if value is None or isinstance(value, int | float | str | bool)}
    kept.pop("python", None)  # asv's own word on the interpreter stands in its place
    return kept


def _entry_of_user(host: str) -> object:
    """What ~/.asv-machine.json says of this host; where it knows one machine only, that one is meant."""
    try:
        known = json.loads(Path("~/.asv-machine.json").expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # no such file, no JSON, no home or JSON without a bottom
        return None
    if not isinstance(known, dict) or known.pop("version", None) != _FORMAT:
        return None
    return known.get(host, next(iter(known.values())) if len(known) == 1 else None)


def _found() -> dict[str, Scalar | None]:
    """What asv finds out by itself; '' for what the system does not say."""
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
    """The first value of that name in a file of 'name : value' lines."""
    try:
        text = Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _bytes(size: str) -> str:
    """'24 kB' as bytes; what is no number stays as it is."""
    number, _, unit = size.partition(" ")
    return str(int(number) * 1024) if number.isdecimal() and unit == "kB" else number


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def named_by_asv(path: str) -> str:
    """An interpreter as its command `asv` names it.

    asv goes by the path it was started with, which the first lines of its script say (bin/python3, say), while
    `python -m fp8bench` goes by bin/python: one interpreter, but two series to asv.
    """
    ours = _absolute(path)
    for folder in dict.fromkeys((Path(ours).parent, Path(sysconfig.get_path("scripts")))):
        named = _started_by(folder / "asv")
        if named is not None and resolved(named) == resolved(ours) != ours:
            return _absolute(named)
    return ours


def _absolute(path: str) -> str:
    """As asv does it: links stay, because a virtual environment's interpreter is one."""
    return os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow them


def _started_by(script: Path) -> str | None:
    """The interpreter that a script names, as `#!path`, `#!/usr/bin/env name`, or in the launcher below.

    A path that is too long for a first line, or has spaces, is written by pip and uv as a line of shell that Python
    reads as text: #!/bin/sh, then '''exec' "/the path/python" "$0" "$@".
    """
    try:
        with script.open("rb") as file:
            lines = os.fsdecode(file.read(_LAUNCHER_BYTES)).split("\n")
    except OSError:
        return None
    words = lines[0].removeprefix("#!").split() if lines[0].startswith("#!") else []
    if not words:
        return None
    if Path(words[0]).name == "env":
        return next((shutil.which(word) for word in words[1:] if not word.startswith("-")), None)
    if Path(words[0]).name == "sh":
        own_folder = shlex.quote(str(script.resolve().parent))
        try:
            words = shlex.split(_OWN_FOLDER.sub(lambda _: own_folder, lines[1] if len(lines) > 1 else ""))
        except ValueError:
            return None
        return words[1] if len(words) > 1 and words[0] == "exec" else None
    return words[0]
