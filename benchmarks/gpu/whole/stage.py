"""One stage of one whole model; what each of its parts finds is a file of its own."""

import argparse
import faulthandler
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import record
from benchmarks.gpu.registry import SEED, WHOLE_SHAPES, parts_of
from benchmarks.gpu.trees import bush, draw_tokens, shape_window, spine
from benchmarks.gpu.whole import peaks, rollouts
from benchmarks.gpu.whole.models import build_model
from benchmarks.gpu.whole.windows import Window
from harts_hf import PlannerConfig, TreeGRPOConfig, TreeGRPOTrainer, patch, tree_logprobs

MICROBATCH = 32768
REPEATS = 2
LOGGED = ("loss", "grad_norm", "tree/sharing_ratio", "tree/logp_recompute_maxdiff", "tree/backward_seconds")


class Stage:
    """What the parts share.

    Args:
        family: of the model.
        folder: where parts are written.
        shapes: folder of shape files.
        dry: tiny, on the CPU.
    """

    def __init__(self, family: str, folder: Path, shapes: Path, dry: bool) -> None:
        self.family, self.folder, self.shapes, self.dry = family, folder, shapes, dry
        self.device = "cpu" if dry else "cuda"

    def model(self) -> nn.Module:
        """Patched."""
        return patch(build_model(self.family, self.dry))

    def config_folder(self) -> Path:
        """A folder with the model's configuration alone."""
        folder = self.folder / f"{self.family}-config"
        build_model(self.family, self.dry).config.save_pretrained(folder)
        return folder

    def verify(self) -> dict[str, Any]:
        """`harts verify` on random weights and real trees."""
        return self._verify("float32" if self.dry else "bfloat16", draws=2 if self.dry else 5)

    def verify_float32(self) -> dict[str, Any]:
        """The same in float32, which is the command's default, on fewer draws."""
        return self._verify("float32", draws=2)

    def _verify(self, dtype: str, draws: int) -> dict[str, Any]:
        from harts_hf.cli import verify

        out = self.folder / f"{self.family}-verdict-{dtype}.json"
        status = verify.main(
            [str(self.shapes / "tot_game24.jsonl.gz"), "--model", str(self.config_folder()), "--device", self.device,
             "--dtype", dtype, "--draws", str(draws), "--max-tokens", "150" if self.dry else "1536",
             "--seed", str(SEED), "--json", str(out)]
        )  # fmt: skip
        return {"passed": status == 0, **record.read(out)}

    def train(self) -> dict[str, Any]:
        """Three steps of TreeGRPOTrainer on recorded rollouts."""
        model = build_model(self.family, self.dry)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        options = rollouts.arguments(self.folder / f"{self.family}-train", use_cpu=self.dry, bf16=not self.dry)
        trainer = TreeGRPOTrainer(
            model, rollouts.recorded_reward, args=TreeGRPOConfig(**options), train_dataset=rollouts.dataset(),
            processing_class=rollouts.tokenizer(), rollout_func=rollouts.rollout_func,
        )  # fmt: skip
        begin = time.monotonic()
        trainer.train()
        moved = max((p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters())
        finite = all(torch.isfinite(p).all().item() for p in model.parameters())
        logs = [{k: log[k] for k in LOGGED if k in log} for log in trainer.state.log_history[:-1]]
        steps = trainer.state.global_step
        assert finite and moved > 0 and steps == rollouts.STEPS, (finite, moved, steps)
        return {"steps": steps, "seconds": time.monotonic() - begin, "largest_change": moved, "logs": logs}

    def repeat(self) -> dict[str, Any]:
        """Parameters whose gradients differ between two runs, with `deterministic` and without."""
        model = self.model()
        vocab = model.get_input_embeddings().num_embeddings
        trajectories = draw_tokens(bush(6200), vocab)
        if self.dry:
            trajectories = [row[:150] for row in trajectories[:3]]
        planner = PlannerConfig(max_tokens_per_microbatch=100 if self.dry else 4096, sharing="always")
        found: dict[str, Any] = {}
        for deterministic in (True, False):
            runs = []
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                torch.cat(tree_logprobs(model, trajectories, planner, deterministic=deterministic)).sum().backward()
                runs.append([p.grad.clone() for p in model.parameters()])
            names = [name for name, _ in model.named_parameters()]
            equal = [torch.equal(a, b) for a, b in zip(*runs, strict=True)]
            differ = [name for name, same in zip(names, equal, strict=True) if not same]
            found["differ_deterministic" if deterministic else "differ"] = differ
        print("repeat:", len(found["differ_deterministic"]), "and", len(found["differ"]), "differ", flush=True)
        return {"passed": not found["differ_deterministic"], **found}

    def speed(self) -> dict[str, Any]:
        """Time of an update on the tree, and of the same kernels on packed trajectories.

        Forward and backward of each microbatch, as TRL runs them, is the comparison; with a scoring pass before, which
        the package needs for GRPO's losses wherever there are several microbatches, is reported beside it.
        """
        model = self.model()
        vocab = model.get_input_embeddings().num_embeddings
        found = {}
        for name, rows in WHOLE_SHAPES.items():
            if self.dry:
                trajectories = [row[:1400] for row in draw_tokens(spine(2700), vocab)]
            else:
                trajectories = shape_window(self.shapes, name, rows, vocab)
            ways = {sharing: self._update(model, trajectories, sharing) for sharing in ("always", "never")}
            tree, expanded = ways["always"], ways["never"]
            difference = (tree.pop("log_probs") - expanded.pop("log_probs")).square().mean().sqrt().item()
            gradients, theirs = tree.pop("gradients"), expanded.pop("gradients")
            error = sum((gradients[n] - theirs[n]).square().sum().item() for n in gradients) ** 0.5
            size = sum(theirs[n].square().sum().item() for n in gradients) ** 0.5
            found[name] = {
                "tree": tree,
                "expanded": expanded,
                "speedup": expanded["seconds"] / tree["seconds"],
                "speedup_with_scoring": expanded["seconds_with_scoring"] / tree["seconds_with_scoring"],
                "sharing_ratio": expanded["rows"] / tree["rows"],
                "rms_log_prob_difference": difference,
                "gradient_difference": error / size,
            }
            print(name, found[name], flush=True)
            assert found[name]["gradient_difference"] < 0.2, "tree and expanded gradients are not of one model"
            self._empty()
        return {"layers": len(model.config.layer_types), "max_tokens_per_microbatch": MICROBATCH, "shapes": found}

    def _update(self, model: nn.Module, trajectories: list, sharing: str) -> dict[str, Any]:
        # Without microbatches that depend on others, nested runs forward and backward of one after the other.
        config = PlannerConfig(
            max_tokens_per_microbatch=MICROBATCH,
            max_graph_tokens=MICROBATCH,
            sharing=sharing,
            execution="nested",
        )
        begin = time.perf_counter()
        window = Window(trajectories, config, self.device)
        planning = time.perf_counter() - begin
        weights = window.random_weights()
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(1 + REPEATS):
            for scored in (True, False):
                model.zero_grad(set_to_none=True)
                if repeat == 1 and not scored:
                    self._reset_peak()
                begin = time.perf_counter()
                if scored:
                    window.run_scored(model, weights)
                else:
                    scores = window.run_unscored(model, weights)
                self._synchronise()
                times[scored].append(time.perf_counter() - begin)
        return {
            "seconds": statistics.median(times[False][1:]),
            "seconds_with_scoring": statistics.median(times[True][1:]),
            "first_seconds": times[True][0],
            "planning_seconds": planning,
            "peak_bytes": 0 if self.dry else torch.cuda.max_memory_allocated(),
            "rows": window.schedule.backward_tokens,
            "microbatches": window.num_microbatches,
            "log_probs": window.log_probs(scores),
            "gradients": {n: p.grad.detach().float().cpu() for n, p in model.named_parameters() if p.grad is not None},
        }

    def memory(self) -> dict[str, Any]:
        """Peaks of windows against the planner's counts times bytes fitted on others."""
        model = self.model()
        vocab = model.get_input_embeddings().num_embeddings
        measured = {}
        for name, trajectories in peaks.trees(vocab).items():
            if self.dry:
                trajectories = [row[:700] for row in trajectories[:2]]
            for execution in ("replay", "nested"):
                for budget in peaks.BUDGETS:
                    planner = peaks.planner(execution, budget // 32 if self.dry else budget)
                    window = Window(trajectories, planner, self.device)
                    for _ in range(2):  # gradients and caches are there the second time
                        peak = self._peak(model, window)
                    measured[name, execution, budget] = peaks.units(window.schedule), peak
        found = peaks.predict(measured)
        print("memory: worst error", found["worst_error_of_predicted_windows"], flush=True)
        return found

    def _peak(self, model: nn.Module, window: Window) -> float:
        """Most bytes allocated above what was there before the run."""
        self._reset_peak()
        before = 0 if self.dry else torch.cuda.memory_allocated()
        run = window.run_unscored if window.schedule.execution == "nested" else window.run_scored
        run(model, window.ones())
        return max(1.0, (0 if self.dry else torch.cuda.max_memory_allocated()) - before)

    def cost(self) -> dict[str, Any]:
        """`harts bench --fit-cost`."""
        from harts_hf.cli import bench

        out = self.folder / f"{self.family}-cost.json"
        begin = time.monotonic()
        status = bench.main(
            ["--fit-cost", "--model", str(self.config_folder()), "--random-weights", "--out", str(out),
             "--max-rows", "256" if self.dry else "8192", "--repeats", "1" if self.dry else "2",
             "--dtype", "float32" if self.dry else "bfloat16", "--device", self.device]
        )  # fmt: skip
        assert status == 0, status
        return {"seconds": time.monotonic() - begin, "cost": record.read(out)}

    def _synchronise(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def _empty(self) -> None:
        if not self.dry:
            torch.cuda.empty_cache()

    def _reset_peak(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()


def main(options: argparse.Namespace) -> None:
    """Part after part."""
    faulthandler.register(signal.SIGUSR1)  # into the log: what a stage was at when its time was over
    stage = Stage(options.family, options.folder, options.shapes, options.dry_run)
    for part in parts_of(options.family, options.what):
        begin = time.monotonic()
        try:
            entry = getattr(stage, part)()
        except BaseException:
            entry = {"failure": record.failure()}
        seconds = time.monotonic() - begin
        path = options.folder / f"{options.family}-{part}.json"
        record.write(path, {**record.about(), **entry, "part_seconds": seconds})
        print(options.family, part, f"{seconds:.0f} s", flush=True)
        stage._empty()
