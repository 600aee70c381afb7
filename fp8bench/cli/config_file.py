"""Files of options: YAML whose keys are a command's options, read by the command line's own parsers.

The keys come from the parser, so that a new option is a new key. The metavar gives a value's shape: A,B may be a list,
AXIS=A,B and LAYER=DTYPE a mapping. Values keep their text, as a shell would pass it: `1e3` and `yes` stay what was
written. Aliases, anchors and tags are refused: a few lines of them can stand for gigabytes. Beside the options stand
the keys of FP8 training configurations, `use_fp8` and its like. The same functions read other files that a person types
(thresholds, a topology) as mappings, lists and texts, each with its line.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fp8bench.errors import UsageError
from fp8bench.registry import precisions

LARGEST_FILE = 1 << 20
MOST_VALUES = 10_000
LONGEST_VALUE = 4096
# Options with mappings of lists take four.
DEEPEST = 8
SHAPES = {yaml.ScalarNode: "one value", yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}


@dataclass(frozen=True)
class FileKind:
    """What a file is for: the option that names it, what its mapping holds, and the form of its lines."""

    option: str
    content: str
    form: str


class _NotTakenError(yaml.MarkedYAMLError):
    """Valid YAML that files of settings do not need."""


class _PlainLoader(yaml.SafeLoader):
    """Composes nodes, and refuses what settings do not need before it can grow."""

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
    """The file's mapping. Raises UsageError with file and line."""
    tree = _tree(file, _text(file, kind), kind)
    if tree is None:
        raise UsageError(f"{file}: the file holds no {kind.content}. {kind.form}")
    if not isinstance(tree, yaml.MappingNode):
        raise UsageError(
            f"{place(file, tree)}: expected a mapping of {kind.content}, got {SHAPES[type(tree)]}. {kind.form}"
        )
    return tree


def items(file: str | Path, mapping: yaml.MappingNode, kind: FileKind) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yields keys as text with their nodes and value nodes; refuses repeated keys."""
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
    """The file as nodes, which keep their text and line; None if there are only comments."""
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
        # PyYAML leaves \UFFFFFFFF to chr().
        line, problem = "", "broken YAML: an escape in double quotes stands for no character"
    else:
        return tree
    raise UsageError(f"{file}{line}: {problem}. {kind.form}") from None


class Alias(NamedTuple):
    """Our option, or axis of --set, behind another name; `values` translates values."""

    option: str
    values: Mapping[str, str] = {}
    axis: str = ""


_YES = {"true": "yes", "false": "no"}
_BLOCKS = {"true": "blocks", "false": "no"}
# A name may stand for an option of `train` and for an axis of `suite`.
ALIASES: Mapping[str, tuple[Alias, ...]] = {
    **dict.fromkeys(("max_grad_norm", "gradient_clipping", "clip_grad", "grad_clip"), (Alias("clip"),)),
    **dict.fromkeys(("learning_rate", "lr"), (Alias("rate"),)),
    **dict.fromkeys(("warmup_ratio", "warmup_fraction"), (Alias("warmup"),)),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_decay_style"), (Alias("schedule", {
        "warmup_stable_decay": "wsd", "inverse_sqrt": "inverse-sqrt",
        "one_cycle": "one-cycle", "onecycle": "one-cycle", "constant_with_warmup": "constant",
    }),)),
    "optim": (Alias("optimizer", {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}),),
    **dict.fromkeys(("max_steps", "train_iters", "num_train_steps"), (Alias("steps"),)),
    **dict.fromkeys(
        ("max_batch_size", "batch_size", "micro_batch_size", "per_device_train_batch_size"),
        (Alias("batch"), Alias("set", axis="batch")),
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps"),
                    (Alias("micro-batches"), Alias("set", axis="micro_batches"))),
    **dict.fromkeys(("seq_length", "sequence_length", "max_seq_length", "block_size"),
                    (Alias("sequence"), Alias("set", axis="sequence"))),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"),
                    (Alias("checkpointing", _BLOCKS), Alias("set", _BLOCKS, "checkpointing"))),
    "torch_compile": (Alias("compile", _YES), Alias("set", _YES, "compile")),
    "use_flash_attention": (Alias("attention", {"true": "auto"}),
                            Alias("set", {"true": "flash", "false": "math"}, "attention")),
    "eval_steps": (Alias("evaluate"),),
    "save_steps": (Alias("keep"),),
}  # fmt: skip


_KIND = FileKind("--config", "options", "Expected lines of the form OPTION: VALUE.")
# Compared with the mode of FP8 training if a file names no dtypes.
_BESIDE_TRAINING = ("bf16",)
# The keys of FP8 training configurations: a switch, and other names for options of a mode.
SWITCH = "use_fp8"
MODE = "fp8-delayed"
KEYS = (SWITCH, "fp8_format", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo")


def with_config(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, words: Sequence[str], file: Path
) -> argparse.Namespace:
    """Parses the words with a file's values as defaults: the command line wins.

    Options that may be repeated are added to the file's, but an axis on the command line replaces the file's values of
    that axis. `parser` and `command` (its sub-parser) keep the file's values as their defaults. In the result, `unused`
    has a sentence for each key without effect.
    """
    values, training = read_config(file, command)
    places = training.options
    command.set_defaults(**values)
    arguments = parser.parse_args(words)
    arguments.unused = (
        *training.without_effect(arguments.dtypes is not values.get("dtypes")),
        *(
            f"{places[action.dest]} has no effect: {word} on the command line wins"
            for action in command._actions
            for word in dict.fromkeys(word.partition("=")[0] for word in words)
            if word.startswith("--") and word in action.option_strings and not _repeats(action)
            if action.dest in places
        ),
    )
    for action in command._actions:
        if _repeats(action) and _names_things(action) and action.dest in values:
            kept, given = values[action.dest], getattr(arguments, action.dest)[len(values[action.dest]) :]
            replaced = {name for name, _ in given}
            setattr(arguments, action.dest, [*(pair for pair in kept if pair[0] not in replaced), *given])
            where, word = places[action.dest], action.option_strings[0]
            lost = dict.fromkeys(name for name, _ in kept if name in replaced)
            wins = f"has no effect: {word} on the command line wins"
            arguments.unused += tuple(f"{where}: {name} {wins}" for name in lost)
    return arguments


def config_text(command: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """The text of a file with the options that differ from their defaults, and all others as comments."""
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
    """The value of a key with another name, as its option or axis takes it."""
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
    """Keys and their options: options without dashes, arguments by name; not --config and --resume."""
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
    """The keys of FP8 training in a file, with values and places ('my.yaml:7').

    `options` has the place of each other option, by its destination.
    """

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._values: dict[str, str] = {}

    def take(self, key: str, text: str, place: str) -> None:
        """Adds a key with its value in any case; raises UsageError with the place for impossible values."""
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
        """The mode that the switch adds to a run; '' if it is off."""
        if self._values.get(SWITCH) != "true":
            return ""
        words = [f"{key}={value}" for key, value in self._values.items() if key != SWITCH]
        return precisions.canonical(":".join([MODE, *words]))

    def without_effect(self, overruled: bool) -> Iterator[str]:
        """A sentence for each key that changes nothing; `overruled` if the command line chose the dtypes."""
        for key, where in self._places.items():
            why = ""
            if not self.mode:
                why = "" if key == SWITCH else f"{SWITCH} is {self._values.get(SWITCH, 'not there')}"
            elif overruled:
                why = "--dtypes on the command line says which precisions there are"
            if why:
                yield f"{where}: {key} has no effect: {why}"
