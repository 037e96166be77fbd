"""What is run on how many GPUs: jobs, how long each takes, which run side by side. Needs no torch."""

import re
from math import ceil
from typing import NamedTuple

DIVISOR = 8  # every job takes as many rows as 1, 2, 4 and 8 processes divide: all of a workload train the same ones
CALL_SECONDS = 560.0  # of a call, which a device machine ends after 600
# Rows and tokens per second of one H200, Ling-3.0-tiny in bf16, the slowest of what was measured: trees of four and
# eight groups in microbatches of 32,768 rows, 23,500 and 19,800 (ranks_h200.json), packed rows in as many 31,400,
# stock TRL 13,600 (docs/performance.md); and what two GPUs keep of twice one's speed (0.74 to 0.79).
TREE_SPEED, PACKED_SPEED, STOCK_SPEED, OF_IDEAL = 19_000, 30_000, 13_000, 0.7
START, COMPILE = 60.0, 40.0  # seconds of a process before its first step, and of that step beside its work
LONGEST = 200.0  # a step without sharing that takes longer is not run
UNWARMED = 60.0  # a side whose step takes longer is timed without a step that is not


class Workload(NamedTuple):
    """A step: groups of a shape file (all if None), their tokens and rows."""

    shapes: str
    groups: tuple[int, ...] | None
    tokens: int
    rows: int


WORKLOADS = {
    "miniswe1": Workload("miniswe_b_drop", (0,), 200_068, 20_249),
    "miniswe4": Workload("miniswe_b_drop", (0, 1, 2, 3), 1_706_948, 111_624),
    "miniswe20": Workload("miniswe_b_drop", None, 11_713_040, 589_671),
    "tau50": Workload("tau_airline_b", None, 13_898_843, 740_189),
}
MAIN = "miniswe20"


class Side(NamedTuple):
    """A way of training the same rows.

    Attributes:
        kind: "tree"; "packed", the same trainer without sharing; "stock", TRL's.
        size: rows of a microbatch; of stock, of a batch.
    """

    kind: str
    size: int

    @property
    def label(self) -> str:
        """Such as ``packed 32768``."""
        return f"{self.kind} {self.size}"


class Step(NamedTuple):
    """An optimizer step of a job.

    Attributes:
        side: that takes it.
        role: "warm"; "timed"; "ops", each forward and backward timed by itself; "moved", the only ones that change
            weights.
    """

    side: Side
    role: str


# What jobs do.
KINDS = {
    "parity": "float32, four layers whose tokens take all experts: gradients and three steps' parameters",
    "parity16": "the same in bfloat16",
    "time": "the whole model: trees beside packed rows in turns",
    "stock": "the whole model in stock TRL",
    "kill": "a process is killed within a step: all others have to end, with an error",
    "large": "Ling-3.0-flash's widths, as many layers as fit: a step, memory by part",
}
BACKENDS = ("one", "ddp", "fsdp2", "fsdp2-kept", "zero3")
_TREE, _HALF, _PACKED = Side("tree", 32768), Side("tree", 16384), Side("packed", 32768)
SIDES = {
    "parity": (Side("tree", 8192), Side("packed", 8192)),
    "parity16": (Side("tree", 8192), Side("packed", 8192)),
    "stock": (Side("stock", 1),),
    "kill": (_TREE,),
}
MOVED = 3  # steps that change weights
MOST_TIMED = 5


class Job(NamedTuple):
    """One training in processes of its own, named such as ``time-fsdp2-8-miniswe20``.

    Attributes:
        kind: of :data:`KINDS`.
        backend: of :data:`BACKENDS`; "one" is a single process.
        processes: how many.
        workload: of :data:`WORKLOADS`.
    """

    kind: str
    backend: str
    processes: int
    workload: str

    @property
    def name(self) -> str:
        """What :meth:`parse` reads."""
        return f"{self.kind}-{self.backend}-{self.processes}-{self.workload}"

    @classmethod
    def parse(cls, name: str) -> "Job":
        """A job by its name.

        Raises:
            ValueError: no such job.
        """
        found = re.fullmatch(r"([^-]+)-(.+)-(\d+)-([^-]+)", name)
        if found is None:
            raise ValueError(f"expected a job such as time-fsdp2-8-miniswe20, got {name!r}")
        kind, backend, count, workload = found.groups()
        for what, value, known in (
            ("kind", kind, KINDS), ("backend", backend, BACKENDS), ("workload", workload, WORKLOADS)
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"expected a {what} of {', '.join(known)} in {name!r}, got {value!r}")
        if int(count) not in (1, 2, 4, 8) or (backend == "one") != (int(count) == 1):
            raise ValueError(f"expected 2, 4 or 8 processes, or one-1, in {name!r}")
        if kind in ("kill", "large") and backend == "one":
            raise ValueError(f"expected several processes for {kind}, got {name!r}")
        if kind == "large" and backend not in ("zero3", "fsdp2"):
            raise ValueError(f"expected zero3 or fsdp2 for a model that no GPU holds, got {name!r}")
        return cls(kind, backend, int(count), workload)

    @property
    def one(self) -> "Job":
        """Of one process, that this one is compared with."""
        return Job(self.kind, "one", 1, self.workload)

    @property
    def is_exact(self) -> bool:
        """Whether it runs in float32."""
        return self.kind == "parity"

    @property
    def sides(self) -> tuple[Side, ...]:
        """In the order in which they take turns. One process times trees only on large workloads, in two budgets,
        whose gradients tell what roundings do; the best budget of packed rows is found on small ones."""
        if self.kind in SIDES:
            return SIDES[self.kind]
        if self.kind == "large":
            return (_TREE,)  # at most so many rows; the memory model says how many
        if self.backend == "one":
            return (_TREE, _HALF, *((_PACKED,) if self.workload in ("miniswe1", "miniswe4") else ()))
        packed = (_PACKED, Side("packed", 65536)) if self.workload in ("miniswe1", "miniswe4") else (_PACKED,)
        return (_TREE, *(side for side in packed if self.side_seconds(side) <= LONGEST))

    def side_seconds(self, side: Side) -> float:
        """About how long a step takes on H200s."""
        work = WORKLOADS[self.workload]
        speed = {"tree": TREE_SPEED, "packed": PACKED_SPEED, "stock": STOCK_SPEED}[side.kind]
        count = work.rows if side.kind == "tree" else work.tokens
        several = self.processes * (OF_IDEAL if self.processes > 1 else 1.0)
        seconds = count / speed / several
        if self.kind.startswith("parity"):
            return seconds / 2  # fewer layers, in float32
        return 4 * seconds if self.kind == "large" else seconds

    @property
    def steps(self) -> list[Step]:
        """All of them, known beforehand, since ranks take them together."""
        sides = self.sides
        if self.kind == "large":
            return [Step(sides[0], "warm"), Step(sides[0], "timed")]
        if self.kind == "kill":
            return [Step(sides[0], "warm")] * 2
        warm = [Step(side, "warm") for side in sides if self.side_seconds(side) <= UNWARMED]
        if self.kind.startswith("parity"):
            return [*warm, *[Step(sides[0], "moved")] * MOVED]
        timed = {side: self._timed(side) for side in sides}
        rounds = [
            Step(side, "timed") for number in range(MOST_TIMED) for side in sides if number < timed[side]
        ]  # fmt: skip
        ops = [Step(sides[0], "ops")] if self.backend in ("one", "ddp") and self.kind == "time" else []
        return warm + rounds + ops

    def _timed(self, side: Side) -> int:
        seconds = self.side_seconds(side)
        if side == _HALF:
            return 1
        return MOST_TIMED if seconds <= 15 else 3 if seconds <= 30 else 2 if seconds <= 60 else 1

    @property
    def seconds(self) -> float:
        """About how long all of it takes."""
        return START + COMPILE + sum(self.side_seconds(step.side) for step in self.steps)


def jobs_for(gpus: int) -> list[Job]:
    """All that is worth running on so many GPUs, the most important first; what proves a row comes before it.

    Raises:
        ValueError: other numbers than 2, 4 and 8.
    """
    if gpus not in (2, 4, 8):
        raise ValueError(f"expected 2, 4 or 8 GPUs, got {gpus}")
    several = [f"fsdp2-{gpus}", f"zero3-{gpus}"]
    names = [f"parity-{backend}-miniswe1" for backend in ("one-1", *several)]
    names += [f"time-{backend}-{MAIN}" for backend in ("one-1", *several)]
    names += [f"kill-{backend}-miniswe1" for backend in several]
    names += [f"time-{backend}-tau50" for backend in ("one-1", *several)]
    names += [f"large-{backend}-miniswe1" for backend in reversed(several)]
    for kind, workload in (("parity", "miniswe1"), ("time", MAIN)):
        names += [f"{kind}-{backend}-{count}-{workload}" for count in (4, 2) if count < gpus
                  for backend in ("fsdp2", "zero3")]  # fmt: skip
    names += [f"parity16-{backend}-miniswe1" for backend in ("one-1", *several)]
    for backend in (f"ddp-{gpus}", f"fsdp2-kept-{gpus}"):
        names += [f"parity-{backend}-miniswe1", f"time-{backend}-{MAIN}"]
    names += [f"parity16-ddp-{gpus}-miniswe1", "time-one-1-miniswe4", f"time-fsdp2-{gpus}-miniswe4"]
    return list(map(Job.parse, [*names, f"stock-ddp-{gpus}-miniswe4"]))


def waves_of(jobs: list[Job], gpus: int) -> list[list[Job]]:
    """Jobs that run side by side, each on GPUs of its own: the first that is left and all later ones that find room.

    A job that kills one of its processes is alone.
    """
    left, waves = list(jobs), []
    while left:
        wave = [left.pop(0)]
        if wave[0].kind != "kill":
            for job in list(left):
                if job.kind != "kill" and job.processes + sum(one.processes for one in wave) <= gpus:
                    left.remove(job)
                    wave.append(job)
        waves.append(wave)
    return waves


def text_of(gpus: int, seconds: float = CALL_SECONDS) -> str:
    """The jobs for so many GPUs in the order in which a call runs them, in words."""
    lines, about = [], 0.0
    for wave in waves_of(jobs_for(gpus), gpus):
        about += max(job.seconds for job in wave)
        lines.append(f"# until {ceil(about):5,} s, call {ceil(about / seconds)}:")
        lines += [f"#   {job.seconds:5.0f} s  {job.name}: {KINDS[job.kind]}" for job in wave]
    return "\n".join([
        f"# {gpus} GPUs, the most important first; what finds room runs side by side, each on GPUs of its own.",
        f"# A call ends after {seconds:.0f} s; the same call again goes on where one of this commit ended.",
        "# Estimates are from speeds of one and two H200s: none of these jobs has run on GPUs yet (docs/ranks.md).",
        *lines,
        f"python -m benchmarks.ranks call --gpus {gpus} --shapes SHAPES --out OUT",
        "python -m benchmarks.ranks record OUT/ranks_jobs.json",
    ])  # fmt: skip
