"""Documents in forms whose differences a person can read, and whose files are small."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

# Text that does not come from fp8bench, and why it may differ.
MASKS = (
    (re.compile(r"fp8bench \d+\.\d+\.\d+\w*"), "fp8bench VERSION", "a release does not change a document"),
    (re.compile(r"acknowledged \d{4}-\d{2}-\d{2}"), "acknowledged TODAY", "a change is acknowledged while a test runs"),
    (re.compile(r"-?\d+\.\d{8,}(?:e[-+]?\d+)?"), None, "last digits are those of vector instructions"),
)
# Limits: characters of a line and of a text, rows of a table, values of a list, and the excess over them that is
# shortened.
_LINE, _LONG, _ROWS, _KEPT, _FEW = 150, 400, 800, 20, 3


def masked(text: str) -> str:
    for pattern, words, _ in MASKS:
        text = pattern.sub(words if words is not None else _rounded, text)
    return text


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.9g}"


def normal(name: str, text: str) -> str:
    """The document in its stored form: JSON by lines, CSV without repetitions."""
    forms = {".json": of_json, ".csv": of_csv}
    form = forms.get(Path(name).suffix)
    return masked(text) if form is None else form(masked(text))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def of_json(text: str) -> str:
    """One value per line. Samples are replaced by their number and a digest."""
    try:
        documents, rest = [json.loads(text)], ""
    except ValueError:  # a message followed the document
        first, _, rest = text.partition("\n")
        documents = [json.loads(first)] if first.startswith("{") else []
        rest = rest if documents else text
    return "".join("\n".join(_laid_out(_short(document), "")) + "\n" for document in documents) + rest


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items()}
    if isinstance(value, list):
        plain = json.dumps(value)
        if len(plain) > _LINE and not re.search(r"[^\d\s\[\],.e+-]", plain):
            return f"{len(value)} of numbers: {digest(plain)}"
        return _thinned([_short(part) for part in value])
    if isinstance(value, str) and len(value) > _LONG:
        return f"{value[:_LONG]}... {digest(value)}"
    return value


def _thinned(values: list[Any]) -> list[Any]:
    """Every n-th of many values, with a digest of all."""
    step = 1 + len(values) // _KEPT
    if step < _FEW:
        return values
    kept = values[::step]
    return [*kept, f"{len(kept)} of {len(values)}, {digest(json.dumps(values))}"]


def _laid_out(value: Any, before: str) -> Iterator[str]:
    """On one line if it is short, else one line for each part."""
    plain = json.dumps(value, ensure_ascii=False)
    if len(plain) <= _LINE or not isinstance(value, dict | list):
        yield before + plain
        return
    indent = " " * (len(before) - len(before.lstrip()) + 1)
    pairs = value.items() if isinstance(value, dict) else (("-", part) for part in value)
    yield before + ("{" if isinstance(value, dict) else "[")
    for key, part in pairs:
        yield from _laid_out(part, f"{indent}{key}: " if isinstance(value, dict) else indent)


def of_csv(text: str) -> str:
    """Leaves out cells equal to those above ('~3' for three), and of many rows all but every n-th, with a digest."""
    rows = list(csv.reader(io.StringIO(text)))
    lines = [_ditto(row, before) for before, row in zip([[], *rows], rows, strict=False)]
    step = 1 + len(lines) // _ROWS
    kept = [line for number, line in enumerate(lines) if number < _KEPT or number % step == 0]
    return "\n".join([*kept, f"{len(lines)} rows, {digest(text)}", ""])


def _ditto(row: list[str], before: list[str]) -> str:
    same = [cell == other for cell, other in zip(row, before, strict=False)]
    cells: list[str] = []
    for alike, run in groupby(zip(row, [*same, *[False] * len(row)], strict=False), key=lambda pair: pair[1]):
        own = [cell for cell, _ in run]
        cells += [f"~{len(own)}"] if alike else own
    return "|".join(cells)


def of_frame(frame: Any) -> str:
    """A data frame's column types, and its rows as CSV."""
    kinds = ", ".join(f"{name} {kind}" for name, kind in frame.dtypes.items())
    return f"{len(frame)} rows of {kinds}\n{of_csv(masked(frame.to_csv(index=False)))}"


def of_files(folder: Path) -> str:
    """The texts in binary files, such as TensorBoard's."""
    rows = []
    for path in sorted(folder.rglob("*")):
        rows += [[str(path.relative_to(folder)), *words] for words in _words(path)]
    lines = io.StringIO()
    csv.writer(lines).writerows(rows)
    return of_csv(lines.getvalue())


def _words(path: Path) -> Iterator[list[str]]:
    content = path.read_bytes() if path.is_file() else b""
    if content:
        yield [hashlib.sha256(content).hexdigest()[:12]]
        yield from ([word.decode()] for word in re.findall(rb"[ -~]{6,}", content))
