"""plan-parallel's text, rows and exit codes, and its topology file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.plan_parallel.command import read_topology
from fp8bench.features.plan_parallel.formulas import Topology
from tests.commands import Say, unfolding
from tests.counts import for_each

MEASURED = "llama3-8b,FSDP8,6667,dtype=bf16,batch=16,checkpointing=selective"
LINES = {"node": "8", "memory": "80 GiB", "inside": "450", "between": "50", "bf16": "660", "fp8": "980"}


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    return unfolding(fp8bench, "plan-parallel")


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    return written(tmp_path, LINES)


def written(folder: Path, lines: dict[str, str]) -> Path:
    file = folder / "h100.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    return file


@for_each(
    ("line", "value", "words"),
    [
        ("node", "8.5", "h100.yaml: node: expected a whole number"),
        ("node", "0", "h100.yaml: node: expected a whole number"),
        ("memory", "80", "h100.yaml: memory: expected a size"),
        ("memory", "lots", "1 GiB or more, got 'lots'"),
        ("inside", "-3", "h100.yaml: inside: expected a number above 0, in GB/s, got '-3'"),
        ("inside", "450 TFLOP/s", "in GB/s, got '450 TFLOP/s'"),
        ("between", "nan", ": between: expected a number above 0"),
        ("bf16", "[1, 2]", "in TFLOP/s, got ['1', '2']"),
        ("fp4", "3", "h100.yaml: unknown key 'fp4'"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, line: str, value: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        read_topology(written(tmp_path, {**LINES, line: value}))
    assert words in str(error.value)


def test_units_may_stand_behind_numbers(tmp_path: Path) -> None:
    units = {"inside": "450 GB/s", "between": "50GB/s", "bf16": "660 TFLOP/s", "fp8": "980 TFLOP/s"}
    for lines in (LINES, {**LINES, **units}):
        assert read_topology(written(tmp_path, lines)) == Topology(8, 80 * 2**30, 450e9, 50e9, 660e12, 980e12)
    with pytest.raises(UsageError, match="bf16, fp8 are missing"):
        read_topology(written(tmp_path, {name: LINES[name] for name in ("node", "memory", "inside", "between")}))


@for_each("name", ["b200", "h100", "h200", "mi300x"])
def test_topologies_are_shipped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    """By their names; a file of that name comes first, and what their rates rest on is said."""
    monkeypatch.chdir(tmp_path)
    shipped = read_topology(Path(name))
    assert shipped.node == 8 and shipped.memory >= 80 * 2**30 and shipped.fp8 > shipped.bf16 > 3e14
    code, out, err = say("llama3-8b", "--gpus", "8", "--topology", name, "--top", "1")
    assert code == 0 and "FSDP 8" in out and f"--topology {name}: 8 {name.upper()} (" in err and "rates" in err
    Path(name).write_text("".join(f"{line}: {value}\n" for line, value in LINES.items()))
    assert read_topology(Path(name)).bf16 == 660e12


def test_one_gpu_divides_nothing(say: Say) -> None:
    code, out, _ = say("nano", "--gpus", "1", "--topology", "h100")
    assert code == 0 and "one GPU" in out and "each kind of division" not in out


@for_each(
    ("words", "code", "said"),
    [
        ("llama3-405b --gpus 8", 3, "No way fits: more GPUs"),
        ("nano --gpus 2", 0, "the paces here mean nothing"),
        ("nano --gpus 2", 0, "No published training is like this: 2 GPUs"),
        ("llama3-8b --gpus 8", 0, "No whole training has calibrated these rates"),
        ("llama3-8b --gpus 8 --calibrate MEASURED", 0, "By llama3-8b with FSDP 8 at 6667 tokens/s"),
        ("llama3-8b --gpus 8 --dtype fp8 --states fp8-lm", 0, "States take 6 bytes a weight instead of 16"),
        ("llama3-8b --gpus 8 --batch 16 --rlhf --checkpointing full", 0, "reference and reward"),
    ],
)
def test_what_an_answer_is_worth_is_said(say: Say, topology: Path, words: str, code: int, said: str) -> None:
    ended, out, _ = say(*words.replace("MEASURED", MEASURED).split(), "--topology", str(topology))
    assert ended == code and said in " ".join(out.split())
    assert said.startswith("No whole") or "No whole training" not in out or "--calibrate" not in words


def test_a_measured_training_sets_the_rates(say: Say, topology: Path) -> None:
    """It also gives paces a band, which a power limit takes away."""
    given = ("llama3-8b", "--gpus", "8", "--topology", str(topology), "--json", "--checkpointing", "selective")
    given = (*given, "--batch", "16")

    def way(*words: str) -> dict[str, float]:
        ways = json.loads(say(*given, *words)[1])["ways"]
        return next(
            way for way in ways if (way["shards"], way["context"], way["tensor"] * way["pipeline"]) == (8, 1, 1)
        )

    plain = way("--calibrate", MEASURED)
    assert plain["tokens_per_second"] == pytest.approx(6667, rel=0.01) and plain["pace_band"] == 0.24
    narrow = way("--calibrate", MEASURED, "--dtype", "fp8")
    assert narrow["pace_band"] == 0.28 and abs(narrow["tokens_per_second"] / 8532 - 1) < 0.28
    by_rows = way("--calibrate", MEASURED, "--dtype", "fp8", "--recipe", "rowwise")
    assert plain["tokens_per_second"] < by_rows["tokens_per_second"] < narrow["tokens_per_second"]
    limited = way("--calibrate", MEASURED, "--power-limit", "500/700")
    assert limited["pace_band"] is None
    assert limited["tokens_per_second"] == pytest.approx(6667 * (5 / 7) ** (2 / 3), rel=0.02)
    assert way()["pace_band"] is None and way()["tokens_per_second"] > 1.4 * plain["tokens_per_second"]
    assert way("--compiled-loss")["logits_bytes"] == pytest.approx(way()["logits_bytes"] / 3)


def test_states_of_fp8_lm(say: Say, topology: Path) -> None:
    """Less memory; a measured training keeps its own states, and so its rates."""
    given = ("llama3-8b", "--gpus", "8", "--topology", str(topology), "--dtype", "fp8", "--batch", "16")

    def value(*words: str) -> Any:
        return json.loads(say(*given, *words, "--json", "--checkpointing", "full")[1])

    wide, narrow = (value("--states", name, "--calibrate", MEASURED) for name in ("fp32", "fp8-lm"))
    assert [document["asked"]["topology"]["bf16"] for document in (wide, narrow)] == [
        wide["asked"]["topology"]["bf16"]
    ] * 2
    alike = [next(way for way in document["ways"] if way["shards"] == 8) for document in (wide, narrow)]
    assert alike[1]["states_bytes"] / alike[0]["states_bytes"] == 6 / 16


@for_each(
    ("words", "said"),
    [
        ("", "--model is missing"),
        ("llama3-8b --gpus 8 --topology h100 --states fp8-lm", "goes with FP8 products"),
        ("llama3-8b --gpus 8 --topology h100 --recipe mxfp8", "add --dtype fp8"),
        ("--model llama3-8 --gpus 8", "--topology is missing"),
        ("--model llama3-8 --gpus 8 --topology FILE", "llama3-8b"),
        ("nano --gpus 3 --batch 5 --topology FILE", "cannot be dealt out evenly"),
        ("nano --gpus 0", "--gpus"),
        ("nano --gpus 2 --topology h10", "Did you mean 'h100'?"),
        ("nano --gpus 2 --topology nowhere.yaml", "nowhere.yaml cannot be read"),
        ("nano --gpus 8 --topology FILE --calibrate llama3-8b,FSDP8", "is too short"),
        ("nano --gpus 8 --topology FILE --calibrate llama3-9b,FSDP8,3", "unknown model 'llama3-9b'"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8+FSDP2,3", "'FSDP2' is no part"),
        ("nano --gpus 8 --topology FILE --calibrate nano,EP8,3", "'EP8' is no part"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8,nan", "cannot be read"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8,3,batch=7", "divides nothing evenly"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8,3,seq=7", "cannot be read"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8,1e15", "more than these links carry"),
        ("nano --gpus 8 --topology FILE --power-limit 700/500", "the lower first"),
    ],
)
def test_nonsense(say: Say, topology: Path, words: str, said: str) -> None:
    code, _, err = say(*words.replace("FILE", str(topology)).split())
    assert code == 2 and said in err


def test_rlhf_takes_more_memory_at_the_same_pace(say: Say, topology: Path) -> None:
    given = ("llama3-8b", "--gpus", "8", "--topology", str(topology), "--batch", "16", "--checkpointing", "full")
    plain, four = (json.loads(say(*given, *more, "--json")[1])["ways"] for more in ((), ("--rlhf",)))
    cuts = ("copies", "shards", "tensor", "pipeline", "context", "virtual", "micro_batches")
    ways = {tuple(way[cut] for cut in cuts): way for way in plain}
    alike = [(way, ways[key]) for way in four if (key := tuple(way[cut] for cut in cuts)) in ways]
    assert len(alike) > 1  # where less fits another number of micro-batches is chosen
    for way, alone in alike:
        more = way["critic_bytes"] + way["frozen_bytes"]
        assert way["memory_bytes"] == pytest.approx(alone["memory_bytes"] + more) and more > 0
        assert way["tokens_per_second"] == alone["tokens_per_second"]


def test_asking_for_scales_is_counted_where_tensors_are_cut(say: Say, topology: Path) -> None:
    """Eight messages a block and micro-batch: none in bf16, none by rows, none without TP."""
    words = ["llama3-70b", "--gpus", "64", "--topology", str(topology), "--dtype", "fp8"]
    ways = json.loads(say(*words, "--json")[1])["ways"]
    for way in ways:
        blocks = -(-80 // way["pipeline"]) * way["micro_batches"]
        assert way["scale_messages"] == (8 * blocks if way["tensor"] > 1 else 0)
        assert way["scale_bytes"] == way["scale_messages"] * 8 * (way["tensor"] - 1) / way["tensor"]
    assert ways[0]["tensor"] > 1 and f"for {ways[0]['scale_messages']} messages of 4 bytes" in say(*words)[1]
    for others in (["--recipe", "rowwise"], ["--dtype", "bf16"]):
        assert not any(way["scale_messages"] for way in json.loads(say(*words, *others, "--json")[1])["ways"])
