"""Trains with TreePPOTrainer and with the plain loop, and compares what both leave."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from harts_hf import TreePPOConfig, TreePPOTrainer
from support import recorded
from support.episodes import RaggedRollouts
from support.models import shallow_model
from support.oracle import float64_everywhere
from support.ppo_oracle import PPOLoop

FAMILY = "qwen3_5_text"
# Parts of what training moved parameters by, and of each metric: float64 on both sides, summed in other orders.
TOLERANCE = 1e-9
# A value head of tiny models that says something from the start: weight and bias.
HEAD = (
    torch.randn(1, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float32).double() / 4,
    torch.tensor([0.3], dtype=torch.float64),
)
# On two processes; in float64 a head of numbers that float32 holds, too.
DISTRIBUTED = {
    "num_iterations": 2,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 3,  # two minibatches of an epoch, and one of the next
    "value_learning_rate": 0.04,
}

# So large an epsilon makes rounding no larger, and leaves something of the gradients' sizes.
ADAMW = {"optim": "adamw_torch", "adam_epsilon": 1.0, "learning_rate": 0.5, "value_learning_rate": 0.2}


def with_adapters(model: Any) -> Any:
    """A model with LoRA, always the same, which says something from the start."""
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))


def give_head(trainer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives a trainer that head."""
    head = trainer._tree.head
    with torch.no_grad():
        head.weight.copy_(HEAD[0])
        head.bias.copy_(HEAD[1])
    return HEAD


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    """Of SGD steps on groups of four, which share whatever it costs."""
    settings = {"tree_sharing": "always", "max_steps": 2, "learning_rate": 0.1, "num_generations": 4, **options}
    return recorded.arguments(folder, **settings)


def build_trainer(folder: Path, rollouts: Any, *, family: str = FAMILY, **options: Any) -> Any:
    """A trainer of a fresh float64 model, with a value head that says something."""
    extra = {name: options.pop(name) for name in ("value_model", "peft_config", "eval_dataset") if name in options}
    model = shallow_model(family, dtype=torch.float64, seed=1)
    if options.get("beta"):  # TRL loads the reference model from where the policy came from
        model.save_pretrained(folder / "start")
        model = type(model).from_pretrained(folder / "start", dtype=torch.float64, experts_implementation="eager")
        model.train()
    trainer = TreePPOTrainer(
        model,
        recorded.recorded_reward,
        args=TreePPOConfig(**arguments(folder, **options)),
        train_dataset=recorded.dataset(),
        processing_class=recorded.tokenizer(),
        rollout_func=rollouts,
        **extra,
    )
    give_head(trainer)
    return trainer


def train(trainer: Any, *, resume: str | None = None) -> dict[str, torch.Tensor]:
    """Trains, from a checkpoint if ``resume`` names one; the parameters afterwards."""
    with float64_everywhere(trainer.model), float64_everywhere(trainer.value_model or trainer.model):
        trainer.train(resume_from_checkpoint=resume)
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_equals_the_loop(
    folder: Path, rollouts: RaggedRollouts | None = None, *, loop: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Parameters, losses and metrics of a training are those of the plain loop; the trainer."""
    rollouts = rollouts or RaggedRollouts()
    value_model = options.get("value_model")
    critic = None if value_model is None else shallow_model(value_model.config.model_type, dtype=torch.float64, seed=5)
    trainer = build_trainer(folder, rollouts, **options)
    weight, bias = give_head(trainer)
    begun = {name: value.clone() for name, value in trainer.model.state_dict().items() if "lora" in name}
    found = train(trainer)
    plain: Any = shallow_model(options.get("family", FAMILY), dtype=torch.float64, seed=1)
    if "peft_config" in options:  # adapters as they began: only their first halves are drawn, and were kept
        plain = get_peft_model(plain, options["peft_config"])
        plain.load_state_dict(begun, strict=False)
    start = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    reference = (
        shallow_model(options.get("family", FAMILY), dtype=torch.float64, seed=1) if trainer.args.beta else None
    )
    follower = PPOLoop(plain, (weight, bias), trainer.args, critic=critic, reference=reference, **(loop or {}))
    with float64_everywhere(plain), float64_everywhere(critic or plain):
        follower.train([[generation] for generation in rollouts.training], trainer.args.max_steps)
    assert_same(found, dict(plain.named_parameters()), start)
    head = trainer._tree.head
    assert_same({"weight": head.weight, "bias": head.bias}, {"weight": follower.weight, "bias": follower.bias},
                {"weight": weight, "bias": bias})  # fmt: skip
    if critic is not None:
        start = dict(shallow_model(critic.config.model_type, dtype=torch.float64, seed=5).named_parameters())
        own = {name: p for name, p in value_model.named_parameters() if not name.startswith("critic.")}
        assert_same(own, dict(critic.named_parameters()), start)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == len(follower.logs)
    for entry, expected in zip(logs, follower.logs, strict=True):
        for name, value in expected.items():
            if name in entry:
                assert abs(entry[name] - value) < 1e-6 * max(1.0, abs(value)), f"{name}: {entry[name]}, {value}"
    return trainer


def assert_same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> None:
    """Equal to a part of what training moved them by at most."""
    moved = max((expected[name].detach() - start[name]).abs().max().item() for name in expected)
    assert 1e-4 < moved < 1, f"the training moved parameters by {moved:.1e}: nothing to compare, or chaos"
    for name, value in expected.items():
        difference = (found[name].detach() - value.detach()).abs().max().item()
        assert difference < TOLERANCE * moved, f"{name}: {difference:.2e}, training moved it by {moved:.1e}"
