"""The dry run itself: goes through all that a training would begin with, collecting what is refused."""

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import get_peft_config

from harts_hf.cli.data import TrainPrompts, eval_dataset, train_prompts
from harts_hf.cli.dry_run.building import as_if_launched, without_weights
from harts_hf.cli.dry_run.memory import Memory, memory_of, parameter_counts
from harts_hf.cli.dry_run.planning import StepPlan, plan_step
from harts_hf.cli.dry_run.report import Findings
from harts_hf.cli.dry_run.rollouts import PlannedRollouts, file_rollouts, made_up_rollouts
from harts_hf.cli.launching import AsLaunched, Launch, find_launch, whole_number
from harts_hf.cli.policy import find_policy, named_tokenizer
from harts_hf.cli.recipe import parse, peek, split_recipe
from harts_hf.cli.sources import RolloutSource, find_source, reward_functions
from harts_hf.cli.train_arguments import PolicyArguments, TrainArguments
from harts_hf.cli.train_checks import check_folders
from harts_hf.cli.trainer_kinds import TRAINERS
from harts_hf.errors import MissingExtraError, missing_extra
from harts_hf.modeling.checks import check_experts
from harts_hf.modeling.patching import causal_lm_of
from harts_hf.runtime.budgets import MARGIN, Budget, fitting_budget, parse_bytes
from harts_hf.trainers.refusals import check_settings
from harts_hf.trainers.router_loss import has_router_loss
from harts_hf.trainers.sampling import why_not_sampled
from harts_hf.trainers.tree_options import check_optimizer
from harts_hf.trainers.zero3 import has_frozen_layers


def _said(error: BaseException) -> str:
    """An error in one line. Of one that is not ours (somebody's module, constructor or data) also what and where."""
    if isinstance(error, ModuleNotFoundError):
        error = missing_extra(error) or error
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | MissingExtraError) and text:
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({frame.filename}, line {frame.lineno})"


def _memory_of_gpu() -> float | None:
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


@dataclass
class _Parts:
    """What has been found so far."""

    tokenizer: Any = None
    source: RolloutSource | None = None
    rewards: Any = None
    train: TrainPrompts = field(default_factory=TrainPrompts)
    evaluation: Any = None
    trainer: Any = None
    planned: PlannedRollouts | None = None
    plan: StepPlan | None = None
    memory: Memory | None = None
    budget: Budget | None = None
    refused: list[str] = field(default_factory=list)


class DryRun:
    """Reads the recipe as if all processes ran (batches depend on their number), then looks at part after part."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.recipe = split_recipe(argv)[0]
        running = int(os.environ.get("WORLD_SIZE", 1))
        self.launch: Launch = find_launch(
            peek(argv, "accelerate_config"), whole_number(peek(argv, "num_processes")), running
        )
        self.arguments: TrainArguments
        self.training: Any
        self.model: PolicyArguments
        unknown: list[str] = []
        with as_if_launched(self.launch.num_processes):
            self.arguments, self.training, self.model = parse(argv, unknown=unknown)
        self.names_backend = bool(self.training.deepspeed or self.training.fsdp)
        if self.training.deepspeed:
            # Models would be built in parts, by DeepSpeed and for processes that do not run.
            self.training.deepspeed = self.training.deepspeed_plugin = self.training.hf_deepspeed_config = None
            unset_hf_deepspeed_config()
        given = self.arguments.dry_run_memory
        self.capacity = _memory_of_gpu() if given is None else parse_bytes("dry_run_memory", given)
        self.parts = _Parts(refused=[*self.launch.refused, *unknown])

    def findings(self) -> Findings:
        """What there is to say of it."""
        parts = self.parts
        for look in (
            self._files,
            self._tokenizer,
            self._source,
            self._data,
            self._trainer,
            self._processes,
            self._memory,
            self._plan,
        ):
            with self._collecting():
                look()
        model = getattr(parts.trainer, "model", None)
        return Findings(
            recipe=self.recipe or "the command line",
            arguments=self.arguments,
            training=self.training,
            launch=self.launch,
            model=model,
            counts=None if model is None else parameter_counts(model),
            num_prompts=parts.train.number,
            planned=parts.planned,
            plan=parts.plan,
            memory=parts.memory,
            budget=parts.budget,
            capacity=self.capacity,
            refused=parts.refused,
            not_checked=list(self._not_checked()),
        )

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # whatever it is, the training would end with it
            said = _said(error)
            if said not in self.parts.refused:
                self.parts.refused.append(said)

    def _files(self) -> None:
        self._each(
            lambda: check_optimizer(self.training),
            lambda: check_folders(self.training, self.model, self.recipe, makes=False),
        )

    def _each(self, *checks: Callable[[], object]) -> None:
        for check in checks:
            with self._collecting():
                check()

    def _tokenizer(self) -> None:
        self.parts.tokenizer = named_tokenizer(self.arguments, self.training, self.model)

    def _source(self) -> None:
        source = find_source(self.arguments, self.training, self.parts.tokenizer)
        self.parts.source = source
        named = self.arguments.tokenizer or self.model.model_name_or_path  # and then refused, if there is none
        if self.parts.tokenizer is None and source.task is not None and not named:
            self.parts.tokenizer = source.task.tokenizer()
        kind = TRAINERS[self.arguments.trainer]
        self._each(
            lambda: kind.check(self.arguments.trainer, self.arguments.source, source.arguments),
            lambda: source.check(self.training, self.parts.tokenizer),
        )
        self.parts.rewards = reward_functions(self.arguments, source)

    def _data(self) -> None:
        if self.parts.source is not None:
            self.parts.train = train_prompts(self.arguments, self.training, self.parts.source)
            self.parts.evaluation = eval_dataset(self.arguments, self.training, self.parts.source)

    def _trainer(self) -> None:
        parts = self.parts
        if parts.source is None or parts.tokenizer is None or parts.rewards is None:
            return  # what is missing was refused already
        if parts.train.dataset is None and not parts.source.plays_itself:
            return
        uses_vllm = self.training.use_vllm
        self.training.use_vllm = False  # the constructor would talk to the server
        try:
            self._make_trainer()
        finally:
            self.training.use_vllm = uses_vllm
        parts.trainer.use_vllm = uses_vllm

    def _make_trainer(self) -> None:
        parts, training = self.parts, self.training
        with without_weights(), torch.device("meta"):
            policy = find_policy(self.arguments, training, self.model, parts.tokenizer)
        folder = training.output_dir
        try:
            with without_weights(), tempfile.TemporaryDirectory() as training.output_dir:  # which the trainer makes
                parts.trainer = self._trainer_of(policy)
        finally:
            training.output_dir = folder

    def _trainer_of(self, policy: Any) -> Any:
        parts = self.parts
        assert parts.source is not None
        return TRAINERS[self.arguments.trainer].trainer(
            policy,
            parts.rewards,
            args=self.training,
            train_dataset=parts.train.dataset,
            eval_dataset=parts.evaluation,
            processing_class=parts.tokenizer,
            peft_config=get_peft_config(self.model),
            **parts.source.arguments,
        )

    def _processes(self) -> None:
        """What the trainer would refuse under the backend, which this process does not have."""
        trainer, launch, source = self.parts.trainer, self.launch, self.parts.source
        if source is not None and source.arguments:
            given = {"rollout_func": None, "tools": source.plays_itself, **source.arguments}
            reason = why_not_sampled(
                SimpleNamespace(args=self.training, use_vllm=self.training.use_vllm, **given),
                num_processes=launch.num_processes,
                is_fsdp=launch.backend == "FSDP2",
                is_zero3=launch.backend == "ZeRO-3",
            )
            self.parts.refused += [reason] if reason else []
        if trainer is not None:
            self._each(
                lambda: check_settings(AsLaunched(trainer, launch)),
                trainer.check_ready,
                lambda: check_experts(
                    causal_lm_of(trainer.model),
                    zero3=launch.backend == "ZeRO-3" and has_frozen_layers(trainer.model),
                ),
            )

    def _memory(self) -> None:
        """What the training takes, and the limits that fit beside it."""
        parts, training = self.parts, self.training
        if parts.trainer is None:
            return
        model = parts.trainer.model
        memory = parts.memory = memory_of(
            model if hasattr(model, "peft_config") else causal_lm_of(model),
            training,
            self.launch,
            with_reference=getattr(parts.trainer, "ref_model", None) is not None,
        )
        if not training.asks_for_memory:
            return
        if training.use_cpu or self.capacity is None:
            ask = "the default: say how much memory a GPU has by --dry_run_memory 141GB"
            parts.budget = Budget(reason="the default on a CPU" if training.use_cpu else ask)
            return
        room = self.capacity * (1 - MARGIN) - memory.states_bytes
        reason = f"of {self.capacity / 1e9:,.1f} GB, {MARGIN:.0%} of them left alone"
        parts.budget = fitting_budget(memory.rows, room, offload=memory.offload, reason=reason)

    def _plan(self) -> None:
        parts = self.parts
        if parts.trainer is None or (parts.budget is None and self.training.asks_for_memory):
            return
        parts.planned = self._planned()
        placement = getattr(self.training, "tree_placement", "local")
        together = self.launch.num_processes == 1 or hasattr(self.training, "tree_placement")
        skips = together and self._may_skip_scoring() and not has_router_loss(parts.trainer)
        planner = parts.trainer.tree_policy.planner
        if parts.budget is not None:
            planner = replace(planner, config=replace(planner.config, **self.training.limits(parts.budget)))
        parts.plan = plan_step(
            planner,
            parts.planned,
            num_processes=self.launch.num_processes,
            placement=placement,
            skips=[True] if skips and self.launch.num_processes == 1 else sorted({skips, False}),
        )

    def _planned(self) -> PlannedRollouts:
        parts = self.parts
        recorded = self.arguments.dry_run_rollouts or self.arguments.recorded_rollouts
        if recorded:
            given: Any = self.arguments.recorded_kwargs
            options = {key: given[key] for key in ("format", "samples_per", "group_key") if key in given}
            return file_rollouts(recorded, self.training, parts.tokenizer, options)
        return made_up_rollouts(self.arguments, self.training, self._prompt_tokens())

    def _may_skip_scoring(self) -> bool:
        """Whether a step's scoring pass is left out, as far as the settings say (docs/windows.md)."""
        training = self.training
        aligned = training.gradient_accumulation_steps % training.steps_per_generation == 0
        return aligned and training.num_iterations == 1 and not training.use_vllm and training.beta == 0

    def _prompt_tokens(self) -> int | None:
        """Tokens of the longest of a few prompts, if they are texts or messages."""
        dataset = self.parts.train.dataset
        if dataset is None or self.parts.tokenizer is None or self.parts.source is None:
            return None
        longest = 0
        for row in dataset.take(64) if hasattr(dataset, "take") else ():
            prompt = row["prompt"]
            if isinstance(prompt, list) and self.parts.tokenizer.chat_template:
                ids = self.parts.tokenizer.apply_chat_template(prompt, tokenize=True, return_dict=False)
            else:
                ids = self.parts.tokenizer(str(prompt))["input_ids"]
            longest = max(longest, len(ids))
        return longest or None

    def _not_checked(self) -> Iterator[str]:
        if self.parts.trainer is None:
            yield "the model, its memory and the trainer's other settings, as the trainer could not be made"
        if getattr(self.training, "use_vllm", False):  # supervised training has none
            server = self.training.vllm_server_base_url or self.training.vllm_server_host
            yield f"the vLLM server ({server}): whether it is there, and right"
        if not self.training.use_cpu and not torch.cuda.is_available():
            yield "GPUs: torch finds none here (to train on this machine's CPU say use_cpu: true and bf16: false)"
        if self.names_backend:
            yield "the recipe's keys deepspeed and fsdp: a dry run reads the backend from accelerate_config"
        if self.launch.num_processes > 1:
            yield "whether weights fit on the CPU while they are loaded"
