"""One thing has one word in terminal, page, CSV and docs: the glossary lists it, and what is not used for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from fp8bench.model import Label, Verdict
from fp8bench.report.data import run as csv_columns
from tests.house.sources import ROOT, tree_of

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
# Calls whose strings a reader sees as names: columns, and titles of tables, parts and sections.
NAMING = {"Col", "Column", "Field", "Part", "Chart", "Panel", "Metric", "Figure", "section", "table", "list_of", "spec"}


def words_of_the_glossary() -> dict[str, list[str]]:
    """Each replaced word, and the glossary's words for it."""
    rows = re.findall(
        r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", GLOSSARY.partition("## One word for one thing")[2], re.MULTILINE
    )
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
    wrong = [f"{place}: {name!r}: {fault}" for place, name in names for fault in find_synonyms(name, replaced)]
    assert not wrong, "\n".join(wrong)


def test_a_synonym_is_found_as_a_word() -> None:
    replaced = {"iteration": ["step", "round"]}
    assert find_synonyms("Time of an Iteration", replaced) == ["'iteration': write step or round"]
    assert find_synonyms("iterations", replaced)
    assert not find_synonyms("reiterations, `iteration`, max_iteration, --iteration", replaced)


def test_the_words_of_the_table_are_explained() -> None:
    """Each recommended word is in one of the glossary's other tables."""
    explained = set()
    for row in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", GLOSSARY, re.MULTILINE):
        explained.update(word.strip() for word in row.split(","))
    used = {word for words in words_of_the_glossary().values() for word in words}
    assert used <= explained


# Idioms that made new readers stop. A hit is a place to look at, not a fault: the number may only fall.
IDIOMS = (
    r"(?:^|[.:;!?] )(?:Of (?!course)|By (?!default))[a-z`]",
    r"\b[Ss]o (?:many|much|long|few|often|far)\b(?! (?:that|as\b))",
    r"(?:^|[.;:] )(?:What|Whose|That which|Those|That of|Whoever)\b(?![^.]*\?)",
    r"\bof (?:its|their|your|one's|a) own\b|one's own\b|(?:its|their) own(?=[,.;:)])",
    r"\b(?:is|are|was|were) (?:no (?!longer|more\b)|none\b)|\b[Nn]othing of\b|\bnone of (?:its|a)\b",
    r"\b(?:says?|said|tells?|told|telling|saying)\b(?<!cannot tell)",
    r"\b(?:stands?|stood|lies?|lay|lying) (?:in|at|on|under|behind|beside|between|once|with|before)\b",
    r"\b(?:beside|anew|once more|meanwhile|unasked|likewise|all the same)\b|, too[.;,]",
    r"\bas (?:it|they|these) (?:is|was|are|were|came|stands?|lies?)\b",
    r"\b(?:is|are|be|was|has|had|of|to|in|with) (?:another|other ones|the other one)\b",
)
MOST_IDIOMS = 190


def paragraphs(text: str) -> list[str]:
    """A Markdown page's paragraphs without code blocks, each on one line."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(paragraph.split()) for paragraph in prose.split("\n\n")]


def test_pages_do_not_return_to_idioms() -> None:
    pages = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")),
    ]
    texts = [text for page in pages for text in paragraphs(page.read_text())]
    hits = sum(len(re.findall(rule, text)) for rule in IDIOMS for text in texts)
    assert hits <= MOST_IDIOMS, f"{hits} turns of phrase that make readers read twice, at most {MOST_IDIOMS} allowed"


def test_an_idiom_is_found_in_prose_and_not_in_code() -> None:
    (prose, *_) = paragraphs("It says\nso.\n\n```sh\nit says so\n```\n")
    assert prose == "It says so." and sum(bool(re.search(rule, prose)) for rule in IDIOMS) == 1
    assert not any("says" in text for text in paragraphs("```sh\nit says so\n```\n"))
    assert not any(re.search(rule, "The verdict is cannot tell.") for rule in IDIOMS)
