"""Run by torchrun: trains a stock or a tree trainer on recorded rollouts with a backend, and saves what rank 0 has.

    torchrun --nproc_per_node 2 train_two.py {stock,tree} {ddp,fsdp2,zero1,zero2,zero3} FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch


def accelerator_state(backend: str) -> None:
    """On a CPU, accelerate runs DDP where FSDP is asked for, unless the state says MULTI_GPU before it is made."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    if backend == "fsdp2":
        PartialState(True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def backend_options(backend: str) -> dict:
    """TrainingArguments for a backend."""
    if backend == "fsdp2":
        return {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {
                "version": 2,
                "transformer_layer_cls_to_wrap": ["Qwen3_5DecoderLayer"],
                "reshard_after_forward": True,
            },
        }
    if backend.startswith("zero"):
        config = {
            "zero_optimization": {"stage": int(backend[-1])},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1e9,
            "bf16": {"enabled": False},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        return {"deepspeed": config}
    return {"ddp_find_unused_parameters": False}


def full_parameters(trainer) -> dict[str, torch.Tensor]:
    """Every parameter, gathered; a collective."""
    found = {}
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor"):
            value = parameter.full_tensor()
        elif hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.detach().clone()
        else:
            value = parameter
        found[name] = value.detach().clone().cpu()
    return found


def main() -> None:
    """See the module."""
    kind, backend, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    accelerator_state(backend)
    from trl import GRPOConfig, GRPOTrainer

    from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
    from support import recorded
    from support.models import tiny_model

    rank = int(os.environ["RANK"])
    tree = kind == "tree"
    options = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64} if tree else {}
    arguments = {**recorded.arguments(folder), **backend_options(backend), **options}
    # Two rows of a group fewer on one rank would be illegal in TRL; ragged lengths make the ranks' plans unequal.
    trainer = (TreeGRPOTrainer if tree else GRPOTrainer)(
        tiny_model("qwen3_5_text", seed=1),
        recorded.recorded_reward,
        args=(TreeGRPOConfig if tree else GRPOConfig)(**arguments),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
    )
    trainer.train()
    facts = {
        "world_size": trainer.accelerator.num_processes,
        "distributed_type": str(trainer.accelerator.distributed_type),
        "wrapper": type(trainer.model_wrapped).__name__,
        "logs": trainer.state.log_history,
    }
    parameters = full_parameters(trainer)
    if rank == 0:
        torch.save(parameters, folder / f"{kind}-{backend}.pt")
        (folder / f"{kind}-{backend}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
