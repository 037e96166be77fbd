"""What recorded log-probs are off by before any weight has moved: counted, explained, over all processes."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import recorded
from support.models import shallow_model
from support.oracle import float64_everywhere, trajectory_log_probs
from support.recordings import rows_of_prompts
from support.trainer_runs import run_trainer

from harts_hf import PlannerConfig, RolloutTree, TreeGMPOTrainer, TreeGRPOConfig, TreeGRPOTrainer, plan_window
from harts_hf.rollouts import RecordedRollouts
from harts_hf.runtime.replayed import RoutingCounts
from harts_hf.trainers.metrics import tree_metrics
from harts_hf.trainers.micro_steps import TRLSlice
from harts_hf.trainers.old_logprobs import Agreement, LogRange, OldLogProbs, agreement_of

TEMPERATURE = recorded.arguments("")["temperature"]
NAMES = ("tree/old_logp_clipped", "tree/old_logp_meandiff", "tree/old_logp_maxdiff")


def rows_off_by(differences):
    """Two groups of a file whose old log-probs are the unpatched model's, less planted differences in turn; and what
    was planted, by trained token."""
    model, planted = shallow_model("qwen3_5_text", dtype=torch.float64, seed=1), []
    rows = rows_of_prompts()[: 2 * recorded.NUM_GENERATIONS]
    with torch.no_grad(), float64_everywhere(model):
        for number, row in enumerate(rows):
            new = trajectory_log_probs(model, np.array(row["token_ids"]), TEMPERATURE).tolist()
            off = np.resize(np.roll(differences, number), len(new))
            old = [None, *(np.array(new) - off).tolist()]
            row["old_logprobs"] = [value if own else None for value, own in zip(old, row["loss_mask"], strict=True)]
            planted += off[np.array(row["loss_mask"][1:], bool)].tolist()
    return rows, np.array(planted)


def test_first_steps_tell_what_is_clipped(tmp_path, caplog):
    """Exactly the planted differences, at the first of two steps on a generation; one warning, with the likely cause.

    Recorded log-probs reach TRL in float32: 1e-6 of a log-prob of 5 at most.
    """
    rows, planted = rows_off_by([0.01, -0.01, 0.4, 0.02, -0.5, 0.03, -0.02, 0.01, -0.03, -0.01, 0.0])
    _, logs, _ = run_trainer(
        TreeGRPOTrainer, TreeGRPOConfig, tmp_path, rollout_func=RecordedRollouts(rows), num_iterations=2, max_steps=4,
        dataset=recorded.dataset().select(range(2)), loss_type="grpo", tree_sharing="always",
    )  # fmt: skip
    steps = [log for log in logs if "tree/unique_tokens" in log]
    assert [NAMES[1] in log for log in steps] == [True, False, True, False]
    outside = (planted < math.log(0.8)) | (planted > math.log(1.2))
    assert 0.1 < outside.mean() < 0.3
    expected = (outside.mean(), np.abs(planted).mean(), np.abs(planted).max())
    assert [steps[0][name] for name in NAMES] == pytest.approx(expected, abs=2e-6)
    assert steps[2][NAMES[1]] > 1.01 * expected[1]  # weights have moved since they were recorded
    (said,) = [record.getMessage() for record in caplog.records if "before any weight" in record.getMessage()]
    assert said.startswith(f"{100 * outside.mean():.1f}% of the trained tokens") and "to both sides alike" in said


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 3 / 6),  # log-ratios: -0.3, 0.1, 0.3; 0.3, -0.1, 0.1
        ({"epsilon_high": 0.5}, 1 / 6),
        ({"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05}, 3 / 6),
        ({"loss_type": "cispo", "epsilon_high": 1.2}, 2 / 6),
        ({"loss_type": "sapo"}, None),
        ({"_clips_log_ratios": True, "epsilon_low": 0.29, "epsilon_high": 0.29}, 3 / 6),
    ],
)
def test_range_of_each_loss(settings, expected):
    """What each loss clips, of six trained tokens in two rows."""
    trainer = SimpleNamespace(
        **{"epsilon_low": 0.2, "epsilon_high": 0.2, "loss_type": "grpo", **settings},
        state=SimpleNamespace(global_step=3), _recorded_at_step=3, is_world_process_zero=lambda: False,
    )  # fmt: skip
    old = OldLogProbs(trainer)
    new = torch.tensor([[-0.3, 0.1, 0.3, 9.0], [0.3, -0.1, 0.1, 9.0]]) - 2
    mask = torch.tensor([[1, 1, 1, 0]] * 2)
    batch = {"old_per_token_logps": torch.full((2, 4), -2.0), "completion_mask": mask}
    assert old.is_first()
    for _ in range(2):  # a loss may be computed twice; the last time counts
        old.note(TRLSlice(batch=batch, number=0, settings={}, is_first_of_recorded=True), {"log_prob": new})
    old.note(TRLSlice(batch=batch, number=1, settings={}), {"log_prob": new + 5})  # on weights that have moved
    sums, largest = old.sums()
    found = old.metrics(Agreement(**sums, **largest))
    assert found.pop("old_logp_clipped", None) == (None if expected is None else pytest.approx(expected))
    assert found == pytest.approx({"old_logp_meandiff": 0.2, "old_logp_maxdiff": 0.3})


def test_gmpo_clips_log_ratios():
    """Its range is in log space; TRL's documentation says so."""
    assert TreeGMPOTrainer._clips_log_ratios and not hasattr(TreeGRPOTrainer, "_clips_log_ratios")


def test_causes():
    """Roundings go to both sides; other weights do not."""
    generator = torch.Generator().manual_seed(0)
    noise, allowed = torch.randn(4000, generator=generator), LogRange.of(0.2, 0.2)
    assert agreement_of(0.3 * noise, allowed).cause(None).startswith("to both sides alike")
    assert agreement_of(0.3 * noise - 0.3, allowed).cause(None).startswith("one-sided (-0.3")


def test_over_processes():
    """Sums and the largest of all, in either placement; each process has slices of its own."""
    tree = RolloutTree.from_trajectories([np.arange(9), np.arange(7)])
    sums, most = {"tokens": 4.0, "outside": 1.0, "total": 0.5, "absolute": 2.0, "squares": 3.0}, {"largest": 1.5}
    other = ({name: 2 * value for name, value in sums.items()}, {"largest": 1.75})
    old = OldLogProbs(
        SimpleNamespace(epsilon_low=0.2, epsilon_high=0.2, loss_type="grpo", is_world_process_zero=lambda: False)
    )
    old.sums = lambda: (sums, dict(most))

    def totals(summed, largest):
        added = {name: value + other[0].get(name, value) for name, value in summed.items()}
        return added, {name: max(value, other[1].get(name, value)) for name, value in largest.items()}

    for is_global in (False, True):
        config = PlannerConfig(world_size=2 if is_global else 1)
        window = SimpleNamespace(
            schedule=plan_window(tree, config), rollout_tree=tree, rank=0, is_of_all_ranks=is_global
        )
        report = SimpleNamespace(
            window=window, routing=None, recompute_difference=0.0, limits_raised=False, scoring_skipped=False,
            scoring_kept=False, seconds={}, exchanged_bytes=0, scoring_needed_by=None,
        )  # fmt: skip
        replay = SimpleNamespace(counts=lambda _: dict.fromkeys(vars(RoutingCounts()), 0.0), mode="off")
        found = tree_metrics(report, SimpleNamespace(count=2, totals=totals), replay, old)
        assert "largest" not in found and "tokens" not in found
        assert found["old_logp_clipped"] == 3 / 12 and found["old_logp_meandiff"] == 6 / 12
        assert found["old_logp_maxdiff"] == 1.75
