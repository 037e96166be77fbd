"""A GPU host without a package index: what was unpacked there, FLA's tuned configurations and Triton's cache.

A site is a folder with ``fla_h200/``, ``shapes/`` and, as far as they are needed and not unpacked on this host yet,
``site.tar.xz``, ``flash4.part.*`` and ``triton.part.*`` (Triton's cache, as an earlier run packed it).
"""

import json
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

from benchmarks.gpu.processes import ROOT

PIECE, MOST_PIECES = 15_000_000, 3  # bytes of a file that comes back from the host, and how many
CACHE = Path.home() / ".triton"


def environment(site: Path | None) -> dict[str, str]:
    """Variables of processes that import what ``unpack_site.sh`` unpacks; without a site this process's own."""
    variables = dict(os.environ)
    if site is not None:
        script = Path(__file__).with_name("unpack_site.sh")
        command = ["bash", "-c", '. "$0" "$1" >&2 && env -0', str(script), str(site.resolve())]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        variables = dict(pair.split("=", 1) for pair in found.split("\0") if pair)
        unpack_cache(site)
    path = variables.get("PYTHONPATH")
    return {**variables, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}


def fla_defaults(source: Path, target: Path, most_stages: int | None = None) -> str:
    """Copies FLA's tuned configurations and names one of each kernel as its default.

    With FLA_CACHE_MODE=full, FLA then takes it wherever it has tuned no other. (Whether a batch is packed, and the
    dtype of beta, are part of what FLA tunes for: without defaults, stock models alone tune for minutes in every
    process.) What was tuned for heads of 128 in bf16 does not fit the shared memory for wider ones or float32. FLA's
    own tuning would drop it, but its cache takes configurations of any head dim: with ``most_stages``, all that stays
    is a default of at most so many pipeline stages.

    Returns:
        The target, for FLA_CONFIG_DIR.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        found = json.loads(path.read_text())
        default = dict(next(iter(found["autotune_entries"].values()))["config"])
        if most_stages:
            default["num_stages"] = min(default["num_stages"], most_stages)
            found["autotune_entries"] = {}
        found["default_config"] = default
        (target / path.name).write_text(json.dumps(found))
    return str(target)


def forget_tuning() -> None:
    """Drops what Triton's autotuner found, which it does while other processes share the GPU."""
    for path in CACHE.rglob("*.autotune.json"):
        path.unlink()


def pack_cache(out: Path) -> None:
    """Cubins and what describes them, as ``triton.part.0`` and so on; nothing if they would be too many."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "cache.tar.xz"
        with tarfile.open(archive, "w:xz", preset=1) as tar:
            for path in sorted(CACHE.rglob("*")):
                if path.suffix in (".cubin", ".json", ".so") and not path.name.endswith(".autotune.json"):
                    tar.add(path, path.relative_to(CACHE))
        data = archive.read_bytes()
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    print(f"Triton's cache: {len(data):,} bytes", flush=True)
    for number, piece in enumerate(pieces if len(pieces) <= MOST_PIECES else []):
        (out / f"triton.part.{number}").write_bytes(piece)


def unpack_cache(site: Path) -> None:
    """Adds what the pieces hold, if there are any, to what is there."""
    pieces = sorted(site.glob("triton.part.*"))
    if not pieces:
        return
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryFile() as joined:
        for piece in pieces:
            joined.write(piece.read_bytes())
        joined.seek(0)
        with tarfile.open(fileobj=joined, mode="r:xz") as tar:
            tar.extractall(CACHE, filter="data")
