"""Backends of several processes, as trainers are told of them."""


def allow_fsdp_on_cpu() -> None:
    """On a CPU, accelerate runs DDP where FSDP is asked for, unless the state says MULTI_GPU before it is read."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def backend_options(backend: str) -> dict:
    """TrainingArguments for a backend."""
    if backend.startswith("fsdp2"):
        return {
            "num_iterations": 2 if backend == "fsdp2_whole" else 1,
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"],
                "reshard_after_forward": backend == "fsdp2",
            },
        }
    if backend.startswith("zero"):
        config = {
            "zero_optimization": {"stage": int(backend[-1]), "stage3_gather_16bit_weights_on_model_save": True},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1e9,
            "bf16": {"enabled": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        return {"deepspeed": config}
    return {"ddp_find_unused_parameters": False}
