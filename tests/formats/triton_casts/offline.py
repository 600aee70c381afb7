"""Compiles Triton casts for GPUs that are not present, and reads their machine code.

A plan's arguments tell Triton what a launch would: sizes that are multiples of 16, and aligned pointers. triton
includes assembler and disassembler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8bench.formats.triton_casts.launch import SpecialisedFunction
from fp8bench.formats.triton_casts.plans import Plan

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
_OPERATIONS = re.compile(r"\b((?:LDG|STG|LDL|STL|F2FP|RED|ATOMG?)[A-Z0-9_.]*)")


@dataclass(frozen=True)
class Code:
    """Arguments and machine code of a compiled kernel; bytes of `stack` are spilt registers."""

    registers: int
    stack: int
    operations: Counter[str]
    ptx: str

    def count(self, *beginnings: str) -> int:
        return sum(number for name, number in self.operations.items() if name.startswith(beginnings))


def compile_plan(plan: Plan, tensors: Sequence[Tensor], capability: int) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8bench.formats.triton_casts import kernels

    function = getattr(kernels, plan.function)
    special = SpecialisedFunction.of(plan, tensors)
    types = dict(special.types)
    signature, constants, hints = {}, dict(special.constants), {}
    for place, name in enumerate(function.arg_names):
        kind = types.get(name)
        if kind in (None, 1):
            signature[name] = "constexpr"
            constants.setdefault(name, kind)
            continue
        signature[name] = TYPES[kind] if isinstance(kind, torch.dtype) else "i32"
        aligned = isinstance(kind, torch.dtype) and not function.params[place].do_not_specialize_on_alignment
        if kind == 16 or aligned:
            hints[(place,)] = [["tt.divisibility", 16]]
    constexprs = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs, attrs=hints)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": plan.warps})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        sass = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    words = usage.stdout + usage.stderr
    registers, stack = (int(re.search(rf"{name}:(\d+)", words).group(1)) for name in ("REG", "STACK"))
    return Code(registers, stack, Counter(_OPERATIONS.findall(sass)), result.asm["ptx"])
