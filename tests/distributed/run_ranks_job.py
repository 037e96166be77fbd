"""A process of a job of benchmarks/ranks in dry form: run_ranks_job.py JOB SHAPES OUT [BUG of planted_ranks].

With a bug, of the first step only.
"""

import sys

import pytest
from support import planted_ranks

from benchmarks.ranks import work
from benchmarks.ranks.__main__ import main

if __name__ == "__main__":
    job, shapes, out, *bugs = sys.argv[1:]
    for bug in bugs:
        getattr(planted_ranks, bug)(pytest.MonkeyPatch())
        work.dry_steps = lambda steps, all_of=work.dry_steps: all_of(steps)[:1]
    main(["run", job, "--shapes", shapes, "--out", out, "--dry-run"])
