"""What stands in for `python` in a folder of programs: the same, in a fork of a server that has imported.

`support.launching.write_python` writes it down with the two constants. Signals are handed on, and it ends as the fork
ends; if it is killed, so is the fork. It has to start fast: the standard library only.
"""

import json
import os
import signal
import socket
import sys

SOCKET, INSTALLED = "", []  # written in


def main() -> int:
    """The status to end with, negative for a signal."""
    environment = dict(os.environ)
    path = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *INSTALLED]
    request = {
        "argv": sys.argv[1:], "cwd": os.getcwd(), "environment": environment, "executable": sys.argv[0], "path": path,
    }  # fmt: skip
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(SOCKET)
    line = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(connection, [line], [0, 1, 2])
    connection.sendall(line[sent:])
    answers = connection.makefile()
    pid = json.loads(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code, seconds = json.loads(answers.readline())
    if "HARTS_TESTS_SPENT" in environment:
        with open(environment["HARTS_TESTS_SPENT"], "a") as spent:
            spent.write(f"{seconds}\n")
    return code


if __name__ == "__main__":
    status = main()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
