"""A file of options: YAML whose keys are a command's options, read by the command line's own parsers.

The keys come from the parser, so that a new option is a new key. The shape of a value is what the option's metavar
shows: A,B may be a list, AXIS=A,B and LAYER=DTYPE a mapping. A value is its text, as a shell would pass it: `1e3` and
`yes` stay what was written. Aliases, anchors and tags are refused: nobody needs them here, and a few lines of them can
stand for gigabytes. Beside the options stand the keys of FP8 training configurations (training_keys.py).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fp8bench.errors import UsageError
from fp8bench.training_keys import KEYS, TrainingKeys

LARGEST_FILE = 1 << 20
MOST_VALUES = 10_000
LONGEST_VALUE = 4096
# A mapping of lists in the mapping of options takes four.
DEEPEST = 8
_FORM = "Expected lines of the form OPTION: VALUE."
# What is held against a mode of FP8 training where a file names no precisions.
_BESIDE_TRAINING = ("bf16",)
_SHAPES = {yaml.ScalarNode: "one value", yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}


def with_config(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, words: Sequence[str], file: Path
) -> argparse.Namespace:
    """The words parsed with a file's values as defaults: the command line wins.

    Options that may be repeated add to the file's values, except that an axis given on the command line replaces the
    file's values of that axis. `parser` and `command` (its sub-parser) keep the file's values as their defaults.
    `unused` of what is returned says which keys of the file have no effect.
    """
    values, training = _read(file, command)
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


def read_config(file: Path, command: argparse.ArgumentParser) -> dict[str, Any]:
    """The values of a file by their destination in the command's namespace. Raises UsageError with file and line."""
    return _read(file, command)[0]


def _read(file: Path, command: argparse.ArgumentParser) -> tuple[dict[str, Any], TrainingKeys]:
    """The same, with the keys of FP8 training beside them, whose mode is among the precisions already."""
    options = {key: _Option(str(file), command, action) for key, action in _keys(command).items()}
    tree = _tree(file, _text(file))
    if tree is None:
        raise UsageError(f"{file}: the file holds no options. {_FORM}")
    if not isinstance(tree, yaml.MappingNode):
        raise UsageError(f"{_place(file, tree)}: expected a mapping of options, got {_SHAPES[type(tree)]}. {_FORM}")
    values: dict[str, Any] = {}
    training = TrainingKeys()
    for key, key_node, node in _items(str(file), tree):
        if key in KEYS:
            training.take(key, _one(str(file), key, node), _place(file, node))
            continue
        if key not in options:
            known = [*options, *KEYS]
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{_place(file, key_node)}: unknown key {key!r}.{hint} Known: {', '.join(known)}.")
        values[options[key].action.dest] = options[key].value(node)
    if training.mode:
        values["dtypes"] = (*values.get("dtypes", _BESIDE_TRAINING), training.mode)
    return values, training


def _one(file: str, key: str, node: yaml.Node) -> str:
    """The text of the one value that a key of FP8 training takes."""
    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
        given = "none" if isinstance(node, yaml.ScalarNode) else _shown(node)
        raise UsageError(f"{_place(file, node)}: {key}: expected one value, got {given}.")
    return _scalar(file, node)


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
            return self._flag(node)
        texts = self._texts(node)
        if _repeats(self.action):
            return [self._parsed(text, node) for text in texts]
        return self._parsed(",".join(texts), node)

    def _flag(self, node: yaml.Node) -> Any:
        text = _scalar(self.file, node).lower() if isinstance(node, yaml.ScalarNode) else ""
        if text not in ("true", "false"):
            raise self._refused(node, f"expected true or false, got {_shown(node)}")
        return self.action.const if text == "true" else self.action.default

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
        if isinstance(node, yaml.SequenceNode) and (_repeats(self.action) or "," in str(self.action.metavar)):
            return [self._given(one) for one in node.value]
        if isinstance(node, yaml.MappingNode) and _names_things(self.action):
            return [self._named(name, key, values) for name, key, values in _items(self.file, node)]
        raise self._refused(node, f"expected {self._expected()}, got {_shown(node)}")

    def _named(self, name: str, key: yaml.Node, node: yaml.Node) -> str:
        """NAME=A,B from an entry of a mapping."""
        if not name or set(name) & set("=,"):
            raise self._refused(key, f"expected a plain name before the colon, got {name!r}")
        values = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return f"{name}={','.join(self._given(one) for one in values)}"

    def _given(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._refused(node, f"expected one value, got {_shown(node)}")
        if node.tag == "tag:yaml.org,2002:null":
            raise self._refused(node, "expected a value, got none: give one, or leave the key out")
        return _scalar(self.file, node)

    def _parsed(self, text: str, node: yaml.Node) -> Any:
        try:
            value = self.command._get_value(self.action, text)
            self.command._check_value(self.action, value)
        except argparse.ArgumentError as error:
            raise self._refused(node, error.message) from None
        return value

    def _expected(self) -> str:
        shapes = ["one value"]
        if _repeats(self.action) or "," in str(self.action.metavar):
            shapes.append("a list")
        if _names_things(self.action):
            shapes.append("a mapping")
        return " or ".join(shapes)

    def _refused(self, node: yaml.Node, why: str) -> UsageError:
        name = self.action.option_strings[-1] if self.action.option_strings else self.action.dest
        return UsageError(f"{_place(self.file, node)}: {name}: {why}.")


class _NotTakenError(yaml.MarkedYAMLError):
    """Good YAML that no list of options needs."""


class _PlainLoader(yaml.SafeLoader):
    """Composes what a list of options needs, and refuses the rest before it can grow."""

    depth = 0
    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        self.count += 1
        problem = ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            problem = "aliases (*name) and anchors (&name) are not taken: write the value out, or put it in quotes"
        elif event.tag is not None:
            problem = f"tags ({event.tag[:80]}) are not taken: write the plain value, or put it in quotes"
        elif self.depth >= DEEPEST:
            problem = f"nested more than {DEEPEST} deep"
        elif self.count > MOST_VALUES:
            problem = f"more than {MOST_VALUES} values"
        if problem:
            raise _NotTakenError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--config {file} cannot be read ({reason}). Give a YAML file of options.") from None
    if len(content) > LARGEST_FILE:
        raise UsageError(f"--config {file} is larger than 1 MiB. Give a YAML file of options.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"--config {file} is no UTF-8 text. Give a YAML file of options.") from None


def _tree(file: Path, text: str) -> yaml.Node | None:
    """The file as nodes that keep their text and their line; None where there is nothing but comments."""
    try:
        tree: yaml.Node | None = yaml.compose(text, Loader=_PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = ", ".join(part for part in (error.context, error.problem) if part)[:300]
        if not isinstance(error, _NotTakenError):
            problem = f"broken YAML: {problem}"
    except yaml.reader.ReaderError as error:
        line = f":{text.count(chr(10), 0, error.position) + 1}"
        problem = f"broken YAML: {text[error.position]!r} is no character of a text"
    except (ValueError, OverflowError):
        # PyYAML leaves it to chr() to find out that \UFFFFFFFF is none.
        line, problem = "", "broken YAML: an escape in double quotes stands for no character"
    else:
        return tree
    raise UsageError(f"{file}{line}: {problem}. {_FORM}") from None


def _items(file: str, mapping: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Keys as text, their nodes and the nodes of their values; a key that stands twice is refused."""
    seen: dict[str, int] = {}
    for key, node in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{_place(file, key)}: expected a name before the colon, got {_shown(key)}. {_FORM}")
        text = _scalar(file, key)
        if text in seen:
            raise UsageError(f"{_place(file, key)}: {text!r} stands in line {seen[text]} already. Keep one of the two.")
        seen[text] = key.start_mark.line + 1
        yield text, key, node


def _scalar(file: str, node: yaml.ScalarNode) -> str:
    """The text of a scalar, if it is something that could be typed."""
    text = str(node.value)
    if len(text) > LONGEST_VALUE:
        raise UsageError(f"{_place(file, node)}: a value of {len(text)} characters; the most is {LONGEST_VALUE}.")
    if not text.isprintable():
        raise UsageError(f"{_place(file, node)}: {_shown(node)} has characters that cannot be printed. Leave them out.")
    return text


def _shown(node: yaml.Node) -> str:
    return repr(node.value[:80]) if isinstance(node, yaml.ScalarNode) else _SHAPES[type(node)]


def _place(file: str | Path, node: yaml.Node) -> str:
    return f"{file}:{node.start_mark.line + 1}"
