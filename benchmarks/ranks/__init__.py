"""Optimizer steps on two to eight GPUs of one host, beside one GPU's and without sharing: see `__main__.py`."""
