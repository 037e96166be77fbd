"""Run by torchrun: trains a stock or a tree trainer on recorded rollouts with a backend, and saves what rank 0 has.

    torchrun --nproc_per_node 2 train_two.py {stock,tree,untouched} {ddp,fsdp2,fsdp2_whole,zero1,zero2,zero3} FOLDER

"untouched" is "tree" with a planted bug: a microbatch without labels has a backward that touches no parameter.
"fsdp2_whole" leaves parameters whole after forwards, and scores old log-probs first, so they are when a window begins.
"""

import json
import os
import sys
from pathlib import Path

import torch


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


def plant_untouched() -> None:
    """A microbatch that scores nothing gets a scalar without a graph behind it."""
    from harts_hf.runtime import run

    stock = run.inner_product

    def planted(answered, coefficients):
        if len(answered.wanted.labels.rows) == 0:
            return torch.zeros((), requires_grad=True)
        return stock(answered, coefficients)

    run.inner_product = planted


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


def with_long_prompts(prompts, trainer):
    """Recorded rollouts whose prompts fill a microbatch, so that some trunks score nothing."""
    from support import recorded

    output = recorded.rollout_func(prompts, trainer)
    output["prompt_ids"] = [[5, 6, 7, 8] * 17 + row for row in output["prompt_ids"]]
    return output


def main() -> None:
    """See the module."""
    kind, backend, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    from support import recorded
    from support.models import tiny_model
    from trl import GRPOConfig, GRPOTrainer

    from harts_hf import TreeGRPOConfig, TreeGRPOTrainer

    rank = int(os.environ["RANK"])
    tree = kind != "stock"
    if kind == "untouched":
        plant_untouched()
    options = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64} if tree else {}
    if tree:  # each rank its own rows, scored: train_ranks.py has the rest
        options |= {"tree_placement": "local", "tree_execution": "replay"}
    arguments = {**recorded.arguments(folder), **backend_options(backend), **options}
    model = tiny_model("qwen3_5_text", seed=1)  # before the arguments, which would have ZeRO-3 take it over
    config = (TreeGRPOConfig if tree else GRPOConfig)(**arguments)
    if backend.startswith("fsdp2"):
        allow_fsdp_on_cpu()
    trainer = (TreeGRPOTrainer if tree else GRPOTrainer)(
        model,
        recorded.recorded_reward,
        args=config,
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=with_long_prompts,
    )
    own_counts = count_own_microbatches(trainer) if tree else []
    trainer.train()
    facts = {
        "world_size": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "wrapper": type(trainer.model_wrapped).__name__,
        "logs": trainer.state.log_history,
        "microbatches": own_counts,
    }
    parameters = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # whole on rank 0; a collective
    (folder / f"{kind}-{backend}-{rank}.json").write_text(json.dumps(facts))
    if rank == 0:
        torch.save({name: value.cpu() for name, value in parameters.items()}, folder / f"{kind}-{backend}.pt")
    torch.distributed.barrier()  # neither rank leaves while the other still needs it
    # Nothing is left to do, and tearing down threads of gloo and DeepSpeed aborts now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
