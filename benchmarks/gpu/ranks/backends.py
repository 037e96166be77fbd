"""``TrainingArguments`` for each way of running several processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LAYER = "BailingHybridDecoderLayer"
# What the model of each is wrapped in.
WRAPPERS = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDPBailingHybridForCausalLM",
    "fsdp2-kept": "FSDPBailingHybridForCausalLM",
    **dict.fromkeys(("zero1", "zero2", "zero3", "zero3-modules"), "DeepSpeedEngine"),
}


def backend_options(backend: str, *, dry: bool) -> dict[str, Any]:
    """Of "one" (a single process) or one of :data:`WRAPPERS`.

    "fsdp2-kept" keeps parameters gathered from a step's first forward to its last backward. "zero3-modules" gathers
    each module of a layer by itself, where the trainer has whole layers gathered.

    Raises:
        ValueError: another name.
    """
    if backend == "one":
        return {}
    if backend not in WRAPPERS:
        raise ValueError(f"expected one or {', '.join(WRAPPERS)}, got {backend!r}")
    if backend == "ddp":
        return {"ddp_find_unused_parameters": False}
    if backend.startswith("fsdp2"):
        settings = {
            "version": 2,
            "transformer_layer_cls_to_wrap": [LAYER],
            "reshard_after_forward": backend == "fsdp2",
        }
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": settings}
    zero: dict[str, Any] = {"stage": int(backend[4])}
    if backend == "zero3-modules":
        zero["leaf_module"] = {"classes": ["NoModule"]}  # the trainer chooses none where some are named
    return {"deepspeed": {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": not dry}, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }}  # fmt: skip


def allow_fsdp_on_cpu() -> None:
    """On a CPU, accelerate runs DDP where FSDP is asked for, unless the state says MULTI_GPU before it is read."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _plain(trainer: Any) -> Callable[[], None]:
    return lambda: None


def _reduced_last(trainer: Any) -> Callable[[], None]:
    """FSDP2 reduces in a step's last backward only: until then each rank adds up whole gradients in bf16."""
    ranks, model = trainer._tree.ranks, trainer.model_wrapped

    @contextmanager
    def around(wrapped: Any, outputs: Any, *, is_last: bool, follows: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(is_last)
        with type(ranks).around_backward(ranks, wrapped, outputs, is_last=is_last, follows=follows):
            yield

    def leave() -> None:
        del ranks.around_backward
        model.set_requires_gradient_sync(True)

    ranks.around_backward = around
    return leave


# Ways of running a backend that the package does not choose: each is entered with a trainer, and answers how to leave.
VARIANTS: dict[str, Callable[[Any], Callable[[], None]]] = {"plain": _plain, "reduced-last": _reduced_last}
