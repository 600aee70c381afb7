"""YAML as a person types it into a file of settings: mappings, lists and texts, each with its line.

A value is its text, as a shell would pass it: `1e3` and `yes` stay what was written. Aliases, anchors and tags are
refused: nobody needs them here, and a few lines of them can stand for gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fp8bench.errors import UsageError

LARGEST_FILE = 1 << 20
MOST_VALUES = 10_000
LONGEST_VALUE = 4096
# A mapping of lists in the mapping of options takes four.
DEEPEST = 8
SHAPES = {yaml.ScalarNode: "one value", yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}


@dataclass(frozen=True)
class Kind:
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


def read_mapping(file: Path, kind: Kind) -> yaml.MappingNode:
    """The mapping that a file is. Raises UsageError with file and line."""
    tree = _tree(file, _text(file, kind), kind)
    if tree is None:
        raise UsageError(f"{file}: the file holds no {kind.content}. {kind.form}")
    if not isinstance(tree, yaml.MappingNode):
        raise UsageError(
            f"{place(file, tree)}: expected a mapping of {kind.content}, got {SHAPES[type(tree)]}. {kind.form}"
        )
    return tree


def items(file: str | Path, mapping: yaml.MappingNode, kind: Kind) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
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
    """The text of a scalar, if it is something that could be typed."""
    text = str(node.value)
    if len(text) > LONGEST_VALUE:
        raise UsageError(f"{place(file, node)}: a value of {len(text)} characters; the most is {LONGEST_VALUE}.")
    if not text.isprintable():
        raise UsageError(f"{place(file, node)}: {shown(node)} has characters that cannot be printed. Leave them out.")
    return text


def shown(node: yaml.Node) -> str:
    """A node in an error: its text, or its shape."""
    return repr(node.value[:80]) if isinstance(node, yaml.ScalarNode) else SHAPES[type(node)]


def is_none(node: yaml.Node) -> bool:
    """Whether it is a scalar without a value."""
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def place(file: str | Path, node: yaml.Node) -> str:
    """'nightly.yaml:3'."""
    return f"{file}:{node.start_mark.line + 1}"


def _text(file: Path, kind: Kind) -> str:
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


def _tree(file: Path, text: str, kind: Kind) -> yaml.Node | None:
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
