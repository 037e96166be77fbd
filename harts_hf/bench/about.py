"""What a benchmark was run on."""

import importlib.metadata
import os
import platform
from typing import Any

import torch

import harts_hf

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "triton",
    "fla-core",
    "flash-attn-4",
    "causal-conv1d",
    "peft",
)


def about_machine(device: torch.device) -> dict[str, Any]:
    """Device, threads and versions, for a result file; ``HARTS_COMMIT`` says which commit, where that is known."""
    versions = {"harts_hf": harts_hf.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    is_cuda = device.type == "cuda"
    name = (
        torch.cuda.get_device_name(device)
        if is_cuda
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    return {"device": name, "commit": os.environ.get("HARTS_COMMIT", "unknown"), "versions": versions}
