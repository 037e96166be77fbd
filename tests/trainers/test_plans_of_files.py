"""What `harts plan` says of a file is what a training on the file logs."""

import json

import pytest
from support import recorded
from support.recordings import rows_of_prompts
from support.trainer_runs import run_trainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.cli.main import main
from harts_hf.rollouts import RecordedRollouts

SYSTEM = [7] * 90  # what all groups begin with: more than a microbatch
COUNTS = ("forward_tokens", "backward_tokens", "replay_tokens", "microbatches")


@pytest.mark.essential("2-recorded")
@pytest.mark.parametrize(("per_step", "logprobs"), [(1, "rescored"), (2, "recorded")])
def test_plan_is_what_training_logs(per_step, logprobs, tmp_path, capsys):
    """Rows, sharing and microbatches of a step, with one group a step and with two that share a beginning."""
    rows = rows_of_prompts()[: 2 * recorded.NUM_GENERATIONS]
    for row in rows:
        row["token_ids"] = SYSTEM + row["token_ids"]
        for name, value in (("loss_mask", 0), ("old_logprobs", None)):
            row[name] = [value] * len(SYSTEM) + row[name]
    path, out = tmp_path / "rollouts.jsonl", tmp_path / "plan.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, logs, _ = run_trainer(
        TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "run", rollout_func=RecordedRollouts(path, logprobs=logprobs),
        dataset=recorded.dataset().select(range(2)), shuffle_dataset=False, gradient_accumulation_steps=per_step,
        max_steps=2 // per_step, tree_max_tokens_per_microbatch=128,
    )  # fmt: skip
    scoring = [] if logprobs == "recorded" else ["--scoring", "skipped"]
    arguments = [
        "--groups-per-step",
        str(per_step),
        "--max-tokens-per-microbatch",
        "128",
        "--json",
        str(out),
        *scoring,
    ]
    assert main(["plan", str(path), *arguments]) == 0
    assert ("scored before the loss" in capsys.readouterr().out) == (logprobs == "recorded")
    found, steps = json.loads(out.read_text()), [log for log in logs if "tree/unique_tokens" in log]
    assert len(steps) == found["plan"]["steps"]
    for name in COUNTS:
        assert found["plan"][name] == sum(log[f"tree/{name}"] for log in steps), name
    for name, key in (("expanded", "expanded_tokens"), ("unique", "unique_tokens")):
        assert found["total"][name] == sum(log[f"tree/{key}"] for log in steps), name
    apart = sum(group["unique"] for group in found["groups"])
    assert found["total"]["unique"] == apart - len(SYSTEM) * (2 - 2 // per_step)
    assert all(log["tree/microbatches"] > 1 and log["tree/sharing_ratio"] > 1 for log in steps)
