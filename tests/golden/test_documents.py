"""Many documents in one file: nothing is lost, and what several hold is written once."""

from __future__ import annotations

from pathlib import Path

from tests.golden.documents import changes, load, save

LONG = "a sentence that is long enough for a reference, because it has more than a hundred characters in one section"
BEFORE = {
    "a.md": f"# a\n\n## One\n\n{LONG}\n\n- {LONG}\n\n## Two\n\n{LONG}\n{LONG}\n",
    "a.txt": f"one\n\n{LONG}\n{LONG}\n",
    "a-all.txt": f"one\ntwo\n\n{LONG}\n{LONG}\n\n\n",
    "b.txt": f"{LONG}\n{LONG}\n",
    "c.txt": "",
    "b.md": f"# b\n\n## Two\n\n{LONG}\n{LONG}\n",
}


def test_documents_are_read_as_they_were_written(tmp_path: Path) -> None:
    save(tmp_path / "texts.txt", BEFORE)
    assert load(tmp_path / "texts.txt") == BEFORE
    text = (tmp_path / "texts.txt").read_text()
    assert "%% section 2 of a.md" in text and text.count(LONG) < sum(part.count(LONG) for part in BEFORE.values())


def test_a_change_is_printed_once_with_all_that_hold_it() -> None:
    now = {name: text.replace("long enough", "longer than is wise") for name, text in BEFORE.items()}
    printed = changes({"b.txt": BEFORE["b.txt"], "b.md": BEFORE["b.md"]}, {"b.txt": now["b.txt"], "b.md": now["b.md"]})
    assert printed.startswith("in b.txt, b.md:\n-a sentence that is long") and printed.count("\n+") == 2
