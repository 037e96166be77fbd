"""Supervised training: three SGD steps equal stock TRL's on the same batches, parameters and metrics."""

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from support import recorded
from support.models import shallow_model, tiny_model
from support.oracle import float64_everywhere
from support.texts import arguments, conversations, dataset
from support.trainer_runs import assert_same_training
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from harts_hf import TreeSFTConfig, TreeSFTTrainer, UnsupportedModelError
from harts_hf.errors import HartsWarning
from harts_hf.trainers.sft import WeightedCollator
from harts_hf.trainers.together import TogetherSampler, rows_together


def run(trainer_class, config_class, folder, *, rows=None, family="qwen3_5_text", resume=None, **options):
    """Trains a fresh float64 model; returns its parameters, its log history and the trainer."""
    model = shallow_model(family, dtype=torch.float64, seed=1)
    trainer = trainer_class(
        model,
        config_class(**arguments(folder, **options)),
        train_dataset=dataset("weight") if rows is None else rows,
        eval_dataset=dataset("weight").select(range(3)),
        processing_class=recorded.tokenizer(),
    )
    with float64_everywhere(model):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return {name: p.detach().clone() for name, p in model.named_parameters()}, trainer.state.log_history, trainer


OPTIONS = {
    "plain": {},
    "windows": {"tree_max_tokens_per_microbatch": 96},
    "dft": {"loss_type": "dft", "tree_max_tokens_per_microbatch": 96},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "checkpointing": {"gradient_checkpointing": True, "tree_max_tokens_per_microbatch": 96},
}


@pytest.mark.essential("windows")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_trl(options, tmp_path):
    """The loss, its gradients, entropy, token accuracy, counts and evaluation; trees cut or not."""
    stock_options = {name: value for name, value in options.items() if not name.startswith("tree_")}
    stock = run(SFTTrainer, SFTConfig, tmp_path / "stock", **stock_options)
    tree = run(TreeSFTTrainer, TreeSFTConfig, tmp_path / "tree", **options)
    assert_same_training(stock, tree)
    logged = tree[1][0]
    assert logged["tree/sharing_ratio"] > 1.3 and 0 <= logged["mean_token_accuracy"] <= 1
    # A whole tree has one forward, whose graph the backward uses.
    scores_apart = options.get("loss_type") == "dft"
    assert (logged["tree/scoring_seconds"] > 0) == scores_apart and logged["tree/backward_seconds"] > 0
    if "tree_max_tokens_per_microbatch" in options:
        assert logged["tree/microbatches"] > 1
        assert logged["tree/scoring_skipped"] == (options.get("loss_type") != "dft")


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["bailing_hybrid", "kimi_linear", "olmo_hybrid"])
def test_other_families(family, tmp_path):
    """Three more families, in several microbatches."""
    stock = run(SFTTrainer, SFTConfig, tmp_path / "stock", family=family)
    tree = run(TreeSFTTrainer, TreeSFTConfig, tmp_path / "tree", family=family, tree_max_tokens_per_microbatch=96)
    assert_same_training(stock, tree, family=family)


@pytest.mark.exhaustive
def test_resumes(tmp_path):
    """In the second shuffled epoch, bit for bit: parameters, losses, counts and which rows come together."""
    options = {"num_train_epochs": 3, "max_steps": -1, "train_sampling_strategy": "random", "optim": "adamw_torch"}
    options |= {"learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
    whole = run(TreeSFTTrainer, TreeSFTConfig, tmp_path / "whole", **options)
    steps = whole[2].state.max_steps
    assert steps // 3 <= 4 < steps
    resumed = run(
        TreeSFTTrainer, TreeSFTConfig, tmp_path / "resumed", resume=tmp_path / "whole" / "checkpoint-4", **options
    )
    for name, value in whole[0].items():
        assert torch.equal(resumed[0][name], value), name
    losses = [
        [(log["step"], log["loss"], log["num_tokens"]) for log in one[1] if "loss" in log] for one in (whole, resumed)
    ]
    assert losses[0] == losses[1]


class _WithSampler(SFTTrainer):
    """Stock, on the batches of the other."""

    sampler = None

    def _get_train_sampler(self, train_dataset=None):
        return self.sampler


@pytest.mark.exhaustive
def test_rows_that_begin_alike_come_together(tmp_path):
    """Two shuffled epochs equal stock TRL's on the same order, which shares more than a random one; each row once."""
    options = {"num_train_epochs": 2, "max_steps": -1, "train_sampling_strategy": "random", "data_seed": 3}
    tree = run(TreeSFTTrainer, TreeSFTConfig, tmp_path / "tree", **options)
    sampler = tree[2]._get_train_sampler()
    assert isinstance(sampler, TogetherSampler)
    rows = [len(rows) for rows in sampler.groups]
    assert sorted(sampler) == list(range(sum(rows))) and max(rows) > 2
    _WithSampler.sampler = sampler
    stock = run(_WithSampler, SFTConfig, tmp_path / "stock", **options)
    assert_same_training(stock, tree)
    scattered = run(TreeSFTTrainer, TreeSFTConfig, tmp_path / "off", tree_keep_together=False, **options)

    def shared(found):
        return np.mean([log["tree/sharing_ratio"] for log in found[1] if "tree/sharing_ratio" in log])

    assert shared(tree) > 1.2 * shared(scattered)


def test_weights_multiply_the_loss_of_a_row(tmp_path):
    """The gradient of a step is the sum of the rows' own, each times its weight; counts and metrics stay TRL's."""
    rows = dataset().select(range(8))
    tree = run(TreeSFTTrainer, TreeSFTConfig, tmp_path / "tree", rows=rows, max_steps=1)
    model = shallow_model("qwen3_5_text", dtype=torch.float64, seed=1)
    labels = sum(label != -100 for row in rows for label in row["labels"])
    with float64_everywhere(model):
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            log_probs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
            is_label = torch.tensor(row["labels"][1:]) != -100
            (-row["weight"] * log_probs[is_label].sum() / labels).backward()
    for name, parameter in model.named_parameters():
        moved = 0.05 * parameter.grad
        torch.testing.assert_close(parameter.detach() - moved, tree[0][name], rtol=0, atol=1e-5 * moved.abs().max())


def test_groups():
    """Rows in the order of their tokens; groups part where less than half is shared, large ones where least is."""
    rows = [[1, 2, 3, 4], [9, 9], [1, 2, 3, 4, 5, 6], [1, 2, 8, 8], [1, 2, 3, 4, 5, 7], [1, 7, 7, 7], [9, 9]]
    assert [group.tolist() for group in rows_together(rows, 4)] == [[0, 2, 4, 3], [5], [1, 6]]
    assert [group.tolist() for group in rows_together(rows, 3)] == [[0, 2, 4], [3], [5], [1, 6]]
    assert [group.tolist() for group in rows_together([[5, 5]] * 5, 2)] == [[0, 1], [2, 3], [4]]
    assert rows_together([], 2) == []


def test_sampler_fills_steps_and_keeps_ranks_apart():
    """Every row once; no group is divided where another fits; a rank's batches hold neighbours."""
    groups = [np.arange(start, start + size) for start, size in ((0, 3), (3, 5), (8, 2), (10, 1), (11, 5))]
    sampler = TogetherSampler(groups, batch_size=2, accumulation=2, num_ranks=2, seed=1)
    orders = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert sorted(orders[-1]) == list(range(16)) and len(sampler) == 16
        for group in groups:  # 5 + 3 and 5 + 2 + 1 fill steps of eight
            steps = {orders[-1].index(row) // 8 for row in group}
            assert len(steps) == 1, (epoch, group, orders[-1])
    assert len({tuple(order) for order in orders}) == 4
    # One group of eight: rank 0 (batches 0 and 2) has its first half, rank 1 its second.
    whole = TogetherSampler([np.arange(8)], batch_size=2, accumulation=2, num_ranks=2)
    assert list(whole) == [0, 1, 4, 5, 2, 3, 6, 7]


def test_group_column(tmp_path):
    """Equal values mark rows that belong together; a column that is not there is named."""
    options = {"train_sampling_strategy": "random", "tree_group_column": "conversation"}
    trainer = run(TreeSFTTrainer, TreeSFTConfig, tmp_path, max_steps=1, **options)[2]
    keys = dataset()["conversation"]
    assert all(len({keys[row] for row in group}) == 1 for group in trainer._get_train_sampler().groups)
    with pytest.raises(ValueError, match="column tree_group_column='talk', got"):
        run(TreeSFTTrainer, TreeSFTConfig, tmp_path, **{**options, "tree_group_column": "talk"})


REFUSED = {
    "packing": ({"packing": True, "max_length": 64}, "got packing=True"),
    "eval_packing": ({"eval_packing": True, "max_length": 64}, "got eval_packing=True"),
    "padding_free": ({"padding_free": True}, "padding_free=True"),
    "label_smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    "offloading": ({"activation_offloading": True}, "activation_offloading=True"),
    "weights-dft": ({"loss_type": "dft", "rows": "weighted"}, "loss_type='nll' with a column 'weight'"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(options, message, tmp_path):
    """By name, before anything trains."""
    if options.get("rows"):
        options = {**options, "rows": dataset()}
    with pytest.raises(UnsupportedModelError, match=message):
        run(TreeSFTTrainer, TreeSFTConfig, tmp_path, **options)


def test_bad_input(tmp_path):
    """Weights that are no numbers, labels of other tokens, a plain configuration; rows that were cut are said."""
    rows = conversations()
    with pytest.raises(ValueError, match="finite numbers in the column 'weight', got nan in row 1"):
        bad = Dataset.from_list([rows[0], {**rows[1], "weight": float("nan")}])
        run(TreeSFTTrainer, TreeSFTConfig, tmp_path, rows=bad)
    with pytest.raises(ValueError, match="expected labels to be the row's own tokens or -100, got 7"):
        bad = Dataset.from_list([{"input_ids": [4, 5, 6], "labels": [-100, 7, 6]}])
        run(TreeSFTTrainer, TreeSFTConfig, tmp_path, rows=bad, per_device_train_batch_size=1)
    row = {"input_ids": [4, 5, 6], "labels": [4, 5, 6]}
    for bad, options, message in (
        ([{**row, "labels": [4, 5]}], {}, r"of one shape, got \(1, 3\), \(1, 2\)"),
        (
            [{**row, "labels": [-100, -100, 6]}],
            {"max_length": 2},
            "whose labels are all cut off, here by max_length=2",
        ),
        ([{"question": "t4"}], {}, "messages, prompt and completion, or text, got question"),
        ([{**row, "key": [1]}], {"tree_group_column": "key", "train_sampling_strategy": "random"}, "got .1.$"),
    ):
        with pytest.raises(ValueError, match=message):
            run(TreeSFTTrainer, TreeSFTConfig, tmp_path, rows=Dataset.from_list(bad), **options)
    with pytest.raises(ValueError, match="a train_dataset with rows, got an empty one"):
        run(TreeSFTTrainer, TreeSFTConfig, tmp_path, rows=Dataset.from_list([row]).select([]))
    stream = IterableDataset.from_generator(lambda: iter([{**row, "weight": 2.0}] * 8))
    with pytest.raises(UnsupportedModelError, match="loss_type='nll' with a column 'weight'"):
        run(TreeSFTTrainer, TreeSFTConfig, tmp_path, rows=stream, loss_type="dft", tree_keep_together=False)
    with pytest.raises(ValueError, match="expected args to be a TreeSFTConfig, got SFTConfig"):
        TreeSFTTrainer(tiny_model("qwen3_5_text"), SFTConfig(**arguments(tmp_path)), train_dataset=dataset())
    with pytest.warns(HartsWarning, match="rows have max_length=40 tokens and were probably cut"):
        TreeSFTTrainer(
            tiny_model("qwen3_5_text"),
            TreeSFTConfig(**{**arguments(tmp_path), "max_length": 40}),
            train_dataset=dataset("weight"),
            processing_class=recorded.tokenizer(),
        )


def test_weights_that_a_collator_drops(tmp_path):
    """They would count as 1."""
    trainer = TreeSFTTrainer(
        tiny_model("qwen3_5_text"),
        TreeSFTConfig(**arguments(tmp_path)),
        data_collator=lambda rows: DataCollatorForLanguageModeling(pad_token_id=0)(rows),
        train_dataset=dataset(),
        processing_class=recorded.tokenizer(),
    )
    with pytest.raises(ValueError, match="expected batches with the data set's column 'weight', got input_ids"):
        trainer.train()


@pytest.mark.parametrize("weight", [1e39, float("nan"), float("-inf"), None, "1", [1.0]])
def test_weights_of_streams_and_evaluations(weight):
    """Checked as batches are made, where no column can be looked through before, and in the dtype of the loss."""
    row = {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}
    with pytest.raises(ValueError, match=r"expected finite numbers in the column 'weight', got .* in row 1"):
        WeightedCollator(pad_token_id=0).torch_call([{**row, "weight": 1.0}, {**row, "weight": weight}])
    with pytest.raises(ValueError, match="got None in row 0"):
        WeightedCollator(pad_token_id=0).torch_call([row, {**row, "weight": 1.0}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree_keep_together": "no"}, "tree_keep_together to be True or False, got 'no'"),
        ({"tree_group_column": ["a"]}, "tree_group_column to be a text, or None, got"),
        ({"max_length": -1}, "max_length to be an integer of at least 1, or None, got -1"),
        ({"tree_offload_handoff": None}, "tree_offload_handoff to be True or False, got None"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size to be an integer of at least 1, got 0"),
    ],
)
def test_settings_that_cannot_work(options, message, tmp_path):
    """Each is named as the configuration is made."""
    with pytest.raises(ValueError, match=message):
        TreeSFTConfig(**arguments(tmp_path, **options))
