"""asv's benchmarks.json and machine.json: what there is to show, and the machine it ran on.

asv writes both anew whenever it runs, from its own discovery. fp8bench merges: it never drops what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.errors import AsvFileBroken, AsvFileError
from fp8bench.history.asv_files import read_object, write_object
from fp8bench.history.asv_rows import are_params
from fp8bench.model import Scalar

BENCHMARKS_VERSION = 2
MACHINE_VERSION = 1
_INDENT = 4
# What a reader of results goes by; the rest is for asv's runner.
_TELLING = ("params", "version", "unit", "param_names")


@dataclass(frozen=True)
class Definition:
    """A benchmark as asv's discovery would describe it. `params` are texts, as in a row; `timeout` is in seconds."""

    name: str
    unit: str
    params: tuple[tuple[str, ...], ...]
    param_names: tuple[str, ...]
    version: str
    code: str | None = None
    timeout: float | None = None
    setup_cache_key: str | None = None

    def plain(self) -> dict[str, Any]:
        """What stands in benchmarks.json."""
        optional = {"code": self.code, "timeout": self.timeout, "setup_cache_key": self.setup_cache_key}
        return {
            "name": self.name,
            "type": "track",
            "unit": self.unit,
            "params": [list(values) for values in self.params],
            "param_names": list(self.param_names),
            "version": self.version,
            **{key: value for key, value in optional.items() if value is not None},
        }


def load_benchmarks(path: Path) -> dict[str, Any]:
    """The definitions in benchmarks.json by name, as they are. One that asv would fail on breaks the file for asv."""
    content = read_object(path, BENCHMARKS_VERSION)
    for name, one in content.items():
        if not isinstance(one, dict) or one.get("name") != name or not are_params(one.get("params")):
            raise AsvFileBroken(f"{path} is broken: the benchmark {name!r:.120} has no name and params.")
    return content


def merge_benchmarks(old: Mapping[str, Any], definitions: Iterable[Definition]) -> dict[str, Any]:
    """The old definitions with these among them. One that says the same to a reader stays as it is."""
    new = dict(old)
    for definition in definitions:
        plain = definition.plain()
        known = new.get(definition.name)
        if known is None or any(known.get(key) != plain[key] for key in _TELLING):
            new[definition.name] = plain
    return new


def save_benchmarks(path: Path, benchmarks: Mapping[str, Any]) -> None:
    """Write benchmarks.json in one step, sorted and indented as asv does."""
    write_object(path, {**benchmarks, "version": BENCHMARKS_VERSION}, _INDENT)


def load_machine(path: Path) -> dict[str, Any]:
    """What machine.json says of a machine, its name at least."""
    content = read_object(path, MACHINE_VERSION)
    if not isinstance(content.get("machine"), str):
        raise AsvFileBroken(f"{path} is broken: it names no 'machine'.")
    return content


def merge_machine(old: Mapping[str, Any], new: Mapping[str, Scalar | None]) -> dict[str, Any]:
    """What was known of a machine, and what is new; None is not given. Another machine has a folder of its own."""
    if old and old.get("machine") != new.get("machine"):
        raise AsvFileError(
            f"the results of machine {old.get('machine')!r:.80} cannot become those of {new.get('machine')!r:.80}: "
            "asv would no longer show them. Choose another --store DIR."
        )
    return {**old, **{key: value for key, value in new.items() if value is not None}}


def save_machine(path: Path, machine: Mapping[str, Any]) -> None:
    """Write machine.json in one step, sorted and indented as asv does."""
    write_object(path, {**machine, "version": MACHINE_VERSION}, _INDENT)
