"""TrainingArguments for each way of running several processes, and what its model is wrapped in."""

from typing import Any

LAYER = "BailingHybridDecoderLayer"
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPBailingHybridForCausalLM", "zero3": "DeepSpeedEngine"}


def backend_options(backend: str, *, dry: bool) -> dict[str, Any]:
    """Of ``one`` (a single process), ``ddp``, ``fsdp2``, or ``zero1`` to ``zero3``.

    Raises:
        ValueError: another name.
    """
    if backend == "one":
        return {}
    if backend == "ddp":
        return {"ddp_find_unused_parameters": False}
    if backend == "fsdp2":
        settings = {"version": 2, "transformer_layer_cls_to_wrap": [LAYER], "reshard_after_forward": True}
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": settings}
    if backend in ("zero1", "zero2", "zero3"):
        return {"deepspeed": {
            "zero_optimization": {"stage": int(backend[-1])},
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": not dry}, "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        }}  # fmt: skip
    raise ValueError(f"expected one, ddp, fsdp2 or zero1 to zero3, got {backend!r}")


def allow_fsdp_on_cpu() -> None:
    """On a CPU, accelerate runs DDP where FSDP is asked for, unless the state says MULTI_GPU before it is read."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
