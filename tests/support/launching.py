"""Starts a script on several processes, as users do or from a server that has imported, and waits for a time-out."""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

SUPPORT = str(Path(__file__).parents[1])


def _python_path() -> str:
    return os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))


def launch(
    script: Path, *arguments: object, launcher: tuple[str, ...], count: int = 2, timeout: float = 900
) -> subprocess.CompletedProcess:
    """What Accelerate's launcher returned and printed; an error if it did not end in time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
    command = [sys.executable, *launcher, "--num_processes", str(count), str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def start_fork(script: Path, *arguments: object, environment: dict[str, object], output: str) -> BaseProcess:
    """Starts ``python SCRIPT ARGUMENTS`` as a fork of a server that has imported; both its streams go to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.forked_imports"])
    process = context.Process(target=_run_script, args=(str(script), list(map(str, arguments)), environment, output))
    with _server_environment():
        process.start()
    return process


def run_processes(script: Path, *arguments: object, count: int = 2, timeout: float = 600) -> None:
    """Asserts that the script ended well on all processes, which have torchrun's environment.

    They are forks of a server that has imported what they need: imports take six seconds of a core in each process,
    and a training of a tiny model one or two. Launchers themselves are tested with `launch`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(count):
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none",
            }  # fmt: skip
            processes.append(start_fork(script, *arguments, environment=environment, output=f"{folder}/{rank}"))
        failed = _first_failure(processes, timeout)
        for process in processes:  # as launchers do: one that failed ends the others
            if failed is not None:
                process.kill()
            process.join()
        if failed is not None:
            raise AssertionError(f"process {failed} failed: " + Path(f"{folder}/{failed}").read_text()[-3000:])


def _first_failure(processes: list, timeout: float) -> int | None:
    """Which process failed first, or still runs after `timeout` seconds; None if all ended well."""
    end = time.monotonic() + timeout
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = wait(list(running), max(0.0, end - time.monotonic()))
        if not ended:
            return min(running.values())
        for sentinel in ended:
            rank = running.pop(sentinel)
            processes[rank].join()
            if processes[rank].exitcode != 0:
                return rank
    return None


@contextmanager
def _server_environment():
    """What a server that starts now inherits; it reads PYTHONPATH, not `sys.path`."""
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_script(script: str, arguments: list[str], environment: dict, output: str) -> None:
    """One process: the script as `python script arguments`, what it prints in the file `output`."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {name: str(value) for name, value in environment.items()}
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
