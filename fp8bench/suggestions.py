"""Finds the name that a user probably meant: fp8bench's name for another tool's word, or the known name with the most
similar spelling.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

# For each kind of name: our names, each with the names of the same thing in other tools and papers. If our name ends in
# "=", the value that the user gave to the other tool's option is appended.
_NAME_ALIASES_BY_KIND: dict[str, dict[str, str]] = {
    "command": {
        "suite": "benchmark measure run test",
        "train": "finetune fine-tune fit",
        "infer": "eval generate serve",
        "show": "cat open print view",
        "report": "export html plot",
        "compare": "diff",
        "history": "log ls runs",
        "doctor": "check env info status",
        "store": "clean gc prune rm",
        "init": "create new",
        "audit": "kernel verify",
    },
    "argument": {
        "--dtypes": "--dtype --precision --precisions --types",
        "--precision": "--dtype --dtypes",
        "--devices": "--cuda --device --gpu --gpus",
        "--device": "--cuda --devices --gpu --gpus",
        "--rounds": "--iter --iterations --iters --repeat --repeats --reps --runs --samples -n",
        "--budget": "--duration --max-time --min-run-time --seconds --time --timeout --warmup",
        "--steps": "--epochs --iterations --iters --max-steps --num-steps -n",
        "--rate": "--learning-rate --lr",
        "--batch": "--batch-size --bs -b",
        "--set batch=": "--batch-size --bs -b",
        "--set shape=": "--m --n --k --shape --shapes --size --sizes",
        "--csv": "--export --out --output --save -o",
        "--all": "--details --full --verbose -v",
        "--quick": "--fast --short --smoke -q",
        "--threads": "--cpus --jobs --num-threads -j",
        "--import": "--file --module",
        "--store": "--cache --dir --folder",
    },
    "suite": {
        "gemm": "bmm dense gemv linear matmul mm",
        "transformer": "bert gpt gpt2 llama llama3 llm model t5",
        "attention": "flash flash-attention sdpa",
        "vision": "resnet resnet50 vit",
        "conv": "cnn conv2d convolution",
        "decode": "generate inference kv-cache serve",
        "norm_act": "activation gelu layernorm norm rmsnorm softmax",
        "optimizer": "adam adamw sgd",
        "collective": "allreduce nccl",
        "diffusion": "dit sd unet",
        "cast": "quant quantize quantization",
    },
    "precision": {
        "fp32": "f32 float float32 single",
        "tf32": "tensorfloat32",
        "bf16": "amp autocast bfloat bfloat16 mixed",
        "fp16": "f16 float16 half",
        "fp8": "f8 float8 int8 w8a8",
        "fp8-e4m3": "e4m3 e4m3fn float8_e4m3fn",
        "fp8-e5m2": "e5m2 float8_e5m2",
        "fp4": "e2m1 float4 float4_e2m1fn_x2 int4 nf4 w4a4",
        "mxfp8": "mx mx8",
        "mxfp6": "fp6 mx6",
        "mxfp4": "mx4",
    },
    "device": {"cuda": "gpu nvidia rocm"},
    "model": {
        "nano": "bert gpt tiny transformer",
        "gpt2-124m": "gpt2 gpt2-small",
        "llama-1b": "llama llama2 llama3",
    },
    "run": {"last": "latest newest recent"},
    "thing to list": {"suites": "benchmarks models workloads", "devices": "gpu gpus hardware", "precisions": "formats"},
    "choice": {"product": "gemm matmul mm"},
}
# The commands that list the names of a kind. An error suggests the command if no known name is similar.
_LIST_COMMAND_BY_KIND = {
    "suite": "fp8bench list suites",
    "precision": "fp8bench list precisions",
    "backend": "fp8bench list backends",
    "run": "fp8bench history list --runs",
    "device": "fp8bench doctor",
    "device on this machine": "fp8bench doctor",
}


def guess_intended_name(kind: str, given: str, known: Collection[str]) -> str | None:
    """Returns the known name that the user probably meant, or None if no name is similar. The name of an option may
    include the beginning of its value.
    """
    if kind == "key" or kind.startswith("argument of "):
        options = {f"--{name.replace('_', '-')}": name for name in known}
        return options.get(guess_intended_name("argument", f"--{given.replace('_', '-')}", options) or "")
    # Users also type torch's names, such as torch.float16.
    normalised_name = given.lower().removeprefix("torch.")
    if kind == "argument":
        normalised_name = normalised_name.replace("_", "-")
    for name, aliases in _NAME_ALIASES_BY_KIND.get(kind, {}).items():
        if normalised_name in aliases.split() and name.partition(" ")[0] in known:
            return name
    names_without_dashes = {name.lstrip("-"): name for name in sorted(known)}
    similar_names = difflib.get_close_matches(normalised_name.lstrip("-"), names_without_dashes, n=1, cutoff=0.6)
    return names_without_dashes[similar_names[0]] if similar_names else None


def explaining_command(kind: str) -> str:
    """Returns the command that lists all names of a kind (such as suites), or '' if the kind has no such command."""
    return _LIST_COMMAND_BY_KIND.get(kind, "")
