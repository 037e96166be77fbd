"""Run by torchrun: trains stock and tree trainers on recorded rollouts, case by case, and saves what each rank has.

    torchrun --nproc_per_node N train_ranks.py FOLDER CASE ...

A case is ``backend:family:kind[:option]...``; kinds and options are the dictionaries below.
"""

import os
import pickle
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from support.backends import allow_fsdp_on_cpu, backend_options
from support.counted import SPEED, CountedGRPOTrainer
from support.oracle import float64_everywhere

TREE = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64}
KINDS = {
    "stock": {},
    "global": {**TREE, "tree_placement": "global"},
    "local": {**TREE, "tree_placement": "local"},
    "random": {**TREE, "tree_placement": "global"},  # every piece of the forest on a rank drawn at random
}
OPTIONS = {
    "replay": {"tree_execution": "replay"},
    "nested": {"tree_execution": "nested"},
    "whole": {"tree_max_tokens_per_microbatch": 4096},  # at most one microbatch on each rank
    "checkpointing": {"gradient_checkpointing": True},
    "unused": {"ddp_find_unused_parameters": True},
    "scored": {"num_iterations": 2, "epsilon": 0.02, "learning_rate": 0.01},
    "twice": {"num_iterations": 2},
    "entropy": {"entropy_coef": 0.05},
    "router": {"router_aux_loss_coef": 0.3},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    # Four updates of the bias of the experts, of loads that all ranks count; float64, so that no token's experts flip.
    "bias": {
        "tree_expert_bias_update_speed": SPEED,
        "max_steps": 4,
        "learning_rate": 0.005,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
    },
    "routes": {"tree_replay_routing": "engine"},  # drawn at random
    "lora": {},
    "long": {},  # rank 0's prompts fill a microbatch, so that some trunks score nothing
    "untouched": {},  # planted: the backward of a microbatch without labels touches no parameter
    "unarmed": {},  # planted: DDP's reducer is not told of a step's last backward
    "unflagged": {},  # planted: nor is ZeRO-3 told that another backward begins
    "idle": {"mask_truncated_completions": True},  # rank 0's are all truncated: it has no trajectories
    "uneven": {},  # rank 0 has one token to score in each rollout
}


def plan_at_random(seed: int):
    """Replaces the planner of windows of several ranks."""
    from support.schedules import random_placement

    from harts_hf.runtime import window

    stock = window.plan_window
    calls = iter(range(10**6))

    def planned(tree, config):
        if config.world_size == 1:
            return stock(tree, config)
        execution = "nested" if config.execution == "nested" else "replay"
        return random_placement(tree, seed + next(calls), execution, config.world_size)

    window.plan_window = planned
    return lambda: setattr(window, "plan_window", stock)


def plant_untold():
    """Backends are not told of backwards: DDP of the last one, DeepSpeed of any that does not follow its forward."""
    from harts_hf.trainers.ranks import AccelerateRanks

    around = AccelerateRanks._around

    @contextmanager
    def untold(self, model, outputs, is_last, follows):
        self._is_ddp, is_ddp = False, self._is_ddp
        try:
            with around(self, model, outputs, is_last, True):
                yield
        finally:
            self._is_ddp = is_ddp

    AccelerateRanks._around = untold
    return lambda: setattr(AccelerateRanks, "_around", around)


def plant_untouched():
    """A microbatch that scores nothing gets a scalar without a graph behind it."""
    from harts_hf.runtime import run

    stock = run.inner_product

    def planted(answered, coefficients):
        if len(answered.wanted.labels.rows) == 0:
            return torch.zeros((), requires_grad=True)
        return stock(answered, coefficients)

    run.inner_product = planted
    return lambda: setattr(run, "inner_product", stock)


def count_own_microbatches(trainer) -> list[int]:
    """A list that gets this rank's number of microbatches at each step: metrics count those of all ranks."""
    counts: list[int] = []
    step = trainer._tree.step

    def counting(*args):
        report = step(*args)
        counts.append(len(report.window.schedule.microbatches))
        return report

    trainer._tree.step = counting
    return counts


def rollouts_for(options: list[str]):
    """The recorded rollouts, or some in which rank 0 has next to nothing."""
    from support import recorded

    def rollouts(prompts, trainer):
        output = recorded.rollout_func(prompts, trainer)
        if "long" in options and trainer.accelerator.process_index == 0:
            output["prompt_ids"] = [[5, 6, 7, 8] * 17 + row for row in output["prompt_ids"]]
        if "routes" in options:
            output["routed_experts"] = [
                np.random.default_rng(row).random((len(tokens), 2, 8)).argsort(axis=-1)[..., :2]
                for row, tokens in enumerate(output["completion_ids"])
            ]
        if trainer.accelerator.process_index == 0:
            if "idle" in options:
                output["completion_ids"] = [[*row[:-1], 3] for row in output["completion_ids"]]
            if "uneven" in options:
                output["completion_ids"] = [row[:1] for row in output["completion_ids"]]
                output["logprobs"] = [row[:1] for row in output["logprobs"]]
                output["env_mask"] = [[1] for _ in output["env_mask"]]
        return output

    return rollouts


def loads_of(trainer):
    """``[L, E]`` of a tree trainer, all steps together; None for other trainers and models."""
    load = trainer._tree.expert_load if hasattr(trainer, "_tree") else None
    return None if load is None or not load.observed else load.total.clone()


def lora():
    """Adapters on attention and MLPs."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False)


def run(case: str, folder: Path) -> dict:
    """Trains one case; what this rank has afterwards."""
    from support import recorded
    from support.models import shallow_model, tiny_model
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from trl import GRPOConfig, GRPOTrainer

    from harts_hf import TreeGRPOConfig, TreeGRPOTrainer

    backend, family, kind, *options = case.split(":")
    # A group on each rank; layers are computed twice where a case says so, of each backend one.
    small = {"router_aux_loss_coef": 0.0, "max_steps": 2, "per_device_train_batch_size": 2}
    small |= {"gradient_checkpointing": False, "ddp_find_unused_parameters": False}
    arguments = recorded.arguments(folder, **{**small, **KINDS[kind]})
    for option in options:
        arguments |= {k: v for k, v in OPTIONS[option].items() if kind != "stock" or not k.startswith("tree_")}
    arguments |= {k: v for k, v in backend_options(backend).items() if k not in arguments}
    config_class, trainer_class = (GRPOConfig, GRPOTrainer) if kind == "stock" else (TreeGRPOConfig, TreeGRPOTrainer)
    dtype = torch.float32
    if "bias" in options:
        dtype, trainer_class = torch.float64, CountedGRPOTrainer if kind == "stock" else trainer_class
    unset_hf_deepspeed_config()  # of the case before
    make_model = tiny_model if "bias" in options else shallow_model  # which has one router, or two
    model = make_model(family, seed=1, dtype=dtype)  # before the arguments, which would have ZeRO-3 take it over
    torch.manual_seed(0)
    if backend.startswith("fsdp2"):
        arguments["fsdp_config"]["transformer_layer_cls_to_wrap"] = [type(model.model.layers[0]).__name__]
    config = config_class(**arguments)
    if backend.startswith("fsdp2"):
        allow_fsdp_on_cpu()
    trainer = trainer_class(
        model,
        recorded.recorded_reward,
        args=config,
        train_dataset=recorded.dataset(),
        eval_dataset=recorded.dataset() if "evaluated" in options else None,
        processing_class=recorded.tokenizer(),
        rollout_func=rollouts_for(options),
        peft_config=lora() if "lora" in options else None,
    )
    own_counts = [] if kind == "stock" else count_own_microbatches(trainer)
    with ExitStack() as stack:
        if "bias" in options:
            stack.enter_context(float64_everywhere(model))
        if {"unarmed", "unflagged"} & set(options):
            stack.callback(plant_untold())
        if "untouched" in options:
            stack.callback(plant_untouched())
        if kind == "random":
            stack.callback(plan_at_random(seed=len(case)))
        trainer.train()
    wrapped = trainer.model_wrapped
    if backend == "ddp":  # each rank its own
        parameters = trainer.accelerator.unwrap_model(wrapped).state_dict()
    else:
        parameters = trainer.accelerator.get_state_dict(wrapped)  # whole on rank 0; a collective
    return {
        "world_size": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "wrapper": type(wrapped).__name__,
        "logs": trainer.state.log_history,
        "microbatches": own_counts,
        "loads": sum(trainer.steps) if hasattr(trainer, "steps") else loads_of(trainer),
        "parameters": {name: value.cpu().clone() for name, value in parameters.items()} if parameters else {},
    }


def main() -> None:
    """See the module."""
    folder, cases, rank = Path(sys.argv[1]), sys.argv[2:], int(os.environ["RANK"])
    from accelerate.state import AcceleratorState

    before = None
    for case in cases:
        backend = case.partition(":")[0]
        if before is not None and backend != before:  # one process runs one backend after another
            AcceleratorState._reset_state(reset_partial_state=True)
        before = backend
        result = run(case, folder)
        (folder / f"{case}-{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()  # neither rank leaves while the other still needs it
    # Nothing is left to do, and tearing down threads of gloo and DeepSpeed aborts now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
