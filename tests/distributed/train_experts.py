"""Run by torchrun: trains a mixture of experts, stock with whole experts, on trees with experts spread over processes.

    torchrun --nproc_per_node 2 train_experts.py FOLDER

Two processes have all experts together; of four, two pairs, which shard them with one another.

Two also train without kept graphs, and load a model with joined convolutions in parts, of which they note how far its
weights are off.
"""

import os
import sys
from pathlib import Path

import torch

FAMILY, JOINED = "qwen3_5_moe_text", "bailing_hybrid"
KINDS = ("stock-ddp", "tree-experts", "tree-kept-graphs")


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's values, of all processes; a collective."""
    gathered = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return gathered.detach().cpu().clone()


def main() -> None:
    """See the module."""
    from accelerate import PartialState
    from support import recorded
    from support.models import shallow_model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from trl import GRPOConfig, GRPOTrainer

    from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
    from harts_hf.runtime import run

    folder, rank, world_size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    PartialState(cpu=True)
    for family in (FAMILY, JOINED):
        if rank == 0:
            model = shallow_model(family, seed=1)
            model.config.router_aux_loss_coef = 0.0
            model.save_pretrained(folder / family)
    torch.distributed.barrier()
    found, ran, ops_of = {}, [], run.ops_of

    def noted(*args):
        ops, num_scoring = ops_of(*args)
        ran.extend(ops)
        return ops, num_scoring

    run.ops_of = noted
    for kind in KINDS if world_size == 2 else KINDS[::2]:
        spread = DistributedConfig(ep_size=2, fsdp_size=world_size) if kind != "stock-ddp" else None
        options = {} if spread is None else {"distributed_config": spread}
        model = AutoModelForCausalLM.from_pretrained(folder / FAMILY, experts_implementation="grouped_mm", **options)
        model.train()
        tree = kind.startswith("tree")
        options = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64} if tree else {}
        options |= {"gradient_checkpointing": kind == "tree-experts"}
        if kind == "tree-experts":
            options |= {"tree_placement": "local"}  # ranks tell one another the kinds of their ops
        if kind == "tree-kept-graphs":
            options |= {"tree_placement": "global", "tree_max_graph_tokens": 130}  # one rank drops a trunk's graph
        options |= {"max_steps": 2, "per_device_train_batch_size": 2}  # ranks open and close graphs at other places
        trainer = (TreeGRPOTrainer if tree else GRPOTrainer)(
            model,
            recorded.recorded_reward,
            args=(TreeGRPOConfig if tree else GRPOConfig)(
                **recorded.arguments(folder, ddp_find_unused_parameters=False, **options)
            ),
            train_dataset=recorded.dataset(),
            processing_class=recorded.tokenizer(),
            rollout_func=recorded.rollout_func,
        )
        ran.clear()
        trainer.train()
        policy = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        experts = policy.model.layers[0].mlp.experts.gate_up_proj
        found[kind] = {
            "world_size": trainer.accelerator.num_processes,
            "wrapper": type(trainer.model_wrapped).__name__,
            "local_experts": len(experts.to_local() if hasattr(experts, "to_local") else experts),
            "ops": list(ran),
            "logs": trainer.state.log_history,
            "parameters": {name: whole(parameter) for name, parameter in policy.named_parameters()},
        }
    if world_size == 2:
        plain = AutoModelForCausalLM.from_pretrained(folder / JOINED).state_dict()
        parted = DistributedConfig(fsdp_size=world_size)
        parts = AutoModelForCausalLM.from_pretrained(folder / JOINED, distributed_config=parted)
        off = {name: (whole(value) - plain[name]).abs().max().item() for name, value in parts.state_dict().items()}
        found["misplaced"] = sorted(name for name, distance in off.items() if distance > 0)
    torch.save(found, folder / f"experts-{rank}.pt")
    torch.distributed.barrier()  # neither rank leaves while the other still needs it
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # tearing down threads of gloo aborts now and then


if __name__ == "__main__":
    main()
