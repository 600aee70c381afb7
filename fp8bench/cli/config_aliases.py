"""What other trainers call our options, for files of options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Alias(NamedTuple):
    """An option by the name that others give it, or an axis of --set; `values` are its values in their words."""

    option: str
    values: Mapping[str, str] = {}
    axis: str = ""


_YES = {"true": "yes", "false": "no"}
_BLOCKS = {"true": "blocks", "false": "no"}
# An option or axis may have several names, a name one option and one axis: `train` has the first, `suite` the second.
ALIASES: Mapping[str, tuple[Alias, ...]] = {
    **dict.fromkeys(("max_grad_norm", "gradient_clipping", "clip_grad", "grad_clip"), (Alias("clip"),)),
    **dict.fromkeys(("learning_rate", "lr"), (Alias("rate"),)),
    **dict.fromkeys(("warmup_ratio", "warmup_fraction"), (Alias("warmup"),)),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_decay_style"), (Alias("schedule", {
        "reduce_lr_on_plateau": "plateau", "warmup_stable_decay": "wsd", "inverse_sqrt": "inverse-sqrt",
        "one_cycle": "one-cycle", "onecycle": "one-cycle", "constant_with_warmup": "constant",
    }),)),
    "optim": (Alias("optimizer", {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}),),
    **dict.fromkeys(("adam_beta1", "momentum"), (Alias("beta1"),)),
    "adam_beta2": (Alias("beta2"),),
    **dict.fromkeys(("adam_epsilon", "adam_eps", "epsilon"), (Alias("eps"),)),
    **dict.fromkeys(("max_steps", "train_iters", "num_train_steps"), (Alias("steps"),)),
    **dict.fromkeys(
        ("max_batch_size", "batch_size", "micro_batch_size", "per_device_train_batch_size"),
        (Alias("batch"), Alias("set", axis="batch")),
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps"),
                    (Alias("micro-batches"), Alias("set", axis="micro_batches"))),
    **dict.fromkeys(("seq_length", "sequence_length", "max_seq_length", "block_size"),
                    (Alias("sequence"), Alias("set", axis="sequence"))),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"),
                    (Alias("checkpointing", _BLOCKS), Alias("set", _BLOCKS, "checkpointing"))),
    "torch_compile": (Alias("compile", _YES), Alias("set", _YES, "compile")),
    "use_flash_attention": (Alias("attention", {"true": "auto"}),
                            Alias("set", {"true": "flash", "false": "math"}, "attention")),
    **dict.fromkeys(("initial_scale", "init_scale", "initial_loss_scale"), (Alias("scale-first"),)),
    **dict.fromkeys(("scale_window", "loss_scale_window", "growth_interval"), (Alias("scale-growth"),)),
    **dict.fromkeys(("growth_factor", "loss_scale_factor"), (Alias("scale-factor"),)),
    "eval_steps": (Alias("evaluate"),),
    "save_steps": (Alias("keep"),),
}  # fmt: skip
