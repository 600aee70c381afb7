"""Checks that a run can be resumed here: its second half must be measured under the conditions of the first."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Environment, Plan, PlannedCase, Run, Scalar
from fp8bench.model.run import SWITCHES_SET

# Facts of the environment that must be equal, with their names in a sentence.
_SAME = {
    "machine": "machine",
    "fp8bench": "fp8bench",
    "python": "python",
    "torch": "torch",
    "torch_git": "torch_git",
    "threads": "threads",
    "commit": "the commit",
    "dirty": "whether files differ from the commit",
    "imports_sha256": "the code of --import",
    SWITCHES_SET: "what is set in the process",
}


def refuse_lost(run: Run) -> None:
    """Raises UsageError if the run's file has lost its header."""
    if not run.devices:
        reason = "its header is lost, so what is missing is not known"
        raise cannot_resume(f"the run {run.id}", reason, "Start a new run.")


def refuse_elsewhere(run: Run) -> None:
    """Raises UsageError if a file that the run names by a relative path is not found from this folder."""
    refuse_files_elsewhere(f"the run {run.id}", run.request.imports, run.request.data)


def refuse_files_elsewhere(what: str, imports: Sequence[str], *texts: str | None) -> None:
    """Raises UsageError if code or a text that `what` reads is missing here, or if the code may be somebody else's."""
    refuse_code_of_others(what, imports)
    for name in texts:
        if name and not Path(name).is_absolute() and not Path(name).exists():
            raise _not_here(what, name)


def refuse_code_of_others(what: str, imports: Sequence[str]) -> None:
    """Raises UsageError before importing a file that another user may have replaced."""
    for name in imports:
        file = Path(name)
        if file.suffix != ".py":
            continue
        if not file.exists():
            raise _not_here(what, name)
        if _is_from_others(file):
            reason = f"{file} belongs to another user, in a folder where every user may create files"
            raise cannot_resume(what, reason, "It may be other code than before; start a new run.")


def _not_here(what: str, name: str) -> UsageError:
    return cannot_resume(what, f"it reads {name}, which does not exist here", "Resume it in the folder where it began.")


def _is_from_others(file: Path) -> bool:
    """Whether another user owns the file, or a folder above it that is below a world-writable folder like /tmp.

    A temporary folder is deleted after its run, and then any user can create one with the same name.
    """
    has_other_owner = False
    path = Path(os.path.abspath(file))  # noqa: PTH100 - does not follow links, which other users may have made
    for parent in (path, *path.parents):
        status = parent.lstat()
        if status.st_mode & stat.S_ISVTX:
            return has_other_owner
        has_other_owner = has_other_owner or status.st_uid not in (0, os.geteuid())
    return False


def cannot_resume(what: str, reason: str, advice: str) -> UsageError:
    return UsageError(f"{what} cannot be resumed here: {reason}. {advice}")


def refuse_foreign(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> None:
    """Raises UsageError if machine, software, devices or plan differ from those that the run began with."""
    if difference := foreign(run, plan, facts, environment):
        raise cannot_resume(f"the run {run.id}", difference, "Its halves could not be compared; start a new run.")


def foreign(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> str:
    """Returns the first difference from the conditions that the run began with; '' if all are equal."""
    return next(iter(_differences(run, plan, facts, environment)), "")


def _differences(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> Iterable[str]:
    yield from surroundings_differ(run.environment, environment)
    here = {fact.key: fact for fact in facts}
    previous = {fact.key: fact for fact in run.devices}
    for key in dict.fromkeys(planned.case.device for planned in _planned_cases(run.plan)):
        if key not in previous or key not in here:
            yield f"there is no device {key}"
        elif previous[key].name != here[key].name:
            yield f"{key} was {previous[key].name} and is {here[key].name}"
    yield from _plan_differences(run.plan, plan)


def surroundings_differ(first: Environment, second: Environment) -> Iterable[str]:
    """Yields a sentence for each fact of the environment that differs."""
    for fact, name in _SAME.items():
        previous, current = first.get(fact), second.get(fact)
        if previous != current:
            yield f"{name} was {_describe_value(previous)} and is {_describe_value(current)}"


def _plan_differences(previous: Plan, current: Plan) -> Iterable[str]:
    old = {planned.case.id: planned for planned in _planned_cases(previous)}
    new = {planned.case.id: planned for planned in _planned_cases(current)}
    changed = [name for name in old if name not in new] or [name for name in new if name not in old]
    if changed:
        yield f"it would be planned differently today ({changed[0]})"
    for name in (name for name in old if name in new):
        backend, new_backend = old[name].support.backend, new[name].support.backend
        if backend and new_backend != backend:
            yield f"{name} was multiplied by {backend} and would be by {new_backend or 'nobody'}"
        version, new_version = old[name].case.version, new[name].case.version
        if version != new_version:
            yield f"the workload {old[name].case.workload} was version {version} and is {new_version}"


def _planned_cases(plan: Plan) -> Iterator[PlannedCase]:
    for group in plan:
        yield from group.cases


def _describe_value(value: Scalar | None) -> str:
    return "not known" if value is None else str(value)
