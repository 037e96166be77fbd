"""What `harts train` shows and leaves behind: progress lines, metrics, two pictures and a summary."""

import json
import platform
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import harts_hf
from harts_hf.cli.output import printable, replacing, write_json
from harts_hf.cli.train_metrics import WINDOW, cut_metrics, plot_measure, shown, values_of
from harts_hf.tree import RolloutTree

REPORT_FILES = ("metrics.jsonl", "summary.json", "reward.png", "loss.png", "tree.png", "evaluation.jsonl")


class TrainReport(TrainerCallback):
    """Prints a line at every log, and writes into the output folder.

    ``metrics.jsonl`` (one log per line, as they come), ``evaluation.jsonl`` (the same of evaluations) and, at the end,
    ``reward.png`` (or ``loss.png``), ``summary.json`` and, if the rollout function keeps its latest rollouts,
    ``tree.png``. A new run begins them anew. A resumed one goes on with the metrics of its folder, less those that
    are later than its checkpoint, and its pictures and summary tell of both.

    Of several processes the first of the world prints and writes, and no other. Tokens and rewards in the summary are
    sums and means of the logs, which are of all processes; seconds, device and the tree in ``tree.png`` are its own.

    Args:
        collector: the rollout function; of one with ``last_rollouts`` (each with ``tree``, ``prompt_ids``,
            ``completion_ids`` and ``reward``) the largest tree is drawn.
        measure: the metric that says how the training goes: ``reward``, or ``loss`` where there are no rewards.
        prints_lines: whether to print a line at every log, or to leave that to a bar.
    """

    def __init__(self, collector: Any, *, measure: str = "reward", prints_lines: bool = True) -> None:
        self._collector = collector
        self._measure = measure
        self._prints_lines = prints_lines
        self._begun = (0.0, 0)  # this run: its clock, and the steps before it
        self._entries: list[dict[str, Any]] = []
        self._started = 0.0
        self._cpu_started = 0.0
        self._first_step = 0  # steps before it are in no entry

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()
        self._cpu_started = time.process_time()
        self._begun = self._started, state.global_step
        if state.is_world_process_zero:
            self._take_up(Path(str(args.output_dir)), state.global_step)
            # Under ZeRO-3 a parameter is empty between its uses, and remembers its size.
            parameters = sum(getattr(p, "ds_numel", p.numel()) for p in kwargs["model"].parameters())
            print(
                f"training {parameters:,} parameters for {state.max_steps} steps on "
                f"{_processes(getattr(args, 'world_size', 1))}, output in {printable(args.output_dir)}"
            )

    def _take_up(self, folder: Path, step: int) -> None:
        """Leaves the metrics up to ``step`` in the folder, and counts from them on."""
        folder.mkdir(parents=True, exist_ok=True)
        metrics, *at_end, evaluation = (folder / name for name in REPORT_FILES)
        for path in at_end:
            path.unlink(missing_ok=True)
        self._entries = cut_metrics(metrics, step)
        if not cut_metrics(evaluation, step):
            evaluation.unlink()
        if self._entries:
            self._started -= self._entries[-1]["seconds"]
            self._cpu_started -= self._entries[-1].get("cpu_seconds", 0.0)
        else:
            self._first_step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Logs the last step too, where the logging interval does not divide the number of steps."""
        if state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Records a log of a training step, or of an evaluation, and prints its line."""
        measure = self._measure
        if not state.is_world_process_zero or logs is None or not {measure, f"eval_{measure}"} & logs.keys():
            return
        entry = {"step": state.global_step, "seconds": self._seconds(), "cpu_seconds": self._cpu_seconds(), **logs}
        is_training = measure in logs
        with open(Path(str(args.output_dir)) / ("metrics.jsonl" if is_training else "evaluation.jsonl"), "a") as file:
            file.write(json.dumps(entry) + "\n")
        if is_training:
            self._entries.append(entry)
            line = (
                f"{measure} {shown(entry[measure], 6)}{_accuracy(entry)}  "
                f"shared {entry.get('tree/sharing_ratio', 1.0):5.2f}x  "
                f"{entry['seconds']:6.1f} s  ETA {self._left(state)}"
            )
        else:
            line = f"evaluation: {measure} {shown(entry[f'eval_{measure}'])}"
        if self._prints_lines:
            print(f"step {entry['step']:>5}/{state.max_steps}  {line}", flush=True)

    def _left(self, state: TrainerState) -> str:
        """The time that the remaining steps take if they are as fast as those of this run so far: ``h:mm:ss``."""
        started, first = self._begun
        done = state.global_step - first
        if done < 1:
            return "unknown"
        seconds = (time.perf_counter() - started) / done * (state.max_steps - state.global_step)
        return str(timedelta(seconds=round(seconds)))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the pictures and the summary."""
        if not state.is_world_process_zero or not self._entries:
            return
        folder = Path(str(args.output_dir))
        summary = self._summary(args)
        write_json(folder / "summary.json", summary)
        with replacing(folder / f"{self._measure}.png") as new:
            plot_measure(self._entries, self._measure, new)
        with replacing(folder / "tree.png") as new:
            self._plot_tree(new)
        first, last = self._windows()
        means = shown(summary[f"last_mean_{self._measure}"])
        if not np.array_equal(first, last):  # of few steps, both would be the mean of all
            up_to = max(WINDOW, self._entries[0]["step"])
            begun = shown(summary[f"first_mean_{self._measure}"])
            means = f"{begun} (steps up to {up_to}) -> {means} (last {WINDOW} steps)"
        print(
            f"mean {self._measure} {means} in {summary['seconds']:.0f} s; "
            f"{summary['expanded_tokens']:,} tokens trained as {summary['forward_tokens']:,}"
        )

    def _plot_tree(self, path: Path) -> None:
        """Draws the tree of the last step with the most tokens: once all goes well, many trees are a single line."""
        from harts_hf.rollouts.plot import plot_tree

        leaves: dict[int, list[Any]] = {}
        for rollout in getattr(self._collector, "last_rollouts", ()):
            leaves.setdefault(rollout.tree, []).append(rollout)
        trees = {
            number: RolloutTree.from_trajectories([leaf.prompt_ids + leaf.completion_ids for leaf in group])
            for number, group in leaves.items()
        }
        if trees:
            largest = max(trees, key=lambda number: trees[number].num_tokens)
            plot_tree(trees[largest], [leaf.reward for leaf in leaves[largest]], path)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._started, 3)

    def _cpu_seconds(self) -> float:
        return round(time.process_time() - self._cpu_started, 3)

    def _windows(self) -> tuple[np.ndarray, np.ndarray]:
        """``[logs]`` bool each: those of the first steps, and of the last."""
        steps = np.array([entry["step"] for entry in self._entries])
        return steps <= max(WINDOW, steps[0]), steps > steps[-1] - WINDOW

    def _summary(self, args: TrainingArguments) -> dict[str, Any]:
        steps = np.array([entry["step"] for entry in self._entries])
        values = values_of(self._entries, self._measure)
        first, last = self._windows()
        # Logged metrics are means over the steps since the log before.
        spans = np.diff(steps, prepend=self._first_step)

        def total(name: str) -> int:
            return round(sum(entry.get(name, 0.0) * span for entry, span in zip(self._entries, spans, strict=True)))

        def mean(logs: np.ndarray) -> float | None:
            logs = logs & ~np.isnan(values)
            return float(np.average(values[logs], weights=spans[logs])) if logs.any() else None

        return {
            "steps": int(steps[-1]),
            # Figures below are of the steps after this one: 0, or the checkpoint whose metrics are elsewhere.
            "counted_from_step": self._first_step,
            "window_steps": WINDOW,
            f"first_mean_{self._measure}": mean(first),
            f"last_mean_{self._measure}": mean(last),
            "sharing_ratio": total("tree/expanded_tokens") / max(total("tree/forward_tokens"), 1),
            "forward_tokens": total("tree/forward_tokens"),
            "backward_tokens": total("tree/backward_tokens"),
            "expanded_tokens": total("tree/expanded_tokens"),
            "seconds": self._seconds(),
            # Of all threads: on a machine that does other work too, this says what the run itself took.
            "cpu_seconds": self._cpu_seconds(),
            "seed": args.seed,
            "device": torch.cuda.get_device_name() if args.device.type == "cuda" else platform.processor() or "cpu",
            "threads": torch.get_num_threads(),
            "versions": {
                "harts_hf": harts_hf.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "trl": trl.__version__,
                "python": platform.python_version(),
            },
        }


def _accuracy(entry: dict[str, Any]) -> str:
    """The part of trained tokens that the model would have chosen itself, where it is logged."""
    accuracy = entry.get("mean_token_accuracy")
    return "" if accuracy is None else f"  accuracy {accuracy:.3f}"


def _processes(count: int) -> str:
    return f"{count} process" if count == 1 else f"{count} processes"
