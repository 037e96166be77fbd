"""How much each expert of a mixture has to do: metrics, a picture, and the update of DeepSeek's expert bias.

Load is counted over the trajectories' tokens (a token that ``m`` trajectories share counts ``m`` times), from the
experts that routers chose on the step's weights, over all processes: the numbers that training on the expanded
trajectories would count.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from harts_hf.batch.tables import read_together
from harts_hf.errors import UnsupportedModelError
from harts_hf.modeling import EXPERT_LOAD, LOAD_SUMS, ROUTER_ENTROPY, find_routers
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.modeling.routing import has_bias

FILE = "expert_load"


class ExpertLoad:
    """The load of the experts of a trainer's policy.

    Args:
        model: the policy, not wrapped yet.

    Attributes:
        observed: names of the sums that updates are asked for; none without routers.
        layers: dotted names of the routers.
        latest: ``[L, E]`` float64 on the CPU, of the latest step; None before the first.
        pending: the same until the bias was updated by it.
        total: of all steps so far.
        steps: how many those are.
    """

    def __init__(self, model: nn.Module) -> None:
        base = causal_lm_of(model)
        routers = set(find_routers(base))
        self.layers = [name for name, module in base.named_modules() if module in routers]
        self.observed: tuple[str, ...] = LOAD_SUMS if routers else ()
        self._top_k: int = getattr(base.config, "num_experts_per_tok", 1)
        self.latest: torch.Tensor | None = None
        self.pending: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.steps = 0

    def note(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Takes up a step's sums.

        Returns:
            Metrics: ``expert_load_max_over_mean`` (the largest of any layer), ``expert_load_cv`` (coefficient of
            variation over the experts of a layer, its mean over layers) and ``router_entropy`` (nats per token and
            layer); none where nothing was observed.
        """
        if EXPERT_LOAD not in sums:
            return {}
        load, entropy = read_together([sums[EXPERT_LOAD], sums[ROUTER_ENTROPY]])
        self.latest = self.pending = load
        self.steps += 1
        self.total = load if self.total is None else self.total + load
        mean = load.mean(dim=1).clamp(min=1e-9)
        choices = load.sum().clamp(min=1)
        return {
            "expert_load_max_over_mean": float((load.amax(dim=1) / mean).max()),
            "expert_load_cv": float((load.std(dim=1, correction=0) / mean).mean()),
            "router_entropy": float(entropy.sum()) * self._top_k / float(choices),
        }

    def write(self, folder: Path) -> None:
        """``expert_load.json`` and ``expert_load.png``: choices by layer and expert since the training (re)started."""
        if self.total is None or self.latest is None:
            return
        from harts_hf.trainers.load_picture import plot_expert_load  # matplotlib: a tenth of a start

        folder.mkdir(parents=True, exist_ok=True)
        table = {
            "layers": self.layers,
            "steps": self.steps,
            "load": self.total.long().tolist(),
            "latest": self.latest.long().tolist(),
        }
        (folder / f"{FILE}.json").write_text(json.dumps(table) + "\n")
        plot_expert_load(self.total.numpy(), self.layers, folder / f"{FILE}.png")


class ExpertLoadFiles(TrainerCallback):
    """Writes the run's load into its output folder where checkpoints are saved and at its end."""

    def __init__(self, load: ExpertLoad) -> None:
        self._load = load

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's."""
        if state.is_world_process_zero:
            self._load.write(Path(args.output_dir))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's."""
        self.on_save(args, state, control)


class ExpertBiasUpdate(TrainerCallback):
    """Balances experts without a loss: after each optimizer step, ``bias += speed * sign(mean load - load)``.

    DeepSeek-V3's rule (arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664), in float32, from the load of
    the step over all processes, so that it is the same on all of them. The bias moves choices only, no weights.

    Args:
        model: the policy, before it is wrapped (its routers stay the same modules).
        load: of the policy.
        speed: the size of an update.

    Raises:
        UnsupportedModelError: a model without such routers, with an adapter (whose checkpoints would lack the bias),
            or a bias that is kept in fewer bits than float32, where updates would be lost.
    """

    def __init__(self, model: nn.Module, load: ExpertLoad, speed: float) -> None:
        self._routers: list[Any] = find_routers(causal_lm_of(model))
        if not self._routers or not all(map(has_bias, self._routers)):
            raise UnsupportedModelError(
                "expected a model whose routers have a bias (bailing_hybrid, kimi_linear) with "
                f"tree_expert_bias_update_speed={speed}, got {type(causal_lm_of(model)).__name__}"
            )
        if hasattr(model, "peft_config"):
            raise UnsupportedModelError(
                f"expected a model without adapters with tree_expert_bias_update_speed={speed}, got one with (their "
                "checkpoints would lack the bias)"
            )
        dtypes = {router.e_score_correction_bias.dtype for router in self._routers} - {torch.float32, torch.float64}
        if dtypes:
            raise UnsupportedModelError(
                f"expected router biases in float32, got {', '.join(map(str, dtypes))}: updates would be rounded away"
            )
        self._load, self._speed = load, speed

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's: the optimizer has stepped."""
        found, self._load.pending = self._load.pending, None
        if found is None:
            return
        for router, load in zip(self._routers, found, strict=True):
            bias = router.e_score_correction_bias
            below = torch.sign(load.mean() - load).to(bias)
            bias.add_(below, alpha=self._speed)


def send_bias_to_engines(trainer: Any) -> None:
    """Adds routers' biases to the weights that TRL sends to vLLM: it (1.16) walks parameters, and they are buffers."""
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        return
    every = generation._iter_named_params

    def with_bias() -> Iterator[tuple[str, torch.Tensor]]:
        yield from every()
        for name, buffer in causal_lm_of(trainer.accelerator.unwrap_model(generation.model)).named_buffers():
            if name.endswith("e_score_correction_bias"):
                yield generation._fix_param_name_to_vllm(name), buffer

    generation._iter_named_params = with_bias
