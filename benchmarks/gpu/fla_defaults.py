"""Copies FLA's tuned configurations and names one of each kernel as its default: python fla_defaults.py FROM TO

With FLA_CACHE_MODE=full, FLA then takes it wherever it has tuned no other. (Whether a batch is packed, and the dtype
of beta, are part of what FLA tunes for: without defaults, stock models alone tune for minutes in every process.)
"""

import json
import sys
from pathlib import Path

source, target = map(Path, sys.argv[1:])
for path in source.glob("*.json"):
    found = json.loads(path.read_text())
    found["default_config"] = next(iter(found["autotune_entries"].values()))["config"]
    (target / path.name).write_text(json.dumps(found))
