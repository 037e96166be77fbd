"""One stage of one family of ``whole.py``: python whole_parts.py FAMILY STAGE FOLDER SHAPES_FOLDER [--dry-run]"""

import argparse
import faulthandler
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measure import failure, machine
from whole import PARTS, parts_of
from whole_models import build_model, bush, draw_tokens, shape_window, spine

from harts_hf import PlannerConfig, TreeGRPOConfig, TreeGRPOTrainer, patch, tree_logprobs
from harts_hf.runtime import Coefficients, TreeWindow, WindowRun

SEED = 0
SHAPES = {"miniswe_b_drop": 16384, "tot_game24": 16384}  # unique tokens, at least
MICROBATCH = 32768
REPEATS = 2


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

    def about(self) -> dict[str, Any]:
        if self.dry:
            return {"device": "cpu (dry run)", "commit": os.environ.get("HARTS_COMMIT", "unknown"), "seed": SEED}
        return {**machine(), "seed": SEED}

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
        return {"passed": status == 0, **json.loads(out.read_text())}

    def train(self) -> dict[str, Any]:
        """Three steps of TreeGRPOTrainer on recorded rollouts."""
        from support import recorded

        model = build_model(self.family, self.dry, SEED)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        options = {"use_cpu": self.dry, "bf16": not self.dry, "router_aux_loss_coef": 0.0}
        arguments = TreeGRPOConfig(**recorded.arguments(self.folder / f"{self.family}-train", **options))
        trainer = TreeGRPOTrainer(
            model, recorded.recorded_reward, args=arguments, train_dataset=recorded.dataset(),
            processing_class=recorded.tokenizer(), rollout_func=recorded.rollout_func,
        )  # fmt: skip
        begin = time.monotonic()
        trainer.train()
        moved = max((p.detach() - before[name]).abs().max().item() for name, p in model.named_parameters())
        finite = all(torch.isfinite(p).all().item() for p in model.parameters())
        keep = ("loss", "grad_norm", "tree/sharing_ratio", "tree/logp_recompute_maxdiff", "tree/backward_seconds")
        logs = [{k: log[k] for k in keep if k in log} for log in trainer.state.log_history[:-1]]
        assert finite and moved > 0 and trainer.state.global_step == 3, (finite, moved, trainer.state.global_step)
        return {"steps": 3, "seconds": time.monotonic() - begin, "largest_change": moved, "logs": logs}

    def repeat(self) -> dict[str, Any]:
        """Parameters whose gradients differ between two runs, with `deterministic` and without."""
        model = patch(build_model(self.family, self.dry, SEED))
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
        model = patch(build_model(self.family, self.dry, SEED))
        vocab = model.get_input_embeddings().num_embeddings
        found = {}
        for name, rows in SHAPES.items():
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

    def _update(self, model: Any, trajectories: list, sharing: str) -> dict[str, Any]:
        # Without microbatches that depend on others, nested runs forward and backward of one after the other.
        config = PlannerConfig(
            max_tokens_per_microbatch=MICROBATCH,
            max_graph_tokens=MICROBATCH,
            sharing=sharing,
            execution="nested",
        )
        begin = time.perf_counter()
        window = TreeWindow(trajectories, config).to(self.device)
        planning = time.perf_counter() - begin
        generator = torch.Generator().manual_seed(SEED)
        weights = [torch.randn(len(row) - 1, generator=generator) for row in trajectories]
        per_row = torch.zeros(window.tree.num_tokens)
        for index, weight in enumerate(weights):
            per_row.index_add_(0, torch.from_numpy(window.label_rows(index)), weight)
        coefficients = Coefficients(log_probs=per_row.to(self.device))
        wanted = torch.ones(window.tree.num_tokens, dtype=torch.bool, device=self.device)
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(1 + REPEATS):
            for scored in (True, False):
                model.zero_grad(set_to_none=True)
                if repeat == 1 and not scored:
                    self._reset_peak()
                begin = time.perf_counter()
                if scored:
                    run = WindowRun(model, window)
                    run.score()
                    run.backward(coefficients, torch.Tensor.backward)
                else:
                    run = WindowRun(model, window, mode="unscored")
                    scores = run.backward_unscored(coefficients, torch.Tensor.backward, wanted)
                self._synchronise()
                times[scored].append(time.perf_counter() - begin)
        rows = [torch.from_numpy(window.label_rows(index)) for index in range(len(trajectories))]
        log_probs = scores.log_probs.cpu()
        return {
            "seconds": statistics.median(times[False][1:]),
            "seconds_with_scoring": statistics.median(times[True][1:]),
            "first_seconds": times[True][0],
            "planning_seconds": planning,
            "peak_bytes": 0 if self.dry else torch.cuda.max_memory_allocated(),
            "rows": window.schedule.backward_tokens,
            "microbatches": len(window.batches),
            "log_probs": torch.cat([log_probs[r] for r in rows]),
            "gradients": {n: p.grad.detach().float().cpu() for n, p in model.named_parameters() if p.grad is not None},
        }

    def memory(self) -> dict[str, Any]:
        """Peaks of windows against the planner's counts times bytes fitted on others."""
        from window_peaks import BUDGETS, planner, predict, trees, units

        model = patch(build_model(self.family, self.dry, SEED))
        vocab = model.get_input_embeddings().num_embeddings
        budgets = {budget: budget // 32 if self.dry else budget for budget in BUDGETS}
        measured = {}
        for name, trajectories in trees(vocab).items():
            if self.dry:
                trajectories = [row[:700] for row in trajectories[:2]]
            for execution in ("replay", "nested"):
                for budget, rows in budgets.items():
                    window = TreeWindow(trajectories, planner(execution, rows)).to(self.device)
                    for _ in range(2):  # gradients and caches are there the second time
                        peak = self._peak(model, window)
                    measured[name, execution, budget] = units(window.schedule), peak
        found = predict(measured)
        print("memory: worst error", found["worst_error_of_predicted_windows"], flush=True)
        return found

    def _peak(self, model: Any, window: TreeWindow) -> float:
        """Most bytes allocated above what was there before the run."""
        self._reset_peak()
        before = self._allocated()
        nested = window.schedule.execution == "nested"
        run = WindowRun(model, window, mode="unscored" if nested else "train")
        tokens = window.tree.num_tokens
        coefficients = Coefficients(log_probs=torch.ones(tokens, device=self.device))
        if nested:
            wanted = torch.ones(tokens, dtype=torch.bool, device=self.device)
            run.backward_unscored(coefficients, torch.Tensor.backward, wanted)
        else:
            run.score()
            run.backward(coefficients, torch.Tensor.backward)
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
        return {"seconds": time.monotonic() - begin, "cost": json.loads(out.read_text())}

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

    def _allocated(self) -> int:
        return 0 if self.dry else torch.cuda.memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family")
    parser.add_argument("stage", choices=PARTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # into the log: what a stage was at when its time was over
    stage = Stage(arguments.family, arguments.folder, arguments.shapes, arguments.dry_run)
    for part in parts_of(arguments.family, arguments.stage):
        begin = time.monotonic()
        try:
            entry = getattr(stage, part)()
        except BaseException:
            entry = {"failure": failure()}
        text = json.dumps({**stage.about(), **entry, "part_seconds": time.monotonic() - begin}, indent=1)
        temporary = arguments.folder / f"{arguments.family}-{part}.tmp"
        temporary.write_text(text + "\n")
        temporary.rename(arguments.folder / f"{arguments.family}-{part}.json")
        print(arguments.family, part, f"{time.monotonic() - begin:.0f} s", flush=True)
        stage._empty()


if __name__ == "__main__":
    main()
