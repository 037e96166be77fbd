"""Benchmarks for one Hopper GPU: `python -m benchmarks.gpu --help`."""
