"""`harts train RECIPE --dry-run`: what a training would take and what would be refused, without weights.

The model is built from its configuration on the meta device, the data are read, the trainer is made as it would be,
and one optimizer step of one process is planned: of recorded rollouts, or of made-up ones as large as the recipe
allows. Number of processes and backend come from `accelerate_config`, or from `num_processes`. The exit status is 0,
or 1 where something would be refused; 2 for a recipe that cannot be read.
"""

from harts_hf.cli.dry_run.command import dry_run

__all__ = ["dry_run"]
