"""Options in a file: equal to those on the command line, overruled by them, and refused by the same sentences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.cli.config_file import MAX_CONFIG_BYTES, parse_with_config, read_config
from fp8bench.cli.main import build_parser, main, subparsers_by_name
from fp8bench.errors import UsageError
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Environment, Plan, Request, Run
from fp8bench.protocols import Observer
from tests.commands import Say, only_sentence, unfolded
from tests.counts import for_each

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text()
Asked = Callable[..., tuple[Request, Path]]


@pytest.fixture
def asked(store: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The request and store for a command line with this file."""
    caught: list[tuple[Request, Path]] = []

    def execute(request: Request, store: Path, observer: Observer, command: str, **options: object) -> Run:
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
        told = only_sentence(err)
        assert told.startswith("fp8bench: ") and told.endswith(".") and len(err) < 1000
        return err.removeprefix("fp8bench: ").rstrip("\n")

    return refuse


# File contents and the equivalent command-line words.
SAME = {
    "the suite alone": ("suite: gemm", "gemm"),
    "lists": ("suite: gemm\ndtypes: [fp8, bf16]\ndevices: [cpu]", "gemm --dtypes fp8,bf16 --devices cpu"),
    "text with commas": ("suite: gemm\ndtypes: fp8,bf16", "gemm --dtypes fp8,bf16"),
    "lists in lines": ("suite: gemm\ndtypes:\n- fp8\n- bf16", "gemm --dtypes fp8,bf16"),
    "axes": (
        "suite: gemm\nset:\n  shape: [64, 1x64x64]\n  operands: ready",
        "gemm --set shape=64,1x64x64 --set operands=ready",
    ),
    "one axis as text": ("suite: gemm\nset: shape=64,32", "gemm --set shape=64,32"),
    "a map": (
        "suite: transformer\nprecision-map: {mlp: fp8, attn: bf16}",
        "transformer --precision-map mlp=fp8,attn=bf16",
    ),
    "a map as text": ("suite: transformer\nprecision-map: mlp=fp8", "transformer --precision-map mlp=fp8"),
    "a map as a list": (
        "suite: transformer\nprecision-map: [mlp=fp8, attn=bf16]",
        "transformer --precision-map mlp=fp8,attn=bf16",
    ),
    "modules": ("suite: gemm\nimport: [json, csv]", "gemm --import json --import csv"),
    "modules as text": ("suite: gemm\nimport: json, csv", "gemm --import json --import csv"),
    "flags": ("suite: gemm\nquick: true\nno-isolation: True", "gemm --quick --no-isolation"),
    "flags that are not set": ("suite: gemm\nquick: false", "gemm"),
    "numbers": (
        "suite: gemm\nbudget: 1e1\nrounds: 5\nseed: 07\nthreads: 2\ncase-timeout: 9.5",
        "gemm --budget 1e1 --rounds=5 --seed=07 --threads=2 --case-timeout=9.5",
    ),
    "names and paths": (
        "suite: transformer\nreference: fp32\ndata: 'a text.txt'\nstore: some/where",
        "transformer --reference fp32 --data 'a text.txt' --store some/where",
    ),
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
    "FP8 training that is compiled": (
        "{suite: transformer, use_fp8: true, torch_compile: true, fp8_format: e4m3, fp8_margin: 0}",
        "transformer --set compile=yes --dtypes bf16,fp8:formats=e4m3",
    ),
    "FP8 training that is compiled, by an axis": (
        "{suite: transformer, use_fp8: true, set: {compile: yes}}",
        "transformer --set compile=yes --dtypes bf16,fp8",
    ),
    "FP8 training, compiled and not": (
        "{suite: transformer, use_fp8: true, set: {compile: [no, yes]}}",
        "transformer --set compile=no,yes --dtypes bf16,fp8-delayed",
    ),
    "keys of other trainers": (
        "{suite: transformer, use_flash_attention: true, torch_compile: false, max_batch_size: 4, dataset: a.txt}",
        "transformer --set attention=flash --set compile=no --set batch=4 --data a.txt",
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


def test_the_training_keys_of_a_file_that_is_off_ask_for_nothing(asked: Asked) -> None:
    for text in ("suite: gemm\nuse_fp8: False\nfp8_margin: 1", "suite: gemm\nfp8_interval: 2\nfp8_format: e4m3"):
        assert asked(text) == asked(None, "gemm")


def test_every_option_is_a_key(store: Path) -> None:
    """Except options that only make sense on the command line."""
    command = subparsers_by_name(build_parser())["suite"]
    options = {word[2:] for action in command._actions for word in action.option_strings if word.startswith("--")}
    for name in options | {"suite"}:
        Path("my.yaml").write_text(f"{name}: {{a: {{b: c}}}}")
        with pytest.raises(UsageError) as caught:
            read_config(Path("my.yaml"), command)
        unknown = f"unknown key {name!r}" in str(caught.value)
        assert unknown == (name in {"help", "help-all", "config", "resume"})


def test_values_keep_their_text(store: Path) -> None:
    """YAML alone would read yes as True, 1e3 as 1000.0, 5:42 as 342 and 2026-01-01 as a date."""
    options = subparsers_by_name(build_parser())["suite"]
    Path("my.yaml").write_text("set: {compile: yes, a: [1e3, 5:42, 2026-01-01, 0x10, ~x, no, 007, 1_000]}")
    assert read_config(Path("my.yaml"), options)["axes"] == [
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
    """For each option and axis, even if the value equals the option's default."""
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


# File contents and the expected message.
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "not a number": ("seed: 1\n\nrounds: many", "my.yaml: rounds: expected a whole number from 1, got 'many'."),
    "no seconds": ("budget: soon", "budget: expected a number of seconds above 0, got 'soon'"),
    "an empty name": ("dtypes: 'fp8,'", "dtypes: 'fp8,' has an empty name"),
    "an empty list": ("dtypes: []", "dtypes: '' has an empty name"),
    "no form of an axis": ("set: [shape]", "set: 'shape' is not of the form AXIS=VALUE,VALUE"),
    "an axis without values": ("set:\n  shape: []", "set: '' has an empty name"),
    "a list for a number": ("seed:\n  - 1\n  - 2", "seed: expected one value, got ['1', '2']."),
    "a mapping for a flag": ("quick: {a: b}", "quick: expected true or false, got {'a': 'b'}."),
    "a word for a flag": ("quick: yes", "quick: expected true or false, got 'yes'."),
    "nothing for a flag": ("quick:", "quick: expected true or false, got ''."),
    "a mapping for a list": ("dtypes: {a: b}", "dtypes: expected one value, got {'a': 'b'}."),
    "a list in a list": ("dtypes: [[fp8]]", "dtypes: expected one value, got ['fp8']."),
    "no value": ("rounds:", "rounds: expected one value, got ''."),
    "a key twice": ("seed: 1\nquick: true\nseed: 1", "my.yaml cannot be read (the key 'seed' occurs twice)"),
    "an axis twice": ("set:\n  shape: 1\n  shape: 2", "the key 'shape' occurs twice"),
    "an unknown key": ("dtype: fp8", "my.yaml: unknown key 'dtype'. Did you mean 'dtypes'? Known: the options of "),
    "a file in a file": ("config: other.yaml", "unknown key 'config'"),
    "a key that is a list": ("? [a]\n: b", "found unhashable key"),
    "a list": ("- seed: 1", "is not a mapping. Give a YAML file of options"),
    "nothing": ("", "is not a mapping"),
    "two documents": ("seed: 1\n---\nseed: 2", "expected a single document in the stream"),
    "a billion laughs": (
        "a: &a [x, x]\n" + "".join(f"{two}: &{two} [*{one}, *{one}]\n" for one, two in pairwise("abcdefg")),
        "unknown key",
    ),
    "a tag of Python": ("rounds: !!python/object/apply:os.system [ls]", "rounds: expected one value, got ['ls']"),
    "no space": ("seed: 1\nrounds:2", "while scanning a simple key"),
    "an open bracket": ("seed: 1\ndtypes: [fp8", "while parsing a flow sequence"),
    "brackets without end": ("[" * 100_000, "cannot be read (maximum recursion depth"),
    "an escape that is none": ('data: "\\UFFFFFFFF"', "cannot be read ("),
    "a control character": ("seed: 1\ndata: \x01", "special characters are not allowed"),
    "bytes": (b"\x89PNG\r\n\x1a\n\xff", "'utf-8' codec can't decode byte"),
    "a huge file": (b"#" * (MAX_CONFIG_BYTES + 1), "and at most 1.00 MiB are read: move it away"),
    **{line: (line, words) for line, words in {
        "use_fp8: yes": "use_fp8: expected true or false, got 'yes'.",
        "fp8_format: hybird": "expected one of hybrid, e4m3, e5m2",
        "fp8_margin: -1": "margin",
        "fp8_interval: 0": "expected a whole number from 1 to 65536",
        "fp8_amax_compute_algo: min": "expected one of max, most_recent",
        "fp8_margin: [1]": "margin",
        "use_fp8: true\ntorch_compile: true\nfp8_amax_history_len: 16": "history=16 belongs to delayed scaling",
        "fp8_magrin: 1": "unknown key 'fp8_magrin'. Did you mean 'fp8_margin'?",
        "max_grad_norm: 1": "max_grad_norm: '1' is not supported: suites clip no gradients",
        "num_epochs: 3": "num_epochs: '3' is not supported: write steps: N for `fp8bench train`",
        "wandb_name: mine": "wandb_name: 'mine' is not supported: a run is named by its id; write log: wandb:PROJECT.",
        "use_wandb: maybe": "use_wandb: 'maybe' is not supported: write log: wandb:PROJECT.",
    }.items()},
}  # fmt: skip


@for_each("name", REFUSED)
def test_what_a_file_cannot_say_is_one_sentence(name: str, refused: Callable[..., str]) -> None:
    content, sentence = REFUSED[name]
    said = refused(content, "gemm")
    assert said.startswith(("my.yaml: ", "--config my.yaml ")) and sentence in said


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
    assert any(
        words in said for words in ("cannot be read (", "an empty text is not a path", "store: expected one value")
    )
    assert only_sentence(said) and not Path("runs").exists()


def test_it_does_not_go_with_resume(refused: Callable[..., str]) -> None:
    """A resumed run takes all options from its run file."""
    expected = "the run of --resume determines what is measured and how, and gemm was given"
    assert expected in refused("suite: gemm", "--resume", "last")


def test_the_files_values_are_defaults(store: Path) -> None:
    """Parsing the command line again finds them, and does not extend the file's lists."""
    Path("my.yaml").write_text("set: {shape: 1}\nimport: json")
    parser = build_parser()
    words = ["suite", "gemm", "--config", "my.yaml", "--set", "tokens=2", "--import", "csv"]
    first, second = (
        parse_with_config(parser, subparsers_by_name(parser)["suite"], words, Path("my.yaml")) for _ in range(2)
    )
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
