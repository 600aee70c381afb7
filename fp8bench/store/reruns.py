"""What runs of each case came to, kept in `<store>/reruns`: a file for each device with its software and settings.

Every run that ends adds to it, and the next one reads it: a few numbers a case, however many runs there were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.analysis.reruns import Seen, is_busy, learned
from fp8bench.analysis.verdicts import best_log
from fp8bench.errors import StoreError
from fp8bench.files import locked, sealed_line, unsealed_line, write_whole
from fp8bench.model import Level, Record, Reruns, Run
from fp8bench.store.ceilings import machine_file

# Raised when the same runs would say something else.
_VERSION = 1
# Other code is another case.
_CODE = ("commit", "fp8bench")
# Of a reference's control over the reference.
_AA = ", A/A"


def with_reruns(records: Sequence[Record], run: Run, store: Path) -> tuple[Record, ...]:
    """The records of a group with what runs of each case differed by so far, on a machine as busy or as quiet.

    Until that is known, with what they differed by in any state: less than in a busy one, and more than nothing.
    """
    seen = _read(_path(records, run, store))
    return tuple(
        replace(record, reruns=_learned(_name(record, records, run), seen)) if record.timing is not None else record
        for record in records
    )


def _learned(name: str, seen: Mapping[str, Seen]) -> Reruns | None:
    same_kind = {other: runs for other, runs in seen.items() if _of_same_code(other) == _of_same_code(name)}
    same_state = {other: runs for other, runs in same_kind.items() if _state(other) == _state(name)}
    return learned(name, same_state) or learned(name, same_kind)


def add_reruns(records: Sequence[Record], run: Run, store: Path) -> None:
    """What a group came to is one run more of each case, unless rounds were too few."""
    logs = {_name(record, records, run): log for record in records if (log := _log(record, records)) is not None}
    path = _path(records, run, store)
    with contextlib.suppress(OSError, StoreError):
        if logs:
            with locked(path.parent):
                seen = _read(path)
                seen |= {name: seen.get(name, Seen()).also(log) for name, log in logs.items()}
                cases = {name: [tensor.runs, tensor.mean, tensor.squares] for name, tensor in seen.items()}
                write_whole(path, f"{sealed_line({'version': _VERSION, 'cases': cases})}\n")


def _log(record: Record, records: Sequence[Record]) -> float | None:
    """Of the ratio that a verdict would be on, of a reference that of its control; None where there is none."""
    lead = next((one for one in records if one.is_reference), None)
    if lead is None or not record.paired or Level.EMULATED in (record.support.level, lead.support.level):
        return None
    arms = [record.timing, record.paired_with or lead.timing, record.control if record.paired_with else lead.control]
    if record is lead:
        arms = [lead.control, lead.timing, None]
    if record.fresh is not None:
        arms = [record.fresh.timing, record.fresh.reference, record.fresh.control]
    own, reference, control = arms
    return best_log(own, reference, control) if own is not None and reference is not None else None


def _name(record: Record, records: Sequence[Record], run: Run) -> str:
    """What runs have in common that should say the same: case, reference, code, and whether others took the CPU.

    Two sides of the same code in the same rounds lie nearer to each other than two modes do: they are known apart.
    """
    reference = next((one for one in records if one.is_reference), record)
    timings = [one.timing for one in (record, reference) if one.timing is not None]
    state = "busy" if record.case.device.startswith("cpu") and is_busy(*timings) else "quiet"
    state += _AA * record.is_reference
    code = (str(run.environment.get(fact) or "") for fact in _CODE)
    return "|".join([record.case.id, reference.case.mode, *code, state])


def _state(name: str) -> str:
    return name.rpartition("|")[2]


def _of_same_code(name: str) -> bool:
    return name.endswith(_AA)


def _path(records: Sequence[Record], run: Run, store: Path) -> Path:
    device = next(device_facts for device_facts in run.devices if device_facts.key == records[0].case.device)
    return store / "reruns" / machine_file(run.environment, device)


def _read(path: Path) -> dict[str, Seen]:
    try:
        content, _ = unsealed_line(path.read_bytes().strip())
        if content["version"] != _VERSION:
            return {}
        rows = content["cases"].items()
        return {str(name): Seen(int(runs), float(mean), float(squares)) for name, (runs, mean, squares) in rows}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
