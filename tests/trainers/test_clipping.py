"""Gradients are clipped as Trainer clips them, and touched only where that changes them."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from harts_hf.trainers.clipping import clip_gradients
from harts_hf.trainers.zero_loss import zero_loss

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def model_with_gradients(scale, device, dtypes=(torch.float32, torch.bfloat16)):
    """Parameters of several dtypes and one without a gradient."""
    torch.manual_seed(0)
    kinds = (*dtypes, torch.float32)
    model = nn.ParameterList([nn.Parameter(torch.randn(300, 50, dtype=dtype, device=device)) for dtype in kinds])
    for parameter in list(model)[:-1]:
        parameter.grad = torch.randn_like(parameter) * scale
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("scale", "max_norm", "changes"),
    [(1.0, 1e9, False), (1.0, 0.3, True), (1.0, math.inf, False), (0.0, 1.0, False), (math.inf, 1.0, True)],
)
def test_as_trainer_clips(scale, max_norm, changes, device):
    """The same norm and the same bits; gradients that are not clipped were not written."""
    stock, own = model_with_gradients(scale, device), model_with_gradients(scale, device)
    accelerator = Accelerator(cpu=device == "cpu")
    expected = accelerator.clip_grad_norm_(stock.parameters(), max_norm)
    versions = [parameter.grad._version for parameter in list(own)[:-1]]
    norm = clip_gradients(SimpleNamespace(accelerator=accelerator), own, max_norm)
    assert norm.dtype == expected.dtype
    assert torch.equal(norm.nan_to_num(7), expected.nan_to_num(7))
    for parameter, other in zip(list(stock)[:-1], list(own)[:-1], strict=True):
        assert torch.equal(parameter.grad.nan_to_num(7), other.grad.nan_to_num(7))
    written = [parameter.grad._version for parameter in list(own)[:-1]] != versions
    assert written == changes


def test_sharded_gradients_are_trainers():
    """Of other kinds of training this knows nothing."""
    assert (
        clip_gradients(SimpleNamespace(accelerator=SimpleNamespace(distributed_type="FSDP")), nn.Linear(1, 1), 1.0)
        is None
    )


def test_a_zero_loss_is_known_to_be_one():
    """Trainer asks whether it is NaN or infinite, adds it up and looks at its device, as with any other scalar."""
    zero, total = zero_loss("cpu"), torch.tensor(2.5)
    assert not torch.isnan(zero) and not torch.isinf(zero)
    assert not torch.isnan(zero).any() and not zero.isnan().item()  # as code of a user's own asks
    on_meta = zero_loss("meta")  # whose values nobody can read, as it takes a wait to read a GPU's
    assert not torch.isnan(on_meta) and not torch.isinf(on_meta)
    total += zero
    assert type(total) is torch.Tensor
    assert (float(total), float(zero), zero.device) == (2.5, 0.0, torch.device("cpu"))
