"""Where rollouts cannot be sampled as a trainer is set up: found at the start, before anything is waited for.

With several processes, each samples rollouts of its own, which have different numbers of turns and tokens. What works:

==============================  ========================  =========================  ==============================
rollouts                        whole parameters (DDP,    FSDP2; ZeRO-3              vLLM server
                                ZeRO-1, ZeRO-2)
==============================  ========================  =========================  ==============================
environment, agent (engines)    yes                       no; ZeRO-3 if gathered     yes
TRL's tools or environments     yes                       no                         one process only
TRL's generation from prompts   yes                       yes (it keeps step)        yes
==============================  ========================  =========================  ==============================
"""

from typing import Any

from accelerate.utils import DistributedType
from datasets import Dataset
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from harts_hf.errors import UnsupportedModelError
from harts_hf.rollouts.fields import shortened

ALTERNATIVE = (
    "serve the policy with vLLM (use_vllm: true, vllm_mode: server; docs/engines.md) and sample by an environment or "
    "an agent, or keep parameters whole (DDP, ZeRO-1 or ZeRO-2)"
)


def check_sampling(trainer: Any) -> None:
    """Refuses a way of sampling that would hang or fail later.

    Args:
        trainer: a TRL trainer that is built.

    Raises:
        UnsupportedModelError: it would under the trainer's backend.
        ValueError: prompts that are texts where TRL's own loop plays tools or environments.
    """
    kind = trainer.accelerator.distributed_type
    reason = why_not_sampled(
        trainer,
        num_processes=trainer.accelerator.num_processes,
        is_fsdp=kind == DistributedType.FSDP,
        is_zero3=kind == DistributedType.DEEPSPEED and is_deepspeed_zero3_enabled(),
    )
    if reason is not None:
        raise UnsupportedModelError(reason)
    if _plays_tools(trainer):
        evaluated = getattr(trainer, "eval_dataset", None)
        for dataset in (trainer.train_dataset, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])):
            _check_are_messages(dataset)


def why_not_sampled(trainer: Any, *, num_processes: int, is_fsdp: bool, is_zero3: bool) -> str | None:
    """What :func:`check_sampling` raises, for processes that need not run; None where sampling works.

    Args:
        trainer: has TRL's ``args``, ``use_vllm``, and of GRPO's ``rollout_func``, ``tools``.
        num_processes: that share the training.
        is_fsdp: parameters are sharded by FSDP.
        is_zero3: parameters are sharded by ZeRO-3.
    """
    args = trainer.args
    server = trainer.use_vllm and args.vllm_mode == "server"
    if getattr(getattr(trainer, "rollout_func", None), "uses_engine", False):
        if trainer.use_vllm:
            return None if server else _colocated(args.vllm_mode)
        if num_processes == 1 or not (is_fsdp or (is_zero3 and not args.ds3_gather_for_generation)):
            return None
        return (
            "expected parameters that are whole while environments and agents are sampled with the trainer's own "
            f"model (processes that sample other numbers of tokens would wait for one another for ever), got "
            f"{_sharding(is_fsdp)}: {ALTERNATIVE}"
        )
    if not _plays_tools(trainer):
        return None
    if num_processes == 1 or not (server or (not trainer.use_vllm and (is_fsdp or is_zero3))):
        return None
    got = "a vLLM server, which TRL asks for all processes together" if server else _sharding(is_fsdp)
    return (
        "expected one process, or parameters that are whole, with TRL's tools and environment_factory (each process "
        f"calls tools until its own conversations are over, and the others would wait for ever), got {num_processes} "
        f"processes and {got}: {ALTERNATIVE}"
    )


def _plays_tools(trainer: Any) -> bool:
    return bool(getattr(trainer, "tools", None)) and getattr(trainer, "rollout_func", None) is None


def _check_are_messages(dataset: Any) -> None:
    # TRL's loop looks for calls in the messages of an answer, and a text gets none.
    if isinstance(dataset, Dataset) and len(dataset) and isinstance(prompt := dataset[0].get("prompt"), str):
        raise ValueError(
            'expected prompts that are messages, such as [{"role": "user", "content": "Hi"}], where TRL plays tools '
            f"or environment_factory itself, got the text {shortened(prompt)}: write the data set so, or play them as "
            "trees (ToolEnvironment; in a recipe, branching), which takes texts"
        )


def _sharding(is_fsdp: bool) -> str:
    return "FSDP" if is_fsdp else "ZeRO-3"


def _colocated(mode: str) -> str:
    return (
        f"expected vllm_mode 'server' for environments and agents (they ask turn by turn, each process for itself), "
        f"got {mode!r}"
    )
