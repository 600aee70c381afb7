"""Which trainings may be resumed: one goes on only where its second half is trained as its first one was."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fp8bench.features.train.values import Arm, Training
from fp8bench.model import DeviceFacts, Environment
from fp8bench.plan.resumable import cannot_resume, refuse_files_elsewhere, surroundings_differ


def refuse_training_elsewhere(training: Training) -> None:
    """Raise where a file that the training names by a path of its own folder is not to be found from here."""
    request = training.request
    refuse_files_elsewhere(f"the training {training.id}", request.imports, request.data, request.other_data)


def refuse_other_training(
    training: Training, arms: Sequence[Arm], device: DeviceFacts, environment: Environment, text: str
) -> None:
    """Raise where machine, software, commit, text or plan are not what the training began with; says which.

    Its checkpoints would not go on to the same losses.
    """
    for why in _training_differences(training, arms, device, environment, text):
        advice = "Its halves would not be one training; start a new one."
        raise cannot_resume(f"the training {training.id}", why, advice)


def _training_differences(
    training: Training, arms: Sequence[Arm], device: DeviceFacts, environment: Environment, text: str
) -> Iterable[str]:
    yield from surroundings_differ(training.environment, environment)
    if training.device.name != device.name:
        yield f"{device.key} was {training.device.name} and is {device.name}"
    if training.text.identity != text:
        yield f"its text was {training.text.identity} and is {text}"
    for before, now in itertools.zip_longest(training.arms, arms):
        if before != now:
            names = [one.name if one is not None else "nothing" for one in (before, now)]
            yield f"an arm would be another today ({names[0]} was, {names[1]} is)"
