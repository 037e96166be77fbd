"""Run by a launcher: trainings one after another, as jobs say; each process saves what it has.

    torchrun --nproc_per_node 2 train_resumed.py JOBS.json

A job is an object of: ``name`` (of what is left beside the jobs' file), ``backend`` (see support.backends), ``folder``
(output_dir), ``family``, ``lora``, ``sharded`` (checkpoints of FSDP2 hold shards), ``resume`` (what ``train`` gets),
``options`` (of the configuration), ``die`` ([process, "rollouts" or "save", step]: it kills itself there) and
``keep_log_probs`` (keeps the hook's log-probs).
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from support.backends import allow_fsdp_on_cpu, backend_options

LORA_TARGETS = ["q_proj", "o_proj"]


def build(job: dict[str, Any]) -> Any:
    """The trainer of a job."""
    from peft import LoraConfig
    from support import recorded
    from support.models import shallow_model

    from harts_hf import TreeGRPOConfig, TreeGRPOTrainer

    backend = job["backend"]
    model = shallow_model(job.get("family", "qwen3_5_text"), seed=1)
    if hasattr(model.config, "router_aux_loss_coef"):
        model.config.router_aux_loss_coef = 0.0
    options = backend_options(backend)
    if backend.startswith("fsdp2"):
        options["fsdp_config"]["transformer_layer_cls_to_wrap"] = [type(model.model.layers[0]).__name__]
        if job.get("sharded"):
            options["fsdp_config"]["state_dict_type"] = "SHARDED_STATE_DICT"
    options |= {"save_strategy": "steps", "tree_sharing": "always", **job.get("options", {})}
    args = TreeGRPOConfig(**recorded.arguments(Path(job["folder"]), **options))
    if backend.startswith("fsdp2"):
        allow_fsdp_on_cpu()
    rank, die = int(os.environ["RANK"]), job.get("die", [-1, "", 0])

    def rollout_func(prompts, trainer):
        if die == [rank, "rollouts", trainer.state.global_step]:
            os.kill(os.getpid(), signal.SIGKILL)
        return recorded.rollout_func(prompts, trainer)

    trainer = TreeGRPOTrainer(
        model,
        recorded.recorded_reward,
        args=args,
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=rollout_func,
        peft_config=LoraConfig(r=2, target_modules=LORA_TARGETS, init_lora_weights=False) if job.get("lora") else None,
    )
    save_scaler = trainer._save_scaler

    def save_scaler_or_die(folder):  # in the middle of a save
        if die == [rank, "save", trainer.state.global_step]:
            os.kill(os.getpid(), signal.SIGKILL)
        save_scaler(folder)

    trainer._save_scaler = save_scaler_or_die
    return trainer


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What a process has after a job."""
    trainer = build(job)
    kept = []
    if job.get("keep_log_probs"):
        hook = trainer._get_per_token_logps_and_entropies

        def keeping(*args, **kwargs):
            kept.append(hook(*args, **kwargs))
            return kept[-1]

        trainer._get_per_token_logps_and_entropies = keeping
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.train(resume_from_checkpoint=job.get("resume"))
        except ValueError as found:
            error = str(found)
    whole = {} if error else trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {
        "error": error,
        "warnings": [str(one.message) for one in caught],
        "world_size": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "wrapper": type(trainer.model_wrapped).__name__,
        "layers_gathered_at_once": sum(getattr(module, "_z3_leaf", False) for module in trainer.model.modules()),
        "logs": trainer.state.log_history,
        "parameters": {name: value.detach().cpu().clone() for name, value in (whole or {}).items()},
        "kept": [tuple(value.detach().cpu() for value in answer[:2]) for answer in kept],
    }


def main() -> None:
    """See the module."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    for job in json.loads(path.read_text()):  # one backend after another in one process
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()  # ZeRO-3 would take over models that are built later
        torch.save(run(job), path.parent / f"{job['name']}-{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # neither rank leaves while the other still needs it
    # Nothing is left to do, and tearing down threads of gloo and DeepSpeed aborts now and then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
