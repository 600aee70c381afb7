"""Linear layers to look at: those of a model, or those that a file names."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import UnknownName, UsageError
from fp8bench.formats.scaled_products import OUTPUTS
from fp8bench.nn.layer_sizes import features_of, models, usual_tokens

LARGEST = (1 << 31) - 1
MOST_SHAPES = 10_000
_LAYOUTS = ("column", "row")
_NAMES = ("m", "n", "k", "name", "output", "layout")
_SIZE = re.compile(r"(\S+?)[xX*](\S+?)[xX*](\S+)")


@dataclass(frozen=True)
class LinearShape:
    """A linear layer: so many tokens, features out and features in.

    `output` is the type of its products; `row_major` says that their second operands lie row by row.
    """

    name: str
    tokens: int
    outputs: int
    inputs: int
    output: str = "bf16"
    row_major: bool = False


def shapes_of_model(model: str, tokens: int | None) -> list[LinearShape]:
    """All linear layers of a model, with its usual tokens unless told."""
    if model not in models():
        raise UnknownName("model", model, models())
    rows = tokens or usual_tokens(model)
    return [LinearShape(layer, rows, *features) for layer, features in features_of(model).items()]


def shapes_of_file(path: Path) -> list[LinearShape]:
    """Those of a file: CSV and YAML by their endings, else a line each, 'MxNxK' and perhaps a name."""
    text = _text(path)
    readers = {".csv": _of_csv, ".yaml": _of_yaml, ".yml": _of_yaml}
    found: list[LinearShape] = []
    for number, given in readers.get(path.suffix.lower(), _of_lines)(text, str(path)):
        place = f"{path}:{number}"
        if len(found) == MOST_SHAPES:
            raise UsageError(f"{place}: more than {MOST_SHAPES} shapes. Give the others in another file.")
        found.append(_shape(given, place))
    if not found:
        raise UsageError(f"{path} has no shape in it. Give lines like '8192x4096x4096 out', CSV or a YAML list.")
    return found


# What a line or an entry says, by the names of _NAMES, and the number of the line.
Given = Iterator[tuple[int, Mapping[str, str]]]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}). Give a file of shapes, or --model NAME.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text in UTF-8. Give lines of MxNxK, CSV or a YAML list.") from None


def _of_lines(text: str, path: str) -> Given:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(None, 1)
        if words:
            yield number, {"shape": words[0], "name": words[1].strip() if len(words) == 2 else ""}


def _of_csv(text: str, path: str) -> Given:
    reader = csv.reader(io.StringIO(text), strict=True)
    titles: list[str] | None = None
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if titles is None:
                titles = [cell.lower() for cell in cells]
                _check_names("column", titles, f"{path}:{reader.line_num}")
                continue
            if len(cells) > len(titles):
                raise UsageError(f"{path}:{reader.line_num}: {len(cells)} cells under {len(titles)} columns.")
            yield reader.line_num, dict(zip(titles, cells, strict=False))
    except csv.Error as error:
        raise UsageError(f"{path}:{reader.line_num}: this is no CSV ({error}).") from None


def _check_names(kind: str, names: list[str], place: str) -> None:
    """Columns of CSV, or keys of YAML: the known ones, once each, no side left out."""
    for name in names:
        if name not in _NAMES:
            raise UsageError(f"{place}: {UnknownName(kind, name, _NAMES)}")
    if len(set(names)) != len(names):
        raise UsageError(f"{place}: a {kind} stands there twice. Keep one of each.")
    lacking = [side for side in "mnk" if side not in names]
    if lacking:
        raise UsageError(f"{place}: there is no {kind} {lacking[0]}. Give m, n and k, perhaps name, output and layout.")


def _of_yaml(text: str, path: str) -> Given:
    import yaml

    try:
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UsageError(f"{place}: this is no YAML ({error.problem}).") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path}: this is no YAML ({type(error).__name__}).") from None
    if root is None:
        return
    if not isinstance(root, yaml.SequenceNode):
        raise UsageError(f"{path}:{root.start_mark.line + 1}: expected a list of shapes, like '- 8192x4096x4096 out'.")
    for node in root.value:
        number = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            yield from ((number, one) for _, one in _of_lines(node.value, path))
        elif isinstance(node, yaml.MappingNode):
            yield number, _mapping(node, f"{path}:{number}")
        else:
            raise UsageError(f"{path}:{number}: expected MxNxK, or m, n and k by name, not a list.")


def _mapping(node: object, place: str) -> dict[str, str]:
    """The scalars of a YAML mapping, as they are written."""
    found: dict[str, str] = {}
    for key, value in node.value:  # type: ignore[attr-defined]
        if not isinstance(key.value, str) or not isinstance(value.value, str):
            raise UsageError(f"{place}: expected words and numbers, not lists.")
        found[key.value] = value.value
    _check_names("key", [key.value for key, _ in node.value], place)  # type: ignore[attr-defined]
    return found


def _shape(given: Mapping[str, str], place: str) -> LinearShape:
    if "shape" in given:
        match = _SIZE.fullmatch(given["shape"])
        if match is None:
            raise UsageError(f"{place}: {given['shape']!r:.80} is no shape. Expected MxNxK, like 8192x4096x4096.")
        sides = match.groups()
    else:
        sides = tuple(given.get(side, "") for side in "mnk")
    m, n, k = (_side(letter, text, place) for letter, text in zip("MNK", sides, strict=True))
    output = given.get("output") or OUTPUTS[0]
    layout = given.get("layout") or _LAYOUTS[0]
    if output not in OUTPUTS:
        raise UsageError(f"{place}: {UnknownName('output', output, OUTPUTS)}")
    if layout not in _LAYOUTS:
        raise UsageError(f"{place}: {UnknownName('layout of the second operand', layout, _LAYOUTS)}")
    name = "".join(letter if letter.isprintable() else " " for letter in given.get("name", "")).strip()
    return LinearShape(name or f"{m}x{n}x{k}", m, n, k, output, layout == "row")


def _side(letter: str, text: str, place: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= LARGEST):
        raise UsageError(f"{place}: {letter} is {text!r:.40}. Expected a whole number from 1 to {LARGEST}.")
    return int(text)
