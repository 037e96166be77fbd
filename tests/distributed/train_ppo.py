"""Run by torchrun: trains with PPO in each way that is named, and saves what each rank has.

torchrun --nproc_per_node 2 train_ppo.py FOLDER {ddp,ddp_model,fsdp2,zero3} ...
"""

import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from train_two import allow_fsdp_on_cpu, backend_options


def main() -> None:
    """See the module."""
    folder, kinds, rank = Path(sys.argv[1]), sys.argv[2:], int(os.environ["RANK"])
    from accelerate.state import AcceleratorState
    from support import recorded
    from support.episodes import RaggedRollouts
    from support.models import tiny_model
    from support.oracle import float64_everywhere
    from support.ppo_runs import DISTRIBUTED, FAMILY, arguments, give_head
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from harts_hf import TreePPOConfig, TreePPOTrainer

    for kind in kinds:
        backend = kind.partition("_")[0]
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()  # or the next model would be built for ZeRO-3
        dtype = torch.float64 if backend == "ddp" else torch.float32  # DeepSpeed knows no float64
        model = tiny_model(FAMILY, dtype=dtype, seed=1)
        value_model = tiny_model(FAMILY, dtype=dtype, seed=5) if kind.endswith("_model") else None
        options = {**DISTRIBUTED, "tree_max_tokens_per_microbatch": 96, **backend_options(backend)}
        options["num_iterations"] = DISTRIBUTED["num_iterations"]
        args = TreePPOConfig(**arguments(folder / kind, **options))
        if backend == "fsdp2":
            allow_fsdp_on_cpu()
        rollouts = RaggedRollouts()
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
        with float64_everywhere(model) if backend == "ddp" else nullcontext():
            trainer.train()
        trainer.save_model(str(folder / kind / "saved"))
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        values = {} if value_model is None else dict(value_model.named_parameters())
        result = {
            "world_size": trainer.accelerator.num_processes,
            "distributed_type": trainer.accelerator.distributed_type.value,
            "logs": trainer.state.log_history,
            "generations": rollouts.training,
            "parameters": {name: value.detach().cpu() for name, value in state.items()} if rank == 0 else {},
            "values": {name: value.detach().cpu() for name, value in values.items()},
        }
        (folder / f"{kind}-{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()  # neither rank leaves while the other still needs it
    # Nothing is left to do, and tearing down threads of gloo and DeepSpeed aborts now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
