"""Writes docs/configuration.md from the fields of the configurations, their defaults and their help.

python docs/tools/configuration.py          # writes the page
python docs/tools/configuration.py --check  # ends with status 1 if it is not what the code says
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

PAGE = Path(__file__).parents[1] / "configuration.md"
HEAD = """# Configuration

Made from the code by `make docs-pages`; edit the docstrings and help texts there. Every field is a key of a recipe, an
option of `harts train` (`--field value`), and an argument of the configuration's class. Beside these, each trainer
takes every field of the TRL configuration that it extends: `harts train RECIPE --help` prints them all.
"""
SECTIONS = (
    ("All tree trainers", "harts_hf.trainers.tree_options", "TreeOptions", "`TreeGRPOConfig`, `TreeGMPOConfig`, "
     "`TreeRLOOConfig`, `TreePPOConfig` and `TreeSFTConfig` have these."),
    ("Rollouts", "harts_hf.trainers.config", "RolloutOptions", "`TreeGRPOConfig`, `TreeGMPOConfig` and "
     "`TreePPOConfig` have these."),
    ("GRPO", "harts_hf.trainers.config", "TreeGRPOConfig", "Beside all of TRL's `GRPOConfig`."),
    ("PPO", "harts_hf.trainers.ppo_config", "TreePPOConfig", "Beside all of TRL's `GRPOConfig` ([which of them "
     "mean something](ppo.md))."),
    ("Supervised training", "harts_hf.trainers.sft", "TreeSFTConfig", "Beside all of TRL's `SFTConfig`."),
    ("Sources of rollouts", "harts_hf.cli.source_arguments", "SourceArguments", "Keys of recipes alone "
     "([what they name](training.md#where-rollouts-come-from))."),
    ("Recipes", "harts_hf.cli.train_arguments", "TrainArguments", "Further keys of recipes."),
    ("Policies", "harts_hf.cli.train_arguments", "PolicyArguments", "Beside TRL's `ModelConfig` (`use_peft`, "
     "`lora_*`, `dtype`, ...)."),
)  # fmt: skip


def own_fields(config: Any) -> list[Any]:
    """The fields that a class declares itself, and not one that it extends."""
    own = vars(config).get("__annotations__", {})
    if not dataclasses.is_dataclass(config):
        return []
    return [field for field in dataclasses.fields(config) if field.init and field.name in own]


def default_of(field: Any) -> str:
    """A field's default as YAML says it."""
    value = field.default
    if value is dataclasses.MISSING:
        value = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(config: Any) -> str:
    """A row per field; one without help is an error, for it would be none in `harts train --help` either."""
    rows = ["| field | default | |", "|---|---|---|"]
    for field in own_fields(config):
        text = field.metadata.get("help", "")
        if not text:
            raise SystemExit(f"{config.__name__}.{field.name} has no help")
        text = text.replace("|", "\\|").replace("%%", "%")
        rows.append(f"| `{field.name}` | {default_of(field)} | {text[0].upper()}{text[1:]} |")
    return "\n".join(rows)


def check_sections() -> None:
    """Ends the program where the configuration of a trainer of `harts train` has fields and no section here."""
    from harts_hf.cli.trainer_kinds import TRAINERS

    known = {name for _, _, name, _ in SECTIONS}
    for kind in TRAINERS.values():
        for config in kind.config.__mro__:
            if config.__module__.startswith("harts_hf.") and own_fields(config) and config.__name__ not in known:
                raise SystemExit(f"expected {config.__name__} in SECTIONS of docs/tools/configuration.py, got none")


def page() -> str:
    """The whole page."""
    check_sections()
    parts = [HEAD]
    for title, module, name, text in SECTIONS:
        config = getattr(__import__(module, fromlist=[name]), name)
        if own_fields(config):
            parts.append(f"## {title}\n\n{text}\n\n{table(config)}\n")
    return "\n".join(parts)


def main() -> int:
    """The command line."""
    if "--check" in sys.argv:
        if PAGE.read_text() == page():
            return 0
        print("expected docs/configuration.md as the code says, got another: make docs-pages", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
