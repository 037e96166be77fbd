"""Optimizer steps on several GPUs of one host, beside one GPU's."""
