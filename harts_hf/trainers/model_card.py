"""The model card that TRL writes, with this package in it."""

from pathlib import Path
from typing import Any

import harts_hf

_TRL = "It has been trained using [TRL](https://github.com/huggingface/trl)."
# TRL's words where the model came from a folder, or from random weights.
_NO_BASE = "[None](https://huggingface.co/None)"
_VERSIONS = "### Framework versions\n\n"


def name_package(card: str) -> str:
    """A card of TRL's that says what computed the updates, and does not link to a model that is not there."""
    here = f"{_TRL[:-1]} and harts_hf {harts_hf.__version__}, which computes tokens that rollouts share once."
    card = card.replace(_TRL, here, 1).replace(_NO_BASE, "a model that is not on the Hub")
    return card.replace(_VERSIONS, f"{_VERSIONS}- harts_hf: {harts_hf.__version__}\n", 1)


class TreeModelCard:
    """Mixin above a TRL trainer."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's card, in the output folder, with this package named."""
        trainer: Any = super()
        trainer.create_model_card(*args, **kwargs)
        own: Any = self
        path = Path(own.args.output_dir) / "README.md"
        if own.is_world_process_zero() and path.is_file():
            path.write_text(name_package(path.read_text(encoding="utf-8")), encoding="utf-8")
