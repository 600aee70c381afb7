"""Checks that a run can be resumed here. All parts of a run must be measured under the same conditions."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Environment, Plan, PlannedCase, Run, Scalar
from fp8bench.model.run import SWITCHES_SET

# The properties of the environment that must be unchanged in a resumed run, with their names in messages. SWITCHES_SET
# lists the global settings of the process and of torch that differ from their usual values.
_REQUIRED_EQUAL_FACTS = {
    "machine": "machine",
    "fp8bench": "fp8bench",
    "python": "python",
    "torch": "torch",
    "torch_git": "torch_git",
    "threads": "threads",
    "commit": "the commit",
    "dirty": "whether files differ from the commit",
    "imports_sha256": "the code of --import",
    SWITCHES_SET: "the setting of switches",
}


def refuse_run_without_header(run: Run) -> None:
    """Raises UsageError if the header of the run's file was lost."""
    if not run.devices:
        reason = "its header is lost, so it is unknown which cases are missing"
        raise make_resume_error(f"the run {run.id}", reason, "Start a new run.")


def refuse_missing_user_files(run: Run) -> None:
    """Checks the code and text files that the run's request names, by `check_files_exist`."""
    check_files_exist(f"the run {run.id}", run.request.imports, run.request.data)


def check_files_exist(subject: str, imports: Sequence[str], *texts: str | None) -> None:
    """Raises UsageError if a code or text file that `subject` reads does not exist here, or if another user may have
    replaced the code. A text file with an absolute path is not checked, because a change of folder would not help.
    """
    refuse_untrusted_code(subject, imports)
    for name in texts:
        if name and not Path(name).is_absolute() and not Path(name).exists():
            raise _make_missing_file_error(subject, name)


def refuse_untrusted_code(subject: str, imports: Sequence[str]) -> None:
    """Raises UsageError if a file in `imports` does not exist, or if another user may have replaced it."""
    for name in imports:
        file = Path(name)
        if file.suffix != ".py":
            continue
        if not file.exists():
            raise _make_missing_file_error(subject, name)
        if _is_owned_by_others(file):
            reason = f"{file} belongs to another user, in a folder where every user may create files"
            raise make_resume_error(subject, reason, "The code may have been replaced; start a new run.")


def _make_missing_file_error(subject: str, name: str) -> UsageError:
    return make_resume_error(
        subject, f"it reads {name}, which does not exist here", "Resume it in the folder where it was started."
    )


def _is_owned_by_others(file: Path) -> bool:
    """Returns whether another user owns a file, or a folder on the path to it from the nearest shared folder. A shared
    folder is one like /tmp, where every user may create files. Returns False if the file is in no such folder.

    After a temporary folder in /tmp was deleted, any user can create one with the same name.
    """
    has_other_owner = False
    path = Path(os.path.abspath(file))  # noqa: PTH100 - does not follow links, which other users may have made
    for parent in (path, *path.parents):
        status = parent.lstat()
        # A folder with the sticky bit, such as /tmp: here every user may create files.
        if status.st_mode & stat.S_ISVTX:
            return has_other_owner
        # User 0 is root, who can replace any file anyway.
        has_other_owner = has_other_owner or status.st_uid not in (0, os.geteuid())
    return False


def make_resume_error(subject: str, reason: str, advice: str) -> UsageError:
    return UsageError(f"{subject} cannot be resumed here: {reason}. {advice}")


def refuse_changed_conditions(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> None:
    """Raises UsageError if the machine, software, devices or plan differ from those at the start of the run."""
    if difference := find_condition_difference(run, plan, facts, environment):
        raise make_resume_error(
            f"the run {run.id}", difference, "Its two parts would not be comparable; start a new run."
        )


def find_condition_difference(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> str:
    """Returns the first difference between the present conditions and those at the start of the run, or '' if nothing
    differs.
    """
    if change := next(describe_environment_changes(run.environment, environment), ""):
        return change
    current_device_names = {fact.key: fact.name for fact in facts}
    previous_device_names = {fact.key: fact.name for fact in run.devices}
    for planned in _list_planned_cases(run.plan):
        key = planned.case.device
        if key not in previous_device_names or key not in current_device_names:
            return f"there is no device {key}"
        if previous_device_names[key] != current_device_names[key]:
            return f"{key} was {previous_device_names[key]} and is {current_device_names[key]}"
    return _find_plan_difference(run.plan, plan)


def describe_environment_changes(first: Environment, second: Environment) -> Iterator[str]:
    """Yields a sentence for each difference between two environments that prevents a run from being resumed."""
    for fact, name in _REQUIRED_EQUAL_FACTS.items():
        previous_value = first.get(fact)
        current_value = second.get(fact)
        if previous_value != current_value:
            yield f"{name} was {_describe_value(previous_value)} and is {_describe_value(current_value)}"


def _find_plan_difference(previous: Plan, current: Plan) -> str:
    previous_cases_by_id = {planned.case.id: planned for planned in _list_planned_cases(previous)}
    current_cases_by_id = {planned.case.id: planned for planned in _list_planned_cases(current)}
    for name in (*previous_cases_by_id, *current_cases_by_id):
        if name not in previous_cases_by_id or name not in current_cases_by_id:
            return f"it would be planned differently now ({name})"
    for name, old_case in previous_cases_by_id.items():
        current_case = current_cases_by_id[name]
        # A backend is the library that computes the products of a case.
        backend = current_case.support.backend
        if old_case.support.backend and backend != old_case.support.backend:
            return f"{name} was multiplied by {old_case.support.backend} and would now be by {backend or 'no backend'}"
        if old_case.case.version != current_case.case.version:
            return (
                f"the workload {old_case.case.workload} was version {old_case.case.version} "
                f"and is {current_case.case.version}"
            )
    return ""


def _list_planned_cases(plan: Plan) -> Iterator[PlannedCase]:
    for group in plan:
        yield from group.cases


def _describe_value(value: Scalar | None) -> str:
    return "not known" if value is None else str(value)
