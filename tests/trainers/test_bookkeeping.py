"""What a step does outside forwards and backwards: losses on the CPU, and nothing expensive for each slice."""

import functools
import inspect

import datasets
import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from support import recorded
from support.device_tags import DEVICE, is_tagged, pretended_gpu
from support.models import shallow_model
from support.origins import as_of
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.base_trainer import _BaseTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer
from harts_hf.rollouts import agent_reward, environment_reward, recorded_reward
from harts_hf.runtime import WindowRun
from harts_hf.trainers import policy
from harts_hf.trainers.prompts import Prompts

CUT = {"tree_sharing": "always", "tree_max_tokens_per_microbatch": 64, "max_steps": 1}
# A pretended GPU takes milliseconds for each operation: a group in a step.
GROUP = {"per_device_train_batch_size": 2}


def made(tmp_path, kind=TreeGRPOTrainer, callbacks=None, **options):
    """A trainer."""
    return kind(
        shallow_model("qwen3_5_text"),
        recorded.recorded_reward,
        args=TreeGRPOConfig(**recorded.arguments(tmp_path, **{**CUT, **options})),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=recorded.rollout_func,
        callbacks=callbacks,
    )


def trained(tmp_path, kind=TreeGRPOTrainer, **options):
    """A trainer after one step, and its log."""
    trainer = made(tmp_path, kind, **options)
    trainer.train()
    log = trainer.state.log_history[0]
    return trainer, {name: value for name, value in log.items() if "time" not in name and "seconds" not in name}


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU that a trainer takes for its own."""
    monkeypatch.setattr(Accelerator, "device", property(lambda self: DEVICE))
    arguments = transformers.TrainingArguments
    monkeypatch.setattr(arguments, "device", property(lambda self: self._setup_devices and DEVICE))
    monkeypatch.setattr(_BaseTrainer, "_send_telemetry", lambda *_: None)  # asks for the GPU's name
    with pretended_gpu(monkeypatch) as waits:
        yield waits


class Watching(TreeGRPOTrainer):
    """Notes where the tensors of each loss's batch are."""

    places: set

    def _prepare_inputs(self, generation_batch):
        self.places = getattr(self, "places", set())
        return super()._prepare_inputs(generation_batch)

    def compute_loss(self, model, inputs, *args, **kwargs):
        """TRL's; its module says so, since a loss of a user's own stays where the model is."""
        self.places |= {is_tagged(value) for value in inputs.values() if isinstance(value, torch.Tensor)}
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("execution", ["nested", "replay"])
def test_losses_run_on_the_cpu(execution, monkeypatch, tmp_path):
    """TRL's loss gets batches on the CPU, also where the tree is scored first; larger batches and losses of one's own
    stay on the GPU; parameters, losses and metrics are the same, bit by bit, as the pretended GPU computes as the CPU
    does."""
    found = {}
    cases = [("cpu", 2**20, "trl"), ("large", 0, "trl")]
    if execution == "nested":  # whose the loss is knows no execution
        cases.append(("own", 2**20, "mine"))
    for place, most, module in cases:
        monkeypatch.setattr(policy, "MOST_ON_CPU", most)
        monkeypatch.setattr(Watching, "compute_loss", as_of(module, Watching.compute_loss))
        trainer, log = trained(tmp_path / place, Watching, tree_execution=execution, **GROUP)
        assert trainer.places == {place != "cpu"}
        assert log.pop("tree/scoring_needed_by/custom_loss", 0) == (place == "own")
        found[place] = ([parameter.detach().clone() for parameter in trainer.model.parameters()], log)
    assert all(map(torch.equal, found["cpu"][0], found["large"][0]))
    assert found["cpu"][1] == found["large"][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("accumulation", [2, 4])
def test_wrappers_are_looked_through_once(accumulation, monkeypatch, tmp_path):
    """However many slices a step has: Accelerate takes milliseconds for it."""
    calls = []
    unwrap = Accelerator.unwrap_model

    def counted(self, model, *args, **kwargs):
        if model.training and "harts_hf" in inspect.stack()[1].filename:
            calls.append(model)
        return unwrap(self, model, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "unwrap_model", counted)
    trained(tmp_path, gradient_accumulation_steps=accumulation)
    assert len(calls) <= 2


class Ops(TorchDispatchMode):
    """Counts PyTorch's operations: on a GPU each of them would be a launch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class CountsOps(TrainerCallback):
    """Of a step up to its optimizer's, without what windows run."""

    def __init__(self, monkeypatch):
        self.ops = Ops()
        for name in ("score", "backward", "backward_unscored"):
            monkeypatch.setattr(WindowRun, name, self.outside(getattr(WindowRun, name)))

    def outside(self, run):
        """A run that is not counted."""

        def uncounted(*args, **kwargs):
            with _disable_current_modes():
                return run(*args, **kwargs)

        return uncounted

    def on_step_begin(self, *args, **kwargs):
        """Trainer's: the step's batches have been read."""
        self.ops.__enter__()

    def on_pre_optimizer_step(self, *args, **kwargs):
        """Trainer's: gradients have been clipped."""
        self.ops.__exit__(None, None, None)


def test_operations_of_a_step(monkeypatch, tmp_path):
    """Outside forwards and backwards, counted by slices of one loss pass each: TRL's loss, its metrics and their
    derivatives are 117 of each slice's (TRL 1.16). Four are Trainer's look for NaN, on the CPU."""
    found = {}
    for slices in (2, 8):
        counts = CountsOps(monkeypatch)
        options = {"per_device_train_batch_size": 8 // slices, "gradient_accumulation_steps": slices}
        trained(tmp_path / str(slices), tree_execution="replay", callbacks=[counts], **options)
        found[slices] = counts.ops.count
        monkeypatch.undo()
    of_slice = (found[8] - found[2]) / 6
    print(found, of_slice)
    assert of_slice <= 150 + 4
    assert found[2] - 2 * of_slice <= 681


def test_prompts_are_read_where_they_are_used(monkeypatch, tmp_path):
    """Once for each generation, by TRL's code and ours; at each micro-step for code that may want a list."""
    reads, kinds = [], []
    stock = datasets.Dataset.__getitems__
    monkeypatch.setattr(datasets.Dataset, "__getitems__", lambda self, keys: reads.append(keys) or stock(self, keys))

    class Generates(TreeGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            kinds.append(type(inputs))
            return super()._generate_and_score_completions(inputs)

    class Prepares(TreeGRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            kinds.append(type(generation_batch))
            return super()._prepare_inputs(generation_batch)

    logs, numbers = [], []
    for kind in (TreeGRPOTrainer, Generates, Prepares):
        reads.clear()
        logs.append(trained(tmp_path / kind.__name__, kind, max_steps=2)[1])
        numbers.append(len(reads))
    assert numbers[:2] == [2, 2] and numbers[2] >= 4 and set(kinds) == {list}
    assert logs[0] == logs[1] == logs[2]


@pytest.mark.parametrize(
    ("options", "later"),
    [({}, True), ({"dataloader_pin_memory": True}, True), ({"remove_unused_columns": True}, False)],
)
def test_loaders_of_prompts(options, later, tmp_path):
    """Rows are the data set's; what may hold tensors, or is made anew each time, is read as ever."""
    trainer = made(tmp_path, **options)
    for dataset in (recorded.dataset(), recorded.dataset().with_format("torch")):
        trainer.train_dataset = dataset
        loader = trainer.get_train_dataloader()
        assert trainer.train_dataset is dataset and len(loader.dataset) == len(dataset)
        batch = next(iter(loader))
        assert isinstance(batch, Prompts) == (later and dataset.format["type"] is None)
        rows = list(batch)
        assert len(batch) == len(rows) == 8 and all(row in list(dataset) for row in rows) and rows[0] in batch

    class Wraps(TreeGRPOTrainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    trainer.__class__, trainer.train_dataset = Wraps, recorded.dataset()
    assert isinstance(next(iter(trainer.get_train_dataloader())), list)


def batch_of(base, config, folder, rollouts, reward=recorded.recorded_reward, **options):
    """What a trainer makes of rollouts, before it is shuffled and split."""
    trainer = base(
        shallow_model("qwen3_5_text"),
        reward,
        args=config(**recorded.arguments(folder, **options)),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=rollouts,
    )
    trainer.model.train()
    prompts = [{"prompt": f"p{number // 4}"} for number in range(8)]
    return trainer._generate_and_score_completions(prompts)


def test_narrow_rows_do_not_make_a_narrow_batch(tmp_path):
    """TRL pads rows in the dtype of the first: ids of a wider one would wrap around."""

    def narrow(prompts, trainer):
        output = recorded.rollout_func(prompts, trainer)
        for key in ("prompt_ids", "completion_ids"):
            first, second, *rest = output[key]
            output[key] = [np.array(first, np.uint8), torch.tensor(second, dtype=torch.int16), *rest]
        return output

    kinds = (TreeGRPOTrainer, TreeGRPOConfig, tmp_path)
    expected, found = (batch_of(*kinds, source) for source in (recorded.rollout_func, narrow))
    for key in ("prompt_ids", "completion_ids"):
        assert found[key].dtype == torch.int64
        assert torch.equal(found[key], expected[key])


def unusual(prompts, trainer):
    """Unknown log-probs, masks of bools, rows that are arrays or tuples, a prompt of one token."""
    output = recorded.rollout_func(prompts, trainer)
    output["logprobs"] = [[None if n == 1 else value for n, value in enumerate(row)] for row in output["logprobs"]]
    output["env_mask"] = [[bool(one) for one in row] for row in output["env_mask"]]
    output["prompt_ids"] = [[5], *output["prompt_ids"][1:]]
    output["completion_ids"] = [tuple(output["completion_ids"][0]), *output["completion_ids"][1:]]
    output["prompt_ids"][2] = np.array(output["prompt_ids"][2], np.int32)
    return output


@pytest.mark.parametrize("rollouts", [recorded.rollout_func, recorded.rollout_func_without_mask, unusual])
@pytest.mark.parametrize("options", [{}, {"mask_truncated_completions": True, "pad_to_multiple_of": 8}])
def test_batches_are_trls(rollouts, options, tmp_path):
    """TRL's batch, bit by bit and in dtype, though its tensors are made of arrays."""
    stock = batch_of(GRPOTrainer, GRPOConfig, tmp_path / "stock", rollouts, **options)
    tree = batch_of(TreeGRPOTrainer, TreeGRPOConfig, tmp_path / "tree", rollouts, **options)
    assert stock.keys() == tree.keys()
    for name, value in stock.items():
        assert value.dtype == tree[name].dtype, name
        assert torch.equal(value.nan_to_num(7.0), tree[name].nan_to_num(7.0)), name


def test_reward_functions_get_lists(tmp_path):
    """The very lists that the rollout function returned, as TRL gives them."""
    given, seen = [], []

    def rollouts(prompts, trainer):
        output = recorded.rollout_func(prompts, trainer)
        given.extend(output["completion_ids"])
        return output

    def reward(completion_ids, **_):
        seen.extend(completion_ids)
        return [0.0] * len(completion_ids)

    batch_of(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, rollouts, reward)
    assert all(one is other for one, other in zip(given, seen, strict=True))


@pytest.mark.parametrize(
    ("reads", "options", "decoded"), [(True, {}, True), (False, {}, False), (False, {"log_completions": True}, True)]
)
def test_texts_that_nobody_reads_are_not_made(reads, options, decoded, tmp_path):
    """A reward function may say that it reads no completions; where they are logged, they are made all the same."""
    seen = []

    def reward(completions, **_):
        seen.extend(completions)
        return [0.0] * len(completions)

    reward.reads_texts = reads
    batch_of(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, recorded.rollout_func, reward, **options)
    ids = [row for prompt in ("p0", "p1") for row in recorded.rollouts_of(prompt)["completion_ids"]]
    texts = recorded.tokenizer().batch_decode(ids, skip_special_tokens=True)
    assert seen == (texts if decoded else [""] * len(ids))


def test_a_wrapper_of_a_reward_function_reads_texts(tmp_path):
    """functools.wraps copies what a reward function says of itself; the wrapper is given texts all the same."""
    seen = []

    @functools.wraps(recorded_reward)
    def shaped(completions, **_):
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    assert not shaped.reads_texts
    batch_of(TreeGRPOTrainer, TreeGRPOConfig, tmp_path, recorded.rollout_func, shaped)
    assert seen and all(seen)


@pytest.mark.parametrize("reads", [True, False])
def test_what_generates_decodes_texts_itself(reads, tmp_path):
    """A rollout function whose list of tokens grows turn by turn, and a subclass: whatever rewards read, they see the
    texts of their lists, and the batch has the whole ones."""
    right = []

    def decoded(trainer, row, step):
        grown = []
        for start in range(0, len(row), step):
            grown.extend(row[start : start + step])
            (text,) = trainer.processing_class.batch_decode([grown])
            right.append(text.split() == [f"t{token}" for token in grown])
        return grown

    def rollouts(prompts, trainer):
        output = recorded.rollout_func(prompts, trainer)
        return {**output, "completion_ids": [decoded(trainer, row, 20) for row in output["completion_ids"]]}

    class Decodes(TreeGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            rows = rollouts([f"p{number // 4}" for number in range(8)], self)
            return rows["completion_ids"], None

    def reward(completion_ids, **_):
        return [0.0] * len(completion_ids)

    reward.reads_texts = reads
    wanted = [row for prompt in ("p0", "p1") for row in recorded.rollouts_of(prompt)["completion_ids"]]
    for kind, given in ((TreeGRPOTrainer, rollouts), (Decodes, None)):
        batch = batch_of(kind, TreeGRPOConfig, tmp_path / kind.__name__, given, reward)
        pairs = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        rows = [ids[mask != 0].tolist() for ids, mask in pairs]
        assert rows == wanted
    assert len(right) > 2 * len(wanted) and all(right)


@pytest.mark.parametrize("reward", [agent_reward, environment_reward, recorded_reward], ids=lambda one: one.__name__)
def test_our_reward_functions_read_no_texts(reward):
    """Rollouts come with what they say."""
    assert not reward.reads_texts


def test_changed_rows_reach_the_batch(tmp_path):
    """A subclass that changes what was generated is believed, in place too."""

    class Changes(TreeGRPOTrainer):
        def _generate(self, prompts):
            generated = super()._generate(prompts)
            generated[0][0][0] = 7
            return generated

    batch = batch_of(Changes, TreeGRPOConfig, tmp_path, recorded.rollout_func)
    first = batch["prompt_ids"][0][batch["prompt_mask"][0] != 0]
    assert first[0] == 7


@pytest.mark.exhaustive
def test_losses_see_prompts_of_one_column(tmp_path):
    """TRL's own loss reads nothing of them; a loss of the user's own gets them whole."""
    widths = {}

    def noted(self, model, inputs, *args, **kwargs):
        widths[type(self).compute_loss.__module__] = inputs["prompt_ids"].shape[1]
        return TreeGRPOTrainer.compute_loss(self, model, inputs, *args, **kwargs)

    for module in ("trl", "mine"):
        trained(tmp_path / module, type("Noted", (TreeGRPOTrainer,), {"compute_loss": as_of(module, noted)}))
    assert widths["trl"] == 1 < widths["mine"]


@pytest.mark.exhaustive
def test_waits_do_not_grow_with_slices(gpu, tmp_path):
    """A step waits for the GPU as often with four slices as with two, metrics and Trainer's look for NaN included.
    (Batches are copied to the CPU together by a GPU, one by one by this one.)"""
    counts = []
    for accumulation in (2, 4):
        options = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
        gpu.places.clear()
        trained(tmp_path / str(accumulation), tree_execution="replay", **options)
        counts.append({place: n for place, n in gpu.places.items() if not is_kernel(place) and "tables" not in place})
    assert counts[0] == counts[1]


def is_kernel(place):
    """Whether a wait is one of a portable kernel, which no GPU runs."""
    return place.startswith("kernels/") and "logprobs" not in place
