"""Files of shapes: three ways of writing the same, and what nobody can mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.lint_shapes.job import MOST_SHAPES, shapes_of_file, shapes_of_model
from fp8bench.features.lint_shapes.view import LinearShape

WANTED = [LinearShape("out", 8192, 4096, 1024), LinearShape("17x33x48", 17, 33, 48)]


def file_of(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "# tokens, features out, features in\n8192x4096x1024 out\n\n 17X33x48   # no name\n"),
        ("a", "\ufeff8192*4096*1024 out\n17x33x48"),
        ("a.csv", "m,n,k,name\n8192,4096,1024,out\n\n17,33,48,\n"),
        ("a.CSV", 'name, K ,n,m\n"out",1024,4096,8192\n,48,33,17\n'),
        ("a.yaml", "- 8192x4096x1024 out\n- 17x33x48\n"),
        ("a.yml", "- {m: 8192, n: 4096, k: 1024, name: out}\n- m: 17\n  n: 33\n  k: 48\n"),
    ],
)
def test_three_ways_of_writing_shapes(tmp_path: Path, name: str, text: str) -> None:
    """Comments, blank lines, blanks, another order of columns."""
    assert shapes_of_file(file_of(tmp_path, name, text)) == WANTED


def test_csv_and_yaml_say_output_and_layout(tmp_path: Path) -> None:
    """Which a line of MxNxK does not."""
    wanted = [LinearShape("a", 1, 2, 3, "fp32", True), LinearShape("b", 1, 2, 3)]
    rows = file_of(tmp_path, "a.csv", "m,n,k,name,output,layout\n1,2,3,a,fp32,row\n1,2,3,b,,\n")
    entries = file_of(
        tmp_path, "a.yaml", "- {m: 1, n: 2, k: 3, name: a, output: fp32, layout: row}\n- {m: 1, n: 2, k: 3, name: b}\n"
    )

    assert shapes_of_file(rows) == shapes_of_file(entries) == wanted


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "8x8x8\n12x3 short\n", "a.txt:2: '12x3' is no shape"),
        ("a.txt", "0x3x4", "a.txt:1: M is '0'"),
        ("a.txt", "1x-3x4", "a.txt:1: N is '-3'"),
        ("a.txt", "1x2x4.5", "a.txt:1: K is '4.5'"),
        ("a.txt", "1x2x99999999999", "a.txt:1: K is '99999999999'"),
        ("a.txt", "1x2x²", "a.txt:1: K is"),
        ("a.txt", "\n# nothing\n", "has no shape in it"),
        ("a.txt", b"\xff\xfe", "no text in UTF-8"),
        ("a.csv", "m,n\n1,2\n", "a.csv:1: there is no column k"),
        ("a.csv", "m,n,k,m\n1,2,3,4\n", "a.csv:1: a column stands there twice"),
        ("a.csv", "m,n,k,nmae\n1,2,3,4\n", "a.csv:1: unknown column 'nmae'. Did you mean 'name'"),
        ("a.csv", "m,n,k\n\n1,2,x\n", "a.csv:3: K is 'x'"),
        ("a.csv", "m,n,k\n1,2\n", "a.csv:2: K is ''"),
        ("a.csv", "m,n,k\n1,2,3,4\n", "a.csv:2: 4 cells under 3 columns"),
        ("a.csv", 'm,n,k\n1,2,"3\n', "this is no CSV"),
        ("a.csv", "m,n,k,output\n1,2,3,fp8\n", "a.csv:2: unknown output 'fp8'"),
        ("a.csv", "m,n,k,layout\n1,2,3,rows\n", "a.csv:2: unknown layout of the second operand 'rows'"),
        ("a.yaml", "a: b\n", "a.yaml:1: expected a list of shapes"),
        ("a.yaml", "- 1x2x3\n- [1, 2]\n", "a.yaml:2: expected MxNxK"),
        ("a.yaml", "- {m: 1, n: 2}\n", "a.yaml:1: there is no key k"),
        ("a.yaml", "- {m: 1, n: 2, k: [3]}\n", "a.yaml:1: expected words and numbers"),
        ("a.yaml", "- {m: 1, m: 1, n: 2, k: 3}\n", "a.yaml:1: a key stands there twice"),
        ("a.yaml", "- {m: 1, n: 2, k: 3, outptu: fp32}\n", "a.yaml:1: unknown key 'outptu'. Did you mean 'output'"),
        ("a.yaml", "- ~\n", "a.yaml:1: '~' is no shape"),
        ("a.yaml", '- "1x2x3\n', "this is no YAML"),
        ("a.yaml", "- " + "[" * 3000, "this is no YAML"),
        ("a.yaml", "", "has no shape in it"),
    ],
)
def test_nonsense_gets_its_place_and_a_sentence(tmp_path: Path, name: str, text: str | bytes, said: str) -> None:
    """Never a traceback."""
    with pytest.raises(UsageError) as raised:
        shapes_of_file(file_of(tmp_path, name, text))

    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Absent ones, and folders."""
    for path in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            shapes_of_file(path)


def test_too_many_shapes_are_refused(tmp_path: Path) -> None:
    """At the line that is too many."""
    path = file_of(tmp_path, "a.txt", "1x1x1\n" * (MOST_SHAPES + 1))
    with pytest.raises(UsageError, match=f"a.txt:{MOST_SHAPES + 1}: more than"):
        shapes_of_file(path)


@given(st.sampled_from(["a.txt", "a.csv", "a.yaml"]), st.text(max_size=60) | st.binary(max_size=60).map(repr))
def test_any_text_is_shapes_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, name: str, text: str) -> None:
    """Searched for a counterexample."""
    path = file_of(tmp_path_factory.mktemp("shapes"), name, text.encode("utf-8", "surrogatepass"))
    try:
        found = shapes_of_file(path)
    except UsageError:
        return
    assert found and all(min(one.tokens, one.outputs, one.inputs) >= 1 for one in found)


def test_names_carry_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    """Escape sequences become blanks."""
    (found,) = shapes_of_file(file_of(tmp_path, "a.txt", "1x2x3 \x1b[31mred"))
    assert found.name == "[31mred"


def test_models_have_their_layers_and_their_tokens() -> None:
    """Or those that one asks for."""
    gpt2 = shapes_of_model("gpt2", None)
    assert [one.name for one in gpt2] == ["qkv", "out", "up", "down", "head"]
    assert {one.tokens for one in gpt2} == {8192} and gpt2[-1].outputs == 50257
    assert {one.tokens for one in shapes_of_model("nano", None)} == {192}
    assert {one.tokens for one in shapes_of_model("nano", 7)} == {7}
    with pytest.raises(UnknownName, match="Did you mean 'llama3-8b'"):
        shapes_of_model("llama-8b", None)
