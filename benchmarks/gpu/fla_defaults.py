"""Copies FLA's tuned configurations and names one of each kernel as its default.

    python fla_defaults.py FROM TO [STAGES]

With FLA_CACHE_MODE=full, FLA then takes it wherever it has tuned no other. (Whether a batch is packed, and the dtype
of beta, are part of what FLA tunes for: without defaults, stock models alone tune for minutes in every process.)
What was tuned for heads of 128 in bf16 does not fit the shared memory for wider ones or float32. FLA's own tuning
would drop it, but its cache takes configurations of any head dim: with STAGES, all that stays is a default of at most
so many pipeline stages.
"""

import json
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:3])
most_stages = int(sys.argv[3]) if len(sys.argv) > 3 else None
target.mkdir(parents=True, exist_ok=True)
for path in source.glob("*.json"):
    found = json.loads(path.read_text())
    default = dict(next(iter(found["autotune_entries"].values()))["config"])
    if most_stages:
        default["num_stages"] = min(default["num_stages"], most_stages)
        found["autotune_entries"] = {}
    found["default_config"] = default
    (target / path.name).write_text(json.dumps(found))
