"""``TrainingArguments`` for each way of running several processes."""

from typing import Any

LAYER = "BailingHybridDecoderLayer"
# What the model of each is wrapped in.
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPBailingHybridForCausalLM",
    "fsdp2-kept": "FSDPBailingHybridForCausalLM",
    "zero3": "DeepSpeedEngine",
}


def backend_options(backend: str, *, dry: bool) -> dict[str, Any]:
    """Of "one" (a single process) or one of :data:`WRAPPERS`.

    "fsdp2-kept" keeps parameters gathered from a step's first forward to its last backward.

    Raises:
        ValueError: another name.
    """
    if backend == "one":
        return {}
    if backend not in WRAPPERS:
        raise ValueError(f"expected one or {', '.join(WRAPPERS)}, got {backend!r}")
    if backend == "ddp":
        return {"ddp_find_unused_parameters": False}
    if backend.startswith("fsdp2"):
        settings = {
            "version": 2,
            "transformer_layer_cls_to_wrap": [LAYER],
            "reshard_after_forward": backend == "fsdp2",
        }
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": settings}
    return {"deepspeed": {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": not dry}, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }}  # fmt: skip


def allow_fsdp_on_cpu() -> None:
    """On a CPU, accelerate runs DDP where FSDP is asked for, unless the state says MULTI_GPU before it is read."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
