"""plan-parallel's text, rows and exit codes, and its topology file."""

from __future__ import annotations

import json
import re
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.plan_parallel.command import read_topology
from fp8bench.features.plan_parallel.formulas import Topology
from fp8bench.features.plan_parallel.models import parse_model, read_decoder_sizes
from fp8bench.model.step import HeldProduct, Holder
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
def test_bad_numbers_are_refused(tmp_path: Path, line: str, value: str, words: str) -> None:
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
    monkeypatch.chdir(tmp_path)
    shipped = read_topology(Path(name))
    assert shipped.node == 8 and shipped.memory >= 80 * 2**30 and shipped.fp8 > shipped.bf16 > 3e14
    code, out, err = say("llama3-8b", "--gpus", "8", "--topology", name, "--top", "1")
    assert code == 0 and "FSDP 8" in out and f"--topology {name}: 8 {name.upper()} (" in err and "rates" in err
    Path(name).write_text("".join(f"{line}: {value}\n" for line, value in LINES.items()))
    assert read_topology(Path(name)).bf16 == 660e12


def test_counts_of_gpus_are_compared(say: Say, topology: Path) -> None:
    arguments = ("llama3-8b", "--topology", str(topology), "--gpus")
    several = json.loads(say(*arguments, "8,64,8", "--json")[1])["counts"]
    assert several == [json.loads(say(*arguments, count, "--json")[1]) for count in ("8", "64")]
    code, out, _ = say(*arguments, "8,64,512")
    rows = {words[0]: words for line in out.splitlines() if (words := line.split()) and words[0].isdigit()}
    assert code == 0 and list(rows) == ["8", "64", "512"] and out.count("No whole training") == 1
    assert rows["8"].count("yes") == 1  # of the matrix: FSDP
    lines = say(*arguments, "8,64", "--csv", "-")[1].splitlines()
    assert len(lines) == 1 + sum(len(answer["ways"]) for answer in several) and lines[0].startswith("gpus,")
    code, out, _ = say("llama3-405b", "--topology", str(topology), "--gpus", "8,512")
    assert code == 0
    code, _, err = say("nano", "--topology", str(topology), "--gpus", "2,3", "--batch", "8")
    assert code == 2 and "8 sequences cannot be divided evenly among 3 GPUs" in err


MAKER = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleList([nn.Linear(64, 64 + 2 * 16, bias=False), nn.Linear(64, 64, bias=False)])
        self.fc1, self.mlp = nn.Linear(64, 192, bias=False), nn.Linear(96, 64, bias=False)

    def forward(self, x):
        x = x + self.attn[1](self.attn[0](x)[..., :64])
        return x + self.mlp(self.fc1(x)[..., :96])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().mean()

def make():
    return Net(), (torch.zeros(2, 16, dtype=torch.long),)

def mixed():
    net = Net()
    net.blocks[1].mlp = nn.Sequential(nn.Linear(96, 64, bias=False), nn.Linear(64, 64, bias=False))
    return net, (torch.zeros(2, 16, dtype=torch.long),)
"""


@for_each(
    ("model", "fields"),
    [
        ("layers=4,width=64,heads=8", (50304, 64, 4, 8, 8, 256, False, False)),
        (
            "heads=8,width=64,layers=4,key-heads=2,hidden=96,vocabulary=500,gated=yes,tied=yes",
            (500, 64, 4, 8, 2, 96, True, True),
        ),
        ("gpt-175b", (50304, 12288, 96, 96, 96, 49152, False, True)),
    ],
)
def test_models_of_any_size(model: str, fields: tuple[object, ...]) -> None:
    assert astuple(parse_model(model)) == (model, *fields)


@for_each(("model", "weights"), [("gpt-7b", 6.7e9), ("gpt-13b", 12.8e9), ("gpt-175b", 175e9)])
def test_fp8_lm_s_models_have_the_weights_of_their_names(model: str, weights: float) -> None:
    assert parse_model(model).weights == pytest.approx(weights, rel=0.01)


@pytest.mark.slow
def test_a_maker_of_yours_is_planned(tmp_path: Path, say: Say, topology: Path) -> None:
    (tmp_path / "net.py").write_text(MAKER)
    model = parse_model(f"{tmp_path}/net.py:make,heads=8,tied=yes")
    assert astuple(model)[1:] == (500, 64, 3, 8, 2, 96, True, True)
    for words, message in (
        ("make,heads=7", "7 heads must divide the width (64)"),
        ("mixed,heads=8", "are not a head and equal blocks"),
    ):
        code, _, err = say(f"{tmp_path}/net.py:{words}", "--gpus", "2", "--topology", str(topology))
        assert code == 2 and message in err


def holders(*layers: str, blocks: int = 3) -> list[Holder]:
    """Layers like 'attn.qkv 96x64' in each block, and a head of 500 ids."""
    holders_of_layers = []
    for name, outputs, inputs in (re.split("[ x](?=[0-9])", layer) for layer in layers):
        product = HeldProduct(32, int(outputs), int(inputs))
        holders_of_layers += [
            Holder(f"net.h.{number}.{name}", "linear", (0, 0), (product,)) for number in range(blocks)
        ]
    return [*holders_of_layers, Holder("head", "head", (0, 0), (HeldProduct(32, 500, 64),))]


ATTENTION = ("attn.qkv 96x64", "attn.out 64x64")


@for_each(
    ("layers", "hidden", "keys", "gated"),
    [
        (("attn.qkv 192x64", "attn.out 64x64", "mlp.up 256x64", "mlp.down 64x256"), 256, 64, False),
        # Attention's fused product is as wide as the feed-forward part.
        ((*ATTENTION, "mlp.up 96x64", "mlp.down 64x96"), 96, 16, False),
        ((*ATTENTION, "mlp.up 192x64", "mlp.down 64x96"), 96, 16, True),
        ((*ATTENTION, "feed_forward.w1 96x64", "feed_forward.w2 64x96", "feed_forward.w3 96x64"), 96, 16, True),
        (
            (
                "attention.wq 64x64",
                "attention.wk 16x64",
                "attention.wv 16x64",
                "attention.wo 64x64",
                "mlp.gate 96x64",
                "mlp.up 96x64",
                "mlp.down 64x96",
            ),
            96,
            16,
            True,
        ),
    ],
)
def test_layers_tell_the_sizes_of_a_decoder(layers: tuple[str, ...], hidden: int, keys: int, gated: bool) -> None:
    sizes = {"vocabulary": 500, "width": 64, "layers": 3, "hidden": hidden, "keys": keys, "gated": gated}
    assert read_decoder_sizes(holders(*layers)) == sizes


@for_each(
    "layers",
    [
        ("mlp.up 256x64", "mlp.down 64x256"),
        (*ATTENTION, "mlp.a 256x64", "mlp.b 64x256", "mlp.c 64x256"),
        (*ATTENTION, "mlp.a 96x64", "mlp.b 64x128"),
        ATTENTION,
    ],
)
def test_other_models_are_no_decoders(layers: tuple[str, ...]) -> None:
    assert read_decoder_sizes(holders(*layers)) is None
    assert read_decoder_sizes(holders(*layers)[:-1]) is None


def test_one_gpu_needs_no_split(say: Say) -> None:
    code, out, _ = say("nano", "--gpus", "1", "--topology", "h100")
    assert code == 0 and "one GPU" in out and "each kind of division" not in out


@for_each(
    ("words", "code", "message"),
    [
        ("llama3-405b --gpus 8", 3, "No layout fits. Try more GPUs"),
        ("nano --gpus 2", 0, "the paces here mean nothing"),
        ("nano --gpus 2", 0, "No published training is like this: 2 GPUs"),
        ("llama3-8b --gpus 8", 0, "No whole training has calibrated these rates"),
        ("llama3-8b --gpus 8 --calibrate MEASURED", 0, "By llama3-8b with FSDP 8 at 6667 tokens/s"),
        ("llama3-8b --gpus 8 --dtype fp8 --states fp8-lm", 0, "States take 6 bytes a weight instead of 16"),
        ("llama3-8b --gpus 8 --batch 16 --rlhf --checkpointing full", 0, "reference and reward"),
    ],
)
def test_an_answer_says_what_it_rests_on(say: Say, topology: Path, words: str, code: int, message: str) -> None:
    ended, out, _ = say(*words.replace("MEASURED", MEASURED).split(), "--topology", str(topology))
    assert ended == code and message in " ".join(out.split())
    assert message.startswith("No whole") or "No whole training" not in out or "--calibrate" not in words


def test_a_measured_training_sets_the_rates(say: Say, topology: Path) -> None:
    arguments = ("llama3-8b", "--gpus", "8", "--topology", str(topology), "--json", "--checkpointing", "selective")
    arguments = (*arguments, "--batch", "16")

    def way(*words: str) -> dict[str, float]:
        layouts = json.loads(say(*arguments, *words)[1])["ways"]
        return next(
            way for way in layouts if (way["shards"], way["context"], way["tensor"] * way["pipeline"]) == (8, 1, 1)
        )

    plain = way("--calibrate", MEASURED)
    assert plain["tokens_per_second"] == pytest.approx(6667, rel=0.01) and plain["pace_band"] == 0.24
    narrow = way("--calibrate", MEASURED, "--dtype", "fp8")
    assert narrow["pace_band"] == 0.28 and abs(narrow["tokens_per_second"] / 8532 - 1) < 0.28
    by_rows = way("--calibrate", MEASURED, "--dtype", "fp8", "--recipe", "rowwise")
    assert plain["tokens_per_second"] < by_rows["tokens_per_second"] < narrow["tokens_per_second"]
    same = "vocabulary=128256,width=4096,layers=32,heads=32,key-heads=8,hidden=14336,gated=yes"
    assert way("--calibrate", MEASURED.replace("llama3-8b", same)) == plain
    assert way()["pace_band"] is None and way()["tokens_per_second"] > 1.4 * plain["tokens_per_second"]
    assert way("--compiled-loss")["logits_bytes"] == pytest.approx(way()["logits_bytes"] / 3)


def test_fp8_lm_needs_less_memory(say: Say, topology: Path) -> None:
    arguments = ("llama3-8b", "--gpus", "8", "--topology", str(topology), "--dtype", "fp8", "--batch", "16")

    def value(*words: str) -> Any:
        return json.loads(say(*arguments, *words, "--json", "--checkpointing", "full")[1])

    wide, narrow = (value("--states", name, "--calibrate", MEASURED) for name in ("fp32", "fp8-lm"))
    assert [document["asked"]["topology"]["bf16"] for document in (wide, narrow)] == [
        wide["asked"]["topology"]["bf16"]
    ] * 2
    in_16_bits = {way["shards"]: way["states_bytes"] for way in wide["ways"]}
    in_8_bits = {way["shards"]: way["states_bytes"] for way in narrow["ways"]}
    assert in_8_bits[8] / in_16_bits[8] == 6 / 16


@for_each(
    ("words", "message"),
    [
        ("llama3-8b --gpus 8 --topology h100 --states fp8-lm", "goes with FP8 products"),
        ("llama3-8b --gpus 8 --topology h100 --recipe mxfp8", "Add --dtype fp8"),
        ("llama3-8 --gpus 8", "required: --topology"),
        ("llama3-8 --gpus 8 --topology FILE", "llama3-8b"),
        ("nano --gpus 3 --batch 5 --topology FILE", "cannot be divided evenly"),
        ("nano --gpus 0", "--gpus"),
        ("nano --gpus 8,x", "--gpus"),
        ("net.py:make --gpus 2 --topology FILE", "Write net.py:make,heads=N"),
        ("net.py,heads=8 --gpus 2 --topology FILE", "is not a function"),
        ("net.py:make,heads=8,layers=3 --gpus 2 --topology FILE", "its layers show all sizes except"),
        ("layers=2,width=64 --gpus 2 --topology FILE", "lacks heads. Give layers="),
        ("layers=2,width=64,heads=0 --gpus 2 --topology FILE", "'heads=0' cannot be read"),
        ("layers=2,width=64,heads=8,depth=3 --gpus 2 --topology FILE", "'depth=3' cannot be read"),
        ("layers=2,width=64,heads=8,tied=3 --gpus 2 --topology FILE", "'tied=3' cannot be read"),
        ("layers=2,width=64,heads=7 --gpus 2 --topology FILE", "7 heads must divide the width (64)"),
        ("layers=2,width=64,heads=8,heads=8 --gpus 2 --topology FILE", "or is given twice"),
        ("nano --gpus 2 --topology h10", "Did you mean 'h100'?"),
        ("nano --gpus 2 --topology nowhere.yaml", "nowhere.yaml cannot be read"),
        ("nano --gpus 8 --topology FILE --calibrate llama3-8b,FSDP8", "is too short"),
        ("nano --gpus 8 --topology FILE --calibrate llama3-9b,FSDP8,3", "unknown model 'llama3-9b'"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8+FSDP2,3", "'FSDP2' is not a part"),
        ("nano --gpus 8 --topology FILE --calibrate nano,EP8,3", "'EP8' is not a part"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8,nan", "cannot be read"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8,3,batch=7", "does not divide evenly"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8,3,seq=7", "cannot be read"),
        ("nano --gpus 8 --topology FILE --calibrate nano,FSDP8,1e15", "more than these links allow"),
    ],
)
def test_bad_arguments_are_refused(say: Say, topology: Path, words: str, message: str) -> None:
    code, _, err = say(*words.replace("FILE", str(topology)).split())
    assert code == 2 and message in err


def test_asking_for_scales_is_counted_where_tensors_are_cut(say: Say, topology: Path) -> None:
    words = ["llama3-70b", "--gpus", "64", "--topology", str(topology), "--dtype", "fp8"]
    layouts = json.loads(say(*words, "--json")[1])["ways"]
    for way in layouts:
        blocks = -(-80 // way["pipeline"]) * way["micro_batches"]
        assert way["scale_messages"] == (8 * blocks if way["tensor"] > 1 else 0)
        assert way["scale_bytes"] == way["scale_messages"] * 8 * (way["tensor"] - 1) / way["tensor"]
    assert layouts[0]["tensor"] > 1 and f"for {layouts[0]['scale_messages']} messages of 4 bytes" in say(*words)[1]
    for others in (["--recipe", "rowwise"], ["--dtype", "bf16"]):
        assert not any(way["scale_messages"] for way in json.loads(say(*words, *others, "--json")[1])["ways"])
