"""What may be resumed: a run goes on only where its second half is measured as the first one was."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Environment, Plan, Run, Scalar
from fp8bench.model.run import SWITCHES_SET

# Facts of the environment, and how a sentence calls them where it is not by that name.
_SAME = (
    "machine", "fp8bench", "python", "torch", "torch_git", "threads", "commit", "dirty", "imports_sha256", SWITCHES_SET,
)  # fmt: skip
_CALLED = {
    "commit": "the commit", "dirty": "whether files differ from the commit", "imports_sha256": "the code of --import",
    SWITCHES_SET: "what is set in the process",
}  # fmt: skip


def refuse_lost(run: Run) -> None:
    """Raise where the file does not say what was asked."""
    if not run.devices:
        raise cannot_resume(
            f"the run {run.id}", "its header is lost, so what is missing is not known", "Start a new run."
        )


def refuse_elsewhere(run: Run) -> None:
    """Raise where a file that the run names by a path of its own folder is not to be found from here."""
    refuse_files_elsewhere(f"the run {run.id}", run.request.imports, run.request.data)


def refuse_files_elsewhere(what: str, imports: Sequence[str], *texts: str | None) -> None:
    """The same of anything that was kept."""
    refuse_code_of_others(what, imports)
    for name in filter(None, texts):
        if not Path(name).is_absolute() and not Path(name).exists():
            raise _not_here(what, name)


def refuse_code_of_others(what: str, imports: Sequence[str]) -> None:
    """Raise before anything is imported whose name alone is known, where somebody else may have put it there since."""
    for file in (Path(name) for name in imports if name.endswith(".py")):
        if not file.exists():
            raise _not_here(what, str(file))
        if _put_there_by_others(file):
            raise cannot_resume(
                what,
                f"{file} lies where anybody may put files, and is somebody else's",
                "Nobody knows that it is the same code; start a new run.",
            )


def _not_here(what: str, name: str) -> UsageError:
    return cannot_resume(
        what, f"there is no file {name} here, which it reads", "Resume it in the folder where it began."
    )


def _put_there_by_others(file: Path) -> bool:
    """Whether it, or a folder that it is in, is another user's in a folder where anybody may make some.

    A temporary folder goes with its run, and then whoever is first can make another one by its name.
    """
    others = False
    for parent in (path := Path(os.path.abspath(file)), *path.parents):  # noqa: PTH100 - links are theirs, too
        status = parent.lstat()
        if status.st_mode & stat.S_ISVTX:
            return others
        others = others or status.st_uid not in (0, os.geteuid())
    return False


def cannot_resume(what: str, why: str, advice: str) -> UsageError:
    return UsageError(f"{what} cannot be resumed here: {why}. {advice}")


def refuse_foreign(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> None:
    """Raise where machine, software, device or plan are not what the run began with; says which."""
    differs = foreign(run, plan, facts, environment)
    if differs:
        raise cannot_resume(f"the run {run.id}", differs, "Its halves would not compare; start a new run.")


def foreign(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> str:
    """The first thing that is not as it was when the run began; '' if what is measured now belongs to it."""
    return next(iter(_differences(run, plan, facts, environment)), "")


def _differences(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> Iterable[str]:
    yield from surroundings_differ(run.environment, environment)
    here = {fact.key: fact for fact in facts}
    for key in dict.fromkeys(planned.case.device for group in run.plan for planned in group.cases):
        before_facts = next((device for device in run.devices if device.key == key), None)
        if before_facts is None or key not in here:
            yield f"there is no device {key}"
        elif before_facts.name != here[key].name:
            yield f"{key} was {before_facts.name} and is {here[key].name}"
    yield from _plan_differences(run.plan, plan)


def surroundings_differ(first: Environment, second: Environment) -> Iterable[str]:
    for name in _SAME:
        before, now = first.get(name), second.get(name)
        if before != now:
            yield f"{_CALLED.get(name, name)} was {_shown(before)} and is {_shown(now)}"


def _plan_differences(before: Plan, now: Plan) -> Iterable[str]:
    old, new = ({planned.case.id: planned.case for group in plan for planned in group.cases} for plan in (before, now))
    gone = [name for name in old if name not in new]
    if gone or len(old) != len(new):
        yield f"it would be planned differently today ({(gone or [name for name in new if name not in old])[0]})"
    by, now_by = (
        {planned_case.case.id: planned_case.support.backend for group in plan for planned_case in group.cases}
        for plan in (before, now)
    )
    for name, was in by.items():
        if was and now_by.get(name, was) != was:
            yield f"{name} was multiplied by {was} and would be by {now_by[name] or 'nobody'}"
    for name, case in old.items():
        if name in new and new[name].version != case.version:
            yield f"the workload {case.workload} was version {case.version} and is {new[name].version}"


def _shown(value: Scalar | None) -> str:
    return "not known" if value is None else str(value)
