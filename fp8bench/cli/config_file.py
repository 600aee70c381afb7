"""Reads options from a YAML file. The keys of the file are the options of a command, and the command's parser parses
their values, so that a new option is automatically a new key.

The metavar of an option determines the form of its value in the file: A,B may be a list, and AXIS=A,B and LAYER=DTYPE
may be a mapping. All values stay text, as a shell would pass them: `1e3` and `yes` are not converted. `TRAINER_KEYS`
are keys that configurations of FP8 trainings use, like `use_fp8`.
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

MAX_CONFIG_BYTES = 1 << 20


class _TextYamlLoader(yaml.BaseLoader):
    """A YAML loader that keeps scalars as text, and rejects duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        constructed_mapping: dict[Any, Any] = super().construct_mapping(node, deep=True)
        if len(constructed_mapping) < len(node.value):
            keys = [key.value for key, _ in node.value]
            duplicate_key = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"the key {duplicate_key!r:.80} occurs twice")
        return constructed_mapping


def read_config_mapping(option: str, file: Path, content: str) -> dict[str, Any]:
    """Reads a YAML file as a mapping whose innermost values are texts. Raises UsageError if the file is not readable or
    not such a mapping.

    The error names `option`, the option that named the file. `content` describes what the file should contain.
    """
    try:
        # utf-8-sig drops the byte order mark with which some editors begin a file.
        config_mapping = yaml.load(read_file(file, MAX_CONFIG_BYTES).decode("utf-8-sig"), Loader=_TextYamlLoader)
    except OSError as error:
        raise UsageError(f"{option} {file} cannot be read ({error.strerror}). Give a YAML file of {content}.") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{option} {file} cannot be read ({reason:.300}). Give a YAML file of {content}.") from None
    if not isinstance(config_mapping, dict) or not all(isinstance(key, str) for key in config_mapping):
        raise UsageError(f"{option} {file} is not a mapping. Give a YAML file of {content}.")
    return config_mapping


class TrainerKey(NamedTuple):
    """The option that is set by a key from files of a training framework, like `use_wandb`.

    `targets` are options or 'set AXIS', each with a translation of the key's values. The first target that the command
    has is used. An empty translation leaves values unchanged. If no target fits, the key is refused with the advice
    `replacement_text`.
    """

    targets: Mapping[str, Mapping[str, str]]
    replacement_text: str


_BOOLEAN_TO_YES_NO = {"true": "yes", "false": "no"}
_NO_TRANSLATIONS: Mapping[str, str] = {}
TRAINER_KEYS = {
    "max_grad_norm": TrainerKey(
        {"clip": _NO_TRANSLATIONS}, "suites clip no gradients; write it in a file of `fp8bench train`"
    ),
    "max_batch_size": TrainerKey(
        {"batch": _NO_TRANSLATIONS, "set batch": _NO_TRANSLATIONS}, "write batch: N in a file of `fp8bench train`"
    ),
    # `fp8bench train` refuses `use_flash_attention: false`, because its option --attention cannot choose a kernel.
    "use_flash_attention": TrainerKey(
        {"attention": {"true": "auto"}, "set attention": {"true": "flash", "false": "math"}},
        "torch chooses the kernel of attention here, or a precision emulates it; leave the key out. `fp8bench suite "
        "transformer --set attention=math,flash` compares kernels",
    ),
    "torch_compile": TrainerKey(
        {"compile": _BOOLEAN_TO_YES_NO, "set compile": _BOOLEAN_TO_YES_NO}, "write true or false"
    ),
    "dataset": TrainerKey({"data": _NO_TRANSLATIONS}, "write data: FILE"),
    "num_epochs": TrainerKey({}, "write steps: N for `fp8bench train`, budget: SECONDS for `fp8bench suite`"),
    "use_wandb": TrainerKey({"log": {"true": "wandb", "false": ""}}, "write log: wandb:PROJECT"),
    "wandb_name": TrainerKey({}, "a run is named by its id; write log: wandb:PROJECT"),
}
# `use_fp8: true` adds DELAYED_MODE to the dtypes of the file. The keys of MODE_OPTIONS set options of this mode. With
# torch.compile, COMPILED_MODE is added instead, because a compiled graph cannot remember earlier casts.
FP8_SWITCH, DELAYED_MODE, COMPILED_MODE = "use_fp8", "fp8-delayed", "fp8"
MODE_OPTIONS = {
    "fp8_format": "formats",
    "fp8_margin": "margin",
    "fp8_interval": "interval",
    "fp8_amax_history_len": "history",
    "fp8_amax_compute_algo": "algorithm",
}
# If a file names no dtypes, its FP8 mode is compared with these dtypes.
_DEFAULT_COMPARED_DTYPES = ("bf16",)


def parse_with_config(
    parser: argparse.ArgumentParser, command: argparse.ArgumentParser, words: Sequence[str], file: Path
) -> argparse.Namespace:
    """Parses the command line with the values of a file as defaults. The command line overrides the file.

    The values of a repeatable option on the command line are added to those in the file. However, NAME=VALUE on the
    command line replaces what the file has for NAME. `parser` and its sub-parser `command` keep the file's values as
    their defaults.
    """
    values = read_config(file, command)
    command.set_defaults(**values)
    arguments = parser.parse_args(words)
    for action in command._actions:
        if _is_repeatable_option(action) and _is_key_value_option(action) and action.dest in values:
            # argparse appended the values of the command line to the defaults, which are those of the file.
            config_file_values = values[action.dest]
            command_line_values = getattr(arguments, action.dest)[len(config_file_values) :]
            command_line_names = {name for name, _ in command_line_values}
            unoverridden_config_values = [pair for pair in config_file_values if pair[0] not in command_line_names]
            setattr(arguments, action.dest, [*unoverridden_config_values, *command_line_values])
    return arguments


def read_config(file: Path, command: argparse.ArgumentParser) -> dict[str, Any]:
    """Returns the values in a file. The key of each value is the name under which argparse stores the option."""
    config_file_values = read_config_mapping("--config", file, "options, in lines like `dtypes: fp32,bf16`")
    try:
        return _parse_options(config_file_values, command)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def _parse_options(content: dict[str, Any], command: argparse.ArgumentParser) -> dict[str, Any]:
    # 1. Take out the keys that together name an FP8 mode: `use_fp8` and `fp8_amax_history_len: 16` mean
    # fp8-delayed:history=16.
    options = _options_by_key(command)
    mode_options = {key: content.pop(key) for key in (FP8_SWITCH, *MODE_OPTIONS) if key in content}
    # 2. Parse each value with the parser of its option, so that the file and the command line mean the same.
    values: dict[str, Any] = {}
    for key, raw_value in content.items():
        try:
            name, value = _translate_config_key(key, raw_value, options)
            option_action = options.get(name) or options.get(name.replace("_", "-"))
            # For an unknown key, suggest the most similar one. All keys of trainers count, even those that this command
            # does not have.
            if option_action is None:
                all_keys = [*options, FP8_SWITCH, *MODE_OPTIONS, *TRAINER_KEYS]
                raise UnknownName("key", key, all_keys, f"the options of {command.prog}, without dashes")
            # A translation to '' sets no option, as for `use_wandb: false`.
            if value == "" and key in TRAINER_KEYS:
                continue
            parsed_value = _parse_value(command, option_action, value)
        except ValueError as error:
            raise UsageError(f"{key}: {error}.") from None
        if option_action.dest in values and not _is_repeatable_option(option_action):
            raise UsageError(f"{key!r} sets what another key sets. Keep one of the two.")
        values[option_action.dest] = (
            [*values.get(option_action.dest, ()), *parsed_value]
            if _is_repeatable_option(option_action)
            else parsed_value
        )
    # 3. Add the FP8 mode to the dtypes.
    is_compiled = values.get("compile") == "yes" or ("compile", ("yes",)) in values.get("axes", ())
    if mode := _find_fp8_mode(mode_options, is_compiled):
        values["dtypes"] = (*values.get("dtypes", _DEFAULT_COMPARED_DTYPES), mode)
    return values


def _translate_config_key(key: str, value: Any, options: Mapping[str, Any]) -> tuple[str, Any]:
    """Returns the name of the option that a key sets, and the value of the option. A key of a trainer is translated,
    any other key is the name of the option.
    """
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
    raise ValueError(f"{value!r:.80} is not supported: {trainer_key.replacement_text}")


def _find_fp8_mode(mode_options: Mapping[str, Any], is_compiled: bool) -> str:
    """Returns the FP8 mode that the file asks for, with its options. Returns '' if `use_fp8` is false or missing."""
    fp8_switch_text = str(mode_options.get(FP8_SWITCH, "false")).lower()
    if fp8_switch_text not in ("true", "false"):
        raise UsageError(f"{FP8_SWITCH}: expected true or false, got {fp8_switch_text!r:.80}.")
    fp8_option_pairs = [
        f"{option}={str(mode_options[key]).lower()}" for key, option in MODE_OPTIONS.items() if key in mode_options
    ]
    # Parse the options even if `use_fp8` is false, so that a wrong option is reported. The canonical name leaves out
    # options with default values.
    mode = precisions.find_canonical_name(":".join([DELAYED_MODE, *fp8_option_pairs]))
    if fp8_switch_text == "false":
        return ""
    return _find_compiled_mode(mode) if is_compiled else mode


def _find_compiled_mode(mode: str) -> str:
    """Returns the FP8 mode that torch.compile supports, with the same formats.

    `mode` is a canonical name. Raises UsageError if it has other options than formats, because these belong to delayed
    scaling.
    """
    _, *options = mode.split(":")
    delayed_scaling_options = [option for option in options if not option.startswith("formats=")]
    if delayed_scaling_options:
        raise UsageError(
            f"{', '.join(delayed_scaling_options)} belongs to delayed scaling, which depends on earlier casts, and a "
            "compiled graph does not know them. Leave these keys out, or write torch_compile: false."
        )
    return ":".join([COMPILED_MODE, *options])


def _options_by_key(command: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns the options that a file may set, by their names without dashes. --config and --resume are left out."""
    option_by_key: dict[str, argparse.Action] = {}
    for action in command._actions:
        # --help and --help-all have no value (SUPPRESS). A file can name neither another file nor a run to resume.
        if action.default is argparse.SUPPRESS or action.dest in ("config", "resume"):
            continue
        long_names = [word.removeprefix("--") for word in action.option_strings if word.startswith("--")]
        option_by_key.update(dict.fromkeys(long_names or [action.dest], action))
    return option_by_key


def _is_repeatable_option(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _is_key_value_option(action: argparse.Action) -> bool:
    return "=" in str(action.metavar)


def _parse_value(command: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0:
        if str(value).lower() not in ("true", "false"):
            raise ValueError(f"expected true or false, got {value!r:.80}")
        return action.const if value.lower() == "true" else action.default
    texts = _list_option_value_words(action, value)
    if not _is_repeatable_option(action):
        texts = [",".join(texts)]
    try:
        parsed_values = [command._get_value(action, text) for text in texts]
        for part in parsed_values:
            command._check_value(action, part)
    except argparse.ArgumentError as error:
        raise ValueError(error.message) from None
    return parsed_values if _is_repeatable_option(action) else parsed_values[0]


def _list_option_value_words(action: argparse.Action, value: Any) -> list[str]:
    """Returns the words of a command line that set an option to a value of a file."""
    if isinstance(value, dict) and _is_key_value_option(action):
        return [f"{_require_text(name)}={','.join(_list_values(texts))}" for name, texts in value.items()]
    if isinstance(value, list) and (_is_repeatable_option(action) or "," in str(action.metavar)):
        return _list_values(value)
    text = _require_text(value)
    if _is_repeatable_option(action) and not _is_key_value_option(action):
        return [part.strip() for part in text.split(",")]
    return [text]


def _list_values(value: Any) -> list[str]:
    return [_require_text(part) for part in value] if isinstance(value, list) else [_require_text(value)]


def _require_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected one value, got {value!r:.80}")
    return value
