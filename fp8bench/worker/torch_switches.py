"""Lists all switches (global settings) of torch. tests/worker/test_census.py compares them with torch's public names.

The class `Switch` explains the fields of a switch, for example `usual`, its value in a new process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import torch
from torch.nn import attention
from torch.nn.modules import module

from fp8bench.user_code.switches import Switch, Unset, UnusedLibraryValue, make_attribute_switch
from fp8bench.worker import torch_state as state

_SMALLEST_FLOAT = 5e-324
_DEVICE_KINDS = ("cpu", "cuda")
_LOWERED_PRECISIONS = ("tf32", "bf16", "mixed")
# For each kind of device: the older functions that turn autocast on, and that set its dtype. Older versions of torch
# had autocast only for CUDA, so the function whose name has no device is CUDA's.
_OLD_AUTOCAST_SETTERS = {
    "cpu": ("torch.set_autocast_cpu_enabled", "torch.set_autocast_cpu_dtype"),
    "cuda": ("torch.set_autocast_enabled", "torch.set_autocast_gpu_dtype"),
}


def list_torch_switches() -> Iterator[Switch]:
    """Yields the switches in the order in which they must be restored. The lock on torch's flags comes first, because
    no flag can be restored while it is locked. Settings that other settings overwrite come last.
    """
    yield from _list_mode_switches()
    yield from _list_numerics_switches()
    yield from _list_library_switches()
    yield from _list_attention_switches()
    yield from _list_module_and_compiler_switches()
    yield from _list_gpu_switches()
    yield from _list_product_switches()


def list_arithmetic_switches() -> Iterator[Switch]:
    """Yields the switches that change how fast, or how exactly, torch computes an operator."""
    # Do not list modes and hooks, because they run additional code, but do not change how an operator computes.
    yield from _list_numerics_switches()
    yield from _list_library_switches()
    yield from _list_product_switches()


def _list_mode_switches() -> Iterator[Switch]:
    yield Switch(
        "torch's lock on its flags",
        torch.backends.flags_frozen,
        state.set_flags_frozen,
        usual=False,
        is_distorting=bool,
        names=("torch.backends.disable_global_flags",),
        restore_instruction="do not call torch.backends.disable_global_flags()",
    )
    # Inference mode comes before gradients, because it also turns gradients off.
    for name, read, usual, remedy in (
        ("inference mode", torch.is_inference_mode_enabled, False, "leave torch.inference_mode()"),
        ("modes of torch's functions", state.count_function_modes, 0, "leave the TorchFunctionMode"),
        ("modes of torch's dispatcher", torch._C._len_torch_dispatch_stack, 0, "leave the TorchDispatchMode"),
        ("torch's profiler", torch._C._autograd._profiler_enabled, False, "end the profiler"),
    ):
        yield Switch(name, read, None, usual=usual, is_distorting=bool, restore_instruction=remedy)
    yield _make_function_switch("gradients", torch.is_grad_enabled, "torch.set_grad_enabled", usual=True)
    yield _make_function_switch("the default device", state.get_default_device, "torch.set_default_device", usual=None)
    yield Switch(
        "hooks of saved tensors",
        state.get_saved_hooks,
        state.restore_saved_hooks,
        usual=None,
        is_distorting=bool,
        restore_instruction="leave torch.autograd.graph.saved_tensors_hooks",
    )
    for kind in _DEVICE_KINDS:
        old_enabled_setter, old_dtype_setter = _OLD_AUTOCAST_SETTERS[kind]
        yield _make_function_switch(
            f"autocast on {kind}",
            partial(torch.is_autocast_enabled, kind),
            "torch.set_autocast_enabled",
            kind,
            usual=False,
            names=("torch.set_autocast_enabled", old_enabled_setter),
        )
        yield _make_function_switch(
            f"the dtype of autocast on {kind}",
            partial(torch.get_autocast_dtype, kind),
            "torch.set_autocast_dtype",
            kind,
            names=("torch.set_autocast_dtype", old_dtype_setter),
        )
    yield _make_function_switch(
        "the cache of autocast", torch.is_autocast_cache_enabled, "torch.set_autocast_cache_enabled"
    )
    yield _make_function_switch(
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


def _list_numerics_switches() -> Iterator[Switch]:
    """Yields the switches for default dtypes, threads, and denormal numbers."""
    yield _make_function_switch(
        "the default dtype",
        torch.get_default_dtype,
        "torch.set_default_dtype",
        usual=torch.float32,
        names=("torch.set_default_dtype", "torch.set_default_tensor_type"),
    )
    yield _make_function_switch("the number of threads", torch.get_num_threads, "torch.set_num_threads")
    yield _make_function_switch(
        "the number of interop threads", torch.get_num_interop_threads, "torch.set_num_interop_threads"
    )
    yield _make_function_switch(
        "deterministic algorithms",
        torch.get_deterministic_debug_mode,
        "torch.set_deterministic_debug_mode",
        names=("torch.set_deterministic_debug_mode", "torch.use_deterministic_algorithms"),
        default=0,
    )
    yield make_attribute_switch(
        "the filling of new memory", torch.utils.deterministic, "fill_uninitialized_memory", usual=True
    )
    # torch does not report this switch. Python's arithmetic shows it, because it uses the same unit of the CPU.
    yield _make_function_switch(
        "denormals as zero", lambda: _SMALLEST_FLOAT * 1.0 == 0.0, "torch.set_flush_denormal", usual=False
    )


def _list_library_switches() -> Iterator[Switch]:
    cuda = torch.backends.cuda
    yield from _make_flag_switch("oneDNN", "mkldnn.enabled", True, is_distorting=True)
    yield from _make_flag_switch("oneDNN's deterministic algorithms", "mkldnn.deterministic", False)
    yield from _make_flag_switch("cuDNN", "cudnn.enabled", True, is_distorting=True)
    yield from _make_flag_switch("cuDNN's benchmark", "cudnn.benchmark", False)
    yield from _make_flag_switch("cuDNN's limit of benchmarks", "cudnn.benchmark_limit")
    yield from _make_flag_switch("cuDNN's deterministic algorithms", "cudnn.deterministic", False)
    yield from _make_flag_switch("cuDNN's depthwise kernel", "cudnn.depthwise_kernel", "auto")
    yield from _make_flag_switch("MIOpen's immediate mode", "miopen.immediate", False)
    yield from _make_flag_switch("the engine of quantised operators", "quantized.engine")
    yield from _make_flag_switch("the path finder of einsum", "opt_einsum.enabled")
    yield from _make_flag_switch("the strategy of einsum", "opt_einsum.strategy")
    yield Switch(
        "NNPACK",
        torch._C._get_nnpack_enabled,
        torch._C._set_nnpack_enabled,
        usual=True,
        is_distorting=partial(_differs_from_usual, True),
        names=("torch.backends.nnpack.set_flags", "torch.backends.nnpack.flags"),
        restore_instruction="torch.backends.nnpack.set_flags(True)",
    )
    for switch_name, function in (
        ("the library of linear algebra", "preferred_linalg_library"),
        ("the library of products on a GPU", "preferred_blas_library"),
        ("the library of attention on ROCm", "preferred_rocm_fa_library"),
    ):
        preferred_library_function = getattr(cuda, function)
        yield Switch(
            switch_name,
            preferred_library_function,
            preferred_library_function,
            names=(f"torch.backends.cuda.{function}",),
        )
    if hasattr(torch.backends, "python_native"):  # torch.backends.python_native exists since torch 2.12
        setter_names = (
            "DSLController.enabled",
            "DSLController.enable",
            "DSLController.disable",
            "enable_operations",
            "disable_operations",
            "enable_dispatch_keys",
            "disable_dispatch_keys",
        )
        yield Switch(
            "operators in Python's kernel languages",
            state.list_disabled_operators,
            state.restore_disabled_operators,
            usual=(),
            names=tuple(f"torch.backends.python_native.{setter}" for setter in setter_names),
        )


def _list_attention_switches() -> Iterator[Switch]:
    cuda = torch.backends.cuda
    for switch_name, name in (
        ("flash attention", "flash"),
        ("memory-efficient attention", "mem_efficient"),
        ("attention in plain products", "math"),
        ("cuDNN's attention", "cudnn"),
    ):
        yield _make_function_switch(
            switch_name, getattr(cuda, f"{name}_sdp_enabled"), f"torch.backends.cuda.enable_{name}_sdp", usual=True
        )
    # Reading the order of attention kernels would initialise the GPU.
    read_attention_order = torch._C._get_sdp_priority_order
    if torch.cuda.is_available():
        read_attention_order = partial(state.read_if_gpu_active, state.get_attention_order, UnusedLibraryValue)
    yield Switch("the order of attention's kernels", read_attention_order, torch._C._set_sdp_priority_order)
    yield Switch(
        "reduced-precision sums in attention",
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
        usual=False,
        is_distorting=bool,
        names=("torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",),
        restore_instruction="torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)",
    )
    if hasattr(attention, "current_flash_attention_impl"):
        yield Switch(
            "the implementation of flash attention",
            attention.current_flash_attention_impl,
            state.set_flash_attention,
            usual=None,
            names=(
                "torch.nn.attention.activate_flash_attention_impl",
                "torch.nn.attention.restore_flash_attention_impl",
            ),
        )
    yield _make_function_switch(
        "the fast path of encoders",
        torch.backends.mha.get_fastpath_enabled,
        "torch.backends.mha.set_fastpath_enabled",
        default=True,
    )


def _list_module_and_compiler_switches() -> Iterator[Switch]:
    # Global module hooks would also run in the layers of the reference.
    global_hook_dicts = [
        value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)
    ]
    empty_global_hooks = ((),) * len(global_hook_dicts)

    def restore_hooks(old: tuple[dict[int, Any], ...]) -> None:
        for hook_dict, old_hooks in zip(global_hook_dicts, old, strict=True):
            hook_dict.clear()
            hook_dict.update(old_hooks)

    # Usually no module has hooks. Then return a constant, which is fast, because switches are read around every slot.
    yield Switch(
        "hooks of all modules",
        lambda: tuple(map(dict, global_hook_dicts)) if any(global_hook_dicts) else empty_global_hooks,
        restore_hooks,
        usual=empty_global_hooks,
        is_distorting=any,
        restore_instruction="remove the hooks",
    )
    yield Switch(
        "the stance of torch.compile", state.get_compiler_stance, state.set_stance, names=("torch.compiler.set_stance",)
    )
    yield Switch(
        "the default backend of torch.compile",
        state.get_default_compiler,
        state.set_default_compiler,
        names=("torch.compiler.set_default_backend",),
    )


def _list_gpu_switches() -> Iterator[Switch]:
    """Yields the settings of torch for GPUs, such as the current device. They are read only if a GPU is in use,
    because reading would initialise it.
    """
    if not torch.cuda.is_available():
        return
    # For each switch: its name, the function that reads it, the function that sets it, its default, and the public name
    # of the function that sets it.
    cuda = torch.cuda
    tunable = torch.cuda.tunable
    libraries = torch.backends.cuda
    plans = libraries.cufft_plan_cache
    rows: list[tuple[str, Callable[[], Any], Callable[[Any], object], Any, str]] = [
        ("the current GPU", cuda.current_device, cuda.set_device, 0, "torch.cuda.set_device"),
        (
            "the current stream",
            lambda: cuda.current_stream().cuda_stream,
            state.set_cuda_stream,
            0,
            "torch.cuda.set_stream",
        ),
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
            state.has_memory_pool,
            cuda.memory.caching_allocator_enable,
            True,
            "torch.cuda.memory.caching_allocator_enable",
        ),
        (
            "cuFFT's plans",
            lambda: plans.max_size,
            lambda size: setattr(plans, "max_size", size),
            Unset,
            "torch.backends.cuda.cuFFTPlanCache.max_size",
        ),
    ]
    # Each function returns the size of a workspace, or sets it to an argument. Older versions of torch lack them.
    rows += [
        (
            f"the workspace of {library_name}",
            read_or_set_size,
            read_or_set_size,
            Unset,
            f"torch.backends.cuda.{function}",
        )
        for library_name, function in (("cuBLAS", "cublas_workspace_size"), ("cuBLASLt", "cublaslt_workspace_size"))
        if (read_or_set_size := getattr(libraries, function, None)) is not None
    ]
    for switch_name, read, write, usual_value, public_name in rows:
        # If no GPU is in use, a switch reads as its usual value, or as UnusedLibraryValue if it has none.
        switch_value_before_gpu = UnusedLibraryValue if usual_value is Unset else usual_value
        yield Switch(
            switch_name,
            partial(state.read_if_gpu_active, read, switch_value_before_gpu),
            write,
            (public_name,),
            usual_value,
        )


def _list_product_switches() -> Iterator[Switch]:
    """Yields the settings of torch for matrix products and sums. Older float32 settings come first, because setting
    one of them also sets newer ones.
    """
    # If newer settings contradict an older one, torch refuses to read the older one. Then read_setting returns "mixed".
    yield Switch(
        "float32 products",
        partial(state.read_setting, torch.get_float32_matmul_precision),
        torch.set_float32_matmul_precision,
        names=("torch.set_float32_matmul_precision", "torch.backends.cuda.matmul.allow_tf32"),
        usual="highest",
        is_distorting=partial(_differs_from_usual, "highest"),
        restore_instruction='torch.set_float32_matmul_precision("highest")',
    )
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    yield Switch(
        "cuDNN's TF32",
        lambda: state.read_setting(lambda: cudnn.allow_tf32),
        lambda on: setattr(cudnn, "allow_tf32", on),
        names=("torch.backends.cudnn.allow_tf32",),
        usual=True,
    )
    for dtype in ("bf16", "fp16"):
        reduction_flag_name = f"allow_{dtype}_reduced_precision_reduction"
        attribute_names = [reduction_flag_name]
        if hasattr(matmul, f"{reduction_flag_name}_split_k"):
            attribute_names.append(f"{reduction_flag_name}_split_k")
        # The setting is a pair. The split-K attribute reads its second value. Assigning the first attribute sets both.
        yield Switch(
            f"{dtype}'s reduced-precision sums",
            partial(_read_attributes, matmul, attribute_names),
            partial(setattr, matmul, reduction_flag_name),
            names=(f"torch.backends.cuda.matmul.{reduction_flag_name}",),
            usual=(True,) * len(attribute_names),
            is_distorting=lambda values: not all(values),
            restore_instruction=f"torch.backends.cuda.matmul.{reduction_flag_name} = True",
        )
    yield from _make_flag_switch(
        "fp16's accumulators", "cuda.matmul.allow_fp16_accumulation", False, is_distorting=True
    )
    for switch_name, attribute_path, backend, operators in (
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
        # Use torch's private functions, because some public attributes set a different setting than they read. In a new
        # process, cuDNN's convolutions and recurrences use TF32. The reference precision turns TF32 off before
        # `is_distorting` is called.
        yield Switch(
            switch_name,
            partial(torch._C._get_fp32_precision_getter, backend, operators),
            partial(torch._C._set_fp32_precision_setter, backend, operators),
            names=(f"torch.backends.{attribute_path}fp32_precision",),
            usual="tf32" if attribute_path in ("cudnn.conv.", "cudnn.rnn.") else "none",
            is_distorting=_LOWERED_PRECISIONS.__contains__,
            expected="ieee",
            restore_instruction=f'torch.backends.{attribute_path}fp32_precision = "ieee"',
        )


def _make_function_switch(
    name: str,
    read: Callable[[], Any],
    path: str,
    *first_arguments: Any,
    usual: Any = Unset,
    default: Any = Unset,
    names: tuple[str, ...] = (),
) -> Switch:
    """Makes a switch that is set by a function of torch.

    The keyword arguments `usual` and `default` are the value in a new process. Pass `usual` if any other value would
    distort the reference and must be refused, and `default` if other values are harmless.
    """
    setter_function: Any = reduce(getattr, path.split(".")[1:], torch)
    arguments = ", ".join(map(repr, (*first_arguments, usual)))
    is_distorting = None if usual is Unset else partial(_differs_from_usual, usual)
    return Switch(
        name,
        read,
        partial(setter_function, *first_arguments),
        names or (path,),
        default if usual is Unset else usual,
        is_distorting,
        restore_instruction=f"{path}({arguments})",
    )


def _make_flag_switch(name: str, path: str, usual: Any = Unset, is_distorting: bool = False) -> Iterator[Switch]:
    """Yields the switch for an attribute of torch.backends. Yields nothing if this version of torch lacks the
    attribute.
    """
    *parents, attribute_name = path.split(".")
    flag_parent_object = reduce(getattr, parents, torch.backends)
    if hasattr(flag_parent_object, attribute_name):
        full_path = f"torch.backends.{path}"
        yield make_attribute_switch(
            name,
            flag_parent_object,
            attribute_name,
            names=(full_path,),
            usual=usual,
            is_distorting=partial(_differs_from_usual, usual) if is_distorting else None,
            restore_instruction=f"{full_path} = {usual!r}",
        )


def _differs_from_usual(usual: Any, value: Any) -> bool:
    return bool(value != usual)


def _read_attributes(holder: Any, attribute_names: list[str]) -> tuple[Any, ...]:
    return tuple(getattr(holder, name) for name in attribute_names)
