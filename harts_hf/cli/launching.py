"""How many processes a training is launched with and how they share the model, by files, without starting any."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate.utils import DistributedType

# What of a model each backend splits over its processes.
SHARDS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "DDP": (),
    "FSDP2": ("weights", "gradients", "optimizer"),
    "ZeRO-1": ("optimizer",),
    "ZeRO-2": ("gradients", "optimizer"),
    "ZeRO-3": ("weights", "gradients", "optimizer"),
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Processes and their backend.

    Attributes:
        num_processes: of the training.
        backend: a key of ``SHARDS``.
        said_by: the file or option that says so.
        refused: what of it is refused, each a message.
        gradient_bytes: of one gradient where the backend adds up gradients in a dtype of its own; else None.
        offloads_optimizer: whether its states lie on the CPU.
        mixed_precision: what the launcher asks for.
    """

    num_processes: int
    backend: str
    said_by: str
    refused: list[str] = field(default_factory=list)
    gradient_bytes: int | None = None
    offloads_optimizer: bool = False
    mixed_precision: str = "no"

    def shards(self, part: str) -> int:
        """Over how many processes ``weights``, ``gradients`` or ``optimizer`` are split."""
        return self.num_processes if part in SHARDS[self.backend] else 1

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed keeps the parameters."""
        return self.backend.startswith("ZeRO")


class AsLaunched:
    """A trainer of this one process that says it were one of a launch's, for checks that ask it.

    Args:
        trainer: everything else is its own.
        launch: what it would be one of.
    """

    def __init__(self, trainer: Any, launch: Launch) -> None:
        self._trainer = trainer
        kinds = {"F": DistributedType.FSDP, "Z": DistributedType.DEEPSPEED, "D": DistributedType.MULTI_GPU}
        self.accelerator = SimpleNamespace(
            num_processes=launch.num_processes,
            distributed_type=kinds.get(launch.backend[0], DistributedType.NO),
            mixed_precision=launch.mixed_precision,
            state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=2)),  # another one is refused above
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def whole_number(value: Any) -> int | None:
    """A recipe's or the command line's number of processes, unread yet.

    Raises:
        ValueError: no number of at least 1.
    """
    if value is None:
        return None
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"expected num_processes of at least 1, got {value!r}")
    return number


def find_launch(accelerate_config: str | None, num_processes: int | None, running: int) -> Launch:
    """What a recipe would be launched with.

    Args:
        accelerate_config: a file for ``accelerate launch``, which says it.
        num_processes: without such a file, under DDP.
        running: processes that run now, where nothing says how many.

    Raises:
        ValueError: a file that Accelerate cannot read.
    """
    if accelerate_config:
        return _read(accelerate_config, num_processes)
    count = num_processes or running
    said_by = "num_processes" if num_processes else "this process"
    return Launch(num_processes=count, backend="one process" if count == 1 else "DDP", said_by=said_by)


def _read(path: str, num_processes: int | None) -> Launch:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    if not Path(path).is_file():
        raise ValueError(
            f"expected accelerate_config to be a file that Accelerate reads, got {path!r}: no such file, seen from "
            f"{os.getcwd()}"
        )
    try:
        config: Any = load_config_from_file(path)
    except Exception as error:  # OSError, YAML's, and ValueErrors of its own
        raise ValueError(
            f"expected accelerate_config to be a file that Accelerate reads, got {path!r}: {error}"
        ) from error
    if not isinstance(config, ClusterConfig):
        raise ValueError(
            f"expected accelerate_config of machines of one's own, got {config.compute_environment.value}"
        )
    refused = []
    count = config.num_processes
    if num_processes is not None and num_processes != count:
        refused.append(f"expected num_processes {count}, as {path} says, got {num_processes}")
        count = num_processes
    kind = getattr(config.distributed_type, "value", config.distributed_type)
    if kind == "MULTI_CPU" and count > 1 and not config.mpirun_config:
        refused.append(
            f"expected a distributed_type that starts {count} processes, got MULTI_CPU in {path}: `accelerate launch` "
            "starts one for it; use MULTI_GPU, or torchrun"
        )
    more: dict[str, Any] = {}
    if kind == "DEEPSPEED":
        backend, more = _deepspeed(config.deepspeed_config, path, refused)
    elif kind == "FSDP":
        backend = "FSDP2"
        version = int(config.fsdp_config.get("fsdp_version", 1))
        if version != 2:
            refused.append(f"expected FSDP2 (fsdp_version: 2), got version {version} in {path}")
    else:
        backend = "DDP" if count > 1 else "one process"
    more["mixed_precision"] = config.mixed_precision or "no"
    return Launch(num_processes=count, backend=backend, said_by=path, refused=refused, **more)


def _deepspeed(config: dict[str, Any], path: str, refused: list[str]) -> tuple[str, dict[str, Any]]:
    """The stage, and the fields of a launch that the settings decide."""
    settings: dict[str, Any] = {}
    stage: Any = config.get("zero_stage")
    offload = config.get("offload_optimizer_device", "none")
    if config.get("deepspeed_config_file"):
        file = Path(config["deepspeed_config_file"])
        try:
            settings = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"expected deepspeed_config_file of {path} to be JSON, got {str(file)!r}: {error}"
            ) from error
        zero = settings.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        offload = zero.get("offload_optimizer", {}).get("device", "none")
    if stage not in (1, 2, 3):
        refused.append(f"expected ZeRO stage 1, 2 or 3, got {stage} in {path}")
        stage = 1
    wide = settings.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32")
    return f"ZeRO-{stage}", {"gradient_bytes": 4 if wide else 2, "offloads_optimizer": offload not in ("none", None)}
