"""The command: which kind of dry run a recipe has, and what is printed of it."""

import os
import warnings
from collections.abc import Sequence

from harts_hf.cli.dry_run.report import format_findings
from harts_hf.cli.dry_run.run import DryRun
from harts_hf.cli.dry_run.supervised import SupervisedDryRun
from harts_hf.cli.recipe import peek
from harts_hf.cli.trainer_kinds import TRAINERS


def dry_run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Args:
        argv: as for :func:`harts_hf.cli.train.main`.

    Raises:
        ValueError: a recipe that cannot be read, or with a value that its field refuses.
    """
    if int(os.environ.get("RANK", 0)):
        return 0  # of several processes one says it all
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = _kind_of(argv)(argv).findings()
    print(format_findings(findings))
    return 1 if findings.refused else 0


def _kind_of(argv: Sequence[str]) -> type[DryRun]:
    kind = TRAINERS.get(peek(argv, "trainer"))
    return SupervisedDryRun if kind is not None and kind.is_supervised else DryRun
