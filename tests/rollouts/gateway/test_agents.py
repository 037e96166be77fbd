"""Agents as functions and as commands, hostile ones among them: each costs its episode, none costs the run."""

import asyncio
import functools
import json
import os
import sys
import threading
import time

import pytest

from harts_hf.rollouts.gateway import (
    AgentAccess,
    AgentFailure,
    AssistantMessage,
    CommandAgent,
    FunctionAgent,
    ToolCall,
)
from harts_hf.rollouts.gateway.commands import as_agent

ACCESS = AgentAccess(base_url="http://127.0.0.1:1/episodes/KEY/v1", api_key="KEY", model="policy", seed=7)


def play(agent, task="lamp", timeout=20.0, stopped=None):
    return agent.run(task, ACCESS, timeout=timeout, stopped=stopped or threading.Event())


def python(code, **settings):
    """A command that runs Python code."""
    return CommandAgent([sys.executable, "-S", "-c", f"import json, os, sys, time\n{code}", "{task}"], **settings)


def failure_of(agent, **settings):
    with pytest.raises(AgentFailure) as failure:
        play(agent, **settings)
    return failure.value


def is_running(pid):
    """Whether a process is alive, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_functions_get_what_they_take():
    """The task first; of the rest, what their signature names."""

    def few(task, *, base_url):
        return task, base_url

    def many(task, **access):
        return access

    assert play(FunctionAgent(few)) == ("lamp", ACCESS.base_url)
    assert play(FunctionAgent(many)) == {
        "base_url": ACCESS.base_url,
        "api_key": "KEY",
        "model": "policy",
        "seed": 7,
    }


@pytest.mark.parametrize(
    "function",
    [lambda task: 1.0, lambda task, base_url, mood: 1.0, lambda task, api_key: 1.0],
    ids=["no-url", "unknown", "key-only"],
)
def test_functions_that_cannot_be_called_are_refused(function):
    """When the collector is made, not when the first episode fails."""
    with pytest.raises(ValueError, match="that takes a task, base_url and any of api_key, model, seed, got"):
        FunctionAgent(function)


def test_arguments_that_a_function_does_not_take_are_refused():
    """As ``agent_kwargs`` gives them: when the collector is made, by name."""

    def agent(task, *, base_url, mood="calm"):
        return task, mood

    assert play(FunctionAgent(functools.partial(agent, mood="odd"))) == ("lamp", "odd")
    for wrong in ("moods", "task"):
        with pytest.raises(ValueError, match=f"expected arguments that agent takes beside its task, got {wrong}"):
            FunctionAgent(functools.partial(agent, **{wrong: "odd"}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"content": None}, "expected content of an AssistantMessage to be a text, got None"),
        ({"reasoning_content": 1}, "expected reasoning_content of an AssistantMessage to be a text, got 1"),
        ({"tool_calls": ({"name": "look"},)}, "expected tool_calls of an AssistantMessage to be ToolCalls"),
        ({"tool_calls": None}, "expected tool_calls of an AssistantMessage to be ToolCalls, got None"),
    ],
)
def test_messages_are_checked(fields, message):
    """A chat format of one's own is told what is wrong with its messages."""
    with pytest.raises(ValueError, match=message):
        AssistantMessage(**fields)
    with pytest.raises(ValueError, match="expected arguments of a ToolCall to be a text"):
        ToolCall(name="look", arguments={})


def test_what_an_agent_may_be():
    """A function, a command, an agent; nothing else."""
    assert isinstance(as_agent(["python", "agent.py"]), CommandAgent)
    agent = FunctionAgent(lambda task, base_url: 1.0)
    assert as_agent(agent) is agent
    for wrong in ("python agent.py", 5, None):
        with pytest.raises(ValueError, match="expected an agent"):
            as_agent(wrong)
    for wrong in ([], [1], "ls"):
        with pytest.raises(ValueError, match="expected a command as a list of texts"):
            CommandAgent(wrong)
    with pytest.raises(ValueError, match="expected reward_from 'output' or 'exit_status', got 'mood'"):
        CommandAgent(["ls"], reward_from="mood")


def test_coroutines_run_and_are_cancelled_at_the_time_out():
    """A cancelled one gets to clean up."""
    seen = []

    async def agent(task, *, base_url):
        try:
            await asyncio.sleep(0.0 if task == "quick" else 60.0)
            return 0.5
        except asyncio.CancelledError:
            seen.append("cleaned up")
            raise

    assert play(FunctionAgent(agent), task="quick") == 0.5
    failure = failure_of(FunctionAgent(agent), timeout=0.2)
    assert failure.kind == "timeout" and seen == ["cleaned up"]


def test_a_function_that_raises_is_a_failure():
    """With the end of its traceback."""

    def agent(task, *, base_url):
        raise RuntimeError(f"could not reach {base_url}")

    failure = failure_of(FunctionAgent(agent))
    assert failure.kind == "raised" and "RuntimeError: could not reach" in str(failure)
    assert "KEY" in str(failure) and "KEY" not in ACCESS.redacted(str(failure))


def test_a_command_gets_its_task_and_its_endpoint(tmp_path):
    """Task on standard input and in its arguments, endpoint in its environment; rank variables and GPUs are not."""
    code = (
        "names = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'OPENAI_MODEL', 'HARTS_TASK_SEED', 'CUDA_VISIBLE_DEVICES', "
        "'RANK', 'MORE', 'no_proxy']\n"
        "print('noise')\n"
        "seen = [json.loads(sys.stdin.readline()), sys.argv[1], *[os.environ.get(name) for name in names]]\n"
        "print(json.dumps(seen), file=open(os.environ['SEEN'], 'w'))"
    )
    os.environ["RANK"] = "3"
    try:
        play(python(code, env={"MORE": "x", "SEEN": str(tmp_path / "seen")}), task="lamp wanted")
    finally:
        del os.environ["RANK"]
    seen = json.loads((tmp_path / "seen").read_text())
    endpoint = [ACCESS.base_url, "KEY", "policy", "7"]
    assert seen[:9] == ["lamp wanted", "lamp wanted", *endpoint, "", None, "x"] and "127.0.0.1" in seen[9]
    assert play(python("print(json.dumps({'reward': json.loads(sys.stdin.readline())['a']}))"), task={"a": 2}) == 2


@pytest.mark.parametrize(
    ("code", "reward"),
    [("print('{\"reward\": 0.25}')", 0.25), ("print('done')", None), ("", None), ("print('[1]')", None)],
    ids=["reward", "text", "nothing", "list"],
)
def test_the_last_line_of_output_may_say_a_reward(code, reward):
    """Anything else says none."""
    assert play(python(code)) == reward


@pytest.mark.parametrize(
    "reward", ['"1.0"', "[1]", "NaN", "1e999", "9" * 400], ids=["text", "list", "nan", "inf", "huge"]
)
def test_a_commands_reward_that_is_no_number_is_a_failure(reward):
    """Not silently none."""
    failure = failure_of(python(f"print('{{\"reward\": {reward}}}')"))
    assert failure.kind == "reward" and "expected a finite number or None as reward" in str(failure)


def test_the_exit_status_may_be_the_reward():
    """Then no status is a failure."""
    assert play(python("", reward_from="exit_status")) == 1.0
    assert play(python("sys.exit(4)", reward_from="exit_status")) == 0.0


def test_a_command_that_exits_non_zero_is_a_failure():
    """With its last lines of standard error, however much it wrote."""
    failure = failure_of(python("print('y' * 10**6, file=sys.stderr)\nsys.exit('no such tool')"))
    assert failure.kind == "exit_code" and "exit status 1" in str(failure) and "no such tool" in str(failure)
    assert len(str(failure)) < 10_000


def test_a_command_that_does_not_start_is_a_failure():
    """The program is not there."""
    failure = failure_of(CommandAgent(["/no/such/program"]))
    assert failure.kind == "exit_code" and "No such file" in str(failure)


def test_output_without_end_does_not_stop_a_command():
    """Pipes are emptied; only the end is kept."""
    assert play(python("sys.stdout.write('x' * 10**7 + '\\n')\nprint('{\"reward\": 1}')")) == 1


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    time.sleep(600)
open({path!r}, 'w').write(f'{{os.getpid()}} {{child}}')
{then}
"""


@pytest.mark.essential("leaves-a-grandchild")
@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(0)"], ids=["hangs", "leaves-a-grandchild"])
def test_a_stubborn_command_is_killed_with_its_group(tmp_path, then):
    """It ignores SIGTERM, and so does its child: both are gone when the episode is over."""
    path = tmp_path / "pids"
    agent = python(STUBBORN.format(path=str(path), then=then), kill_after=0.3)
    started = time.monotonic()
    if "sleep" in then:
        assert failure_of(agent, timeout=1.5).kind == "timeout"
    else:
        assert play(agent) is None
    assert time.monotonic() - started < 8
    pids = [int(pid) for pid in path.read_text().split()]
    assert len(pids) == 2
    end = time.monotonic() + 2
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def test_a_command_ends_when_nobody_waits_any_more():
    """The run was interrupted."""
    stopped = threading.Event()
    threading.Timer(0.5, stopped.set).start()
    started = time.monotonic()
    assert failure_of(python("time.sleep(600)"), timeout=600, stopped=stopped).kind == "timeout"
    assert time.monotonic() - started < 5


def test_commands_have_a_session_of_their_own():
    """A terminal's Ctrl-C reaches the trainer, which ends them; they are no copies of it."""
    code = "print(json.dumps({'reward': os.getpgid(0) if os.getpgid(0) == os.getpid() == os.getsid(0) else -1}))"
    assert play(python(code)) not in (-1, os.getpgid(0))
