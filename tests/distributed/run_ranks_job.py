"""A process of a job of benchmarks/ranks in dry form: run_ranks_job.py JOB SHAPES OUT [BUG of planted_ranks]."""

import sys

import pytest
from support import planted_ranks

from benchmarks.ranks.__main__ import main

if __name__ == "__main__":
    job, shapes, out, *bugs = sys.argv[1:]
    for bug in bugs:
        getattr(planted_ranks, bug)(pytest.MonkeyPatch())
    main(["run", job, "--shapes", shapes, "--out", out, "--dry-run"])
