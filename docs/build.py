"""Builds the site: `python -m docs.build [FOLDER]`, build/site by default.

Pages keep their places in the repository, so that links work in both. Handwritten pages are copied, the reference is
made from the code, and the gallery from the committed reports.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from sphinx.application import Sphinx

from docs.reference import SCHEMA_ID, pages, run_schema
from fp8bench import __version__
from fp8bench.cli.main import main as fp8bench

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "site"
# The pages for newcomers, and those on background; all others are about commands.
FIRST = ("tutorial", "how-to", "suites", "precisions")
BACKGROUND = ("method", "performance", "glossary", "formats", "run-format", "gpu", "status")
CONFIG: dict[str, Any] = {
    "project": "fp8bench", "release": __version__, "extensions": ["myst_parser"], "html_theme": "furo",
    "html_title": f"fp8bench {__version__}", "myst_heading_anchors": 4, "html_show_sourcelink": False,
    "html_show_sphinx": False,
    "smartquotes": False, "html_extra_path": ["extra"],
    "html_static_path": ["static"],
    "html_css_files": ["site.css"], "exclude_patterns": ["extra", "static"],
    # Some blocks of reports are marked as Python and are not.
    "suppress_warnings": ["misc.highlighting_failure"],
}  # fmt: skip


class Picture(NamedTuple):
    """A report of the gallery: the stored run that it is made of, and what can be seen on it."""

    name: str
    kept: str
    words: str


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Runs, a training and a profile that were measured once and are kept for the tests.
STORE = ROOT / "tests" / "golden" / "stores" / "runs"
GALLERY = (
    Picture("suite", "reports/sample/run.jsonl", "The answer first: speed, error, memory and energy by precision."),
    Picture("numerics", "e35e6c3d", "Errors of a tensor in each format and scaling."),
    Picture("training", "8964265c", "Whether a precision still learns: losses paired over seeds, alarms, a verdict."),
    Picture("profile", "9f3fa731", "A user's model: which layers were converted, and whether that pays."),
    Picture("collectives", "691ae371", "Several ranks: bandwidth over size, and what a vector in FP8 loses."),
    Picture("sweep", "7ba197f1", "From which size on a precision pays."),
)


def stage(source: Path) -> None:
    """Copies the pages and what they link to, and writes those that are made."""
    written = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "reports").rglob("README.md")]
    for page in written:
        linked = re.findall(r"\]\(((?:\.\./|\w)[^)#:]*)", page.read_text(encoding="utf-8"))
        for path in (page, *((page.parent / link).resolve() for link in linked)):
            if path.is_file() and path.is_relative_to(ROOT):
                copy = source / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".md":
                    copy.write_text(as_page(path), encoding="utf-8")
                else:
                    shutil.copyfile(path, copy)
    (source / "static").mkdir()
    (source / "static" / "site.css").write_text(".content { width: 57em } table code { white-space: nowrap }\n")
    made = source / "docs" / "reference"
    made.mkdir()
    for name, text in pages():
        (made / f"{name}.md").write_text(text, encoding="utf-8")
    schema = json.dumps(run_schema(), indent=1)
    (made / f"run-file-{SCHEMA_ID.rpartition(':')[2]}.schema.json").write_text(schema, encoding="utf-8")
    (source / "index.md").write_text(index(source), encoding="utf-8")


def as_page(path: Path) -> str:
    """Links to a part of docs/reference.md lead to the page that is made of it; every page has a title."""
    text = re.sub(r"reference\.md#([\w-]+)", r"reference/\1.md", path.read_text(encoding="utf-8"))
    if path == ROOT / "docs" / "reference.md":
        text = re.sub(r"^## (.+)$", lambda part: f"## [{part[1]}](reference/{part[1].lower().replace(' ', '-')}.md)",
                      text, flags=re.MULTILINE)  # fmt: skip
    return text if text.startswith("#") else f"# {path.stem.capitalize()}\n\n{text}"


def index(source: Path) -> str:
    """The first page: README's first lines, its questions and its table of what to read, and every page."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = sorted(page.stem for page in (source / "docs").glob("*.md"))
    made = [f"reference/{page.stem}" for page in (source / "docs" / "reference").glob("*.md")]
    told = {*FIRST, *BACKGROUND, "reference", "gallery"}
    groups = {
        "Begin": [name for name in FIRST if name in names] + ["gallery"],
        "Commands and topics": [name for name in names if name not in told],
        "Reference": ["reference", *sorted(made, key=lambda name: ("command-" in name, name))],
        "Background": [name for name in BACKGROUND if name in names],
    }
    trees = [_tree(title, [f"docs/{name}" for name in pages]) for title, pages in groups.items()]
    others = sorted(page.relative_to(source).as_posix()[:-3] for page in source.rglob("*.md")
                    if "docs" not in page.relative_to(source).parts)  # fmt: skip
    intro = readme.partition("\n![")[0]
    sections = ["## " + part for part in readme.split("\n## ") if part.startswith(("Questions", "Documentation"))]
    return "\n".join([intro, *sections, *trees, _tree("The project", others)])


def _tree(title: str, names: list[str]) -> str:
    return "\n".join(["```{toctree}", ":maxdepth: 1", f":caption: {title}", ":hidden:" * (title == "The project"), "",
                      *names, "```\n"])  # fmt: skip


def gallery(source: Path, scratch: Path) -> None:
    """The reports themselves, and a picture of each where there is a browser that makes it."""
    folder, store = source / "extra" / "gallery", scratch / "store"
    folder.mkdir(parents=True)
    shutil.copytree(STORE, store)  # reports are also written into the store
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    parts = ["# Gallery\n\nReports of stored runs on CPUs. All but the first are quick runs, as their labels show.\n"]
    for picture in GALLERY:
        page = folder / f"{picture.name}.html"
        kept = str(ROOT / picture.kept) if "/" in picture.kept else picture.kept
        if fp8bench(["report", kept, "--store", str(store), "--html", str(page)]):
            raise SystemExit(f"no report of {picture.kept}")
        shown = "Open the report"
        if browser is not None:
            photograph(browser, page)
            shown = f'<img src="../gallery/{picture.name}.png" alt="The beginning of this report" loading="lazy">'
        parts += [f"## {picture.name.capitalize()}\n", f"{picture.words}\n",
                  f'<a href="../gallery/{picture.name}.html">{shown}</a>\n']  # fmt: skip
    (source / "docs").mkdir()
    (source / "docs" / "gallery.md").write_text("\n".join(parts), encoding="utf-8")


def photograph(browser: str, page: Path) -> None:
    asked = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,900"]
    picture = page.with_suffix(".png")
    command = [browser, *asked, f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if not picture.is_file():
        raise SystemExit(f"{browser} made no picture of {page.name}: {done.stderr[-500:]}")


def llms(source: Path) -> str:
    """Returns llms.txt, an index for language models: the link of every page, with its first sentence."""
    first = (source / "index.md").read_text(encoding="utf-8").partition("```{toctree}")[0]
    lines = [*first.splitlines(), "## Pages", ""]
    for page in sorted((source / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        title, _, rest = text.lstrip("# ").partition("\n")
        sentence = re.split(r"(?<=[.:]) |\n\n", re.sub(r"^(```.*?```|\||#.*$)", "", rest.strip()), maxsplit=1)[0]
        lines.append(f"- [{title}](_sources/{page.relative_to(source)}.txt): {' '.join(sentence.split())}")
    return "\n".join(lines) + "\n"


def build(out: Path) -> None:
    """Raises SystemExit with the warnings of Sphinx, if there are any: a broken link is one."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        gallery(source, Path(folder))
        stage(source)
        (source / "extra" / "llms.txt").write_text(llms(source), encoding="utf-8")
        warnings = io.StringIO()
        site = Sphinx(source, None, out, Path(folder) / "doctrees", "html", CONFIG, None, warnings, freshenv=True)
        site.build()
    if said := warnings.getvalue().replace(folder, ""):
        raise SystemExit(f"the site is not whole:\n{said}")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
