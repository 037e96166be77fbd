"""Run by torchrun: training steps in which one rank fails; writes down what each rank raised, failure by failure.

    torchrun --nproc_per_node 2 fail_ranks.py FOLDER BACKEND FAILURE ...

"op" ends the process that fails: nobody is told, the launcher ends the others.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from support.backends import allow_fsdp_on_cpu, backend_options


def in_loss(trainer, rank):
    """Rank 1's loss of the second slice, after its collectives."""
    stock, calls = trainer._compute_loss, []

    def compute(model, inputs):
        loss = stock(model, inputs)
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise ZeroDivisionError("nothing to divide by")
        return loss

    trainer._compute_loss = compute


def in_collectives(trainer, rank):
    """Rank 1's loss gathers once more than rank 0's."""
    stock = trainer._compute_loss

    def compute(model, inputs):
        loss = stock(model, inputs)
        if rank == 1:
            trainer.accelerator.gather(loss.detach())
        return loss

    trainer._compute_loss = compute


def in_kinds(trainer, rank):
    """Rank 1's loss sums up what rank 0's gathers."""
    stock = trainer._compute_loss

    def compute(model, inputs):
        loss = stock(model, inputs)
        own = loss.detach().reshape(1)
        trainer.accelerator.reduce(own) if rank == 1 else trainer.accelerator.gather(own)
        return loss

    trainer._compute_loss = compute


def in_rows(trainer, rank):
    """Rank 0's batch has a completion without a prompt."""
    add = trainer._tree.add_slice

    def add_slice(batch):
        if rank == 0:
            batch = {**batch, "prompt_mask": torch.zeros_like(batch["prompt_mask"])}
        add(batch)

    trainer._tree.add_slice = add_slice


def in_settings(trainer, rank):
    """Rank 1 plans with another limit, and compares plans of its own with those of all ranks."""
    from dataclasses import replace

    trainer.args.tree_placement = "auto"
    planner = trainer._tree.planner
    limit = 64 + 64 * rank
    trainer._tree.planner = replace(
        planner, config=replace(planner.config, sharing="auto", max_tokens_per_microbatch=limit)
    )


def in_plans(trainer, rank):
    """Rank 1's planner makes other plans of the same settings."""
    from dataclasses import replace

    from harts_hf.runtime import window

    stock = window.plan_window
    if rank == 1:
        window.plan_window = lambda tree, config: stock(tree, replace(config, max_tokens_per_microbatch=128))
    return lambda: setattr(window, "plan_window", stock)


def in_reward(trainer, rank):
    """Rank 1's reward function."""

    def reward(completions, **extra):
        if rank == 1:
            raise LookupError("no such test")
        return [0.0] * len(completions)

    trainer.reward_funcs[0] = reward


def in_advantages(trainer, rank):
    """Rank 0's rollouts have advantages that are not finite in float32."""
    stock = trainer.rollout_func

    def rollouts(prompts, trainer):
        output = stock(prompts, trainer)
        if rank == 0:
            output["advantages"] = [[1e39] * len(row) for row in output["completion_ids"]]
        return output

    trainer.rollout_func = rollouts


def in_scoring(trainer, rank):
    """Rank 1 runs out of memory in a forward of the scoring pass."""
    from harts_hf.runtime import run

    forward = run.WindowRun._forward

    def failing(self, position, *args):
        if rank == 1 and self._ops[position][0] == "S" and position == 1:
            raise torch.OutOfMemoryError("no memory is left")
        return forward(self, position, *args)

    run.WindowRun._forward = failing
    return lambda: setattr(run.WindowRun, "_forward", forward)


def in_op(trainer, rank):
    """Rank 1 runs out of memory in a forward with a graph."""
    from harts_hf.runtime import run

    forward = run.WindowRun._forward

    def failing(self, position, *args):
        if rank == 1 and self._ops[position][0] == "F":
            raise torch.OutOfMemoryError("no memory is left in an op")
        return forward(self, position, *args)

    run.WindowRun._forward = failing


def out_in(kind, times, *, before=False):
    """Rank 1 runs out of memory in its first forwards ("F") or backwards ("B") with graphs, at their ends or before
    they begin; then it has enough."""

    def plant(trainer, rank):
        from harts_hf.runtime import run

        name = "_forward" if kind == "F" else "_backward"
        stock, left = getattr(run.WindowRun, name), [times if rank == 1 else 0]

        def failing(self, position, *args):
            fails = left[0] and self._ops[position][0] == kind
            found = None if fails and before else stock(self, position, *args)
            if fails:
                left[0] -= 1
                raise torch.OutOfMemoryError("no memory is left in an op")
            return found

        setattr(run.WindowRun, name, failing)
        return lambda: setattr(run.WindowRun, name, stock)

    return plant


FAILURES = {
    "loss": in_loss,
    "collectives": in_collectives,
    "kinds": in_kinds,
    "rows": in_rows,
    "settings": in_settings,
    "plans": in_plans,
    "reward": in_reward,
    "advantages": in_advantages,
    "scoring": in_scoring,
    "op": in_op,
    "planned": lambda trainer, rank: None,
    "forward": out_in("F", 1),
    "backward": out_in("B", 1),
    "tables": out_in("F", 1, before=True),
    "again": out_in("F", 2),
}
# Of these, what was trained is written down too; those that run out of memory have microbatches that can be halved.
TRAINED = ("planned", "forward", "backward", "tables")
HALVED = ("forward", "backward", "tables", "again", "scoring")


def main() -> None:
    """See the module."""
    folder, backend, failures, rank = Path(sys.argv[1]), sys.argv[2], sys.argv[3:], int(os.environ["RANK"])
    from support import recorded
    from support.models import tiny_model

    from harts_hf import TreeGRPOConfig, TreeGRPOTrainer

    for failure in failures:
        model = tiny_model("qwen3_5_text", seed=1)
        options = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64, "tree_placement": "global"}
        options |= {"tree_execution": "replay", "max_steps": 1, **backend_options(backend)}
        if failure in HALVED:
            options["tree_max_tokens_per_microbatch"] = 128
        args = TreeGRPOConfig(**recorded.arguments(folder, **options))
        if backend.startswith("fsdp2"):
            allow_fsdp_on_cpu()
        trainer = TreeGRPOTrainer(
            model,
            recorded.recorded_reward,
            args=args,
            train_dataset=recorded.dataset(),
            processing_class=recorded.tokenizer(),
            rollout_func=recorded.rollout_func,
        )
        undo = FAILURES[failure](trainer, rank)
        if failure == "op":
            trainer.train()  # its error ends the process
        found = SimpleNamespace(text="nothing was raised")
        try:
            trainer.train()
        except Exception as error:
            found = SimpleNamespace(text=f"{type(error).__name__}: {error}")
        if failure in TRAINED:
            log = trainer.state.log_history[0]
            found.text += (
                f"; out of memory {log['tree/out_of_memory']:g}, {log['tree/max_tokens_per_microbatch']:g} rows"
            )
            torch.save([p.detach() for p in model.parameters()], folder / f"{failure}-{rank}.pt")
        (folder / f"{failure}-{rank}").write_text(found.text)
        if undo is not None:
            undo()
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
