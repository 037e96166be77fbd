"""A server whose forks have imported what tests, scripts and commands import: six seconds of a core, once for all.

    python fork_server.py FOLDER

In ``FOLDER`` are two sockets: forks of "packages" have other people's packages, those of "ours" have harts_hf and
`support` too. A request is a line of JSON, and its file descriptors become the fork's 0, 1 and 2:

- ``{"stay": true}``: the server lives until the last of these connections is closed, and its standard input;
- ``{"ours": true}``, to "packages": the other socket is opened;
- ``{"argv", "cwd", "environment", "executable", "path"}``: runs ``python ARGV`` with ``path`` in front of what this
  interpreter has installed. Answers are the fork's id and, at its end, ``[returncode, CPU seconds]``, each a line. Who
  closes the connection before has the fork killed.

`support.launching` asks; a folder's `python` (fork_python.py) does for launchers that start processes of their own.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

# What this interpreter has installed: neither this file's folder nor PYTHONPATH.
INSTALLED = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]


# Imported for their own sake.
PACKAGES = (
    "matplotlib.figure",
    "peft",
    *(f"transformers.models.{one}.modeling_{one}" for one in ("bailing_hybrid", "qwen3_5", "qwen3_5_moe")),
)
OURS = (
    "harts_hf.cli.train",
    *(f"support.{name}" for name in ("backends", "episodes", "oracle", "recorded", "schedules", "texts")),
)


def import_packages() -> None:
    """What others wrote."""
    import torch

    # As in workers of pytest (conftest.py): before anything imports Triton.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    with patch.object(torch, "compile", lambda function=None, **_: function or (lambda one: one)):
        # A second of each process that has DeepSpeed: its optimizer Muon, with which nobody trains here, is compiled
        # when it is imported, and torch's compiler with it.
        import deepspeed.runtime.zero.muon.muon_optimizer
    import trl

    _ = (trl.GRPOTrainer, trl.SFTTrainer)  # imported on first use
    for name in PACKAGES:
        importlib.import_module(name)
    # Compiled for two minutes on a new machine; gloo adds up as well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def import_ours() -> None:
    """This package, and what tests share."""
    import harts_hf
    from harts_hf.trainers import load_picture

    _ = (harts_hf.TreeGRPOTrainer, harts_hf.TreePPOTrainer, harts_hf.TreeSFTTrainer)
    for name in OURS:
        importlib.import_module(name)
    # A third of a second at each checkpoint: tests/trainers/test_expert_load.py looks at it.
    load_picture.plot_expert_load = lambda *_: None
    importlib.import_module("support.quicker").make_trainings_quicker()


def listening(path: Path) -> socket.socket:
    """At a path."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


class Server:
    """Forks by request until nobody stays.

    Args:
        listener: where requests come in.
        alive: a file descriptor that ends when the server has to, or None.
    """

    def __init__(self, listener: socket.socket, alive: int | None) -> None:
        self.staying = 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.alive, self.request = alive, None
        if alive is not None:
            self.selector.register(alive, selectors.EVENT_READ, self.end)
        else:  # who started it stays, too, and may have been killed before it could say so
            self.staying = 1
            self.selector.register(0, selectors.EVENT_READ, self.leave)

    def serve(self) -> dict[str, Any]:
        """Returns in a fork only, what it is to do."""
        while self.request is None:
            for key, _ in self.selector.select():
                key.data(key.fileobj)
                if self.request is not None:
                    break
        return self.request

    def end(self, _: Any) -> None:
        """With the forks that run yet, whose connections close."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.data, Fork):
                key.data.kill()
        os._exit(0)

    def accept(self, listener: socket.socket) -> None:
        """A request: forks."""
        connection, _ = listener.accept()
        head, fds, _, _ = socket.recv_fds(connection, 2**16, 3)
        while head and not head.endswith(b"\n"):
            head += connection.recv(2**16)
        request = json.loads(head or "{}")
        if "argv" not in request:  # who closes at once has only looked whether the server is there
            self.staying += request.get("stay", False)
            if "stay" in request:
                self.selector.register(connection, selectors.EVENT_READ, self.leave)
            if "ours" not in request:
                return
        pid = os.fork()
        if pid == 0:
            for key in list(self.selector.get_map().values()):
                os.close(key.fd)
            self.selector.close()
            if "ours" in request:
                self.asked = connection  # closed when this process ends, before its socket is there or after
            else:
                connection.close()
            for number, fd in enumerate(fds):
                os.dup2(fd, number)
                os.close(fd)
            self.request = request
            return
        for fd in fds:
            os.close(fd)
        if "ours" not in request:  # which serves on its own, as long as this process does
            Fork(pid, connection, self.selector)

    def leave(self, connection: Any) -> None:
        """One who stayed."""
        self.selector.unregister(connection)
        self.staying -= 1
        if not self.staying:
            self.end(None)


class Fork:
    """A process that runs, and who asked for it."""

    def __init__(self, pid: int, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self.pid, self.connection, self.selector = pid, connection, selector
        self.ended, self.has_ended = os.pidfd_open(pid), False
        selector.register(self.ended, selectors.EVENT_READ, self)
        selector.register(connection, selectors.EVENT_READ, self)
        self.say(pid)

    def __call__(self, source: Any) -> None:
        """It has ended, or whoever asked has gone."""
        if self.has_ended:  # who asked has gone at the same time
            return
        if source is self.connection:
            self.selector.unregister(self.connection)
            self.kill()
            return
        self.has_ended = True
        _, status, used = os.wait4(self.pid, 0)
        self.selector.unregister(self.ended)
        os.close(self.ended)
        self.say([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime])
        if self.connection in self.selector.get_map():
            self.selector.unregister(self.connection)
        self.connection.close()

    def kill(self) -> None:
        """It has not been waited for, so the id is its own."""
        os.kill(self.pid, signal.SIGKILL)

    def say(self, what: Any) -> None:
        """If somebody listens."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(what).encode() + b"\n")


def run(request: dict[str, Any]) -> None:
    """``python ARGV``, to its end."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.executable = request["executable"]
    words = list(request["argv"])
    while words[0] in ("-u", "-B"):
        words.pop(0)
    sys.path[:] = [str(Path(words[0]).parent.absolute()) if words[0][0] != "-" else "", *request["path"], *INSTALLED]
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.modules.pop(words[1], None)  # else runpy warns
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(words[1], {"__name__": "__main__"})
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # as at an interpreter's end, but for its modules, which need not be taken down
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def main() -> None:
    """See the module."""
    folder = Path(sys.argv[1])
    import_packages()
    # Every training collects garbage itself, through all of this, and would copy its pages into each process.
    gc.collect()
    gc.freeze()
    listener = listening(folder / "packages")
    alive, ends_with_this = os.pipe()
    server = Server(listener, None)
    request = server.serve()
    if "ours" in request:
        os.close(ends_with_this)
        import_ours()
        gc.collect()
        gc.freeze()
        request = Server(listening(folder / "ours"), alive).serve()
    run(request)


if __name__ == "__main__":
    main()
