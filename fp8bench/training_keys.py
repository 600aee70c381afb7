"""The keys that FP8 training configurations use, as a mode: `use_fp8` and what says how."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.errors import UsageError
from fp8bench.registry import precisions

SWITCH = "use_fp8"
MODE = "fp8-delayed"
_HISTORY = "fp8_amax_history_len"
_ALGORITHM = "fp8_amax_compute_algo"
# They are other words for options of the mode.
KEYS = (SWITCH, "fp8_format", "fp8_margin", "fp8_interval", _HISTORY, _ALGORITHM)


class TrainingKeys:
    """Those that a file has, each with its value and the place where it stands ('my.yaml:7')."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._values: dict[str, str] = {}

    def take(self, key: str, text: str, place: str) -> None:
        """A key with its value in any case; raises UsageError with the place for a value that cannot be."""
        value = text.lower()
        try:
            self._values[key] = _switch(value) if key == SWITCH else _value(key, value)
        except ValueError as error:
            raise UsageError(f"{place}: {key} cannot be {text[:80]!r}: {error}.") from None
        self._places[key] = place

    @property
    def mode(self) -> str:
        """What the switch adds to a run; '' where it is not on."""
        if self._values.get(SWITCH) != "true":
            return ""
        words = [f"{key}={value}" for key, value in self._values.items() if key != SWITCH]
        return precisions.canonical(":".join([MODE, *words]))

    def without_effect(self, overruled: bool) -> Iterator[str]:
        """A sentence for each key that changes nothing; `overruled` where the command line chose the precisions."""
        for key, place in self._places.items():
            why = self._why_none(key, overruled)
            if why:
                yield f"{place}: {key} has no effect: {why}"

    def _why_none(self, key: str, overruled: bool) -> str:
        if not self.mode:
            return "" if key == SWITCH else f"{SWITCH} is {self._values.get(SWITCH, 'not there')}"
        if overruled:
            return "--dtypes on the command line says which precisions there are"
        if key == _HISTORY and self._values.get(_ALGORITHM) == "most_recent":
            return f"{_ALGORITHM}: most_recent looks at one amax, however many are kept"
        return ""


def _switch(value: str) -> str:
    if value not in ("true", "false"):
        raise ValueError("expected true or false")
    return value


def _value(key: str, value: str) -> str:
    """The value as the mode's option has it; ValueError for one that it cannot be."""
    option = next(one for one in precisions.get(MODE).options if key in one.aliases)
    return str(option.parse(value))
