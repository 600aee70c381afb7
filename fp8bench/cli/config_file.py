"""Files of options: YAML whose keys are a command's options, read by the command line's parsers.

The keys come from the parser, so that a new option is a new key. The metavar gives a value's shape: A,B may be a list,
AXIS=A,B and LAYER=DTYPE a mapping. Values stay text, as a shell would pass them: `1e3` and `yes` are not converted.
`TRAINER_KEYS` are the keys of FP8 training configurations, like `use_fp8`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fp8bench.errors import UnknownName, UsageError
from fp8bench.files import read_file
from fp8bench.registry import precisions

LARGEST_CONFIG = 1 << 20


class _TextLoader(yaml.BaseLoader):
    """Keeps scalars as text, and rejects duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=True)
        if len(mapping) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"the key {twice!r:.80} occurs twice")
        return mapping


def read_mapping(option: str, file: Path, content: str) -> dict[str, Any]:
    """Reads a YAML file's mapping, whose leaves are text. `content` describes what `option` expects."""
    try:
        mapping = yaml.load(read_file(file, LARGEST_CONFIG).decode("utf-8-sig"), Loader=_TextLoader)
    except OSError as error:
        raise UsageError(f"{option} {file} cannot be read ({error.strerror}). Give a YAML file of {content}.") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{option} {file} cannot be read ({reason:.300}). Give a YAML file of {content}.") from None
    if not isinstance(mapping, dict) or not all(isinstance(key, str) for key in mapping):
        raise UsageError(f"{option} {file} is not a mapping. Give a YAML file of {content}.")
    return mapping


class TrainerKey(NamedTuple):
    """The meaning of a key of a training framework: the first of `targets` that the command has, an option or 'set
    AXIS'.

    A target's values are translated, or passed unchanged without a translation. Without targets the key is rejected
    with the remedy `instead`.
    """

    targets: Mapping[str, Mapping[str, str]]
    instead: str


_YES = {"true": "yes", "false": "no"}
_UNCHANGED: Mapping[str, str] = {}
TRAINER_KEYS = {
    "max_grad_norm": TrainerKey({"clip": _UNCHANGED}, "a suite clips nothing; write it in a file of `fp8bench train`"),
    "max_batch_size": TrainerKey(
        {"batch": _UNCHANGED, "set batch": _UNCHANGED}, "write batch: N in a file of `fp8bench train`"
    ),
    "use_flash_attention": TrainerKey(
        {"attention": {"true": "auto"}, "set attention": {"true": "flash", "false": "math"}},
        "attention is torch's own kernel here, or rounded; leave it out. `fp8bench suite transformer --set "
        "attention=math,flash` measures kernels",
    ),
    "torch_compile": TrainerKey({"compile": _YES, "set compile": _YES}, "write true or false"),
    "dataset": TrainerKey({"data": _UNCHANGED}, "write data: FILE"),
    "num_epochs": TrainerKey({}, "write steps: N for `fp8bench train`, budget: SECONDS for `fp8bench suite`"),
    "use_wandb": TrainerKey({"log": {"true": "wandb", "false": ""}}, "write log: wandb:PROJECT"),
    "wandb_name": TrainerKey({}, "a run is named by its id; write log: wandb:PROJECT"),
}
# The switch adds the mode to the file's dtypes; the other keys are options of the mode. A compiled graph cannot
# remember earlier casts, so it uses the mode without a history.
SWITCH, MODE, COMPILED_MODE = "use_fp8", "fp8-delayed", "fp8"
MODE_OPTIONS = {
    "fp8_format": "formats",
    "fp8_margin": "margin",
    "fp8_interval": "interval",
    "fp8_amax_history_len": "history",
    "fp8_amax_compute_algo": "algorithm",
}
# The dtype compared with that mode if a file names none.
_BESIDE_TRAINING = ("bf16",)


def with_config(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, words: Sequence[str], file: Path
) -> argparse.Namespace:
    """Parses the words with a file's values as defaults: the command line wins.

    Repeatable options are added to the file's, but an axis on the command line replaces the file's values of that axis.
    `parser` and `command` (its sub-parser) keep the file's values as their defaults.
    """
    values = read_config(file, command)
    command.set_defaults(**values)
    arguments = parser.parse_args(words)
    for action in command._actions:
        if _repeats(action) and _names_things(action) and action.dest in values:
            from_file = values[action.dest]
            typed = getattr(arguments, action.dest)[len(from_file) :]
            replaced = {name for name, _ in typed}
            remaining = [pair for pair in from_file if pair[0] not in replaced]
            setattr(arguments, action.dest, [*remaining, *typed])
    return arguments


def read_config(file: Path, command: argparse.ArgumentParser) -> dict[str, Any]:
    """Reads a file's values, keyed by the destinations of the command's options."""
    # 1. Combine options of a mode: they form one word like fp8-delayed:history=16.
    options = _options_of(command)
    content = read_mapping("--config", file, "options, in lines like `dtypes: fp32,bf16`")
    mode_options = {key: content.pop(key) for key in (SWITCH, *MODE_OPTIONS) if key in content}
    # 2. Read each key with the parser of its option, so that a file and a command line mean the same.
    values: dict[str, Any] = {}
    for key, raw_value in content.items():
        try:
            name, value = _as_option(key, raw_value, options)
            action = options.get(name) or options.get(name.replace("_", "-"))
            # Only some commands accept trainers' keys, but all suggest them.
            if action is None:
                known_keys = [*options, SWITCH, *MODE_OPTIONS, *TRAINER_KEYS]
                raise UnknownName("key", key, known_keys, f"the options of {command.prog}, without dashes")
            if value == "" and key in TRAINER_KEYS:
                continue
            parsed = _parse_value(command, action, value)
        except ValueError as error:
            raise UsageError(f"{file}: {key}: {error}.") from None
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from None
        if action.dest in values and not _repeats(action):
            raise UsageError(f"{file}: {key!r} sets what another key sets. Keep one of the two.")
        values[action.dest] = [*values.get(action.dest, ()), *parsed] if _repeats(action) else parsed
    # 3. Add the mode to the other precisions.
    compiles = values.get("compile") == "yes" or ("compile", ("yes",)) in values.get("axes", ())
    mode = _mode_of(file, mode_options, compiles)
    if mode:
        values["dtypes"] = (*values.get("dtypes", _BESIDE_TRAINING), mode)
    return values


def _as_option(key: str, value: Any, options: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the option that a key sets, and its value: translated for other trainers' keys, else unchanged."""
    trainer_key = TRAINER_KEYS.get(key)
    if trainer_key is None:
        return key, value
    for target, translations in trainer_key.targets.items():
        option, _, axis = target.partition(" ")
        text = str(value)
        if option not in options or (translations and text.lower() not in translations):
            continue
        text = translations.get(text.lower(), text)
        return option, {axis: text} if axis else text
    raise ValueError(f"{value!r:.80} is not supported: {trainer_key.instead}")


def _mode_of(file: Path, mode_options: Mapping[str, Any], compiles: bool) -> str:
    """Returns the mode that the switch adds to a run; '' if it is off."""
    if not mode_options:
        return ""
    switch = str(mode_options.get(SWITCH, "false")).lower()
    if switch not in ("true", "false"):
        raise UsageError(f"{file}: {SWITCH}: expected true or false, got {switch!r:.80}.")
    pairs = [
        f"{option}={str(mode_options[key]).lower()}" for key, option in MODE_OPTIONS.items() if key in mode_options
    ]
    try:
        mode = precisions.canonical(":".join([MODE, *pairs]))
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    if compiles and switch == "true":
        return _compiled_mode(file, mode)
    return mode if switch == "true" else ""


def _compiled_mode(file: Path, mode: str) -> str:
    """Returns this mode for compiled graphs, with the same formats. Raises UsageError for options of a history."""
    _, *options = mode.split(":")
    history = [option for option in options if not option.startswith("formats=")]
    if history:
        raise UsageError(
            f"{file}: {', '.join(history)} is of delayed scaling, which depends on earlier casts, and a compiled graph "
            "does not know them. Leave these keys out, or write torch_compile: false."
        )
    return ":".join([COMPILED_MODE, *options])


def _options_of(command: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns options by key: options without dashes, arguments by name; not --config and --resume."""
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


def _parse_value(command: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0:
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"expected true or false, got {value!r:.80}")
        return action.const if value.lower() == "true" else action.default
    texts = _texts(action, value)
    if not _repeats(action):
        texts = [",".join(texts)]
    try:
        parsed = [command._get_value(action, text) for text in texts]
        for part in parsed:
            command._check_value(action, part)
    except argparse.ArgumentError as error:
        raise ValueError(error.message) from None
    return parsed if _repeats(action) else parsed[0]


def _texts(action: argparse.Action, value: Any) -> list[str]:
    """Returns a value as words of the command line."""
    if isinstance(value, dict) and _names_things(action):
        return [f"{_text(name)}={','.join(_list_of(texts))}" for name, texts in value.items()]
    if isinstance(value, list) and (_repeats(action) or "," in str(action.metavar)):
        return _list_of(value)
    text = _text(value)
    if _repeats(action) and not _names_things(action):
        return [part.strip() for part in text.split(",")]
    return [text]


def _list_of(value: Any) -> list[str]:
    return [_text(part) for part in value] if isinstance(value, list) else [_text(value)]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected one value, got {value!r:.80}")
    return value
