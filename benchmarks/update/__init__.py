"""Optimizer steps of whole models beside stock TRL, on real shapes: see `__main__.py`."""
