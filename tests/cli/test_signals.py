"""SIGTERM while `harts train` runs: agents are ended, what they sampled is kept, and the exit status says so."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.launching import Fork

import harts_hf.cli
from harts_hf.cli.signals import Terminated, sigterm_interrupts

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny_agent.yaml")
# An agent whose episodes are commands that ask for one turn and then do not end.
USER_CODE = """
import sys
from harts_hf.rollouts.agents.shelf import ShelfAgent
from harts_hf.rollouts.gateway import CommandAgent

COMMAND = '''
import json, os, sys, time, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", method="POST")
request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
request.add_header("Content-Type", "application/json")
body = {"model": "policy", "messages": [{"role": "user", "content": json.loads(sys.stdin.readline())}]}
urllib.request.urlopen(request, json.dumps(body).encode()).read()
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
time.sleep(600)
'''

class Sleeps(ShelfAgent):
    grace = 6.0

    def __init__(self, folder, **arguments):
        super().__init__(**arguments)
        self._command = CommandAgent([sys.executable, "-c", COMMAND, folder])

    def run(self, task, access, *, timeout, stopped):
        return self._command.run(task, access, timeout=timeout, stopped=stopped)
"""


def is_running(pid):
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition, seconds):
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.exhaustive
def test_a_terminated_training_ends_its_agents_and_keeps_their_rollouts(tmp_path):
    """Exit status 143, a line that names the saved file instead of a traceback, and no process is left."""
    pids, out = tmp_path / "pids", tmp_path / "out"
    pids.mkdir()
    (tmp_path / "sleeps.py").write_text(USER_CODE)
    script, said = tmp_path / "harts.py", tmp_path / "said"  # beside the user's code, as started in its folder
    script.write_text(Path(harts_hf.cli.__file__).with_name("__main__.py").read_text())
    options = ["--agent_kwargs.folder", pids, "--num_generations", 2, "--per_device_train_batch_size", 2]
    command = ["train", TINY, "--agent", "sleeps:Sleeps", *options, "--output_dir", out]
    process = Fork(script, *command, environment={}, output=str(said))
    agents = []
    try:
        assert wait_for(lambda: len(list(pids.iterdir())) == 2 or not process.is_alive(), 120)
        agents = [int(file.name) for file in pids.iterdir()]
        assert len(agents) == 2 and all(map(is_running, agents)), said.read_text()
        end = time.monotonic() + 60
        while process.is_alive() and time.monotonic() < end:
            process.signal(
                signal.SIGTERM
            )  # as from Slurm and then from a launcher: further ones do not disturb the first
            time.sleep(0.02)
        error = said.read_text()
        assert process.exitcode == 143 and "Traceback" not in error
        (saved,) = (out / "salvaged").iterdir()
        assert f"harts: interrupted by SIGTERM\nWhat was collected before (2 rollouts) is in {saved}" in error
        assert wait_for(lambda: not any(map(is_running, agents)), 5)
    finally:
        process.signal(signal.SIGKILL)
        process.join()
        for agent in filter(is_running, agents):
            os.kill(agent, signal.SIGKILL)


def test_sigterm_raises_once_and_is_as_before_where_none_came():
    """A second one is not heard, in the block or after it; after a block without one, it does what it did before."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("outside"))
    try:
        with sigterm_interrupts():
            pass
        signal.raise_signal(signal.SIGTERM)
        assert heard.pop() == "outside"
        with pytest.raises(Terminated), sigterm_interrupts():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                heard.append("cleaned up")
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["cleaned up"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_where_sigterm_is_ignored_or_cannot_be_handled_nothing_changes():
    """A process that was told to ignore it goes on doing so; a thread has no handlers to set."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_interrupts():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    entered = []

    def in_a_thread():
        with sigterm_interrupts():
            entered.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert entered == [before]
