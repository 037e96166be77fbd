"""Opens the engine that a trainer's arguments ask for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models.utils import unwrap_model_for_generation

from harts_hf.modeling.checkpointing import without_checkpointing
from harts_hf.rollouts.engines.engine import Engine, SamplingSettings
from harts_hf.rollouts.engines.transformers import TransformersEngine


def wants_routes(args: Any) -> bool:
    """Whether a trainer's arguments (a plain ``GRPOConfig`` too) ask for the engine's routes."""
    return getattr(args, "tree_replay_routing", "off") == "engine"


@contextmanager
def open_engine(trainer: Any) -> Iterator[Engine]:
    """Opens an engine on the trainer's policy, for one collection of rollouts.

    Args:
        trainer: a ``GRPOTrainer``. With ``use_vllm`` its vLLM server samples, else its own model does, in the mode
            (training or evaluation) that TRL leaves it in.

    Yields:
        The engine, which draws as the trainer's arguments and the seeds of requests say; closed at the end.

    Raises:
        ValueError: a repetition penalty; without vLLM, a model whose parameters are sharded while it samples.
        EngineError: a server that does not answer as it should (or returns no routes, where the arguments ask for
            them), or a model whose states cannot be kept.
    """
    if trainer.use_vllm:
        from harts_hf.rollouts.engines.vllm_server import ServerOptions, VLLMServerEngine

        server_options = getattr(trainer.args, "server_options", ServerOptions)  # a plain GRPOConfig has none
        with VLLMServerEngine.from_trainer(
            trainer, options=server_options(), returns_routes=wants_routes(trainer.args)
        ) as engine:
            yield engine
        return
    _check_parameters_are_whole(trainer)
    settings = SamplingSettings.from_args(trainer.args, tuple(trainer.eos_token_ids))
    with (
        _whole_policy(trainer) as model,
        TransformersEngine(
            model,
            settings=settings,
            returns_routes=wants_routes(trainer.args),
            tokenizer=getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
        ) as engine,
    ):
        yield engine


@contextmanager
def _whole_policy(trainer: Any) -> Iterator[Any]:
    """The policy itself, without its wrapper, its parameters whole, without activation checkpointing meanwhile."""
    policy = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    with without_checkpointing(policy, trainer.args.activation_checkpointing_kwargs):
        if is_deepspeed_zero3_enabled():
            with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as gathered:
                yield gathered
        else:
            yield policy


def _check_parameters_are_whole(trainer: Any) -> None:
    sharded = trainer.is_fsdp_enabled or (is_deepspeed_zero3_enabled() and not trainer.args.ds3_gather_for_generation)
    if sharded:
        raise ValueError(
            "expected parameters that are whole while sampling (DDP, ZeRO up to 2, or ZeRO-3 with "
            "ds3_gather_for_generation), got sharded ones: processes that sample different numbers of tokens would "
            "wait for one another for ever; a vLLM server samples for them (use_vllm)"
        )
