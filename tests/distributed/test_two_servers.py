"""Two processes over gloo whose parameters are sharded sample on vLLM servers, one process three times as much."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sample_two.py"
# "zero3" ("DeepSpeedEngine") passes too, in twice the time: by hand.
WRAPPERS = {"fsdp2": "FSDPQwen3_5ForCausalLM"}
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("backend", WRAPPERS)
def test_ragged_sampling_and_a_broken_server(backend, tmp_path):
    """Nobody waits for anybody; importance ratios are 1; what one process's server has wrong stops both at once."""
    support = str(SCRIPT.parents[1])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [support, os.environ.get("PYTHONPATH")])),
    }
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT), backend]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads((tmp_path / f"{backend}-{rank}.json").read_text()) for rank in (0, 1)]
    for fact in facts:
        assert (fact["world_size"], fact["wrapper"], fact["step"]) == (2, WRAPPERS[backend], 2)
        assert "to have the trainer's weights at step 2" in fact["error"]
    assert facts[0]["requests"] > facts[1]["requests"]
    logs = [log for log in facts[0]["logs"] if "sampling/sampling_logp_difference/max" in log]
    assert len(logs) == 2
    # fp32: a tree's log-probs against a row's; the largest seen was 2e-6.
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs) < 2e-5
