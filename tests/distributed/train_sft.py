"""Run by torchrun: trains supervised with each backend and each trainer, and saves what each rank logged.

torchrun --nproc_per_node 2 train_sft.py FOLDER {ddp,fsdp2,zero3} ...
"""

import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from support.backends import allow_fsdp_on_cpu, backend_options


def main() -> None:
    """See the module."""
    folder, backends, rank = Path(sys.argv[1]), sys.argv[2:], int(os.environ["RANK"])
    from accelerate.state import AcceleratorState
    from support import recorded
    from support.models import shallow_model
    from support.oracle import float64_everywhere
    from support.texts import arguments, dataset
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from trl import SFTConfig, SFTTrainer

    from harts_hf import TreeSFTConfig, TreeSFTTrainer

    for backend in backends:
        order = None
        for name, kind, config in (("tree", TreeSFTTrainer, TreeSFTConfig), ("stock", SFTTrainer, SFTConfig)):
            AcceleratorState._reset_state(reset_partial_state=True)
            unset_hf_deepspeed_config()  # or the next model would be built for ZeRO-3
            dtype = torch.float64 if backend == "ddp" else torch.float32  # DeepSpeed knows no float64
            model = shallow_model("qwen3_5_text", dtype=dtype, seed=1)
            options = {"train_sampling_strategy": "random", "per_device_train_batch_size": 2}
            options |= {} if name == "stock" else {"tree_max_tokens_per_microbatch": 96}
            options |= backend_options(backend)
            options.pop("num_iterations", None)  # of reinforcement learning
            args = config(**arguments(folder, **options))
            if backend == "fsdp2":
                allow_fsdp_on_cpu()
            trainer = kind(model, args, train_dataset=dataset("weight"), processing_class=recorded.tokenizer())
            if name == "tree":
                order = trainer._get_train_sampler()
            else:
                trainer._get_train_sampler = lambda train_dataset=None, order=order: order
            with float64_everywhere(model) if backend == "ddp" else nullcontext():
                trainer.train()
            parameters = trainer.accelerator.get_state_dict(trainer.model_wrapped)
            result = {
                "world_size": trainer.accelerator.num_processes,
                "distributed_type": trainer.accelerator.distributed_type.value,
                "logs": trainer.state.log_history,
                "parameters": {key: value.cpu() for key, value in parameters.items()} if rank == 0 else {},
            }
            (folder / f"{backend}-{name}-{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()  # neither rank leaves while the other still needs it
    # Nothing is left to do, and tearing down threads of gloo and DeepSpeed aborts now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
