"""The private names of TRL, Transformers and Accelerate that the tree trainers stand on, each checked by itself.

When a new release breaks the tree trainers, the failing test of this file names the hook that moved; whether the
results are still right is what test_trl_contract.py tells.
"""

import ast
import inspect
import textwrap

import pytest
import torch
import transformers
from accelerate import PartialState
from accelerate.state import GradientState
from trl import GRPOTrainer, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from harts_hf import TreeGMPOTrainer, TreeGRPOTrainer, TreeRLOOTrainer
from harts_hf.trainers.skipping import OTHER_LOG_PROBS
from harts_hf.trainers.step import TreeStep

TRAINERS = {GRPOTrainer: TreeGRPOTrainer, GMPOTrainer: TreeGMPOTrainer, RLOOTrainer: TreeRLOOTrainer}
every_trainer = pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.__name__)

SCORING = ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
SCORING_OPTIONS = ["batch_size", "compute_entropy", "compute_aux_loss"]
SCORING_INPUTS_OF_IMAGES = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)[8:]
SIGNATURES = {
    "_prepare_inputs": ["self", "generation_batch"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    "prediction_step": ["self", "model", "inputs", "prediction_loss_only", "ignore_keys"],
}
ATTRIBUTES = [
    "_metrics",
    "_step",
    "_buffered_inputs",
    "temperature",
    "ref_model",
    "reward_weights",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "aux_loss_enabled",
]


def moved(trainer: type, hook: str, what: str) -> str:
    """The message of a failure."""
    return f"the hook {trainer.__name__}.{hook} moved: {what}"


def check_signature(trainer: type, hook: str, names: list[str]) -> None:
    """A method takes exactly these arguments, in this order."""
    function = getattr(trainer, hook, None)
    assert function is not None, moved(trainer, hook, "it is gone")
    got = list(inspect.signature(function).parameters)
    assert got == names, moved(trainer, hook, f"expected arguments {names}, got {got}")


def test_clipping():
    """Trainer asks two methods for the norm of the gradients."""
    for hook, names in (("_clip_grad_norm", ["self", "model"]), ("_get_grad_norm", ["self", "model", "grad_norm"])):
        check_signature(_BaseTrainer, hook, names)


def check_scoring(trainer: type) -> None:
    """The one method through which losses see the policy: known arguments first, then optional inputs of images."""
    hook = "_get_per_token_logps_and_entropies"
    function = getattr(trainer, hook, None)
    assert function is not None, moved(trainer, hook, "it is gone")
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    known = SCORING + SCORING_OPTIONS
    assert names[: len(known)] == known, moved(trainer, hook, f"expected arguments {known} first, got {names}")
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]
    assert required == SCORING, moved(trainer, hook, f"expected {SCORING} required, got {required}")
    vision = [parameters[name].default for name in names[len(known) :]]
    assert vision == [None] * len(vision), moved(trainer, hook, "an input beyond the known ones defaults to no None")


def check_calls(trainer: type, hook: str, call: str) -> None:
    """The source of a method holds a call."""
    function = getattr(trainer, hook, None)
    assert function is not None, moved(trainer, hook, "it is gone")
    source = inspect.getsource(inspect.unwrap(function))
    assert call in source, moved(trainer, hook, f"it does not call {call}")


def assigned_attributes(trainer: type) -> set[str]:
    """Attributes of self that the constructors of the class and its TRL bases assign."""
    found = set()
    for base in trainer.__mro__:
        if base.__module__.startswith("trl.") and "__init__" in vars(base):
            tree = ast.parse(textwrap.dedent(inspect.getsource(base.__init__)))
            found |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            }
    return found


def check_attribute(trainer: type, hook: str) -> None:
    """The constructor sets an attribute."""
    assert hook in assigned_attributes(trainer), moved(trainer, hook, "the constructor does not set it")


@every_trainer
def test_scoring(trainer):
    """`_get_per_token_logps_and_entropies` is what it was, and ours takes what it takes."""
    check_scoring(trainer)
    ours = list(inspect.signature(TRAINERS[trainer]._get_per_token_logps_and_entropies).parameters)
    assert ours[:-1] == SCORING + SCORING_OPTIONS


@every_trainer
def test_losses_score_through_the_hook(trainer):
    """`_compute_loss` sees the policy through the hook and asks for entropies there."""
    check_calls(trainer, "_compute_loss", "self._get_per_token_logps_and_entropies(")
    check_calls(trainer, "_compute_loss", "compute_entropy=True")
    check_calls(trainer, "compute_loss", "self._compute_loss(")


@every_trainer
@pytest.mark.parametrize("hook", SIGNATURES)
def test_signature(trainer, hook):
    """Methods that we override or call take the arguments that they took."""
    check_signature(trainer, hook, SIGNATURES[hook])


@every_trainer
@pytest.mark.parametrize("hook", ATTRIBUTES)
def test_attribute(trainer, hook):
    """Attributes that we read are set by TRL's constructors."""
    check_attribute(trainer, hook)


@pytest.mark.parametrize("trainer", [GRPOTrainer, GMPOTrainer], ids=lambda trainer: trainer.__name__)
@pytest.mark.parametrize(
    "hook",
    [
        "rollout_func",
        "scale_rewards",
        "beta",
        "_entropy_bonus_enabled",
        "top_entropy_quantile",
        "off_policy_mask_threshold",
        "loss_type",
        "tools",
        "eos_token_ids",
        "_tokenizer",
    ],
)
def test_attribute_of_grpo(trainer, hook):
    """Attributes that only GRPO and its kin have."""
    check_attribute(trainer, hook)


@every_trainer
def test_training_step_goes_on_to_ours(trainer):
    """TRL's `training_step` calls the next class's, which is TreeStep, right below TRL's own trainers."""
    check_calls(trainer, "training_step", "super().training_step(")
    order = TRAINERS[trainer].__mro__
    below = order[order.index(TreeStep) :]
    assert not any(base.__name__.endswith("OTrainer") for base in below), moved(trainer, "__mro__", f"{order}")
    assert below[1] is _BaseTrainer, moved(trainer, "__mro__", f"expected _BaseTrainer below TreeStep, got {below[1]}")
    assert "training_step" not in vars(_BaseTrainer), moved(trainer, "training_step", "_BaseTrainer has its own now")


@every_trainer
def test_batches(trainer):
    """`_prepare_inputs` generates and buffers as we expect, and batches hold the keys that we read."""
    for call in ("self._generate_and_score_completions(", "self._buffered_inputs[", "self._step %"):
        check_calls(trainer, "_prepare_inputs", call)
    for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"):
        check_calls(trainer, "_generate_and_score_completions", f'"{key}"')
    check_calls(trainer, "_generate_and_score_completions", "self._calculate_rewards(")


@pytest.mark.parametrize("trainer", [GRPOTrainer, GMPOTrainer], ids=lambda trainer: trainer.__name__)
def test_episodes_come_through(trainer):
    """Where samples of episodes join TRL's rollouts, and where its losses gather a number per row."""
    check_signature(trainer, "_generate", ["self", "prompts"])
    returned = "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"
    check_calls(trainer, "_generate", returned)
    check_calls(trainer, "_generate", "self.rollout_func(prompts, self)")
    check_calls(trainer, "_generate", 'extra_fields.pop("env_mask", None)')
    for name in ("length", "terminated_length"):
        for kind in ("mean", "min", "max"):
            check_calls(trainer, "_generate", f'self._metrics[mode]["completions/{kind}_{name}"].append(')
    check_calls(
        trainer,
        "_generate_and_score_completions",
        "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
    )
    check_calls(trainer, "_generate_and_score_completions", "self.accelerator.process_index * len(prompts)")
    for call in ("shuffle_sequence_dict(generation_batch)", "split_tensor_dict(generation_batch, "):
        check_calls(trainer, "_prepare_inputs", call)
    check_calls(trainer, "_compute_loss", "self.accelerator.gather(masked_seq_mean(")
    check_signature(trainer, "compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"])


def test_batches_of_lists_are_shuffled_and_split():
    """TRL's helpers take lists beside a first tensor, by whose length they go."""
    batch = {"first": torch.arange(4), "of_each": [[0], [1, 1], [], [3]], "scalar": torch.tensor(7)}
    shuffled = shuffle_sequence_dict(batch)
    assert shuffled["of_each"] == [batch["of_each"][number] for number in shuffled["first"].tolist()]
    slices = split_tensor_dict(batch, 2)
    assert [one["of_each"] for one in slices] == [[[0], [1, 1]], [[], [3]]]
    assert [one["scalar"].item() for one in slices] == [7, 7]


def batch_entries_read(trainer: type) -> set[str]:
    """Keys that ``_compute_loss`` reads from its batch."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(trainer._compute_loss))))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "inputs":
            found.add(ast.literal_eval(node.slice))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "inputs.get":
            found.add(ast.literal_eval(node.args[0]))
    return found


@every_trainer
def test_losses_read_known_batch_entries(trainer):
    """An entry that a loss did not read before may make its coefficients depend on log-probs: see skipping.py."""
    known = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"}
    known |= {"num_items_in_batch", *OTHER_LOG_PROBS}
    known.add("sampling_per_token_logps")  # read under off_policy_mask_threshold only, which has the scoring pass
    read = {name for name in batch_entries_read(trainer) if name not in SCORING_INPUTS_OF_IMAGES}
    assert read >= {"prompt_ids", "completion_ids", "advantages"}
    assert read <= known, moved(trainer, "_compute_loss", f"it reads {sorted(read - known)} from its batch")


def test_other_log_probs_have_their_names():
    """Batch entries whose presence forbids to skip the scoring pass are called what they were."""
    for name in ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"):
        assert name in OTHER_LOG_PROBS
        check_calls(GRPOTrainer, "_generate_and_score_completions", f'output["{name}"]')
    assert "old_logps" in OTHER_LOG_PROBS
    check_calls(RLOOTrainer, "_generate_and_score_completions", '"old_logps": ')


def test_metrics_have_modes():
    """Metrics are lists under "train" and "eval"."""
    for trainer in (GRPOTrainer, RLOOTrainer):
        check_calls(trainer, "__init__", 'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}')


@pytest.mark.parametrize(("trainer", "scaled"), [(GRPOTrainer, True), (GMPOTrainer, True), (RLOOTrainer, False)])
def test_accumulation(trainer, scaled):
    """`loss_is_scaled_for_ga` says whether the loss is divided already, by `current_gradient_accumulation_steps`."""
    got = getattr(trainer, "loss_is_scaled_for_ga", "gone")
    assert got is scaled, moved(trainer, "loss_is_scaled_for_ga", f"expected {scaled}, got {got}")
    source = inspect.getsource(transformers.Trainer)
    for name in ("current_gradient_accumulation_steps = len(", "self.loss_is_scaled_for_ga is not None"):
        assert name in source, f"the hook transformers.Trainer moved: no {name!r}"


def test_transformers_and_accelerate():
    """What the step uses of Trainer and of Accelerate's gradient state."""
    for hook in ("compute_loss_context_manager", "_prepare_context_parallel_inputs"):
        assert hasattr(transformers.Trainer, hook), f"the hook transformers.Trainer.{hook} moved: it is gone"
    PartialState()
    state = GradientState()
    before = state.sync_gradients
    state._set_sync_gradients(not before)
    assert state.sync_gradients is not before, "the hook GradientState._set_sync_gradients moved"
    state._set_sync_gradients(before)


class Moved(GRPOTrainer):
    """A TRL of the future."""

    _prepare_inputs = None

    def _get_per_token_logps_and_entropies(self, model, batch):
        raise NotImplementedError

    def training_step(self, model, inputs, num_items_in_batch):
        raise NotImplementedError

    def _calculate_rewards(self, inputs):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("hook", "check"),
    [
        ("_get_per_token_logps_and_entropies", check_scoring),
        (
            "_prepare_inputs",
            lambda trainer: check_signature(trainer, "_prepare_inputs", SIGNATURES["_prepare_inputs"]),
        ),
        ("training_step", lambda trainer: check_calls(trainer, "training_step", "super().training_step(")),
        (
            "_calculate_rewards",
            lambda trainer: check_signature(trainer, "_calculate_rewards", SIGNATURES["_calculate_rewards"]),
        ),
        ("_no_such_attribute", lambda trainer: check_attribute(trainer, "_no_such_attribute")),
    ],
)
def test_a_moved_hook_is_named(hook, check):
    """The failure says which hook moved."""
    with pytest.raises(AssertionError, match=rf"the hook Moved\.{hook} moved"):
        check(Moved)
