"""What a patched model can be asked for: named values per row, and named sums.

=============  ====================================  ==================================================================
name           of                                    value
=============  ====================================  ==================================================================
``log_prob``   labels (rows with a parent)           log-probability of row ``u``'s token, computed at ``parent[u]``
``entropy``    labels                                entropy of the distribution that the token was drawn from
``is_top1``    labels                                1 where the token is the likeliest one, else 0; has no gradient
row values     rows, leaves too                      what a module says of the hidden state after row ``u`` (a critic)
sums           a microbatch                          a tensor of fixed shape that adds up over microbatches and ranks
=============  ====================================  ==================================================================

The first three come with :func:`harts_hf.patch`, and of models with routers the sums that :mod:`.routers` has;
:func:`harts_hf.modeling.add_output` adds others. A loss is any
function of them, its derivatives have the same names and shapes, and the backward of a microbatch is one inner product
(docs/architecture.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harts_hf.modeling.tree_pass import TreePass

LOG_PROB = "log_prob"
ENTROPY = "entropy"
IS_TOP1 = "is_top1"
# Values of labels, all from the head; of rows themselves are those that :class:`RowValue` names.
HEAD_VALUES = (LOG_PROB, ENTROPY, IS_TOP1)
# Sums of a model's routers; see harts_hf.modeling.routers.
ROUTER_PROBABILITIES = "router_probabilities"
ROUTER_CHOICES = "router_choices"
EXPERT_LOAD = "expert_load"
ROUTER_ENTROPY = "router_entropy"
# Values and sums that losses are computed with, but not differentiated by.
WITHOUT_GRADIENT = (IS_TOP1, ROUTER_CHOICES, EXPERT_LOAD, ROUTER_ENTROPY)
# Those that losses of reinforcement learning read.
LABEL_VALUES = (LOG_PROB, ENTROPY)


@dataclass(frozen=True, kw_only=True)
class RowValue:
    """A value of each row, from a module of the model.

    Attributes:
        name: of the value.
        module: dotted name, within the causal language model, of a module from hidden states ``[P, D]`` to ``[P]`` or
            ``[P, 1]``. As a part of the model it is sharded, trained and saved with it.
    """

    name: str
    module: str


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A sum over the rows of a microbatch.

    Attributes:
        name: of the sum.
        compute: from the base model's output and the running forward to a tensor whose shape is the same for every
            microbatch. It counts a row ``TreeBatch.occurrence_counts`` times: 0 where another microbatch owns it and
            in dummies, so that microbatches add up to the sum over all trajectories. It is not
            called where the sum is not asked for, so it may read parameters of the base model only.
        base_arguments: what the base model is called with besides, such as ``output_router_logits=True``.
    """

    name: str
    compute: Callable[[Any, TreePass], torch.Tensor]
    base_arguments: Mapping[str, Any] = field(default_factory=dict)
