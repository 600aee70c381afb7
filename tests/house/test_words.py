"""One thing has one word in terminal, page, CSV and docs: the glossary lists it, and what is not used for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain

import pytest

from fp8bench.model import Label, Verdict
from fp8bench.report.data import run as csv_columns
from tests.house import ratchet, word_counts
from tests.house.sources import ROOT, tree_of

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
TITLE = "## One word for one thing"
# Calls whose texts a reader sees as the name of something: columns, and titles of tables, parts and sections.
NAMING = {
    "Col",
    "Column",
    "Field",
    "Part",
    "Chart",
    "Panel",
    "Metric",
    "Figure",
    "section",
    "table",
    "make_list_part",
    "spec",
}


def words_of_the_glossary() -> dict[str, list[str]]:
    """Each word that is used nowhere for a thing, and the glossary's words for it."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", GLOSSARY.partition(TITLE)[2], re.MULTILINE)
    replaced: dict[str, list[str]] = {}
    for word, synonyms in rows[1:]:
        for synonym in synonyms.split(", "):
            replaced.setdefault(synonym.strip(), []).append(word.strip())
    return replaced


def names_that_readers_see() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "fp8bench").rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in NAMING:
                for argument in [*node.args[:2], *(keyword.value for keyword in node.keywords)]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield f"{path.relative_to(ROOT)}:{argument.lineno}", argument.value
    for word in (*Label, *Verdict, *csv_columns._CASE_COLUMNS, *csv_columns._FIGURE_COLUMNS):
        yield "a label, verdict or column of CSV", str(word)


def find_synonyms(text: str, replaced: dict[str, list[str]]) -> list[str]:
    """The synonyms in a text, with the word to write instead. `code` and identifiers with _ are names, not words."""
    plain = re.sub(r"`[^`]*`|\S*_\S*|--\S+", " ", text.lower())
    found = re.findall(rf"\b({'|'.join(map(re.escape, replaced))})s?\b", plain)
    return [f"{synonym!r}: write {' or '.join(replaced[synonym])}" for synonym in found]


@pytest.mark.slow
def test_columns_titles_and_labels_use_the_words_of_the_glossary() -> None:
    replaced, names = words_of_the_glossary(), list(names_that_readers_see())
    assert len(replaced) > 20 and len(names) > 500
    wrong = []
    for place, name in names:
        wrong += [f"{place}: {name!r}: {fault}" for fault in find_synonyms(name, replaced)]
    assert not wrong, "\n".join(wrong)


def test_a_synonym_is_found_as_a_word() -> None:
    replaced = {"iteration": ["step", "round"]}
    assert find_synonyms("Time of an Iteration", replaced) == ["'iteration': write step or round"]
    assert find_synonyms("iterations", replaced)
    assert not find_synonyms("reiterations, `iteration`, max_iteration, --iteration", replaced)


def test_the_words_of_the_table_are_explained() -> None:
    explained = set()
    for row in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY.partition(TITLE)[0], re.MULTILINE):
        explained.update(word.strip() for word in row.split(","))
    used = set(chain.from_iterable(words_of_the_glossary().values()))
    assert used <= explained


@pytest.mark.slow
def test_no_room_returns_to_words_that_make_readers_stop() -> None:
    limits = ratchet.read_limits(word_counts.LIMITS)
    entries = [*limits.get("raised", []), *limits["exceptions"]]
    assert all(entry["reason"].strip().endswith(".") for entry in entries), "an entry lacks its reason"
    excess = ratchet.find_excess(limits, word_counts.measure(limits), word_counts.FIGURES)
    advice = "use plain words, or add an entry with the reason to tests/house/words.toml"
    assert not excess, "\n".join([advice, *excess])


def test_names_and_texts_are_counted() -> None:
    source = '''
"""It says so."""
def drawn(own, speed):  # it lies in memory
    kept = raw = "this is no message"
def is_mixed(): ...
def speed_seed(): ...
def test_nothing_is_counted(): ...
'''
    nodes = list(ast.walk(ast.parse(source)))
    assert word_counts.count_names(nodes, set()) == {"participles": 1, "function words": 2}
    assert word_counts.count_names(nodes, {"drawn", "own"}) == {"participles": 0, "function words": 1}
    texts = [text for text in word_counts.texts_of(source, nodes) if text]
    assert [word_counts.count_idioms(text, set()) for text in texts] == [1, 1, 1]
    assert word_counts.count_idioms("The verdict is cannot tell.", {"cannot tell"}) == 0
    assert word_counts.paragraphs("It says\nso.\n\n```sh\nit says so\n```\n") == ["It says so.", ""]
