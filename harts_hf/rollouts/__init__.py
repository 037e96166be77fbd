"""Collects rollout trees: environments that fork, the sampler, TRL's ``rollout_func``, credit."""
