"""Names to leaves: aliases, unknown names, duplicates, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8bench.errors import Fp8benchError, UnknownName, UsageError
from fp8bench.features.train import arms
from fp8bench.model.words import MSAMP_LEVELS
from fp8bench.protocols import Workload
from fp8bench.registry import Registry, devices, precisions, workloads
from tests.counts import for_each


class Thing:
    """A class for this test's registries."""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Thing]]:
    """A registry over an empty package."""
    package = tmp_path / "things_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Registry("thing", "things_of_a_test")
    sys.modules.pop("things_of_a_test", None)


def test_what_is_registered_is_found_by_name_and_alias(registry: Registry[Thing]) -> None:
    registry.register("one", "uno", "ein")(Thing)
    assert registry.names() == ["one"]
    assert registry.aliases() == {"uno": "one", "ein": "one"}
    assert registry.find_canonical_name("uno") == "one" and registry.find_canonical_name("one") == "one"
    assert isinstance(registry.get("ein"), Thing)
    assert registry.get("one") is not registry.get("one")


def test_names_with_an_underscore_are_hidden_but_usable(registry: Registry[Thing]) -> None:
    registry.register("_secret")(Thing)
    assert registry.names() == [] and registry.names(hidden=True) == ["_secret"]
    assert isinstance(registry.get("_secret"), Thing)


def test_unknown_names_list_the_known_ones_and_the_nearest(registry: Registry[Thing]) -> None:
    registry.register("transformer", "trafo")(Thing)
    registry.register("_hidden")(Thing)
    with pytest.raises(UnknownName, match="Did you mean 'transformer'") as caught:
        registry.get("transfomer")
    assert caught.value.nearest == "transformer"
    assert caught.value.known == ["trafo", "transformer"]
    with pytest.raises(UnknownName) as caught:
        registry.get("zzzzzz")
    assert caught.value.nearest is None and "Did you mean" not in str(caught.value)


@for_each("word", [*MSAMP_LEVELS, "MSAMP-O2", "msamp-o1:x=1"])
def test_a_level_of_ms_amp_is_no_precision_and_says_where_it_is_an_arm(word: str) -> None:
    level = word.lower().partition(":")[0]
    with pytest.raises(UsageError, match=rf"^{level} is .* fp8bench train --dtypes bf16,{level}, without opt"):
        precisions.find_canonical_name(word)
    assert tuple(arms.MSAMP_LEVELS) == MSAMP_LEVELS
    assert {finding.precision for finding in arms.MSAMP_LEVELS.values()} == {"fp8:scale=pow2"}


@pytest.mark.parametrize(
    ("first", "second"),
    [(("a",), ("a",)), (("a", "x"), ("b", "x")), (("a",), ("b", "a")), (("a", "b"), ("b",))],
    ids=["name and name", "alias and alias", "name and alias", "alias and name"],
)
def test_two_leaves_of_one_name_are_refused(
    registry: Registry[Thing], first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    class Other(Thing):
        pass

    registry.register(*first)(Thing)
    with pytest.raises(Fp8benchError, match="Rename one"):
        registry.register(*second)(Other)


def test_the_same_class_defined_again_replaces_the_old_one(registry: Registry[Thing]) -> None:
    """A notebook cell may be run twice."""
    registry.register("thing")(Thing)
    again = type("Thing", (), {"__qualname__": Thing.__qualname__})
    registry.register("thing")(again)
    assert type(registry.get("thing")) is again


def test_leaves_of_a_package_are_found_by_walking_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "walked_things"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fp8bench.registry import Registry\nthings = Registry('thing', 'walked_things')\n"
    )
    (package / "leaf.py").write_text("from walked_things import things\n@things.register('leaf')\nclass Leaf: pass\n")
    things = __import__("walked_things").things
    assert things.names() == ["leaf"]


def test_the_three_registries_know_what_the_road_needs() -> None:
    assert {"transformer", "gemm"} <= set(workloads.names())
    assert {"fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"} <= set(precisions.names())
    assert precisions.find_canonical_name("fp4") == "nvfp4"
    assert devices.names() == ["cpu", "cuda", "xpu"]


@pytest.mark.parametrize(
    "name", [3, None, "", "all", "a,b", "a b", "a\n", "a/b", "mine.py", "a\x1b[2J", "a\ud800"], ids=repr
)
def test_a_word_that_could_not_be_asked_for_is_no_name(registry: Registry[Thing], name: str) -> None:
    for words in ((name,), ("good", name)):
        with pytest.raises(
            Fp8benchError, match=r"registers as .*, which is not a valid name for a thing\. Give a word"
        ):
            registry.register(*words)(Thing)
    assert registry.names() == []


@for_each(
    ("words", "sentence"),
    [
        ({"summary": 3}, "has summary = 3, and it must be text"),
        ({"summary": None}, "has summary = None, and it must be text"),
        ({"version": 2}, "has version = 2, and it must be text"),
    ],
    ids=["a number as summary", "None as summary", "a number as version"],
)
def test_words_of_the_wrong_kind_are_refused_when_registered(words: dict[str, object], sentence: str) -> None:
    methods = dict.fromkeys(("axes", "work", "prepare", "step"), lambda self, *_: None)
    leaf = type("Leaf", (Workload,), {"name": "odd", "summary": "fine", **methods, **words})
    with pytest.raises(Fp8benchError, match=sentence):
        workloads.register("odd")(leaf)
    assert "odd" not in workloads.names()
