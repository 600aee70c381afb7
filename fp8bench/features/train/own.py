"""A training of a model of the user's own: what cannot be asked of it, and how it is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import TokenSpan, TrainingText
from fp8bench.user_code.named import named
from fp8bench.workloads.model import LIVE

# Settings that say how a built-in model is made, or cut for ranks.
_BUILT_IN = (
    "model", "arch", "norm", "batch", "sequence", "rates", "dropout", "checkpointing", "compile", "attention",
    "parallel", "amax_group", "shift", "start", "tasks", "lora",
)  # fmt: skip
_OF_A_TEXT = ("data", "other_data", "tokens", "experiment")


def check_own(request: TrainingRequest) -> None:
    """Raise UsageError for what a model that `make` gives cannot be asked."""
    from fp8bench.jobs.profile import function_named

    settings, usual, name = request.settings, TrainerSettings(), request.settings.make
    if name not in LIVE:
        function_named(name)
    swept = {axis.replace("-", "_") for axis, _ in request.sweep}
    asked = [word for word in _BUILT_IN if getattr(settings, word) != getattr(usual, word) or word in swept]
    asked += [word for word in _OF_A_TEXT if getattr(request, word) != getattr(TrainingRequest(), word)]
    if asked:
        raise UsageError(
            f"--{asked[0].replace('_', '-')} is about the built-in models and texts, and {name} gives a model and "
            "batches of its own. Leave it out."
        )
    refusals = (
        (request.ranks is not None, "--ranks", "its batches are read by one process"),
        (request.scales_from is not None, "--scales-from", "its layers are known to its worker alone"),
        (request.max_batch, "--max-batch", "its batches are as large as it makes them"),
        ("micro_batches" in swept, "--sweep micro-batches", "arms would not read the same batches in a step"),
        (settings.nudge == "order" or any(axis == "nudge" and "order" in values for axis, values in request.sweep),
         "nudge order", "nobody here knows which sides of its batches are sequences"),
    )  # fmt: skip
    for wrong, option, why in refusals:
        if wrong:
            raise UsageError(f"{option} does not go with a model of your own ({name}): {why}. Leave it out.")


def place_of(settings: TrainerSettings) -> tuple[str, ...]:
    """The module or file that has `make`: its code is part of what a training is."""
    place, colon, _ = settings.make.rpartition(":")
    return (place,) if colon else ()


def no_text(settings: TrainerSettings) -> TrainingText:
    """What stands where a text would."""
    nothing = TokenSpan("", 0, 0)
    return TrainingText(nothing, nothing, None, 0, "own", f"batches of {settings.make}")


def name_of_maker(make: Callable[..., Any]) -> str:
    """By what a worker finds it; the word alone of what only this process has (a lambda, what a session defined)."""
    module, word = getattr(make, "__module__", ""), getattr(make, "__qualname__", type(make).__name__)
    name = f"{module}:{word}"
    if module in ("", "__main__", None) or "<" in word:
        return "".join(letter for letter in word if letter.isalnum() or letter in "._") or "make"
    try:
        known = named(name)
    except Exception:  # noqa: BLE001 - it is not to be found by its name, whatever the reason
        known = None
    return name if known is make else word
