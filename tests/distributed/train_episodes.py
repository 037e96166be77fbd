"""Run by torchrun: trains on episodes with a backend, case by case, and saves what each rank drew and logged.

    torchrun --nproc_per_node 2 train_episodes.py FOLDER {ddp,fsdp2,zero3}:CASE ...

The folder holds the model of the start as ``start``.

Ranks have other episodes, so unequal numbers of rows in every slice. ``BROKEN`` cases end with an error on each rank.
"""

import functools
import os
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from support.backends import allow_fsdp_on_cpu, backend_options

DRIFT = {"num_iterations": 2, "epsilon": 0.02, "learning_rate": 0.3}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
PROMPTS = 4  # on each rank, of two slices
CASES = {
    "grpo": {"loss_type": "grpo", "entropy_coef": 0.5, **EVALUATION},
    "bnpo": {"loss_type": "bnpo", "entropy_coef": 0.5, "beta": 0.1, **DRIFT},
    "dapo": {"loss_type": "dapo", "steps_per_generation": 4, **EVALUATION},
    "sequence-level": {"loss_type": "luspo", "importance_sampling_level": "sequence", **DRIFT, "learning_rate": 0.01},
    "clipped": {"loss_type": "grpo", **DRIFT},
    "weighed-grpo": {"loss_type": "grpo", "tree_episode_weight": "episode", "entropy_coef": 0.5, "beta": 0.1},
    "weighed-bnpo": {"loss_type": "bnpo", "tree_episode_weight": "episode", "entropy_coef": 0.5, **EVALUATION},
    "weighed-dapo": {"loss_type": "dapo", "tree_episode_weight": "episode", "entropy_coef": 0.5, **DRIFT},
    # Each group lies on both ranks.
    "recorded-straddling": {
        "loss_type": "grpo",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_iterations": 2,
        "max_steps": 6,
    },
    "recorded-unknown": {"loss_type": "grpo", "per_device_train_batch_size": 4, "max_steps": 3},
}
# The prompt of which log-probs are unknown, so on one of the ranks only.
UNKNOWN = ["p4"]


def drop_key(rank, output):
    """Rank 1 has a row an episode and does not say so."""
    for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask"):
        output[key] = [output[key][0]] * PROMPTS
    output["episode"] = list(range(PROMPTS))
    if rank == 1:
        del output["episode"]


def break_index(rank, output):
    """Rank 0 names an episode that there is not."""
    if rank == 0:
        output["episode"][-1] = 99


def break_reward(rank, output):
    """Rank 1 has rewards for its rows."""
    if rank == 1:
        output["recorded_reward"] = [0.0] * len(output["episode"])


def clip_all(rank, output):
    """Nothing was good: the second iteration finds tokens of every row below the clip range."""
    output["advantages"] = [[-1.0] * len(ids) for ids in output["completion_ids"]]


BROKEN = {"mixed-keys": drop_key, "broken-index": break_index, "broken-reward": break_reward}


def main() -> None:
    """See the module."""
    folder, cases, rank = Path(sys.argv[1]), sys.argv[2:], int(os.environ["RANK"])
    from accelerate.state import AcceleratorState
    from support import recorded
    from support.episodes import RaggedRollouts
    from support.models import shallow_model
    from support.oracle import float64_everywhere
    from support.recordings import WatchedRecording, episodes_with_unknown, rows_of_episodes

    from harts_hf import TreeGRPOConfig, TreeGRPOTrainer

    before = cases[0].partition(":")[0]
    for backend, _, case in (name.partition(":") for name in cases):
        if backend != before:  # one process runs one backend after another
            AcceleratorState._reset_state(reset_partial_state=True)
        before = backend
        change = {**BROKEN, "clipped": clip_all}.get(case)
        rollouts = RaggedRollouts(change=None if change is None else lambda out, change=change: change(rank, out))
        recording = None
        if case.startswith("recorded"):
            prompts = UNKNOWN if case == "recorded-unknown" else []
            source = functools.partial(episodes_with_unknown, prompts=prompts)
            recording = WatchedRecording(rows_of_episodes(source), source=source)
            rollouts = recording.log
        # DeepSpeed knows no float64.
        dtype = torch.float64 if backend == "ddp" else torch.float32
        # Before the arguments, which would have ZeRO-3 take it over.
        model = shallow_model("qwen3_5_text", dtype=dtype, seed=1)
        options = {
            "max_steps": 2,
            "per_device_train_batch_size": PROMPTS // 2,
            "tree_sharing": "always",
            **CASES.get(case, {}),
            **backend_options(backend),
        }
        if options.get("beta"):  # TRL loads the reference model from where the policy came from
            model = type(model).from_pretrained(folder / "start", dtype=dtype)
            model.train()
        args = TreeGRPOConfig(**recorded.arguments(folder, **options))
        if backend.startswith("fsdp2"):
            allow_fsdp_on_cpu()
        trainer = TreeGRPOTrainer(
            model,
            recorded.recorded_reward,
            args=args,
            train_dataset=recorded.dataset(),
            # As many prompts as a batch has rows: of other numbers Trainer cuts its mean over batches short.
            eval_dataset=recorded.dataset().select(range(8)) if "eval_steps" in options else None,
            processing_class=recorded.tokenizer(),
            rollout_func=recording or rollouts,
        )
        error = None
        with rollouts.watched(), float64_everywhere(model) if backend == "ddp" else nullcontext():
            try:
                trainer.train()
            except ValueError as found:
                if case not in BROKEN:
                    raise
                error = str(found)
        parameters = {} if error else trainer.accelerator.get_state_dict(trainer.model_wrapped)
        result = {
            "world_size": trainer.accelerator.num_processes,
            "distributed_type": trainer.accelerator.distributed_type.value,
            "wrapper": type(trainer.model_wrapped).__name__,
            "error": error,
            "logs": trainer.state.log_history,
            "training": rollouts.training,
            "evaluation": rollouts.evaluation,
            "parameters": {name: value.cpu() for name, value in parameters.items()} if rank == 0 else {},
            "settings": {name: value for name, value in vars(args).items() if isinstance(value, int | float | str)},
        }
        (folder / f"{backend}:{case}-{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.barrier()  # neither rank leaves while the other still needs it
    # Nothing is left to do, and tearing down threads of gloo and DeepSpeed aborts now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
