"""Variables of the environment that change what is measured: recorded with every run, watched around every step."""

from __future__ import annotations

from collections.abc import Mapping

from fp8bench.errors import UsageError

# What torch and the libraries below it read while they run. Others are written by themselves: inductor names its cache
# there, CUDA how it loads.
READ_BY_TORCH = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_PLACES", "OMP_DYNAMIC", "OMP_SCHEDULE",
    "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_NUM_THREADS", "MKL_DYNAMIC",
    "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_VERBOSE",
    "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "TORCH_LINALG_PREFER_CUSOLVER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING", "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING", "PYTORCH_TUNABLEOP_FILENAME", "PYTORCH_TUNABLEOP_NUMERICAL_CHECK",
    "PYTORCH_TUNABLEOP_MAX_TUNING_DURATION_MS", "PYTORCH_TUNABLEOP_MAX_TUNING_ITERATIONS",
    "PYTORCH_TUNABLEOP_MAX_WARMUP_DURATION_MS", "PYTORCH_TUNABLEOP_MAX_WARMUP_ITERATIONS",
    "PYTORCH_TUNABLEOP_ICACHE_FLUSH_ENABLED", "PYTORCH_TUNABLEOP_ROTATING_BUFFER_SIZE",
    "PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED", "PYTORCH_TUNABLEOP_ROCBLAS_ENABLED", "MALLOC_ARENA_MAX", "MALLOC_CONF",
    "LD_PRELOAD",
)  # fmt: skip
# Of these, what lowers the precision of products behind a precision's name.
LOWERING = ("NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE")
# What a switch's fact in a run's environment begins with; the fact of those that are not as in a fresh process.
SWITCH = "switch "
SWITCHES_SET = "switches_set"


def is_on(variable: str, environment: Mapping[str, str], on: str, off: str, purpose: str) -> bool:
    """Whether a variable of fp8bench's own says `on`, or nothing; `purpose` is what `off` is for ('to do without')."""
    asked = environment.get(variable, "") or on
    if asked not in (on, off):
        raise UsageError(
            f"{variable} is {asked!r:.80}. Set it to {off} {purpose}, or to {on}, which is what is done without it."
        )
    return asked == on
