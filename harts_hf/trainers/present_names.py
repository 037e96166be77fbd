"""TRL's trainers with the present names of what Transformers has renamed."""

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from harts_hf.modeling.checkpointing import without_checkpointing
from harts_hf.trainers.replacing import replaced

# What TRL's modules call it, by names that warn.
_HELPER = "disable_gradient_checkpointing"


def _as_it_is(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


class PresentNames:
    """Mixin above a TRL trainer."""

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        # Where TRL generates nothing itself, only forwards on trees run inside, to which checkpointing without
        # gradients is nothing; to switch it takes milliseconds.
        plays = getattr(self, "rollout_func", None) is not None
        helper = _as_it_is if plays else without_checkpointing
        modules = {cls.__module__ for cls in type(self).__mro__ if cls.__module__.startswith("trl.")}
        with ExitStack() as stack:
            for module in (sys.modules[name] for name in modules):
                if hasattr(module, _HELPER):
                    stack.enter_context(replaced(module, _HELPER, helper))
            return parent._generate_and_score_completions(*args, **kwargs)
