"""Two processes over gloo whose parameters are sharded sample on vLLM servers, one process three times as much."""

import json
from pathlib import Path

import pytest
from support.launching import run_processes

SCRIPT = Path(__file__).parent / "sample_two.py"
# "zero3" ("DeepSpeedEngine") passes too, in twice the time: by hand.
WRAPPERS = {"fsdp2": "FSDPQwen3_5ForCausalLM"}
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("backend", WRAPPERS)
def test_ragged_sampling_and_a_broken_server(backend, tmp_path):
    """Nobody waits for anybody; importance ratios are 1; what one process's server has wrong stops both at once."""
    run_processes(SCRIPT, backend, tmp_path, timeout=300)
    facts = [json.loads((tmp_path / f"{backend}-{rank}.json").read_text()) for rank in (0, 1)]
    for fact in facts:
        assert (fact["world_size"], fact["wrapper"], fact["step"]) == (2, WRAPPERS[backend], 2)
        assert "to have the trainer's weights at step 2" in fact["error"]
    assert facts[0]["requests"] > facts[1]["requests"]
    logs = [log for log in facts[0]["logs"] if "sampling/sampling_logp_difference/max" in log]
    assert len(logs) == 2
    # fp32: a tree's log-probs against a row's; the largest seen was 2e-6.
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 2e-5
