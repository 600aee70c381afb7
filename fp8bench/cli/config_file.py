"""A file of options: YAML whose keys are a command's options, read by the command line's own parsers.

The keys come from the parser, so that a new option is a new key. The shape of a value is what the option's metavar
shows: A,B may be a list, AXIS=A,B and LAYER=DTYPE a mapping. A value is its text, as a shell would pass it
(yaml_file.py). Beside the options stand the keys of FP8 training configurations: `use_fp8` and what says how.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fp8bench.cli.yaml_file import SHAPES, Kind, is_none, items, place, read_mapping, scalar, shown
from fp8bench.errors import UsageError
from fp8bench.registry import precisions

_KIND = Kind("--config", "options", "Expected lines of the form OPTION: VALUE.")
# What is held against a mode of FP8 training where a file names no precisions.
_BESIDE_TRAINING = ("bf16",)
# The keys of FP8 training configurations: a switch, and other words for options of a mode.
SWITCH = "use_fp8"
MODE = "fp8-delayed"
_HISTORY = "fp8_amax_history_len"
_ALGORITHM = "fp8_amax_compute_algo"
KEYS = (SWITCH, "fp8_format", "fp8_margin", "fp8_interval", _HISTORY, _ALGORITHM)


def with_config(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, words: Sequence[str], file: Path
) -> argparse.Namespace:
    """The words parsed with a file's values as defaults: the command line wins.

    Options that may be repeated add to the file's values, except that an axis given on the command line replaces the
    file's values of that axis. `parser` and `command` (its sub-parser) keep the file's values as their defaults.
    `unused` of what is returned says which keys of the file have no effect.
    """
    values, training = read_config(file, command)
    command.set_defaults(**values)
    arguments = parser.parse_args(words)
    arguments.unused = tuple(training.without_effect(arguments.dtypes is not values.get("dtypes")))
    for action in command._actions:
        if _repeats(action) and _names_things(action) and action.dest in values:
            kept = values[action.dest]
            given = getattr(arguments, action.dest)[len(kept) :]
            replaced = {name for name, _ in given}
            setattr(arguments, action.dest, [*(pair for pair in kept if pair[0] not in replaced), *given])
    return arguments


def written(command: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """A file of options: those that differ from their defaults, and the others as comments."""
    lines = ["# Options of `fp8bench suite`, read by --config FILE; the command line wins."]
    for key, action in _keys(command).items():
        value = getattr(arguments, action.dest)
        line = f"{key}: {_as_yaml(action, value)}".rstrip()
        lines += ["", f"# {action.help}", line if value != action.default else f"# {line}"]
    return "\n".join(lines) + "\n"


def _as_yaml(action: argparse.Action, value: Any) -> str:
    """A value in the form that its option is read in; '' for none."""
    if action.nargs == 0:
        return "true" if value == action.const else "false"
    if _names_things(action):
        named: dict[str, list[str]] = {}
        for name, given in value:
            named.setdefault(name, []).extend([given] if isinstance(given, str) else given)
        texts = {name: [_quoted(text) for text in given] for name, given in named.items()}
        lists = {name: given[0] if len(given) == 1 else f"[{', '.join(given)}]" for name, given in texts.items()}
        return f"{{{', '.join(f'{_quoted(name)}: {given}' for name, given in lists.items())}}}" if texts else ""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_quoted, value))}]" if value else ""
    return "" if value is None else _quoted(str(value))


def _quoted(text: str) -> str:
    """A text as YAML reads it back: in quotes, unless it is a plain word."""
    plain = re.fullmatch(r"[\w./][\w./:=+-]*(?<!:)", text, re.ASCII) and text.lower() != "null"
    return text if plain else json.dumps(text, ensure_ascii=False)


def read_config(file: Path, command: argparse.ArgumentParser) -> tuple[dict[str, Any], TrainingKeys]:
    """The values of a file by their destination in the command's namespace, and the keys of FP8 training beside them,
    whose mode is among the precisions already. Raises UsageError with file and line.
    """
    options = {key: _Option(str(file), command, action) for key, action in _keys(command).items()}
    tree = read_mapping(file, _KIND)
    values: dict[str, Any] = {}
    training = TrainingKeys()
    for key, key_node, node in items(file, tree, _KIND):
        if key in KEYS:
            if not isinstance(node, yaml.ScalarNode) or is_none(node):
                given = "none" if is_none(node) else shown(node)
                raise UsageError(f"{place(file, node)}: {key}: expected one value, got {given}.")
            training.take(key, scalar(file, node), place(file, node))
            continue
        if key not in options:
            known = [*options, *KEYS]
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{place(file, key_node)}: unknown key {key!r}.{hint} Known: {', '.join(known)}.")
        values[options[key].action.dest] = options[key].value(node)
    if training.mode:
        values["dtypes"] = (*values.get("dtypes", _BESIDE_TRAINING), training.mode)
    return values, training


def _keys(command: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Keys and what they stand for: options without their dashes, arguments by their name.

    No file in a file; and a run that is resumed takes what it asks from its own file.
    """
    keys: dict[str, argparse.Action] = {}
    for action in command._actions:
        if action.default is argparse.SUPPRESS or action.dest in ("config", "resume"):
            continue
        long = [word.removeprefix("--") for word in action.option_strings if word.startswith("--")]
        keys.update(dict.fromkeys(long or [action.dest], action))
    return keys


def _repeats(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _names_things(action: argparse.Action) -> bool:
    return "=" in str(action.metavar)


@dataclass(frozen=True)
class _Option:
    """One key of a file: the option it stands for, and how its values are read."""

    file: str
    command: argparse.ArgumentParser
    action: argparse.Action

    def value(self, node: yaml.Node) -> Any:
        """What the command line would have made of it."""
        if self.action.nargs == 0:
            text = scalar(self.file, node).lower() if isinstance(node, yaml.ScalarNode) else ""
            if text not in ("true", "false"):
                raise self._refused(node, f"expected true or false, got {shown(node)}")
            return self.action.const if text == "true" else self.action.default
        texts = self._texts(node)
        if _repeats(self.action):
            return [self._parsed(text, node) for text in texts]
        return self._parsed(",".join(texts), node)

    def _texts(self, node: yaml.Node) -> list[str]:
        """The texts that the option would be given on the command line."""
        if isinstance(node, yaml.ScalarNode):
            text = self._given(node)
            if _names_things(self.action) or not _repeats(self.action):
                return [text]
            parts = [part.strip() for part in text.split(",")]
            if not all(parts):
                raise self._refused(node, f"{text!r} has an empty name; give names with commas between, like a,b")
            return parts
        shapes = {"one value": True, "a list": _repeats(self.action) or "," in str(self.action.metavar),
                  "a mapping": _names_things(self.action)}  # fmt: skip
        if not shapes[SHAPES[type(node)]]:
            expected = " or ".join(shape for shape, taken in shapes.items() if taken)
            raise self._refused(node, f"expected {expected}, got {shown(node)}")
        if isinstance(node, yaml.MappingNode):
            return [self._named(name, key, values) for name, key, values in items(self.file, node, _KIND)]
        return [self._given(one) for one in node.value]

    def _named(self, name: str, key: yaml.Node, node: yaml.Node) -> str:
        """NAME=A,B from an entry of a mapping."""
        if not name or set(name) & set("=,"):
            raise self._refused(key, f"expected a plain name before the colon, got {name!r}")
        values = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return f"{name}={','.join(self._given(one) for one in values)}"

    def _given(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._refused(node, f"expected one value, got {shown(node)}")
        if is_none(node):
            raise self._refused(node, "expected a value, got none: give one, or leave the key out")
        return scalar(self.file, node)

    def _parsed(self, text: str, node: yaml.Node) -> Any:
        try:
            value = self.command._get_value(self.action, text)
            self.command._check_value(self.action, value)
        except argparse.ArgumentError as error:
            raise self._refused(node, error.message) from None
        return value

    def _refused(self, node: yaml.Node, why: str) -> UsageError:
        name = self.action.option_strings[-1] if self.action.option_strings else self.action.dest
        return UsageError(f"{place(self.file, node)}: {name}: {why}.")


class TrainingKeys:
    """The keys of FP8 training that a file has, each with its value and the place where it stands ('my.yaml:7')."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._values: dict[str, str] = {}

    def take(self, key: str, text: str, place: str) -> None:
        """A key with its value in any case; raises UsageError with the place for a value that cannot be."""
        value = text.lower()
        try:
            if key == SWITCH:
                if value not in ("true", "false"):
                    raise ValueError("expected true or false")
                self._values[key] = value
            else:  # as the mode's option has it
                option = next(one for one in precisions.get(MODE).options if key in one.aliases)
                self._values[key] = str(option.parse(value))
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
        for key, where in self._places.items():
            why = ""
            if not self.mode:
                why = "" if key == SWITCH else f"{SWITCH} is {self._values.get(SWITCH, 'not there')}"
            elif overruled:
                why = "--dtypes on the command line says which precisions there are"
            elif key == _HISTORY and self._values.get(_ALGORITHM) == "most_recent":
                why = f"{_ALGORITHM}: most_recent looks at one amax, however many are kept"
            if why:
                yield f"{where}: {key} has no effect: {why}"
