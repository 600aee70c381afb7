"""Options in a file: equal to those on the command line, overruled by them, and refused by the same sentences."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.cli.config_file import KEYS, LARGEST_FILE, LONGEST_VALUE, MOST_VALUES, read_config, with_config
from fp8bench.cli.main import build_parser, commands_of, main
from fp8bench.errors import UsageError
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Environment, Plan, Request, Run
from fp8bench.protocols import Observer
from tests.commands import Say, unfolded
from tests.counts import counts, for_each
from tests.told_before import Told, as_before

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()
Asked = Callable[..., tuple[Request, Path]]


@pytest.fixture
def asked(store: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The request and store that a command line with this file asks for."""
    caught: list[tuple[Request, Path]] = []

    def execute(request: Request, store: Path, observer: Observer, command: str) -> Run:
        caught.append((request, store))
        return Run("abc", "2026-01-01T00:00:00+00:00", command, request, Plan(()), Environment({}), (), finished=True)

    monkeypatch.setattr(pipeline, "execute", execute)

    def ask(text: str | None, *words: str) -> tuple[Request, Path]:
        if text is not None:
            Path("my.yaml").write_text(text)
            words = (*words, "--config", "my.yaml")
        caught.clear()
        main(["suite", *words])
        return caught[0]

    return ask


@pytest.fixture
def refused(store: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:

    def refuse(content: str | bytes, *words: str) -> str:
        Path("my.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
        assert main(["suite", *words, "--config", "my.yaml"]) == 2
        shown = capsys.readouterr()
        assert not shown.out
        err = unfolded(shown.err)
        assert err.startswith("fp8bench: ") and err.endswith(".\n") and err.count("\n") == 1 and len(err) < 1000
        return err.removeprefix("fp8bench: ").rstrip("\n")

    return refuse


# Text of a file, and the words that mean the same.
SAME = {
    "the suite alone": ("suite: gemm", "gemm"),
    "several suites": ("suite: gemm,transformer", "gemm,transformer"),
    "lists": ("suite: gemm\ndtypes: [fp8, bf16]\ndevices: [cpu]", "gemm --dtypes fp8,bf16 --devices cpu"),
    "text with commas": ("suite: gemm\ndtypes: fp8,bf16", "gemm --dtypes fp8,bf16"),
    "lists in lines": ("suite: gemm\ndtypes:\n- fp8\n- bf16", "gemm --dtypes fp8,bf16"),
    "axes": (
        "suite: gemm\nset:\n  shape: [64, 1x64x64]\n  operands: ready",
        "gemm --set shape=64,1x64x64 --set operands=ready",
    ),
    "axes as texts": ("suite: gemm\nset: [shape=64, 'shape=32,16']", "gemm --set=shape=64 --set=shape=32,16"),
    "one axis as text": ("suite: gemm\nset: shape=64,32", "gemm --set shape=64,32"),
    "a map": (
        "suite: transformer\nprecision-map: {mlp: fp8, attn: bf16}",
        "transformer --precision-map mlp=fp8,attn=bf16",
    ),
    "a map of layers to modes with options": (
        "suite: transformer\nprecision-map: {blocks.0.mlp: 'fp8:formats=e4m3', attn: bf16}",
        "transformer --precision-map blocks.0.mlp=fp8:formats=e4m3,attn=bf16",
    ),
    "a map as text": ("suite: transformer\nprecision-map: mlp=fp8", "transformer --precision-map mlp=fp8"),
    "a map as a list": (
        "suite: transformer\nprecision-map: [mlp=fp8, attn=bf16]",
        "transformer --precision-map mlp=fp8,attn=bf16",
    ),
    "modules": ("suite: gemm\nimport: [json, csv]", "gemm --import json --import csv"),
    "modules as text": ("suite: gemm\nimport: json, csv", "gemm --import json --import csv"),
    "flags": ("suite: gemm\nquick: true\nno-isolation: True", "gemm --quick --no-isolation"),
    "flags that are not set": ("suite: gemm\nquick: false\nno-isolation: false\njson: false", "gemm"),
    "numbers": (
        "suite: gemm\nbudget: 1e1\nrounds: 5\nseed: 07\nthreads: 2\ncase-timeout: 9.5",
        "gemm --budget 1e1 --rounds=5 --seed=07 --threads=2 --case-timeout=9.5",
    ),
    "names and paths": (
        "suite: transformer\nreference: fp32\ndata: 'a text.txt'\nstore: some/where",
        "transformer --reference fp32 --data 'a text.txt' --store some/where",
    ),
    "numbers in quotes": ('suite: "gemm"\nrounds: "5"', "gemm --rounds 5"),
    "a comment, a BOM and a marker": ("\ufeff# nightly\n---\nsuite: gemm # all\n...\n", "gemm"),
    "FP8 training, the switch alone": ("suite: gemm\nuse_fp8: true", "gemm --dtypes bf16,fp8-delayed"),
    "FP8 training, every key": (
        "use_fp8: true\nfp8_format: e4m3\nfp8_margin: 2\nfp8_interval: 3\nfp8_amax_history_len: 16\nsuite: gemm",
        "gemm --dtypes bf16,fp8-delayed:history=16:margin=2:interval=3:formats=e4m3",
    ),
    "FP8 training in capitals, beside others": (
        "suite: gemm\nuse_fp8: true\ndtypes: [fp32, fp8]\nfp8_format: E5M2\nfp8_amax_compute_algo: MOST_RECENT",
        "gemm --dtypes fp32,fp8,fp8-delayed:algorithm=most_recent:formats=e5m2",
    ),
    "FP8 training, what is so anyway": (
        "suite: gemm\nuse_fp8: true\nfp8_format: HYBRID\nfp8_margin: 0\nfp8_amax_history_len: 1024",
        "gemm --dtypes bf16,fp8-delayed",
    ),
    "JSON": ('{"suite": "gemm", "set": {"shape": [64, 32]}, "quick": true}', "gemm --quick --set=shape=64,32"),
}  # fmt: skip


@for_each("name", SAME)
def test_a_file_asks_for_what_the_same_options_ask_for(
    name: str, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words = SAME[name]
    assert asked(text) == asked(None, *shlex.split(words))
    assert "has no effect" not in capsys.readouterr().err


@as_before
def test_keys_without_effect(asked: Asked, capsys: pytest.CaptureFixture[str]) -> Told:
    on = "suite: gemm\nuse_fp8: true\n"
    for claim, text, words in (
        ("a switch that is off", "suite: gemm\nuse_fp8: False\nfp8_margin: 1", ()),
        ("no switch", "suite: gemm\nfp8_interval: 2\nfp8_format: e4m3", ()),
        ("the command line", f"{on}fp8_margin: 1", ("--dtypes", "bf16,mxfp8")),
    ):
        request, _ = asked(text, *words)
        said = [line for line in unfolded(capsys.readouterr().err).splitlines() if "has no effect" in line]
        yield claim, [*said, f"dtypes: {request.dtypes}"]


def test_an_axis_of_the_command_line_says_what_it_replaces(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    request, _ = asked("suite: gemm\nset: {shape: 64, operands: ready}", "--set", "shape=128")
    assert dict(request.axes) == {"shape": ("128",), "operands": ("ready",)}
    said = [line for line in unfolded(capsys.readouterr().err).splitlines() if "has no effect" in line]
    assert said == ["fp8bench: my.yaml:2: set: shape has no effect: --set on the command line wins"]


def test_every_option_is_a_key(store: Path) -> None:
    """Except those that belong on the command line only."""
    command = commands_of(build_parser())["suite"]
    options = {word[2:] for action in command._actions for word in action.option_strings if word.startswith("--")}
    Path("my.yaml").write_text("nonsense: 1")
    with pytest.raises(UsageError) as caught:
        read_config(Path("my.yaml"), command)
    known = set(str(caught.value).partition("Known: ")[2].rstrip(".").split(", "))
    assert known == (options | {"suite", *KEYS}) - {"help", "help-all", "config", "resume"}


def test_values_keep_their_text(store: Path) -> None:
    """YAML would make True of yes, 1000.0 of 1e3, 342 of 5:42 and a date of 2026-01-01."""
    options = commands_of(build_parser())["suite"]
    Path("my.yaml").write_text("set: {compile: yes, a: [1e3, 5:42, 2026-01-01, 0x10, ~x, no, 007, 1_000]}")
    assert read_config(Path("my.yaml"), options)[0]["axes"] == [
        ("compile", ("yes",)),
        ("a", ("1e3", "5:42", "2026-01-01", "0x10", "~x", "no", "007", "1_000")),
    ]


BOTH = "suite: gemm\ndtypes: [fp8, bf16]\nseed: 5\nstore: kept\nset: {shape: [64, 32], operands: ready}\nimport: json"


@for_each(
    ("words", "changes"),
    [
        ([], {}),
        (["--dtypes", "fp32"], {"dtypes": ("fp32",)}),
        (["--seed", "0"], {"seed": 0}),
        (["--quick"], {"quick": True}),
        (["--set", "shape=16"], {"axes": (("operands", ("ready",)), ("shape", ("16",)))}),
        (["--set", "shape=16", "--set", "shape=8"], {"axes": (("operands", ("ready",)), ("shape", ("16", "8")))}),
        (["--set", "tokens=8"], {"axes": (("shape", ("64", "32")), ("operands", ("ready",)), ("tokens", ("8",)))}),
        (["--import", "csv"], {"imports": ("json", "csv")}),
    ],
)
def test_the_command_line_wins(words: list[str], changes: dict[str, object], asked: Asked) -> None:
    """Option by option and axis by axis, also with a value that is the option's default."""
    plain, store = asked(BOTH)
    given, other = asked(BOTH, *words)
    assert {name: getattr(given, name) for name in changes} == changes
    assert store == other == Path("kept")
    untouched = {"suite", "dtypes", "axes", "seed", "quick", "imports"} - set(changes)
    assert all(getattr(given, name) == getattr(plain, name) for name in untouched)
    assert asked(BOTH, *words, "--store", "other")[1] == Path("other")


def test_the_name_may_stand_in_either_place(asked: Asked) -> None:
    assert asked("suite: gemm")[0].suite == "gemm"
    assert asked("suite: transformer", "gemm")[0].suite == "gemm"


def test_the_name_may_not_be_left_out(refused: Callable[..., str]) -> None:
    assert "no suite was named" in refused("quick: true")


# Content, what the sentence says, and where.
REFUSED: dict[str, tuple[str | bytes, str, str]] = {
    "not a number": ("seed: 1\n\nrounds: many", "my.yaml:3", "--rounds: expected a whole number from 1, got 'many'."),
    "a real number of rounds": ("rounds: 2.5", "my.yaml:1", "--rounds: expected a whole number from 1, got '2.5'"),
    "no seconds": ("budget: soon", "my.yaml:1", "--budget: expected a number of seconds above 0, got 'soon'"),
    "an empty name": ("dtypes: 'fp8,'", "my.yaml:1", "--dtypes: 'fp8,' has an empty name"),
    "an empty list": ("dtypes: []", "my.yaml:1", "--dtypes: '' has an empty name"),
    "no form of an axis": ("set: [shape]", "my.yaml:1", "--set: 'shape' is not of the form AXIS=VALUE,VALUE"),
    "an axis without values": ("set:\n  shape: []", "my.yaml:2", "--set: '' has an empty name"),
    "no form of a map": ("precision-map: mlp", "my.yaml:1", "--precision-map: 'mlp' is not of the form LAYER=DTYPE"),
    "an empty module": ("import: 'a,,b'", "my.yaml:1", "--import: 'a,,b' has an empty name"),
    "a list for a number": ("seed:\n  - 1\n  - 2", "my.yaml:2", "--seed: expected one value, got a list."),
    "a list for a suite": ("suite: [gemm]", "my.yaml:1", "suite: expected one value, got a list."),
    "a mapping for a flag": ("quick: {a: b}", "my.yaml:1", "--quick: expected true or false, got a mapping."),
    "a word for a flag": ("quick: yes", "my.yaml:1", "--quick: expected true or false, got 'yes'."),
    "nothing for a flag": ("quick:", "my.yaml:1", "--quick: expected true or false, got ''."),
    "a mapping for a list": ("dtypes: {a: b}", "my.yaml:1", "--dtypes: expected one value or a list, got a mapping."),
    "a list in a list": ("dtypes: [[fp8]]", "my.yaml:1", "--dtypes: expected one value, got a list."),
    "a mapping in an axis": ("set: {shape: {a: b}}", "my.yaml:1", "--set: expected one value, got a mapping."),
    "an axis with a sign": ("set: {a=b: 1}", "my.yaml:1", "--set: expected a plain name before the colon, got 'a=b'."),
    "no value": ("rounds:", "my.yaml:1", "--rounds: expected a value, got none: give one, or leave the key out."),
    "null": ("store: ~", "my.yaml:1", "--store: expected a value, got none"),
    "a value among none": ("set: {shape: [64, null]}", "my.yaml:1", "--set: expected a value, got none"),
    "a key twice": ("seed: 1\nquick: true\nseed: 1", "my.yaml:3", "'seed' stands in line 1 already."),
    "an axis twice": ("set:\n  shape: 1\n  shape: 2", "my.yaml:3", "'shape' stands in line 2 already."),
    "an unknown key": ("dtype: fp8", "my.yaml:1", "unknown key 'dtype'. Did you mean 'dtypes'? Known: suite, dtypes,"),
    "an underscore too many": ("no__isolation: true", "my.yaml:1", "Did you mean 'no-isolation'?"),
    "a key with dashes": ("--seed: 1", "my.yaml:1", "Did you mean 'seed'?"),
    "a file in a file": ("config: other.yaml", "my.yaml:1", "unknown key 'config'"),
    "a merge": ("<<: {seed: 1}", "my.yaml:1", "unknown key '<<'"),
    "a key that is a list": ("? [a]\n: b", "my.yaml:1", "expected a name before the colon, got a list."),
    "a list": ("- seed: 1", "my.yaml:1", "expected a mapping of options, got a list."),
    "a word": ("gemm", "my.yaml:1", "expected a mapping of options, got one value."),
    "nothing": ("", "my.yaml", "the file holds no options."),
    "comments": ("# seed: 1\n\n", "my.yaml", "the file holds no options."),
    "two documents": ("seed: 1\n---\nseed: 2", "my.yaml:2", "expected a single document in the stream"),
    "an alias": ("data: &a x\nstore: *a", "my.yaml:1", "aliases (*name) and anchors (&name) are not taken"),
    "an alias without an anchor": ("seed: 1\nstore: *a", "my.yaml:2", "aliases (*name)"),
    "a billion laughs": (
        "a: &a [x, x]\n" + "".join(f"{two}: &{two} [*{one}, *{one}]\n" for one, two in pairwise("abcdefg")),
        "my.yaml:1",
        "aliases (*name) and anchors (&name) are not taken",
    ),
    "a tag": ("seed: !!int '3'", "my.yaml:1", "tags (tag:yaml.org,2002:int) are not taken"),
    "a tag of Python": ("data: !!python/object/apply:os.system [ls]", "my.yaml:1", "are not taken"),
    "a long tag": ("seed: !" + "x" * 5000 + " 1", "my.yaml:1", "are not taken"),
    "no space": ("seed: 1\nrounds:2", "my.yaml:2", "broken YAML: while scanning a simple key, could not find expected"),
    "a tab": ("seed: 1\n\tquick: true", "my.yaml:2", "broken YAML: while scanning"),
    "an option by both its names": (
        "dtypes: fp8\nprecisions: bf16", "my.yaml:2", "'precisions' sets what a line above sets",
    ),
    "an open bracket": ("seed: 1\ndtypes: [fp8", "my.yaml:2", "broken YAML: while parsing a flow sequence"),
    "an open quote": ("store: 'x", "my.yaml:1", "broken YAML: while scanning a quoted scalar"),
    "another YAML": ("%YAML 2.0\n---\nseed: 1", "my.yaml:1", "broken YAML: found incompatible YAML document"),
    "brackets without end": ("[" * 100_000, "my.yaml:1", "nested more than 8 deep"),
    "braces without end": ("{" * 100_000, "my.yaml:1", "nested more than 8 deep"),
    "dashes without end": ("- " * 100_000, "my.yaml:1", "nested more than 8 deep"),
    "questions without end": ("? " * 100_000, "my.yaml:1", "nested more than 8 deep"),
    "lines without end": ("dtypes:\n" + "- a\n" * MOST_VALUES, f"my.yaml:{MOST_VALUES - 1}", "more than 10000 values"),
    "a long value": ("store: " + "x" * (LONGEST_VALUE + 1), "my.yaml:1", "4097 characters; the most is 4096"),
    "an escaped NUL": ('data: "\\0"', "my.yaml:1", "'\\x00' has characters that cannot be printed"),
    "half a character": ('data: "\\ud800"', "my.yaml:1", "has characters that cannot be printed"),
    "a line break in a path": ("data: |\n  a\n  b", "my.yaml:1", "has characters that cannot be printed"),
    "an escape that is none": ('data: "\\UFFFFFFFF"', "my.yaml", "an escape in double quotes stands for no character"),
    "a control character": ("seed: 1\ndata: \x01", "my.yaml:2", "broken YAML: '\\x01' is no character of a text"),
    "NUL": ("seed: 1\n\n\0", "my.yaml:3", "broken YAML: '\\x00' is no character of a text"),
    "bytes": (b"\x89PNG\r\n\x1a\n\xff", "--config my.yaml", "is no UTF-8 text. Give a YAML file of options."),
    "UTF-16": ("seed: 1".encode("utf-16"), "--config my.yaml", "is no UTF-8 text"),
    **{line: (line, "my.yaml:1", words) for line, words in {
        "use_fp8: yes": "use_fp8 cannot be 'yes': expected true or false.",
        "fp8_format: hybird": "fp8_format cannot be 'hybird': expected one of hybrid, e4m3, e5m2; the nearest is",
        "fp8_margin: -1": "fp8_margin cannot be '-1': expected a whole number from 0 to 32.",
        "fp8_margin: '1:history=2'": "fp8_margin cannot be '1:history=2': expected a whole number.",
        "fp8_interval: 0": "fp8_interval cannot be '0': expected a whole number from 1 to 65536.",
        "fp8_amax_history_len: 1e3": "fp8_amax_history_len cannot be '1e3': expected a whole number.",
        "fp8_amax_compute_algo: min": "cannot be 'min': expected one of max, most_recent.",
        "fp8_margin: [1]": "fp8_margin: expected one value, got a list.",
        "fp8_margin:": "fp8_margin: expected one value, got none.",
        "fp8_magrin: 1": "unknown key 'fp8_magrin'. Did you mean 'fp8_margin'?",
    }.items()},
    "a huge file": (b"#" * (LARGEST_FILE + 1), "--config my.yaml", "is larger than 1 MiB"),
}  # fmt: skip


@for_each("name", REFUSED)
def test_what_a_file_cannot_say_is_one_sentence_with_its_line(name: str, refused: Callable[..., str]) -> None:
    content, place, sentence = REFUSED[name]
    said = refused(content, "gemm")
    assert said.startswith(f"{place}: " if ":" in place or place == "my.yaml" else f"{place} ")
    assert sentence in said


def test_the_same_sentence_refuses_a_word(refused: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("rounds", "x"), ("budget", "-1"), ("set", "shape"), ("dtypes", ","), ("seed", "-1")):
        main(["suite", "gemm", f"--{option}={value}"])
        typed = unfolded(capsys.readouterr().err).partition(f"--{option}")[2].partition(": ")[2].partition(". See")[0]
        assert typed and typed in refused(f"{option}: '{value}'", "gemm")


@for_each("path", ["nowhere.yaml", ".", "x" * 400, "/dev/zero", "file/below", "", "my.yaml"])
def test_a_file_that_cannot_be_read(path: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("seed: 1")
    Path("my.yaml").write_text("store: ''")
    assert main(["suite", "gemm", "--config", path]) == 2
    said = unfolded(capsys.readouterr().err)
    assert any(words in said for words in ("cannot be read (", "is larger than 1 MiB", "an empty text is no path"))
    assert said.count("\n") == 1 and not Path("runs").exists()


def test_it_does_not_go_with_resume(refused: Callable[..., str]) -> None:
    """A resumed run takes everything from its own file."""
    expected = "the run of --resume says what to measure and how, and gemm was given"
    assert expected in refused("suite: gemm", "--resume", "last")


VALID = """# a nightly run
suite: gemm
dtypes: [fp8, bf16]
devices: cpu
reference: fp32
set:
  shape: [64, 1x64x64]
  operands: ready
precision-map: {mlp: fp8, attn: bf16}
import:
  - json
  - csv
quick: true
budget: 1.5
rounds: 12
seed: 7
threads: 2
case-timeout: 60
no-isolation: false
store: "some where"
csv: 'out.csv'
"""
ODD = ["&a", "*a", "!!int", "- ", "? ", ": ", *"[{}]'\"|>%", "---\n", "\t", "\n", "\\x", "#"]


def _mutated(dice: random.Random) -> bytes:
    """The valid file after up to four random edits."""
    lines = VALID.splitlines(keepends=True)
    for _ in range(dice.randint(0, 2)):
        place = dice.randrange(len(lines))
        accident = dice.randrange(4)
        if accident == 0:
            del lines[place]
        elif accident == 1:
            lines.insert(dice.randrange(len(lines)), lines[place])
        elif accident == 2:
            lines[place] = " " * dice.randint(0, 4) + lines[place]
        else:
            lines.insert(place, dice.choice(ODD) + dice.choice(lines))
        lines = lines or ["\n"]
    content = bytearray("".join(lines).encode())
    for _ in range(dice.choice([0, 1, 1, 2])):
        place = dice.randrange(len(content) + 1)
        accident = dice.randrange(4)
        if accident == 0 and place < len(content):
            content[place] ^= 1 << dice.randrange(8)
        elif accident == 1:
            content[place:place] = dice.choice(ODD).encode()
        elif accident == 2:
            content[place:place] = content[place : place + dice.randint(1, 60)] * dice.randint(1, 3)
        else:
            del content[place : place + dice.choice([1, 1, 5, 400])]
    return bytes(content)


@counts(200, 2000)
def test_broken_files(count: int, store: Path) -> None:
    """Each mutated file is understood or refused with a sentence; both happen."""
    dice = random.Random(20260101)
    command = commands_of(build_parser())["suite"]
    known = {action.dest for action in command._actions}
    sentences: list[str] = []
    for _ in range(count):
        Path("my.yaml").write_bytes(_mutated(dice))
        try:
            assert set(read_config(Path("my.yaml"), command)[0]) <= known
        except UsageError as error:
            sentences.append(str(error))
    assert count / 4 < len(sentences) < 0.95 * count
    assert not [text for text in sentences if not re.fullmatch(r"(--config )?my\.yaml.{10,900}\.", text)]
    assert len({re.sub(r"[0-9]+|'.*?'", "", text) for text in sentences}) > 25


def test_the_files_values_are_defaults(store: Path) -> None:
    """Parsing the words again finds them, and another parse does not grow the file's list."""
    Path("my.yaml").write_text("set: {shape: 1}\nimport: json")
    parser = build_parser()
    words = ["suite", "gemm", "--config", "my.yaml", "--set", "tokens=2", "--import", "csv"]
    first, second = (with_config(parser, commands_of(parser)["suite"], words, Path("my.yaml")) for _ in range(2))
    assert vars(first) == vars(second)
    assert first.axes == [("shape", ("1",)), ("tokens", ("2",))] and first.imports == ["json", "csv"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, ("m=256", "m=1 ", "operands=ready", "fp32 (reference)", "bf16", "fp8", "groups: 2")),
        (1, (*re.findall(r"`(fp8-delayed:\S+)`", PAGE), "fp32 (reference)")),
    ],
)
def test_the_examples_of_the_page(
    number: int, words: Sequence[str], store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    examples = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("my.yaml").write_text(examples[number])
    code, out, err = fp8bench("suite", "--config", "my.yaml", "--dry-run")
    assert (code, err, len(examples)) == (0, "", 2) and all(word in out for word in words) and len(words) > 1
    code, _, err = fp8bench("suite", "transformer", "--config", "my.yaml", "--dry-run")
    assert (code == 2 and "unknown axis of suite transformer 'shape'" in err) == ("shape" in examples[number])


GIVEN = (
    "suite transformer --dtypes fp8-delayed:margin=1,bf16 --set size=nano --set sequence=64,128 --set size=gpt2-124m "
    "--grid --precision-map mlp=fp8,blocks.0=bf16 --budget 90 --seed 7 --import json --import ./my-suite.py "
    "--no-energy --max-batch --memory-limit 1.5GiB --static-scales 8 --saturation-bound 0.1 --csv rows.csv --store kept"
)


def test_a_written_file_is_read_back_as_it_was_given(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GIVEN.split(), "--data", "a b: 'c' #.txt", "--trace", "~"]
    expected = vars(build_parser(("suite",)).parse_args(words))
    Path("my-suite.py").write_text("")
    assert main(["config", *words[1:], "--write", "new.yaml"]) == 0
    assert capsys.readouterr().out == ""
    command = commands_of(build_parser())["suite"]
    values = read_config(Path("new.yaml"), command)[0]
    merged: dict[str, tuple[str, ...]] = {}
    for name, given in expected["axes"]:
        merged[name] = (*merged.get(name, ()), *given)
    assert {**expected, "axes": list(merged.items())} == {**vars(build_parser().parse_args(["suite"])), **values}
    lines = Path("new.yaml").read_text().splitlines()
    assert {line.partition(":")[0] for line in lines if line.startswith("# ")} >= {"# reference", "# rounds", "# quick"}


def test_a_file_without_anything_given_is_all_comments(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert out and all(not line or line.startswith("#") for line in out.splitlines())
    assert main(["config", "gemm", "--dtypes", "fp9", "--write", "no.yaml"]) == 2
    assert not Path("no.yaml").exists()
