"""TRL's trainers with the present names of what Transformers has renamed."""

import sys
from contextlib import ExitStack
from typing import Any

from harts_hf.modeling.checkpointing import without_checkpointing
from harts_hf.trainers.replacing import replaced

# What TRL's modules call it, by names that warn.
_HELPER = "disable_gradient_checkpointing"


class PresentNames:
    """Mixin above a TRL trainer."""

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        modules = {cls.__module__ for cls in type(self).__mro__ if cls.__module__.startswith("trl.")}
        with ExitStack() as stack:
            for module in (sys.modules[name] for name in modules):
                if hasattr(module, _HELPER):
                    stack.enter_context(replaced(module, _HELPER, without_checkpointing))
            return parent._generate_and_score_completions(*args, **kwargs)
