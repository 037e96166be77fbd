"""Walks over modules are PyTorch's, in order, names and what is left out."""

import pytest
from support.models import tiny_model
from torch import nn

from harts_hf import patch
from harts_hf.modeling import walking


def shared():
    """Modules and parameters that stand in several places, at several depths, and places without any."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(nn.Sequential(inner, nn.Linear(2, 3, bias=False)), inner, inner[0], nn.Linear(3, 2))
    model[3].weight = nn.Parameter(model[0][1].weight.T.detach())
    model[3].again = model[0][1].weight
    model.add_module("none", None)
    model.register_parameter("nothing", None)
    model.top = model[3].bias
    return model


@pytest.mark.parametrize("make", [shared, lambda: nn.Linear(1, 1), lambda: patch(tiny_model("bailing_hybrid"))])
def test_as_pytorch(make):
    """Each module and parameter once, where it comes first."""
    model = make()
    assert list(walking.named_modules(model).items()) == list(model.named_modules())
    assert walking.modules(model) == list(model.modules())
    ours = walking.parameters(model)
    assert list(map(id, ours)) == list(map(id, model.parameters())) and ours
