"""Agents that are commands, each in a process and a process group of its own."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from harts_hf.rollouts.fields import shortened
from harts_hf.rollouts.gateway.agents import (
    Agent,
    AgentAccess,
    AgentFailure,
    FunctionAgent,
    checked_reward,
    last_lines,
)

# What an agent writes is kept up to so many bytes, from its end.
_KEPT_BYTES = 64 * 1024
# Output that a finished process has left in its pipes is there at once; somebody else may hold them open.
_DRAIN_SECONDS = 1.0
# Of a distributed run: an agent that initialises Accelerate or torch.distributed would join the trainer's group.
_RANK_VARIABLES = (
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
)


class CommandAgent(Agent):
    """A command, run in a process and a process group of its own.

    It gets ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``OPENAI_MODEL`` and ``HARTS_TASK_SEED`` in its environment, and
    the task as one line of JSON on its standard input; a text also takes the place of an argument ``{task}``.
    No GPU is visible to it unless ``env`` says so. When it ends, or at the time-out, its whole group is killed, first
    by SIGTERM, ``kill_after`` seconds later by SIGKILL; processes that have left the group are not reached.

    Args:
        command: program and arguments.
        env: further environment variables; None takes one away.
        cwd: folder to run it in.
        reward_from: "output": the last line of its standard output, if that is a JSON object with ``reward`` (a number
            or null), and an exit status other than 0 is a failure; "exit_status": 1.0 for status 0, 0.0 for any other.
        kill_after: seconds between SIGTERM and SIGKILL.

    Raises:
        ValueError: an empty command, another ``reward_from``.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: str | Path | None = None,
        reward_from: Literal["output", "exit_status"] = "output",
        kill_after: float = 2.0,
    ) -> None:
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ValueError(f"expected a command as a list of texts, got {shortened(command)}")
        if reward_from not in ("output", "exit_status"):
            raise ValueError(f"expected reward_from 'output' or 'exit_status', got {reward_from!r}")
        self._command = list(command)
        self._env = dict(env or {})
        self._cwd = cwd
        self._reward_from = reward_from
        self._kill_after = kill_after
        self.grace = kill_after + 4 * _DRAIN_SECONDS

    def run(self, task: Any, access: AgentAccess, *, timeout: float, stopped: threading.Event) -> Any:
        deadline = time.monotonic() + timeout
        command = [task if part == "{task}" and isinstance(task, str) else part for part in self._command]
        try:
            # A new program in a new session, never a fork of this process, whose threads and devices it would share.
            process = subprocess.Popen(
                command,
                env=self._environment(access),
                cwd=self._cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailure("exit_code", f"it did not start: {error.strerror}") from error
        pipes = _Pipes(process, json.dumps(task).encode() + b"\n")
        try:
            is_over = _wait(process, deadline, stopped)
        finally:
            self._kill(process)
        output, errors = pipes.read()
        if not is_over:
            raise AgentFailure("timeout", f"not done after {timeout:g} s; {last_lines(errors)}")
        if self._reward_from == "exit_status":
            return 1.0 if process.returncode == 0 else 0.0
        if process.returncode != 0:
            raise AgentFailure("exit_code", f"exit status {process.returncode}; {last_lines(errors)}")
        return _reward_in(output)

    def _environment(self, access: AgentAccess) -> dict[str, str]:
        variables: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES},
            "CUDA_VISIBLE_DEVICES": "",
            "HARTS_TASK_SEED": str(access.seed),
            **self._env,
            "OPENAI_API_KEY": access.api_key,
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_MODEL": access.model,
        }
        for name in ("NO_PROXY", "no_proxy"):  # a proxy cannot reach this machine's loopback
            variables[name] = ",".join(filter(None, (variables.get(name), "127.0.0.1")))
        return {name: value for name, value in variables.items() if value is not None}

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Ends whatever is left of the group; the process itself may be gone."""
        if _signal(process.pid, signal.SIGTERM):
            end = time.monotonic() + self._kill_after
            while time.monotonic() < end and _is_alive(process):
                time.sleep(0.02)
            _signal(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", deadline: float, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        try:
            process.wait(min(left, 0.2))
            return True
        except subprocess.TimeoutExpired:
            continue
    return False


def _signal(group: int, which: int) -> bool:
    try:
        os.killpg(group, which)
        return True
    except (ProcessLookupError, PermissionError):  # nobody is left in it (macOS says it so)
        return False


def _is_alive(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()  # so that a finished process does not stay in its group
    return _signal(process.pid, 0)


class _Pipes:
    """Feeds a process and keeps the end of what it writes, so that it never waits for a full pipe."""

    def __init__(self, process: "subprocess.Popen[bytes]", given: bytes) -> None:
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        self._threads = [
            threading.Thread(target=self._drain, args=(process.stdout, "stdout"), daemon=True),
            threading.Thread(target=self._drain, args=(process.stderr, "stderr"), daemon=True),
            threading.Thread(target=self._feed, args=(process.stdin, given), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def read(self) -> tuple[str, str]:
        """The end of standard output and of standard error."""
        for thread in self._threads[:2]:
            thread.join(_DRAIN_SECONDS)
        return self._text("stdout"), self._text("stderr")

    def _text(self, name: str) -> str:
        return bytes(self._kept[name]).decode(errors="replace")

    def _drain(self, pipe: Any, name: str) -> None:
        kept = self._kept[name]
        with pipe:
            while chunk := pipe.read1(65536):
                kept += chunk
                del kept[: max(0, len(kept) - _KEPT_BYTES)]

    def _feed(self, pipe: Any, given: bytes) -> None:
        try:
            with pipe:
                pipe.write(given)
        except (BrokenPipeError, ValueError):
            pass  # it does not read its task, which is its own affair


def _reward_in(output: str) -> float | None:
    lines = output.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return checked_reward(said.get("reward")) if isinstance(said, dict) else None


def as_agent(agent: Any) -> Agent:
    """An agent from a function, a command (a list of texts), or an :class:`Agent`.

    Raises:
        ValueError: anything else.
    """
    if isinstance(agent, Agent):
        return agent
    if isinstance(agent, list | tuple):
        return CommandAgent(agent)
    if callable(agent):
        return FunctionAgent(agent)
    raise ValueError(f"expected an agent (a function, a command as a list of texts, an Agent), got {shortened(agent)}")
