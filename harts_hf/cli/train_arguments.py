"""What a recipe may say beside TRL's own settings."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from trl import ModelConfig, ScriptArguments

from harts_hf.cli.source_arguments import SourceArguments, as_dict
from harts_hf.cli.trainer_kinds import TRAINERS
from harts_hf.errors import MissingExtraError

DICT_FIELDS = ("model_config", "environment_kwargs", "agent_kwargs", "collector_kwargs", "recorded_kwargs")


@dataclass
class TrainArguments(SourceArguments, ScriptArguments):
    r"""
    Arguments of `harts train`: those of [`SourceArguments`], and which trainer, which policy, which processes.

    Parameters:
        trainer (`str`, *optional*, defaults to `"grpo"`):
            The algorithm: `"grpo"`, `"gmpo"`, `"rloo"`, `"ppo"`, or `"sft"` for supervised training (on `dataset_name`
            or `recorded_rollouts`); the recipe's other keys are fields of its configuration.
        model_type (`str`, *optional*):
            Architecture of a policy with random weights, such as `bailing_hybrid`; instead of `model_name_or_path`.
        model_config (`dict`, *optional*):
            Fields of that architecture's configuration that differ from its defaults. Vocabulary and special tokens
            are the tokenizer's.
        tokenizer (`str`, *optional*):
            Folder or name of the tokenizer; by default the model's, or for `model_type` the environment's or the
            agent's.
        num_processes (`int`, *optional*):
            Processes that the recipe is meant for; another number is refused, as the batch would be another one.
        accelerate_config (`str`, *optional*):
            The file that the recipe is launched with, `accelerate launch --config_file FILE`; `--dry-run` reads
            backend and number of processes from it.
        cpu_threads (`int`, *optional*):
            Threads of one CPU operation; by default PyTorch's choice. Tiny models are faster with 1.
        dry_run (`bool`, *optional*, defaults to `False`):
            Build the model without its weights, read the data, plan rollouts, print what the training would take and
            what would be refused, and stop: exit status 0, or 1 where something would be refused.
        dry_run_rollouts (`str`, *optional*):
            Rollout file to plan in a dry run; by default `recorded_rollouts`, else made up from the recipe's numbers.
        dry_run_memory (`str`, *optional*):
            Memory of a GPU, such as `141GB` or `80GiB`, that a dry run fits limits into which are
            `auto`; by default that of this machine's first GPU.
    """

    trainer: str = field(
        default="grpo", metadata={"help": f"The algorithm: {', '.join(TRAINERS)}.", "choices": list(TRAINERS)}
    )
    model_type: str | None = field(
        default=None,
        metadata={"help": "Architecture of a policy with random weights (instead of model_name_or_path)."},
    )
    model_config: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Fields of that architecture's configuration that differ from its defaults (JSON)."},
    )
    tokenizer: str | None = field(
        default=None,
        metadata={"help": "Folder or name of the tokenizer, if not the model's, the environment's or the agent's."},
    )
    num_processes: int | None = field(
        default=None, metadata={"help": "Processes that the recipe is meant for; another number is refused."}
    )
    accelerate_config: str | None = field(
        default=None, metadata={"help": "File for `accelerate launch --config_file`; --dry-run reads it."}
    )
    cpu_threads: int | None = field(
        default=None,
        metadata={"help": "Threads of one CPU operation; by default PyTorch's choice. Tiny models are faster with 1."},
    )
    dry_run: bool = field(
        default=False,
        metadata={"help": "Print what the training would take and what would be refused, without weights, and stop."},
    )
    dry_run_rollouts: str | None = field(default=None, metadata={"help": "Rollout file to plan in a dry run."})
    dry_run_memory: str | None = field(
        default=None,
        metadata={"help": "Memory of a GPU (141GB, 80GiB) that a dry run fits limits into which are 'auto'."},
    )
    # Whether recipe or command line say `disable_tqdm: false`, which is also its default.
    asks_for_bar: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        for name in DICT_FIELDS:
            setattr(self, name, as_dict(getattr(self, name), name))
        self.check_source()
        self.check_forks()
        for name in ("cpu_threads", "num_processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")
        if self.dry_run_rollouts and not self.dry_run:
            raise ValueError(f"expected dry_run_rollouts with --dry-run only, got {self.dry_run_rollouts!r}")


@dataclass
class PolicyArguments(ModelConfig):
    r"""TRL's [`ModelConfig`] with adapters that run on trees by default: `lora_dropout` is 0."""

    lora_dropout: float = field(
        default=0.0, metadata={"help": "LoRA dropout; has to be 0, since a token is computed twice (default 0)."}
    )

    def __post_init__(self) -> None:
        named = self.lora_target_modules
        super().__post_init__()
        # TRL makes a text of a list of one module, which PEFT takes for a pattern of whole dotted names.
        if isinstance(named, list) and len(named) == 1 and named[0].isidentifier():
            self.lora_target_modules = named
        if self.load_in_4bit or self.load_in_8bit:
            name = "load_in_4bit" if self.load_in_4bit else "load_in_8bit"
            raise ValueError(f"expected unquantized weights, got {name}: leave it out")
        if self.use_peft and find_spec("peft") is None:
            raise MissingExtraError("use_peft", "peft")
        if self.use_peft and self.lora_dropout:
            raise ValueError(
                f"expected lora_dropout 0 (scoring and training compute a token twice, and a shared one for many "
                f"trajectories), got {self.lora_dropout}: leave lora_dropout out, or set it to 0"
            )
