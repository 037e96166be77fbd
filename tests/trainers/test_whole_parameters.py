"""FSDP2 with ``reshard_after_forward=False``: parameters are gathered once in an optimizer step."""

from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
from accelerate.utils import DistributedType

from harts_hf.trainers.ranks import AccelerateRanks


@pytest.mark.parametrize("reshards", [False, True])
def test_parameters_stay_whole_until_the_last_backward(reshards: bool) -> None:
    """Where layers give up whole parameters after their forwards, nothing is changed. (That training is the same:
    tests/distributed/test_ranks.py, "fsdp2_whole".)"""
    accelerator = SimpleNamespace(
        num_processes=2,
        process_index=0,
        distributed_type=DistributedType.FSDP,
        state=SimpleNamespace(fsdp_plugin=SimpleNamespace(reshard_after_forward=reshards)),
        gradient_state=MagicMock(),
    )
    ranks, model = AccelerateRanks(accelerator), MagicMock()
    for is_last in (False, False, True):
        with ranks.around_backward(model, [], is_last=is_last, follows=True):
            pass
    before = [] if reshards else [call(False), call(False), call(True)]
    assert model.set_reshard_after_backward.call_args_list == before
    assert not model.set_requires_gradient_sync.called
