"""What a training takes of each process's memory, part by part: sizes of tensors, or estimates."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harts_hf.cli.launching import Launch
from harts_hf.modeling.checkpointing import checkpointed_every
from harts_hf.modeling.memory import WORKSPACE, RowBytes, graph_bytes, peak_of_rows, row_bytes
from harts_hf.planner import Schedule
from harts_hf.trainers.memory import gathered_bytes, optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the memory.

    Attributes:
        name: of the part.
        bytes: on each process; None if nobody knows.
        exact: whether it is the size of tensors that are certain to be there, and no estimate.
        note: how it comes about.
    """

    name: str
    bytes: float | None
    exact: bool = False
    note: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Memory:
    """What a training takes on each process.

    Attributes:
        states: parts that are there whatever is run, or gathered for it.
        rows: what forwards and backwards take, by what is counted of them.
        gradients: bytes of all gradients, which are among the states.
        offload: whether handed states lie on the CPU.
    """

    states: list[Part]
    rows: RowBytes
    gradients: float
    offload: bool

    @property
    def states_bytes(self) -> float:
        """Of all states that are known."""
        return sum(part.bytes for part in self.states if part.bytes is not None)

    def parts(self, schedule: Schedule) -> list[Part]:
        """All parts, those of rows on the process with the most work.

        Args:
            schedule: of one optimizer step, on one process or on all.
        """
        return [*self.states, *_of_rows(self, schedule)]

    def peak(self, schedule: Schedule) -> float:
        """The most bytes at once: parts are not all at their largest together."""
        ranks = range(schedule.config.world_size)
        rows = [
            peak_of_rows(schedule, self.rows, gradients=self.gradients, rank=r, offload=self.offload) for r in ranks
        ]
        return self.states_bytes - self.gradients + max(rows)


def memory_of(model: Any, training: Any, launch: Launch, *, with_reference: bool) -> Memory:
    """What a training takes.

    Args:
        model: the policy, adapters included; may be on the meta device.
        training: the trainer's arguments.
        launch: processes and backend.
        with_reference: whether a reference model is kept beside it.

    Raises:
        UnsupportedModelError: a model of no supported family.
    """
    states = [*_states(model, training, launch, with_reference), *_working(model, training, launch)]
    rows = row_bytes(
        model,
        dtype=_dtype(model, training),
        checkpointing=training.gradient_checkpointing,
        every=checkpointed_every(training.gradient_checkpointing_kwargs),
        fused=training.tree_fused_modules == "auto",
        sharded=launch.is_deepspeed or launch.shards("weights") > 1,
    )
    gradients = next(part.bytes or 0.0 for part in states if part.name == "gradients")
    return Memory(states=states, rows=rows, gradients=gradients, offload=training.tree_offload_handoff)


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """All parameters, and those that are trained."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def _states(model: Any, training: Any, launch: Launch, with_reference: bool) -> list[Part]:
    total, trained = parameter_counts(model)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    own_trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    half = launch.is_deepspeed and (training.bf16 or training.fp16)
    weights, gradients = (2 * total, 2 * trained) if half else (own, own_trained)
    if launch.gradient_bytes is not None:
        gradients = launch.gradient_bytes * trained
    split = {name: launch.shards(name) for name in ("weights", "gradients", "optimizer")}
    note = f"{weights / total:.3g} bytes a parameter"
    parts = [Part(name="weights", bytes=weights / split["weights"], exact=True, note=_over(note, split["weights"]))]
    if with_reference:
        parts.append(Part(name="reference model", bytes=weights / split["weights"], exact=True, note=parts[0].note))
    note = f"{gradients / max(trained, 1):.3g} bytes a trained parameter"
    parts.append(
        Part(name="gradients", bytes=gradients / split["gradients"], exact=True, note=_over(note, split["gradients"]))
    )
    name = getattr(training.optim, "value", training.optim)
    states = optimizer_bytes(name, trained, 4 * trained if half else own_trained)
    master = 4 * trained if half else 0
    where = " (on the CPU)" if launch.offloads_optimizer else ""
    note = f"{name}{' and float32 master weights' if master else ''}{where}"
    if states is None:
        parts.append(Part(name="optimizer", bytes=None, note=f"{note}: its states are not known here"))
    else:
        size = 0.0 if launch.offloads_optimizer else (states + master) / split["optimizer"]
        parts.append(Part(name="optimizer", bytes=size, exact=True, note=_over(note, split["optimizer"])))
    return parts


def _working(model: Any, training: Any, launch: Launch) -> list[Part]:
    """What is kept beside weights and gradients while the model runs."""
    found = []
    if launch.backend == "DDP":
        size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        found.append(Part(name="buckets", bytes=size, note="DDP's copies of gradients"))
    if launch.shards("weights") > 1:
        gathered = gathered_bytes(model, _dtype(model, training).itemsize)
        note = f"{launch.backend}: two layers, embedding and head whole"
        found.append(Part(name="gathered weights", bytes=gathered.weights, note=note))
        note = "of one layer before they are reduced"
        found.append(Part(name="gathered gradients", bytes=gathered.gradients, note=note))
    return found


def _of_rows(memory: Memory, schedule: Schedule) -> list[Part]:
    counts = [schedule.memory_counts(rank) for rank in range(schedule.config.world_size)]
    rows = memory.rows
    found = [graph_bytes(schedule, rows, rank=rank) for rank in range(len(counts))]
    graphs = max(float((one.kept + one.running).max(initial=0)) for one in found)
    most = max(int(one.graph_rows.max(initial=0)) for one in counts)
    handed = max(float(one.handed_bytes.max(initial=0)) for one in counts)
    casts = [Part(name="cast weights", bytes=rows.casts, note="autocast's copies")] if rows.casts else []
    return [
        *casts,
        Part(name="graphs", bytes=graphs, note=f"{most:,} rows at most, {rows.row / 1e6:,.3g} MB a row that runs"),
        Part(
            name="handed states",
            bytes=0.0 if memory.offload else handed,
            note="between microbatches" + (" (on the CPU)" if memory.offload else ""),
        ),
        Part(name="head", bytes=rows.head_of(most), note="logits of a chunk, gradients of the head's weight"),
        Part(name="workspaces", bytes=float(WORKSPACE), note="of kernels on a GPU, and a window's tables"),
    ]


def _dtype(model: Any, training: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return torch.bfloat16 if training.bf16 or training.fp16 else dtype


def _over(note: str, shards: int) -> str:
    return note if shards == 1 else f"{note}, over {shards} processes"
