"""What may be resumed: a run goes on only where its second half is measured as the first one was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Environment, Plan, Run, Scalar

_SAME = ("machine", "fp8bench", "python", "torch", "torch_git", "threads")


def refuse_foreign(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> None:
    """Raise where machine, software, device or plan are not what the run began with; says which."""
    differs = next(iter(_differences(run, plan, facts, environment)), "")
    if differs:
        raise UsageError(
            f"the run {run.id} cannot be resumed here: {differs}. Its halves would not compare; start a new run."
        )


def _differences(run: Run, plan: Plan, facts: Sequence[DeviceFacts], environment: Environment) -> Iterable[str]:
    if not run.devices:
        yield "its header is lost, so what is missing is not known"
        return
    for name in _SAME:
        before, now = run.environment.get(name), environment.get(name)
        if before != now:
            yield f"{name} was {_shown(before)} and is {_shown(now)}"
    here = {one.key: one for one in facts}
    for key in dict.fromkeys(planned.case.device for group in run.plan for planned in group.cases):
        before_facts = next((one for one in run.devices if one.key == key), None)
        if before_facts is None or key not in here:
            yield f"there is no device {key}"
        elif before_facts.name != here[key].name:
            yield f"{key} was {before_facts.name} and is {here[key].name}"
    yield from _plan_differences(run.plan, plan)


def _plan_differences(before: Plan, now: Plan) -> Iterable[str]:
    old, new = ({planned.case.id: planned.case for group in plan for planned in group.cases} for plan in (before, now))
    gone = [name for name in old if name not in new]
    if gone or len(old) != len(new):
        yield f"it would be planned differently today ({(gone or [name for name in new if name not in old])[0]})"
    for name, case in old.items():
        if name in new and new[name].version != case.version:
            yield f"the workload {case.workload} was version {case.version} and is {new[name].version}"


def _shown(value: Scalar | None) -> str:
    return "not known" if value is None else str(value)
