"""Triton's cache on disk as pieces of 15 MB and back: python triton_cache.py pack OUT | unpack DIR"""

import sys
import tarfile
import tempfile
from pathlib import Path

PIECE, MOST = 15_000_000, 3
CACHE = Path.home() / ".triton"


def pack(out: Path) -> None:
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
    for number, piece in enumerate(pieces if len(pieces) <= MOST else []):
        (out / f"triton.part.{number}").write_bytes(piece)


def unpack(folder: Path) -> None:
    """Adds what the pieces hold, if there are any, to what is there."""
    pieces = sorted(folder.glob("triton.part.*"))
    if not pieces:
        return
    with tempfile.TemporaryFile() as joined:
        for piece in pieces:
            joined.write(piece.read_bytes())
        joined.seek(0)
        with tarfile.open(fileobj=joined, mode="r:xz") as tar:
            tar.extractall(CACHE, filter="data")


if __name__ == "__main__":
    CACHE.mkdir(exist_ok=True)
    (pack if sys.argv[1] == "pack" else unpack)(Path(sys.argv[2]))
