"""Counts words that make readers stop, and keeps limits that fall and never rise: `python -m tests.house.word_counts`.

Each room has three figures: functions named by a participle, variables named by a function word, and idioms in its
docstrings, comments, messages and pages. A hit is a place to look at, not a fault. The limits are in words.toml, with
the phrases and names that do not count and the reasons of both.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.house import ratchet
from tests.house.sources import ROOT

LIMITS = Path(__file__).with_name("words.toml")
FIGURES = ("participles", "function words", "idioms")
HEADER = """\
# At most how many functions of each room are named by a participle, how many variables by a function word, and how
# many idioms its texts have. A figure may fall and not rise: python -m tests.house.word_counts
# To raise figures of a room, add an entry at the end with the reason, and leave the table alone:
#
#   [[raised]]
#   room = "fp8bench/report"
#   idioms = 2
#   reason = "The page quotes the words of a driver."
#
# A phrase or a name that cannot be another one is an exception:
#
#   [[exceptions]]
#   phrase = "cannot tell"   # or name = "traced"
#   reason = "It is a verdict, and the same in every output."
"""
FUNCTION_WORD = re.compile(
    r"_*(?:own|known|why|before|kept|given|whole|other|wanted|told|left|what|again|beside|said|seen|found|there|here|each"
    r"|more|others|after|alike|who|way|ways|made|far|near|gone|lead|those|rest|one|them)"
)
PARTICIPLE = re.compile(
    r"_?(drawn|kept|told|said|known|given|seen|made|taken|found|shown|held_back|begun|written|sent|cut|split|spread|\w+ed)"
)
# Predicates, and nouns that end as participles do.
NO_PARTICIPLE = re.compile(
    r"_?(?:is|are|has|was)_.*|_?(?:\w+_)?(?:seed|speed|need|feed|bed|embed|shed|thread|spread|head)"
)
IDIOMS = (
    r"(?:^|[.:;!?] )(?:Of (?!course)|By (?!default))[a-z`]",
    r"\b[Ss]o (?:many|much|long|few|often|far)\b(?! (?:that|as\b))",
    r"(?:^|[.;:] )(?:What|Whose|That which|Those|That of|Whoever)\b(?![^.]*\?)",
    r"\bof (?:its|their|your|one's|a) own\b|one's own\b|(?:its|their) own(?=[,.;:)])",
    r"\b(?:is|are|was|were) (?:no (?!longer|more\b)|none\b)|\b[Nn]othing of\b|\bnone of (?:its|a)\b",
    r"\b(?:says?|said|tells?|told|telling|saying)\b",
    r"\b(?:stands?|stood|lies?|lay|lying) (?:in|at|on|under|behind|beside|there|here|once|around|between)\b",
    r"\b(?:stands?|stood|lies?|lay|lying) (?:with|before)\b",
    r"\bcomes? (?:to|out|on top)\b",
    r"\b(?:beside|anew|once more|meanwhile|unasked|likewise|all the same)\b|, too[.;,]",
    r"\bas (?:it|they|these) (?:is|was|are|were|came|stands?|lies?)\b",
    r"\b(?:is|are|be|was|has|had|of|to|in|with) (?:another|other ones|the other one)\b",
)


ANY_IDIOM = re.compile("|".join(IDIOMS))


def is_participle(name: str) -> bool:
    return bool(PARTICIPLE.fullmatch(name)) and not NO_PARTICIPLE.fullmatch(name)


def count_idioms(text: str, phrases: set[str]) -> int:
    """How many idioms a paragraph on one line has without the excepted phrases."""
    if not ANY_IDIOM.search(text):
        return 0
    for phrase in phrases:
        text = text.replace(phrase, "")
    return sum(len(re.findall(rule, text)) for rule in IDIOMS)


def texts_of(source: str, nodes: list[ast.AST]) -> Iterator[str]:
    """The docstrings, messages of four words or more, and comments of a module, each on one line."""
    docstrings = {id(node.value) for node in nodes if ratchet.is_docstring(node)}
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and (id(node) in docstrings or node.value.count(" ") >= 3):
            yield " ".join(node.value.split())
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# ?(?:fmt|noqa|type)", token.string):
            continue
        if token.start[0] != last + 1:
            yield " ".join(block)
            block = []
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    yield " ".join(block)


def paragraphs(text: str) -> list[str]:
    """A Markdown page's paragraphs without code blocks, each on one line."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(paragraph.split()) for paragraph in prose.split("\n\n")]


def pages() -> list[Path]:
    roots = [ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
    return [*(ROOT / "docs").rglob("*.md"), *roots]


def count_names(nodes: list[ast.AST], names: set[str]) -> Counter[str]:
    """How many functions are named by a participle, and how many variables and parameters by a function word."""
    counts: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            counts["participles"] += is_participle(node.name) and node.name not in names
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts["function words"] += bool(FUNCTION_WORD.fullmatch(node.id)) and node.id not in names
        elif isinstance(node, ast.arg):
            counts["function words"] += bool(FUNCTION_WORD.fullmatch(node.arg)) and node.arg not in names
    return counts


def measure(limits: dict[str, Any]) -> ratchet.Table:
    exceptions = limits.get("exceptions", [])
    phrases = {entry["phrase"] for entry in exceptions if "phrase" in entry}
    names = {entry["name"] for entry in exceptions if "name" in entry}
    counts: dict[str, Counter[str]] = {}
    for path in ratchet.tracked_modules():
        source = path.read_text()
        nodes = list(ast.walk(ast.parse(source)))
        room = counts.setdefault(ratchet.name_room(path), Counter())
        room.update(count_names(nodes, names))
        room["idioms"] += sum(count_idioms(text, phrases) for text in texts_of(source, nodes))
    docs = counts.setdefault("docs", Counter())
    for page in pages():
        docs["idioms"] += sum(count_idioms(text, phrases) for text in paragraphs(page.read_text()))
    return {room: {figure: counts[room][figure] for figure in FIGURES} for room in sorted(counts)}


def main() -> None:
    weights = measure(ratchet.read_limits(LIMITS))
    ratchet.lower_limits(LIMITS, HEADER, FIGURES, weights)
    for figure in FIGURES:
        sys.stdout.write(f"{figure:15} {sum(figures[figure] for figures in weights.values()):>6,g}\n")
    for sentence in ratchet.find_excess(ratchet.read_limits(LIMITS), weights, FIGURES):
        sys.stdout.write(f"above its limit: {sentence}\n")


if __name__ == "__main__":
    main()
