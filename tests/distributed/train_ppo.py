"""Run by torchrun: trains with PPO in each way that is named, and saves what each rank has.

torchrun --nproc_per_node 2 train_ppo.py FOLDER WAY ...

A way is a backend ("ddp", "fsdp2", "zero2", "zero3") and, each after a hyphen, "model" (values of a model of its own),
"lora", "resumed" (by AdamW instead of SGD, and once more from its second checkpoint).
"""

import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from support.backends import allow_fsdp_on_cpu, backend_options


def build(folder, way, rollouts):
    """The trainer of a way, which writes into ``folder``."""
    from support import recorded
    from support.models import shallow_model
    from support.ppo_runs import ADAMW, DISTRIBUTED, FAMILY, arguments, give_head, with_adapters

    from harts_hf import TreePPOConfig, TreePPOTrainer

    backend, *more = way.split("-")
    dtype = torch.float64 if backend == "ddp" else torch.float32  # DeepSpeed knows no float64
    model = shallow_model(FAMILY, dtype=dtype, seed=1)  # before the arguments, which would have ZeRO-3 take it over
    value_model = shallow_model(FAMILY, dtype=dtype, seed=5) if "model" in more else None
    options = {**backend_options(backend), **DISTRIBUTED, "tree_max_tokens_per_microbatch": 96}
    if "lora" in more:
        model = with_adapters(model)
        options["gradient_checkpointing"] = False  # which TRL makes reentrant for ZeRO-3 with adapters
    if "resumed" in more:
        options |= {"save_strategy": "steps", "save_steps": 2, **ADAMW}
    args = TreePPOConfig(**arguments(folder, **options))
    if backend == "fsdp2":
        allow_fsdp_on_cpu()
    trainer = TreePPOTrainer(
        model,
        recorded.recorded_reward,
        args=args,
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=rollouts,
        value_model=value_model,
    )
    give_head(trainer)
    return trainer


def parameters_of(trainer):
    """On rank 0 all of the policy's, value head and adapters included."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # a collective
    is_first = trainer.accelerator.process_index == 0
    return {name: value.detach().cpu().clone() for name, value in state.items()} if is_first else {}


def run(folder, way):
    """What this process has after a training, and after another that went on from its second checkpoint."""
    from accelerate.state import AcceleratorState
    from support.episodes import RaggedRollouts
    from support.oracle import float64_everywhere
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def fresh(rollouts):
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()  # or the next model would be built for ZeRO-3
        return build(folder / way, way, rollouts)

    rollouts = RaggedRollouts()
    trainer = fresh(rollouts)
    with float64_everywhere(trainer.model) if way.startswith("ddp") else nullcontext():
        trainer.train()
    trainer.save_model(str(folder / way / "saved"))
    value_model = trainer.value_model
    result = {
        "world_size": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "logs": trainer.state.log_history,
        "generations": rollouts.training,
        "parameters": parameters_of(trainer),
        "values": {} if value_model is None else {n: p.detach().cpu() for n, p in value_model.named_parameters()},
    }
    if way.endswith("resumed"):
        again = fresh(RaggedRollouts())
        again.train(resume_from_checkpoint=str(folder / way / "checkpoint-2"))
        result["resumed"] = {"logs": again.state.log_history, "parameters": parameters_of(again)}
    return result


def main() -> None:
    """See the module."""
    folder, ways, rank = Path(sys.argv[1]), sys.argv[2:], int(os.environ["RANK"])
    for way in ways:
        (folder / f"{way}-{rank}.pickle").write_bytes(pickle.dumps(run(folder, way)))
    torch.distributed.barrier()  # neither rank leaves while the other still needs it
    # Nothing is left to do, and tearing down threads of gloo and DeepSpeed aborts now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
