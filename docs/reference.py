"""The pages of the reference: each is made of the tables that the code itself goes by."""

from __future__ import annotations

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch

from fp8bench import units
from fp8bench.analysis.labels import POSSIBLY_HARD_LABELS
from fp8bench.cli.main import COMMAND_HELP_VERBS, Parser, build_parser, import_command_module, subparsers_by_name
from fp8bench.errors import UsageError
from fp8bench.features.train.health.health import RULES
from fp8bench.formats.codes import encode
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.model import CELL_PHASES, Record, Resumption, Run
from fp8bench.model.codec import SCHEMA
from fp8bench.model.specs import METRICS, Better, MetricSpec, Rank
from fp8bench.model.words import REMARK_LABELS
from fp8bench.report.panels import together
from fp8bench.report.words.legend import WORDS_BY_LABEL
from fp8bench.store.runs.run_file import _FIELDS_NOT_IN_HEADER
from fp8bench.store.series import ASV_UNITS

Rows = Iterable[tuple[str, ...]]
SCHEMA_ID = f"urn:fp8bench:run-file:{SCHEMA}"


def table(heading: tuple[str, ...], rows: Rows) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def plain(text: str) -> str:
    """Returns a help text as Markdown: text in backticks is code, and nothing else is markup."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part[:1] == "`" else re.sub(r"([\\*_<>\[\]#~])", r"\\\1", part) for part in parts).replace(
        "|", "\\|"
    )


def code(text: object) -> str:
    return f"`{text}`".replace("|", "\\|")


# Commands

HELP = {"--help", "--help-all"}


def _option_row(action: argparse.Action) -> tuple[str, str]:
    metavar = action.metavar or ("" if action.nargs == 0 else "|".join(map(str, action.choices or ())) or action.dest)
    shown = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    words = [f"{name} {shown}".rstrip() for name in action.option_strings] or [shown]
    return ", ".join(map(code, words)), plain((action.help or "") % {"default": action.default, "prog": "fp8bench"})


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        actions = [
            action
            for action in group._group_actions
            if action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)
        ]
        if rows := [_option_row(action) for action in actions if not HELP & {*action.option_strings}]:
            yield f"**{group.title or 'options'}**\n\n" + table(("option", "what it does"), rows)


def command_page(name: str, parser: Parser, words: str) -> str:
    examples = getattr(import_command_module(name), "EXAMPLES", ())
    parts = [f"# fp8bench {name}", plain(words[:1].upper() + words[1:].rstrip(".") + ".")]
    if examples:
        parts.append("```console\n" + "\n".join(f"$ {line}" for line in examples) + "\n```")
    parts += [plain(parser.description or ""), *_options(parser)]
    for sub, command in subparsers_by_name(parser).items():
        parts += [f"## fp8bench {name} {sub}", plain(command.description or ""), *_options(command)]
        parts.append(plain(command.epilog or ""))
    return "\n\n".join(filter(None, [*parts, plain(parser.epilog or "")]))


def command_pages() -> Iterator[tuple[str, str]]:
    """A page a command, and one that lists them by their verbs."""
    whole = build_parser()
    helps = {
        action.dest: action.help or ""
        for group in whole._subparsers._group_actions  # type: ignore[union-attr]
        for action in group._choices_actions  # type: ignore[attr-defined]
    }
    by_verb: dict[str, list[tuple[str, str]]] = {verb: [] for verb in COMMAND_HELP_VERBS}
    for name, parser in subparsers_by_name(whole).items():
        verb, _, words = helps[name].partition(": ")
        by_verb[verb].append((f"[{name}](command-{name}.md)", plain(words)))
        assert isinstance(parser, Parser)
        yield f"command-{name}", command_page(name, parser, words)
    heading = "command", "what it is for"
    lists = [f"## {verb.capitalize()}\n\n{table(heading, rows)}" for verb, rows in by_verb.items()]
    yield "options", "\n\n".join(["# Commands and options", "As `fp8bench COMMAND --help-all` prints them.", *lists])


# Metrics


def _shown(name: str) -> str:
    """'..._error', 'share_above_...'."""
    return name.replace("*", "..." if name.startswith("*") else "FORMAT")


def _names(alike: Iterable[str]) -> str:
    return ", ".join(f"`{_shown(name)}`" for name in alike)


def _more(spec: MetricSpec) -> str:
    page = spec.page.partition("#")[0]
    return f" ([{page}](../{spec.page}))" if page else ""


def outputs_rows() -> Rows:
    """Yields the metrics of a run: names, unit, direction, column and meaning."""
    figures = [spec for spec in METRICS.values() if spec.rank is not Rank.RESTATED]
    alike = together(
        ((spec.unit, spec.better.value, spec.heading, spec.description + _more(spec)), spec) for spec in figures
    )
    for (unit, better, heading, words), specs in alike.items():
        yield _names(specs), unit or "none", "" if better == Better.NONE else better, heading, words


def history_rows() -> Rows:
    """Yields the tracked metrics; lower is better."""
    rows = {}
    for spec in METRICS.values():
        phase = spec.kept_where if spec.kept_where in CELL_PHASES else "\0"
        words = spec.history or spec.description * (spec.of_workload and spec.better is Better.LOWER)
        rows[spec.replace(phase, "<phase>")] = spec, words.replace(f"the {phase}", "that")
    for name, (spec, words) in rows.items():
        if words:
            sure = "; exact, so that any change alarms" if spec.counted else ""
            unit = units.RATIO if spec.unit == "x" else ASV_UNITS.get(spec.unit, spec.unit)
            yield f"`track_{_shown(name)}`", unit, words + sure + _more(spec)


def gate_rows() -> Rows:
    """From which change on a figure is worse."""
    default = MetricSpec("anything else").threshold
    known = together((spec.threshold, spec) for spec in METRICS.values() if spec.threshold != default)
    for (relative, smallest), alike in known.items():
        phases = [spec.kept_where if spec.kept_where in CELL_PHASES else "\0" for spec in alike]
        names = dict.fromkeys(spec.replace(phase, "<phase>") for spec, phase in zip(alike, phases, strict=True))
        sure = ": counted, so that one more fails, without a second check" if alike[0].counted else ""
        yield (
            _names(names),
            f"{100 * relative:g}%",
            (units.describe(smallest, alike[0].unit) if smallest else "0") + sure,
        )
    yield "anything else", f"{100 * default[0]:g}%", "0"


def metrics_page() -> str:
    return "\n".join([
        "# Metrics and columns\n", "## Figures of a run\n",
        "As rows of CSV, JSON and frames ([outputs](../outputs.md)), and as columns of terminal and report.\n",
        table(("metric", "unit", "better", "column", "what it is"), outputs_rows()),
        "## Figures of the history\n", "As `fp8bench history` and asv call them ([history](../history.md)).\n",
        table(("metric", "unit", "what it is"), history_rows()),
        "## Thresholds of the gate\n",
        "Both make a regression: the share and the difference ([gate](../compare.md#a-gate-for-builds)).\n",
        table(("figure", "relative", "smallest"), gate_rows()),
    ])  # fmt: skip


# Labels, rules, formats


def labels_page() -> str:
    def grade(label: Any) -> str:
        return "remark" if label in REMARK_LABELS else "doubt, or hard" if label in POSSIBLY_HARD_LABELS else "doubt"

    rows = [
        (code(label), grade(label), words.meaning, words.cause, words.remedy) for label, words in WORDS_BY_LABEL.items()
    ]
    return (
        "# Labels\n\nA label qualifies a verdict: a remark changes nothing, a doubt makes it *perhaps*, and a hard "
        "label removes it. [Method](../method.md) explains how each is found.\n\n"
        + table(("label", "weight", "what it means", "usual cause", "what to do"), rows)
    )


def health_page() -> str:
    rows = [
        (code(rule.name), rule.alarms_at, rule.rationale(), "; ".join(remedy.value for remedy in rule.remedies))
        for rule in RULES
    ]  # fmt: skip
    return (
        "# Health rules\n\nWhat a training alarms about ([watching](../watching.md)): the constants are those that the "
        "rules judge by.\n\n" + table(("rule", "alarms at", "why there", "what may help"), rows)
    )


def _power(value: float) -> str:
    exponent = torch.tensor(value).log2().item()
    assert exponent.is_integer()
    return "1" if exponent == 0 else f"2^{int(exponent)}"


def _largest(fmt: Format) -> str:
    factor = fmt.largest / 2.0**fmt.max_exponent
    power = f"2^{fmt.max_exponent}"
    return f"{fmt.largest:g}" if fmt.largest < 1 << 16 else f"{factor:.11g} x {power}" if factor > 1 else power


def _nan_code(fmt: Format) -> str:
    try:
        return f"0x{int(encode(torch.tensor([torch.nan]), fmt)[0]):02X}"
    except UsageError:
        return "refused"


def formats_page() -> str:
    every = FORMATS.values()
    numbers = [
        (code(fmt.name), str(fmt.bits), f"{int(fmt.signed)}, {fmt.exponent_bits}, {fmt.mantissa_bits}", str(fmt.bias),
         _largest(fmt), _power(fmt.smallest_normal), _power(fmt.smallest_subnormal) if fmt.zeros else "none")
        for fmt in every
    ]  # fmt: skip
    flags = ("no", "yes")
    special = [
        (code(fmt.name), flags[fmt.has_infinity], flags[fmt.has_nan], flags[fmt.signed_zero], ", ".join(fmt.overflows),
         _nan_code(fmt))
        for fmt in every
    ]  # fmt: skip
    return "\n".join([
        "# Formats\n", "How values are rounded, scaled and kept: [formats](../formats.md).\n",
        table(("format", "bits", "sign, exponent, mantissa", "bias", "largest", "smallest normal",
               "smallest subnormal"), numbers),
        "## What is special in each\n",
        table(("format", "infinities", "NaN", "-0", "overflow, the default first", "code of NaN"), special),
    ])  # fmt: skip


# The run file


def run_schema() -> dict[str, Any]:
    """JSON Schema of one line of a run file; keys that it does not name are allowed, as readers ignore them."""
    known: dict[str, Any] = {}
    header = _schema_of(Run, known, _FIELDS_NOT_IN_HEADER)
    record, resumed = (_schema_of(kind, known) for kind in (Record, Resumption))
    contents: list[tuple[str, Any, tuple[str, ...]]] = [
        ("schema", {"const": SCHEMA}, ("header",)), ("record", record, ()), ("note", {"type": "string"}, ()),
        ("resumed", resumed, ()), ("end", {"enum": ["finished", "interrupted"]}, ()),
    ]  # fmt: skip
    lines = [{"required": [key, *more], "properties": {key: value}} for key, value, more in contents]
    lines[0]["properties"]["header"] = header  # type: ignore[index]
    every = {"line": {"type": "integer"}, "sum": {"type": "string"}, "digest": {"type": "string"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, "title": "A line of a run file",
        "type": "object", "properties": every, "oneOf": lines, "$defs": known,
    }  # fmt: skip


_PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}


def _schema_of(kind: Any, known: dict[str, Any], left_out: Iterable[str] = ()) -> dict[str, Any]:
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast(type, kind), known, left_out)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(member, known) for member in inside]}
    if origin is tuple and inside[-1] is not Ellipsis:
        places = [_schema_of(member, known) for member in inside]
        return {"type": "array", "prefixItems": places, "minItems": len(places), "maxItems": len(places)}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(inside[0], known)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema_of(inside[1], known)}
    if issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
    return {"type": _PLAIN[kind]}


def _object(kind: type, known: dict[str, Any], left_out: Iterable[str]) -> dict[str, Any]:
    if kind.__name__ not in known:
        known[kind.__name__] = {}  # a kind may hold itself
        hints = typing.get_type_hints(kind)
        members = [field for field in dataclasses.fields(kind) if field.name not in left_out]
        none = dataclasses.MISSING
        known[kind.__name__].update({
            "type": "object", "description": " ".join((kind.__doc__ or "").split()),
            "properties": {field.name: _schema_of(hints[field.name], known) for field in members},
            "required": [
                field.name for field in members if field.default is none and field.default_factory is none
            ],
        })  # fmt: skip
    return {"$ref": f"#/$defs/{kind.__name__}"}


def run_file_page() -> str:
    schema = run_schema()
    head = (
        f"# Schema of the run file\n\nOne line of [a run file](../run-format.md), as JSON Schema: `$id` `{SCHEMA_ID}`, "
        f"in {{download}}`run-file-{SCHEMA}.schema.json`. Its number rises where old readers would misread new files.\n"
    )
    parts = [head]
    for name, shape in schema["$defs"].items():
        rows = [(code(key), _type_words(value), "yes" if key in shape["required"] else "")
                for key, value in shape["properties"].items()]  # fmt: skip
        parts += [f"## {name}\n", plain(shape["description"]) + "\n", table(("key", "value", "required"), rows)]
    return "\n".join(parts)


def _type_words(shape: dict[str, Any]) -> str:
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in shape:
        return " or ".join(dict.fromkeys(_type_words(member) for member in shape["anyOf"]))
    if "enum" in shape:
        return ", ".join(map(code, shape["enum"]))
    if "prefixItems" in shape:
        return "array of " + ", ".join(_type_words(member) for member in shape["prefixItems"])
    inner = shape.get("items") or shape.get("additionalProperties")
    return f"{shape['type']} of {_type_words(inner)}" if inner else str(shape["type"])


PAGES: Mapping[str, Callable[[], str]] = {
    "metrics": metrics_page, "labels": labels_page, "health-rules": health_page, "number-formats": formats_page,
    "run-file": run_file_page,
}  # fmt: skip


def pages() -> Iterator[tuple[str, str]]:
    """The name and the text of every page."""
    yield from command_pages()
    yield from ((name, make()) for name, make in PAGES.items())
