"""Run by torchrun: two processes sample ragged turns on servers of their own; the third sync breaks one of them.

torchrun --nproc_per_node 2 sample_two.py {fsdp2,zero3} FOLDER
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import trl.trainer.grpo_trainer
from support import recorded
from support.backends import allow_fsdp_on_cpu, backend_options
from support.fake_vllm import FakeVLLM
from support.models import tiny_model

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts.engines import TurnRequest
from harts_hf.rollouts.engines.vllm_probe import LogProbGapError
from harts_hf.rollouts.engines.vllm_server import VLLMServerEngine

SERVED = tiny_model("qwen3_5_text", seed=2).eval()  # before any configuration, which would have ZeRO-3 take it over


class GatheringSync:
    """What a trainer uses of TRL's ``VLLMGeneration``: every process gathers all parameters, for its own server."""

    count = 0

    def __init__(self, *, model, **_):
        self._model = model
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )

    def sync_weights(self):
        type(self).count += 1
        for name, parameter in self._model.named_parameters():
            target = SERVED.get_parameter(name).data
            if hasattr(parameter, "full_tensor"):
                target.copy_(parameter.full_tensor())
            else:
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter]):
                    target.copy_(parameter.data)
        if self.count == 3 and int(os.environ["RANK"]) == 1:
            SERVED.lm_head.weight.data.mul_(-1)


def rollouts(prompts, trainer):
    """The first process asks for three times as many turns as the second."""
    rank = trainer.accelerator.process_index
    output = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    with VLLMServerEngine.from_trainer(trainer) as engine:
        for number, prompt in enumerate(prompts):
            history = tuple(recorded.rollouts_of(prompt)["prompt_ids"][0][:9])
            ids, logprobs = [], []
            for turn in range(3 if rank == 0 else 1):
                request = TurnRequest(history=(*history, *ids), max_tokens=3, seed=10 * number + turn)
                (turn,) = engine.submit(request).result()
                ids += turn.token_ids
                logprobs += turn.logprobs
            for key, value in zip(output, (list(history), ids, logprobs), strict=True):
                output[key].append(value)
    return output


def main() -> None:
    """See the module."""
    backend, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    trl.trainer.grpo_trainer.VLLMGeneration = GatheringSync
    with FakeVLLM(SERVED, tokenizer=recorded.tokenizer(), max_model_len=40) as server:
        arguments = {**recorded.arguments(folder), **backend_options(backend), "learning_rate": 0.5}
        model = tiny_model("qwen3_5_text", seed=1)
        config = TreeGRPOConfig(**arguments, use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url)
        if backend == "fsdp2":
            allow_fsdp_on_cpu()
        trainer = TreeGRPOTrainer(
            model,
            lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            args=config,
            train_dataset=recorded.dataset(),
            processing_class=recorded.tokenizer(),
            rollout_func=rollouts,
        )
        error = None
        try:
            trainer.train()
        except LogProbGapError as raised:
            error = str(raised)
        facts = {
            "world_size": trainer.accelerator.num_processes,
            "wrapper": type(trainer.model_wrapped).__name__,
            "logs": trainer.state.log_history,
            "error": error,
            "step": trainer.state.global_step,
            "requests": len(server.bodies),
        }
        (folder / f"{backend}-{rank}.json").write_text(json.dumps(facts))
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # tearing down threads of gloo and DeepSpeed aborts now and then


if __name__ == "__main__":
    main()
