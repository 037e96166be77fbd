"""One rank fails: every rank raises with its rank and its words, or the job ends; nobody waits, no step is wrong."""

from pathlib import Path

import pytest
import torch
from support.launching import made_once, run_processes

SCRIPT = Path(__file__).parent / "fail_ranks.py"
# What rank 0 and rank 1 raise.
EXPECTED = {
    "loss": ("OtherRankError: process 1 raised ZeroDivisionError: nothing to", "ZeroDivisionError: nothing to"),
    "collectives": ("the same collectives in the losses of all 2 processes",) * 2,
    "kinds": ("the same collectives in the losses of all 2 processes",) * 2,
    "rows": (
        "ValueError: expected prompts of at least one",
        "OtherRankError: process 0 raised ValueError: expected pr",
    ),
    "settings": ("got max_tokens_per_microbatch: 64 on process 0, 128 on process 1",) * 2,
    "plans": ("the same plan on every process, got the hashes",) * 2,
    "reward": ("OtherRankError: process 1 raised LookupError: no such test", "LookupError: no such test"),
    "advantages": ("ValueError: expected finite advantages", "process 0 raised ValueError: expected finite adv"),
    # Once more with half the rows, and then
    "scoring": ("process 1 raised OutOfMemoryError: no memory is left", "OutOfMemoryError: no memory is left"),
    "again": ("process 1 raised OutOfMemoryError: no memory is left in", "had run out with 128 in the same step"),
    # The step is begun again on both.
    "planned": ("nothing was raised; out of memory 0, 64 rows",) * 2,
    "forward": ("nothing was raised; out of memory 1, 64 rows",) * 2,
    "backward": ("nothing was raised; out of memory 1, 64 rows",) * 2,
    "tables": ("nothing was raised; out of memory 1, 64 rows",) * 2,
}
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def raised():
    """What each rank raised, by failure; the processes go on to the next one."""
    folder = made_once("failures", lambda folder: run_processes(SCRIPT, folder, "ddp", *EXPECTED))
    found = {name: [(folder / f"{name}-{rank}").read_text() for rank in (0, 1)] for name in EXPECTED}
    found["parameters"] = {path.stem: torch.load(path) for path in folder.glob("*.pt")}
    return found


@pytest.mark.parametrize("failure", EXPECTED)
def test_all_ranks_raise(failure, raised):
    """Outside forwards and backwards that wait for others."""
    for found, expected in zip(raised[failure], EXPECTED[failure], strict=True):
        assert expected in found


@pytest.mark.parametrize("failure", ["forward", "backward", "tables"])
def test_a_step_that_was_begun_again(failure, raised):
    """One rank ran out of memory before the last backward: both train as if half the rows had been planned."""
    for rank in (0, 1):
        for found, planned in zip(
            raised["parameters"][f"{failure}-{rank}"], raised["parameters"]["planned-0"], strict=True
        ):
            assert torch.equal(found, planned)


def test_inside_an_op(tmp_path):
    """Nobody can be told: that process ends with its error in the log, and whoever launched it ends the others."""
    with pytest.raises(AssertionError, match="process 1 failed") as ended:
        run_processes(SCRIPT, tmp_path, "fsdp2", "op", timeout=240)
    assert "no memory is left in an op" in str(ended.value)
    assert "cannot be begun again where processes share parameters" in str(ended.value)
