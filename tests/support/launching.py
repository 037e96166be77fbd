"""Starts scripts and commands in forks of a server that has imported, as users do, and waits for a time-out.

The server (fork_server.py) is one for all workers of pytest: who needs it first starts it.
"""

import fcntl
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

HERE = Path(__file__).parent
SUPPORT = str(HERE.parent)
# Made by the process that starts workers (conftest.py).
FOLDER = "HARTS_TESTS_FORK_FOLDER"
# Names the file to which what `write_python` wrote adds the CPU seconds of each of its processes, a line each.
SPENT = "HARTS_TESTS_SPENT"
_STAYS: list[socket.socket] = []


@functools.cache
def fork_folder(which: str = "packages") -> Path:
    """Where the server's sockets are, of which this one is open; it runs until the last that asked here has ended."""
    folder = Path(os.environ[FOLDER])
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "packages").exists():
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
            with (folder / "said").open("wb") as said:
                command = [sys.executable, str(HERE / "fork_server.py"), str(folder)]
                server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said)
            fork_folder.server = server  # its standard input is closed when this process ends
            _wait_for(folder / "packages", lambda: server.poll() is None)
        _STAYS.append(_connected(folder / "packages"))  # to this process's end
        _STAYS[-1].sendall(b'{"stay": true}\n')
        if not (folder / which).exists():
            with _connected(folder / "packages") as asks:
                asks.sendall(b'{"ours": true}\n')
                asks.setblocking(False)
                _wait_for(folder / which, lambda: _is_open(asks))
    return folder


def _wait_for(path: Path, is_coming: Callable[[], bool]) -> None:
    """Until the server has made it; what it said if it never will."""
    while not path.exists():
        assert is_coming(), (path.parent / "said").read_text()[-3000:]
        time.sleep(0.05)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder that ``make`` fills, once for all workers of pytest; if it failed, who asks next tries again."""
    folder, made = (Path(os.environ[FOLDER]) / one for one in (name, f"{name}-made"))
    with made.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def _python_path() -> str:
    """The tests' folder, and the repository's, which has `benchmarks`."""
    return os.pathsep.join(filter(None, [SUPPORT, str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))


def _is_open(connection: socket.socket) -> bool:
    """Whether the other side has not closed it."""
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def write_python(file: Path, which: str, installed: tuple[str, ...] = ()) -> Path:
    """Writes a `python` whose processes are forks.

    Args:
        file: of this name.
        which: "packages" for forks that have imported what others wrote, "ours" for those that have this package too.
        installed: folders that come before those of this interpreter.
    """
    text = (HERE / "fork_python.py").read_text()
    constants = f"SOCKET, INSTALLED = {str(fork_folder(which) / which)!r}, {list(installed)!r}"
    text = text.replace('SOCKET, INSTALLED = "", []  # written in', constants)
    assert constants in text
    file.write_text(f"#!{os.path.realpath(sys.executable)} -IS\n{text}")
    file.chmod(0o755)
    return file


def launch(
    folder: Path, *arguments: object, launcher: tuple[str, ...], timeout: float = 900, **options: object
) -> subprocess.CompletedProcess:
    """What a real launcher returned and printed, whose processes are forks; an error if it did not end in time.

    Args:
        folder: gets a `python`.
        arguments: of the launcher's.
        launcher: ``("-m", module, ...)``.
        timeout: seconds.
        options: of `subprocess.run`.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
    command = [write_python(folder / "python", "ours"), *launcher, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, **options)


class Fork:
    """``python SCRIPT ARGUMENTS`` in a fork of the server.

    Args:
        script: its own folder is where it finds modules first.
        arguments: its.
        environment: variables beside this process's.
        output: the file that gets both its streams.
    """

    def __init__(self, script: Path, *arguments: object, environment: dict[str, object], output: str) -> None:
        own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path()}
        request = {
            "argv": [str(script), *map(str, arguments)],
            "cwd": os.getcwd(),
            "environment": {**own, **{name: str(value) for name, value in environment.items()}},
            "executable": sys.executable,
            "path": _python_path().split(os.pathsep),
        }
        line = json.dumps(request).encode() + b"\n"
        self._connection = _connected(fork_folder("ours") / "ours")
        with open(output, "wb") as out, open(os.devnull, "rb") as nothing:
            sent = socket.send_fds(self._connection, [line], [nothing.fileno(), out.fileno(), out.fileno()])
        self._connection.sendall(line[sent:])
        self._answers = self._connection.makefile()
        self.pid = json.loads(self._answers.readline())
        self.exitcode: int | None = None

    def fileno(self) -> int:
        """Can be read when it has ended."""
        return self._connection.fileno()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.exitcode is None and not self.join(0)

    def join(self, timeout: float | None = None) -> bool:
        """Whether it has ended within so many seconds."""
        if self.exitcode is None and wait([self], timeout):
            self.exitcode, _ = json.loads(self._answers.readline())
            self._connection.close()
        return self.exitcode is not None

    def signal(self, number: int) -> None:
        """Sends a signal if it runs."""
        if self.is_alive():
            os.kill(self.pid, number)


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
            processes.append(Fork(script, *arguments, environment=environment, output=f"{folder}/{rank}"))
        failed = _first_failure(processes, timeout)
        for process in processes:  # as launchers do: one that failed ends the others
            if failed is not None:
                process.signal(9)
            process.join()
        if failed is not None:
            raise AssertionError(f"process {failed} failed: " + Path(f"{folder}/{failed}").read_text()[-3000:])


def _first_failure(processes: list[Fork], timeout: float) -> int | None:
    """Which process failed first, or still runs after `timeout` seconds; None if all ended well."""
    end = time.monotonic() + timeout
    running = list(processes)
    while running:
        ended = wait(running, max(0.0, end - time.monotonic()))
        if not ended:
            return processes.index(running[0])
        for process in ended:
            process.join()
            running.remove(process)
            if process.exitcode != 0:
                return processes.index(process)
    return None
