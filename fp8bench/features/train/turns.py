"""Which arms of a seed lie in memory together: all of them, or each beside the reference, where all do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp8bench.errors import UsageError
from fp8bench.features.train.arms import arms_of_seed
from fp8bench.features.train.values import (
    Arm,
    ArmCost,
    ArmRole,
    Training,
)
from fp8bench.units import size

# Of a device's memory: its own context, what allocators round up, and readings of watched steps need the rest.
_USABLE = 0.9


@dataclass(frozen=True)
class Turn:
    """Arms of a seed, counted from 0, that are trained beside each other; `first` of those of their seed."""

    number: int
    arms: tuple[Arm, ...]
    first: bool = True


@dataclass(frozen=True)
class Turns:
    """All turns of a training in their order, the arms that fit into no memory, and why arms are not all together."""

    turns: tuple[Turn, ...]
    out: Mapping[str, str]
    cut: str = ""


def turns_of(training: Training, costs: Iterable[ArmCost]) -> Turns:
    """By what each arm needs alone: all together, else in pairs with the reference, else alone.

    Ranks on a processor share its memory. Nothing is known of an arm that could not be measured; then all are tried
    together. Raises UsageError where the reference needs more than there is.
    """
    request, facts = training.request, training.device
    room = (request.memory_limit or int(_USABLE * facts.memory_bytes)) // (1 if facts.accelerated else facts.ranks)
    measured = {cost.arm: cost for cost in costs if cost.memory is not None}
    seeds = [arms_of_seed(training.arms, number) for number in range(request.seeds)]
    needs = _Needs({arm.name: measured.get(_measured_as(arm, seeds[0])) for arm in seeds[0]})
    if not room or needs.unknown or needs.of(seeds[0]) <= room:
        return Turns(tuple(Turn(number, arms) for number, arms in enumerate(seeds)), {})
    lead = seeds[0][0]
    if needs.of([lead]) > room:
        raise UsageError(
            f"the reference {lead.name} needs {size(needs.of([lead]))} at the highest point of a step, and there are "
            f"{size(room)}. Choose a smaller --model, --batch or --sequence."
        )
    out = {
        arm.name: f"it needs {size(needs.of([arm]))} alone, and there are {size(room)}"
        for arm in seeds[0] if needs.of([arm]) > room
    }  # fmt: skip
    words = (
        f"all arms need {size(needs.of(seeds[0]))} together, and there are {size(room)}: each is trained beside the "
        "reference alone, which takes its steps once more beside every one of them"
    )
    turns = []
    for number, arms in enumerate(seeds):
        parts = _parts(lead, [arm for arm in arms[1:] if arm.name not in out], needs, room)
        turns += [Turn(number, part, place == 0) for place, part in enumerate(parts)]
    return Turns(tuple(turns), out, words)


def _parts(lead: Arm, others: Sequence[Arm], needs: _Needs, room: int) -> list[tuple[Arm, ...]]:
    """The reference is in the first one, whatever fits beside it."""
    beside: list[tuple[Arm, ...]] = [(lead, arm) for arm in others if needs.of([lead, arm]) <= room]
    alone = [(arm,) for arm in others if needs.of([lead, arm]) > room]
    return [*(beside or [(lead,)]), *alone]


def _measured_as(arm: Arm, arms: Sequence[Arm]) -> str:
    """Whose figures are an arm's: repeats and other seeds of the reference take what it takes."""
    return arm.name if arm.role is ArmRole.CANDIDATE else arms[0].name


@dataclass(frozen=True)
class _Needs:
    """What arms need by their names, as measured alone."""

    _costs: Mapping[str, ArmCost | None]

    @property
    def unknown(self) -> bool:
        return any(cost is None for cost in self._costs.values())

    def of(self, arms: Sequence[Arm]) -> int:
        """What all of them keep between their steps, and the most that a step of one needs beside that."""
        kept, more = 0, 0
        for arm in arms:
            cost = self._costs[arm.name]
            assert cost is not None and cost.memory is not None
            own = sum(bytes_of for _, bytes_of in cost.kept)
            kept, more = kept + own, max(more, cost.memory.peak - own)
        return kept + more
