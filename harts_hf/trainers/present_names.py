"""TRL's trainers with the present names of what Transformers has renamed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from harts_hf.modeling.checkpointing import old_names, without_checkpointing
from harts_hf.trainers.replacing import replaced

# TRL's two ways to switch checkpointing off for a while, by names that warn: around forwards, and around generation.
_HELPER, _UNWRAP = "disable_gradient_checkpointing", "unwrap_model_for_generation"


def _as_it_is(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


def unwrapping(stock: Callable[..., Any]) -> Callable[..., Any]:
    """TRL's ``unwrap_model_for_generation``, checkpointing being switched by its present names."""

    @contextmanager
    def unwrap(
        model: Any, accelerator: Any, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> Iterator[Any]:
        policy = accelerator.unwrap_model(model)
        with without_checkpointing(policy, gradient_checkpointing_kwargs), ExitStack() as stack:
            with old_names():
                unwrapped = stack.enter_context(stock(model, accelerator, **options))
            yield unwrapped

    return unwrap


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
                if hasattr(module, _UNWRAP):
                    stack.enter_context(replaced(module, _UNWRAP, unwrapping(getattr(module, _UNWRAP))))
            return parent._generate_and_score_completions(*args, **kwargs)
