"""All switches of torch. tests/worker/test_census.py compares them with torch's public names that could be one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import torch
from torch.nn import attention
from torch.nn.modules import module

from fp8bench.user_code.switches import NotInUse, Switch, Unset, attribute
from fp8bench.worker import torch_state as state

_SMALLEST = 5e-324
_KINDS = ("cpu", "cuda")
_LOWERED = ("tf32", "bf16", "mixed")


def torch_switches() -> Iterator[Switch]:
    """Yields the switches in the order of restoring them: first those that block others, newer settings last."""
    # A lock on flags must be removed before flags are restored.
    yield from _modes()
    yield from _numbers()
    yield from _libraries()
    yield from _attention()
    yield from _modules_and_compilers()
    yield from _gpus()
    yield from _products()


def switches_of_arithmetic() -> Iterator[Switch]:
    """Yields the switches that change how fast, or how exactly, torch computes the same operators."""
    # Modes and hooks are left out: they run code, and change no operator.
    yield from _numbers()
    yield from _libraries()
    yield from _products()


def _modes() -> Iterator[Switch]:
    autograd = torch._C._autograd
    yield Switch(
        "torch's lock on its flags",
        torch.backends.flags_frozen,
        state.freeze,
        usual=False,
        bends=bool,
        names=("torch.backends.disable_global_flags",),
        mend="do not call torch.backends.disable_global_flags()",
    )
    # Comes before gradients, which it also turns off.
    yield Switch(
        "inference mode",
        torch.is_inference_mode_enabled,
        None,
        usual=False,
        bends=bool,
        mend="leave torch.inference_mode()",
    )
    yield _call("gradients", torch.is_grad_enabled, "torch.set_grad_enabled", usual=True)
    yield _call("the default device", state.default_device, "torch.set_default_device", usual=None)
    yield Switch(
        "modes of torch's functions",
        lambda: len(state.function_modes()) - (state.default_device() is not None),
        None,
        usual=0,
        bends=bool,
        mend="leave the TorchFunctionMode",
    )
    yield Switch(
        "modes of torch's dispatcher",
        torch._C._len_torch_dispatch_stack,
        None,
        usual=0,
        bends=bool,
        mend="leave the TorchDispatchMode",
    )
    yield Switch(
        "hooks of saved tensors",
        state.saved_hooks,
        state.put_back_saved_hooks,
        usual=None,
        bends=bool,
        mend="leave torch.autograd.graph.saved_tensors_hooks",
    )
    yield Switch(
        "torch's profiler",
        autograd._profiler_enabled,
        None,
        usual=False,
        bends=bool,
        mend="end the profiler",
    )
    for kind in _KINDS:
        yield _call(
            f"autocast on {kind}",
            partial(torch.is_autocast_enabled, kind),
            "torch.set_autocast_enabled",
            kind,
            usual=False,
            names=("torch.set_autocast_enabled", f"torch.set_autocast_{_OLDER[kind]}enabled"),
        )
        yield _call(
            f"the dtype of autocast on {kind}",
            partial(torch.get_autocast_dtype, kind),
            "torch.set_autocast_dtype",
            kind,
            names=("torch.set_autocast_dtype", f"torch.set_autocast_{kind.replace('cuda', 'gpu')}_dtype"),
        )
    yield _call("the cache of autocast", torch.is_autocast_cache_enabled, "torch.set_autocast_cache_enabled")
    yield _call(
        "anomaly detection",
        torch.is_anomaly_enabled,
        "torch.set_anomaly_enabled",
        usual=False,
        names=("torch.set_anomaly_enabled", "torch.autograd.anomaly_mode.set_detect_anomaly"),
    )
    yield Switch(
        "autograd's threads",
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
        usual=True,
        names=("torch.autograd.grad_mode.set_multithreading_enabled",),
    )


# Before torch had devices in autocast, torch.set_autocast_enabled meant CUDA.
_OLDER = {"cpu": "cpu_", "cuda": ""}


def _numbers() -> Iterator[Switch]:
    """Yields the switches of default dtypes, of threads, and of denormal numbers."""
    yield _call(
        "the default dtype",
        torch.get_default_dtype,
        "torch.set_default_dtype",
        usual=torch.float32,
        names=("torch.set_default_dtype", "torch.set_default_tensor_type"),
    )
    yield _call("the number of threads", torch.get_num_threads, "torch.set_num_threads")
    yield _call("the number of interop threads", torch.get_num_interop_threads, "torch.set_num_interop_threads")
    yield _call(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        "torch.set_deterministic_debug_mode",
        names=("torch.set_deterministic_debug_mode", "torch.use_deterministic_algorithms"),
        recorded_as=0,
    )
    yield attribute("the filling of new memory", torch.utils.deterministic, "fill_uninitialized_memory", usual=True)
    # torch does not report it; Python's arithmetic reveals it, because it uses the same unit of the CPU.
    yield _call("denormals as zero", lambda: _SMALLEST * 1.0 == 0.0, "torch.set_flush_denormal", usual=False)


def _libraries() -> Iterator[Switch]:
    cuda = torch.backends.cuda
    yield from _flag("oneDNN", "mkldnn.enabled", True, bends=True)
    yield from _flag("oneDNN's deterministic algorithms", "mkldnn.deterministic", False)
    yield from _flag("cuDNN", "cudnn.enabled", True, bends=True)
    yield from _flag("cuDNN's benchmark", "cudnn.benchmark", False)
    yield from _flag("cuDNN's limit of benchmarks", "cudnn.benchmark_limit")
    yield from _flag("cuDNN's deterministic algorithms", "cudnn.deterministic", False)
    yield from _flag("cuDNN's depthwise kernel", "cudnn.depthwise_kernel", "auto")
    yield from _flag("MIOpen's immediate mode", "miopen.immediate", False)
    yield from _flag("the engine of quantised operators", "quantized.engine")
    yield from _flag("the path finder of einsum", "opt_einsum.enabled")
    yield from _flag("the strategy of einsum", "opt_einsum.strategy")
    yield Switch(
        "NNPACK",
        torch._C._get_nnpack_enabled,
        torch._C._set_nnpack_enabled,
        usual=True,
        bends=partial(_is_not, True),
        names=("torch.backends.nnpack.set_flags", "torch.backends.nnpack.flags"),
        mend="torch.backends.nnpack.set_flags(True)",
    )
    for words, function in (
        ("the library of linear algebra", "preferred_linalg_library"),
        ("the library of products on a GPU", "preferred_blas_library"),
        ("the library of attention on ROCm", "preferred_rocm_fa_library"),
    ):
        chosen = getattr(cuda, function)
        yield Switch(words, chosen, chosen, names=(f"torch.backends.cuda.{function}",))
    if hasattr(torch.backends, "python_native"):  # since torch 2.12
        native = "torch.backends.python_native"
        yield Switch(
            "operators in Python's kernel languages",
            state.native_off,
            state.put_back_native,
            usual=(),
            names=(
                f"{native}.DSLController.enabled",
                *(
                    f"{native}.{name}"
                    for name in (
                        "DSLController.enable",
                        "DSLController.disable",
                        "enable_operations",
                        "disable_operations",
                        "enable_dispatch_keys",
                        "disable_dispatch_keys",
                    )
                ),
            ),
        )


def _attention() -> Iterator[Switch]:
    cuda = torch.backends.cuda
    for words, name in (
        ("flash attention", "flash"),
        ("memory-efficient attention", "mem_efficient"),
        ("attention in plain products", "math"),
        ("cuDNN's attention", "cudnn"),
    ):
        yield _call(words, getattr(cuda, f"{name}_sdp_enabled"), f"torch.backends.cuda.enable_{name}_sdp", usual=True)
    # Reading the order would initialize a GPU.
    order = torch._C._get_sdp_priority_order
    if torch.cuda.is_available():
        order = partial(state.read_if_used, state.attention_order, NotInUse)
    yield Switch("the order of attention's kernels", order, torch._C._set_sdp_priority_order)
    yield Switch(
        "reduced-precision sums in attention",
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
        usual=False,
        bends=bool,
        names=("torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",),
        mend="torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)",
    )
    if hasattr(attention, "current_flash_attention_impl"):
        yield Switch(
            "the implementation of flash attention",
            attention.current_flash_attention_impl,
            state.activate,
            usual=None,
            names=(
                "torch.nn.attention.activate_flash_attention_impl",
                "torch.nn.attention.restore_flash_attention_impl",
            ),
        )
    yield _call(
        "the fast path of encoders",
        torch.backends.mha.get_fastpath_enabled,
        "torch.backends.mha.set_fastpath_enabled",
        recorded_as=True,
    )


def _modules_and_compilers() -> Iterator[Switch]:
    # Hooks of all modules also run in every layer of the reference.
    hooks = [value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)]

    def put_back(old: tuple[dict[int, Any], ...]) -> None:
        for holder, old_hooks in zip(hooks, old, strict=True):
            holder.clear()
            holder.update(old_hooks)

    yield Switch(
        "hooks of all modules",
        lambda: tuple(dict(hook) for hook in hooks) if any(hooks) else ((),) * len(hooks),
        put_back,
        usual=((),) * len(hooks),
        bends=any,
        mend="remove the hooks",
    )
    yield Switch("the stance of torch.compile", state.stance, state.set_stance, names=("torch.compiler.set_stance",))
    yield Switch(
        "the default backend of torch.compile",
        state.default_compiler,
        state.set_default_compiler,
        names=("torch.compiler.set_default_backend",),
    )


def _gpus() -> Iterator[Switch]:
    """Yields switches of GPUs, which are read only once a GPU is in use, because reading would initialize it."""
    if not torch.cuda.is_available():
        return
    # Name, functions to read and to write, default, and public name.
    cuda, tunable, libraries = torch.cuda, torch.cuda.tunable, torch.backends.cuda
    plans, name = libraries.cufft_plan_cache, "torch.backends.cuda.cuFFTPlanCache.max_size"
    rows: list[tuple[str, Callable[[], Any], Callable[[Any], object], Any, str]] = [
        ("the current GPU", cuda.current_device, cuda.set_device, 0, "torch.cuda.set_device"),
        ("the current stream", lambda: cuda.current_stream().cuda_stream, state.set_stream, 0, "torch.cuda.set_stream"),
        (
            "warnings of waiting",
            cuda.get_sync_debug_mode,
            cuda.set_sync_debug_mode,
            0,
            "torch.cuda.set_sync_debug_mode",
        ),
        (
            "the share of a GPU's memory",
            cuda.get_per_process_memory_fraction,
            cuda.set_per_process_memory_fraction,
            1.0,
            "torch.cuda.memory.set_per_process_memory_fraction",
        ),
        ("tuned products", tunable.is_enabled, tunable.enable, False, "torch.cuda.tunable.enable"),
        (
            "the tuning of products",
            tunable.tuning_is_enabled,
            tunable.tuning_enable,
            True,
            "torch.cuda.tunable.tuning_enable",
        ),
        (
            "the pool of a GPU's memory",
            state.pools_memory,
            cuda.memory.caching_allocator_enable,
            True,
            "torch.cuda.memory.caching_allocator_enable",
        ),
        ("cuFFT's plans", lambda: plans.max_size, lambda size: setattr(plans, "max_size", size), Unset, name),
    ]
    # Older versions of torch lack these.
    rows += [
        (f"the workspace of {called}", size, size, Unset, f"torch.backends.cuda.{function}")
        for called, function in (("cuBLAS", "cublas_workspace_size"), ("cuBLASLt", "cublaslt_workspace_size"))
        if (size := getattr(libraries, function, None)) is not None
    ]
    for words, read, write, usual, public in rows:
        yield Switch(
            words, partial(state.read_if_used, read, NotInUse if usual is Unset else usual), write, (public,), usual
        )


def _products() -> Iterator[Switch]:
    """Yields how numbers are multiplied and summed. Older switches of float32 come first, because they write newer
    ones."""
    yield Switch(
        "float32 products",
        partial(state.read_unmixed, torch.get_float32_matmul_precision),
        torch.set_float32_matmul_precision,
        ("torch.set_float32_matmul_precision", "torch.backends.cuda.matmul.allow_tf32"),
        "highest",
        lambda value: value != "highest",
        mend='torch.set_float32_matmul_precision("highest")',
    )
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    yield Switch(
        "cuDNN's TF32",
        lambda: state.read_unmixed(lambda: cudnn.allow_tf32),
        lambda on: setattr(cudnn, "allow_tf32", on),
        ("torch.backends.cudnn.allow_tf32",),
        True,
    )
    for dtype in ("bf16", "fp16"):
        word = f"allow_{dtype}_reduced_precision_reduction"
        both = [word, *(f"{word}_split_k" for _ in "." if hasattr(matmul, f"{word}_split_k"))]
        yield Switch(
            f"{dtype}'s reduced-precision sums",
            partial(_several, matmul, both),
            partial(setattr, matmul, word),
            (f"torch.backends.cuda.matmul.{word}",),
            (True,) * len(both),
            lambda value: not all(value),
            mend=f"torch.backends.cuda.matmul.{word} = True",
        )
    yield from _flag("fp16's accumulators", "cuda.matmul.allow_fp16_accumulation", False, bends=True)
    for words, path, backend, operators in (
        ("float32 of all backends", "", "generic", "all"),
        ("float32 on CUDA", "cudnn.", "cuda", "all"),
        ("float32 in oneDNN", "mkldnn.", "mkldnn", "all"),
        ("CUDA's float32 products", "cuda.matmul.", "cuda", "matmul"),
        ("cuDNN's float32 convolutions", "cudnn.conv.", "cuda", "conv"),
        ("cuDNN's float32 recurrences", "cudnn.rnn.", "cuda", "rnn"),
        ("oneDNN's float32 products", "mkldnn.matmul.", "mkldnn", "matmul"),
        ("oneDNN's float32 convolutions", "mkldnn.conv.", "mkldnn", "conv"),
        ("oneDNN's float32 recurrences", "mkldnn.rnn.", "mkldnn", "rnn"),
    ):
        # Some attributes write another setting than the one they read.
        yield Switch(
            words,
            partial(torch._C._get_fp32_precision_getter, backend, operators),
            partial(torch._C._set_fp32_precision_setter, backend, operators),
            (f"torch.backends.{path}fp32_precision",),
            "tf32" if path in ("cudnn.conv.", "cudnn.rnn.") else "none",
            _LOWERED.__contains__,
            wanted="ieee",
            mend=f'torch.backends.{path}fp32_precision = "ieee"',
        )


def _call(
    name: str,
    read: Callable[[], Any],
    path: str,
    *first: Any,
    usual: Any = Unset,
    recorded_as: Any = Unset,
    names: tuple[str, ...] = (),
) -> Switch:
    """Makes a switch that a function of torch sets. If a value is `usual`, any other distorts the reference;
    `recorded_as` is a value that is only the default."""
    write: Any = reduce(getattr, path.split(".")[1:], torch)
    arguments = ", ".join(map(repr, (*first, usual)))
    bends = None if usual is Unset else partial(_is_not, usual)
    return Switch(
        name,
        read,
        partial(write, *first),
        names or (path,),
        recorded_as if usual is Unset else usual,
        bends,
        mend=f"{path}({arguments})",
    )


def _flag(name: str, path: str, usual: Any = Unset, bends: bool = False) -> Iterator[Switch]:
    """Makes a switch of an attribute below torch.backends, if this torch has it."""
    *above, word = path.split(".")
    holder = reduce(getattr, above, torch.backends)
    if hasattr(holder, word):
        full = f"torch.backends.{path}"
        yield attribute(
            name,
            holder,
            word,
            names=(full,),
            usual=usual,
            bends=partial(_is_not, usual) if bends else None,
            mend=f"{full} = {usual!r}",
        )


def _is_not(usual: Any, value: Any) -> bool:
    return bool(value != usual)


def _several(holder: Any, words: list[str]) -> tuple[Any, ...]:
    return tuple(getattr(holder, word) for word in words)
