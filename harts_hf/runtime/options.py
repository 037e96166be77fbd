"""How the forwards of a window run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How forwards run.

    Attributes:
        temperature: logits are divided by it.
        head_in_fp32: whether the head runs in float32 whatever the model's dtype.
        context: entered around each forward (autocast).
        offload: whether handed states lie on the CPU between uses.
        expand_latents: whether an MLA hands over expanded keys and values instead of latents.
        deterministic: whether attention on a GPU has to be bitwise reproducible (a slower backend).
        fused_modules: whether norms, gates and experts on a GPU run as single operations.
        replay_routing: whether each microbatch's later forwards take the experts that its first one chose.
    """

    temperature: float = 1.0
    head_in_fp32: bool = False
    context: Context = field(default=nullcontext)
    offload: bool = False
    expand_latents: bool = False
    deterministic: bool = False
    fused_modules: bool = True
    replay_routing: bool = False
