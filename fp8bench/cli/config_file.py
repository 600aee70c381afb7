"""A file of options: YAML whose keys are a command's options, read by the command line's own parsers.

The keys come from the parser, so that a new option is a new key. The shape of a value is what the option's metavar
shows: A,B may be a list, AXIS=A,B and LAYER=DTYPE a mapping. A value is its text, as a shell would pass it: `1e3` and
`yes` stay what was written. Aliases, anchors and tags are refused: nobody needs them here, and a few lines of them can
stand for gigabytes. Beside the options stand the keys of FP8 training configurations: `use_fp8` and what says how.

Other files that a person types (thresholds, a topology) are read by the same functions: mappings, lists and texts, each
with its line.
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

from fp8bench.cli.config_aliases import ALIASES, Alias
from fp8bench.errors import UsageError
from fp8bench.registry import precisions

LARGEST_FILE = 1 << 20
MOST_VALUES = 10_000
LONGEST_VALUE = 4096
# A mapping of lists in the mapping of options takes four.
DEEPEST = 8
SHAPES = {yaml.ScalarNode: "one value", yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}


@dataclass(frozen=True)
class FileKind:
    """What a file is for, in words: the option that names it, what its mapping holds, and the form of its lines."""

    option: str
    content: str
    form: str


class _NotTakenError(yaml.MarkedYAMLError):
    """Good YAML that no file of settings needs."""


class _PlainLoader(yaml.SafeLoader):
    """Composes what settings need, and refuses the rest before it can grow."""

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


def read_mapping(file: Path, kind: FileKind) -> yaml.MappingNode:
    """The mapping that a file is. Raises UsageError with file and line."""
    tree = _tree(file, _text(file, kind), kind)
    if tree is None:
        raise UsageError(f"{file}: the file holds no {kind.content}. {kind.form}")
    if not isinstance(tree, yaml.MappingNode):
        raise UsageError(
            f"{place(file, tree)}: expected a mapping of {kind.content}, got {SHAPES[type(tree)]}. {kind.form}"
        )
    return tree


def items(file: str | Path, mapping: yaml.MappingNode, kind: FileKind) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Keys as text, their nodes and the nodes of their values; a key that stands twice is refused."""
    seen: dict[str, int] = {}
    for key, node in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{place(file, key)}: expected a name before the colon, got {shown(key)}. {kind.form}")
        text = scalar(file, key)
        if text in seen:
            raise UsageError(f"{place(file, key)}: {text!r} stands in line {seen[text]} already. Keep one of the two.")
        seen[text] = key.start_mark.line + 1
        yield text, key, node


def scalar(file: str | Path, node: yaml.ScalarNode) -> str:
    text = str(node.value)
    if len(text) > LONGEST_VALUE:
        raise UsageError(f"{place(file, node)}: a value of {len(text)} characters; the most is {LONGEST_VALUE}.")
    if not text.isprintable():
        raise UsageError(f"{place(file, node)}: {shown(node)} has characters that cannot be printed. Leave them out.")
    return text


def shown(node: yaml.Node) -> str:
    return repr(node.value[:80]) if isinstance(node, yaml.ScalarNode) else SHAPES[type(node)]


def is_none(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def place(file: str | Path, node: yaml.Node) -> str:
    """'nightly.yaml:3'."""
    return f"{file}:{node.start_mark.line + 1}"


def _text(file: Path, kind: FileKind) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
        if len(content) <= LARGEST_FILE:
            return content.decode("utf-8-sig")
        problem = "is larger than 1 MiB"
    except UnicodeDecodeError:
        problem = "is no UTF-8 text"
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"
    raise UsageError(f"{kind.option} {file} {problem}. Give a YAML file of {kind.content}.")


def _tree(file: Path, text: str, kind: FileKind) -> yaml.Node | None:
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
    raise UsageError(f"{file}{line}: {problem}. {kind.form}") from None


_KIND = FileKind("--config", "options", "Expected lines of the form OPTION: VALUE.")
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
    `unused` of what is returned says which keys of the file have no effect, `configured` where options stand in it.
    """
    values, training = read_config(file, command)
    places = training.options
    command.set_defaults(**values)
    arguments = parser.parse_args(words)
    arguments.configured = places
    arguments.unused = (
        *training.without_effect(arguments.dtypes is not values.get("dtypes")),
        *(
            f"{places[action.dest]} has no effect: {word} on the command line wins"
            for action, word in _winning(command, words)
            if action.dest in places
        ),
    )
    for action in command._actions:
        if _repeats(action) and _names_things(action) and action.dest in values:
            kept = values[action.dest]
            given = getattr(arguments, action.dest)[len(kept) :]
            replaced = {name for name, _ in given}
            setattr(arguments, action.dest, [*(pair for pair in kept if pair[0] not in replaced), *given])
    return arguments


def _winning(command: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[tuple[argparse.Action, str]]:
    """The options on the command line that take the place of a file's values, as they were typed."""
    options = list(dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")))
    for action in command._actions:
        yield from ((action, word) for word in options if word in action.option_strings and not _repeats(action))


def written(command: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """A file of options: those that differ from their defaults, and the others as comments."""
    lines = ["# Options of `fp8bench suite`, read by --config FILE; the command line wins."]
    names = {action: key for key, action in reversed(_keys(command).items())}  # the first of those that it has
    for action, key in reversed(names.items()):
        value = getattr(arguments, action.dest)
        line = f"{key}: {_as_yaml(action, value)}".rstrip()
        lines += ["", f"# {action.help}", line if value != action.default else f"# {line}"]
    return "\n".join(lines) + "\n"


def _as_yaml(action: argparse.Action, value: Any) -> str:
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
    plain = re.fullmatch(r"[\w./][\w./:=+-]*(?<!:)", text, re.ASCII) and text.lower() != "null"
    return text if plain else json.dumps(text, ensure_ascii=False)


def read_config(file: Path, command: argparse.ArgumentParser) -> tuple[dict[str, Any], TrainingKeys]:
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
        alias = next((alias for alias in ALIASES.get(key, ()) if alias.option in options), Alias(key))
        option = options.get(alias.option) or options.get(key.replace("_", "-"))
        if option is None:
            raise _unknown(place(file, key_node), key, [*options, *KEYS])
        given = option.value(_in_our_words(place(file, node), key, alias, node))
        name = option.action.dest
        if name in values and not alias.axis:
            raise UsageError(f"{place(file, key_node)}: {key!r} sets what a line above sets. Keep one of the two.")
        values[name] = [*values.get(name, ()), *given] if alias.axis else given
        training.options[name] = f"{place(file, key_node)}: {key}"
    if training.mode:
        values["dtypes"] = (*values.get("dtypes", _BESIDE_TRAINING), training.mode)
    return values, training


def _unknown(where: str, key: str, known: Sequence[str]) -> UsageError:
    if key in ALIASES:
        called = " or ".join(f"--{alias.option}" for alias in ALIASES[key])
        return UsageError(f"{where}: {key} is {called} of `fp8bench train`, and this command has nothing of the kind.")
    near = difflib.get_close_matches(key, [*known, *ALIASES], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"{where}: unknown key {key!r}.{hint} Known: {', '.join(known)}.")


def _in_our_words(where: str, key: str, alias: Alias, node: yaml.Node) -> yaml.Node:
    """The value of a key that has another name here, as its option or axis takes it."""
    if not isinstance(node, yaml.ScalarNode) or not (alias.values or alias.axis) or is_none(node):
        return node
    text = str(node.value)
    if text.lower() in ("true", "false") and alias.values and text.lower() not in alias.values:
        raise UsageError(
            f"{where}: {key} cannot be {text} here: attention is torch's own kernel, or rounded. Leave it out; "
            "`fp8bench suite transformer --set attention=math,flash` measures kernels."
        )
    text = alias.values.get(text.lower(), text)
    whole = f"{alias.axis}={text}" if alias.axis else text
    return yaml.ScalarNode("tag:yaml.org,2002:str", whole, node.start_mark, node.end_mark)


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
    file: str
    command: argparse.ArgumentParser
    action: argparse.Action

    def value(self, node: yaml.Node) -> Any:
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
            named = []  # NAME=A,B from each entry
            for name, key, values in items(self.file, node, _KIND):
                if not name or set(name) & set("=,"):
                    raise self._refused(key, f"expected a plain name before the colon, got {name!r}")
                given = values.value if isinstance(values, yaml.SequenceNode) else [values]
                named.append(f"{name}={','.join(map(self._given, given))}")
            return named
        return [self._given(item) for item in node.value]

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
        name = next((word for word in self.action.option_strings if word.startswith("--")), self.action.dest)
        return UsageError(f"{place(self.file, node)}: {name}: {why}.")


class TrainingKeys:
    """The keys of FP8 training that a file has, each with its value and the place where it stands ('my.yaml:7').

    `options` says where each other option stands, by its destination.
    """

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
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
                option = next(choice for choice in precisions.get(MODE).options if key in choice.aliases)
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
