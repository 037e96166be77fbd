"""The root forward of a patched model: what is wanted of a microbatch's rows instead of logits."""

from typing import Any

import torch
from torch import nn

from harts_hf.errors import UnsupportedModelError
from harts_hf.kernels.logprobs import token_logprobs
from harts_hf.modeling.adapters import check_adapters
from harts_hf.modeling.checks import check_checkpointing, check_dropout
from harts_hf.modeling.fused import check_layers, fusing
from harts_hf.modeling.outputs import ENTROPY, HEAD_VALUES, IS_TOP1, RowValue, Sum
from harts_hf.modeling.routing import routing
from harts_hf.modeling.tree_pass import TreePass

# A dict reaches every layer as it is, so Transformers builds no mask (it would be N x N and wrong).
NO_MASK = {"full_attention": None, "linear_attention": None}

# What a forward answers: plain tensors in dicts, where wrappers (FSDP2, DDP, DeepSpeed) find them.
TreeAnswer = dict[str, dict[str, torch.Tensor]]


def tree_forward(self: Any, *args: Any, harts: TreePass | None = None, **kwargs: Any) -> Any:
    """Bound to a patched model as its ``forward``; without ``harts`` the stock forward runs as it is.

    Returns:
        ``{"rows": {name: [P]}, "sums": {name: tensor}}``, float32 or wider. Of every trainable output there is one,
        empty where it is not asked for, so that each forward is connected to every parameter.
    """
    if harts is None:
        return self._harts_stock_forward(*args, **kwargs)
    given = [name for name, value in kwargs.items() if value is not None] + ["positional arguments"] * bool(args)
    if given:
        raise ValueError(f"expected harts and nothing else, got {', '.join(given)}")
    check_checkpointing(self)
    check_dropout(self)
    check_adapters(self)
    check_head(self)
    if not isinstance(harts, TreePass):
        raise ValueError(f"expected harts to be a TreePass, got {type(harts).__name__}")
    batch, wanted, outputs = harts.batch, harts.wanted, self._harts_outputs
    unknown = [name for name in wanted.names if name not in outputs and name not in HEAD_VALUES]
    if unknown:
        raise ValueError(f"expected outputs among {', '.join([*HEAD_VALUES, *outputs])}, got {', '.join(unknown)}")
    sums = {name: output for name, output in outputs.items() if isinstance(output, Sum) and name in wanted.names}
    base_arguments = {name: value for output in sums.values() for name, value in output.base_arguments.items()}
    if harts.routes.replayed is not None:
        check_layers(self)
    with fusing(harts.fused_modules), routing(harts):
        base_output = self.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=NO_MASK,
            use_cache=False,
            harts=harts,
            **base_arguments,
        )
    hidden = base_output.last_hidden_state.squeeze(0)  # not [0], whose backward copies into zeros
    # Through the head's own call, so that FSDP2 and ZeRO-3 gather its weight for the forward and for the backward.
    rows: dict[str, torch.Tensor] = self.get_output_embeddings()(hidden, harts=harts)
    for name, output in outputs.items():
        if isinstance(output, RowValue):
            asked = wanted.rows.rows if name in wanted.names else wanted.rows.rows[:0]
            rows[name] = _row_value(self.get_submodule(output.module), hidden.index_select(0, asked), output)
    return {"rows": rows, "sums": {name: _wide(output.compute(base_output, harts)) for name, output in sums.items()}}


def _row_value(module: nn.Module, hidden: torch.Tensor, output: RowValue) -> torch.Tensor:
    first = next(module.parameters(), None)
    value = module(hidden if first is None else hidden.to(first.dtype))  # a critic may be kept in float32
    if not isinstance(value, torch.Tensor) or value.numel() != len(hidden):
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"expected {output.module} to give {len(hidden)} numbers for {output.name}, got {got}")
    return _wide(value.reshape(len(hidden)))


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def has_tree_head(model: Any) -> bool:
    """Whether a patched model's head is still the one that was patched."""
    return "_harts_stock_forward" in vars(model.get_output_embeddings())


def check_head(model: Any) -> None:
    """Refuses a patched model whose head was replaced.

    Raises:
        UnsupportedModelError: the head is another module than the one that was patched.
    """
    if not has_tree_head(model):
        raise UnsupportedModelError(
            "expected the output head that was patched, got another one (resize_token_embeddings and "
            "set_output_embeddings replace it): call unpatch before they run, or unpatch and patch after"
        )


def head_forward(self: Any, hidden: torch.Tensor, *args: Any, harts: TreePass | None = None) -> Any:
    """Bound to a patched model's head as its ``forward``: log-probs (entropies, ...) of the labels that are wanted.

    Args:
        self: the head, a linear layer ``[V, D]``.
        hidden: ``[N, D]``.
        args: what the stock forward takes besides.
        harts: the running forward; without it the stock forward runs as it is.

    Returns:
        ``{"log_prob": [P]}``, and ``"entropy"`` and ``"is_top1"`` if they are wanted.
    """
    if harts is None:
        return self._harts_stock_forward(hidden, *args)
    wanted = harts.wanted
    weight, bias = self.weight, self.bias
    if wanted.head_in_fp32:
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    values = token_logprobs(
        hidden,
        weight,
        bias,
        wanted.labels.rows,
        wanted.labels.token_ids,
        temperature=wanted.temperature,
        return_entropy=ENTROPY in wanted.names,
        return_top1=IS_TOP1 in wanted.names,
        host_rows=wanted.labels.host.rows,
    )
    return {name: value for name, value in zip(HEAD_VALUES, values, strict=True) if value is not None}
