"""Collecting agents' episodes as TRL's ``rollout_func``: rows, rewards, seeds, failures."""

import contextlib
import json
import logging
import sys
import threading
import time
from collections import defaultdict
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import torch
from support.agents import ScriptedEngine, chat_tokenizer, odd_tokens

from harts_hf.rollouts.checks import check_rollouts
from harts_hf.rollouts.engines import EngineError
from harts_hf.rollouts.episodes import read_episodes
from harts_hf.rollouts.gateway import AgentError, AgentRolloutCollector, CommandAgent, agent_reward
from harts_hf.rollouts.gateway import collector as collector_module
from harts_hf.rollouts.gateway.episodes import group_prompts

TOKENIZER = chat_tokenizer()
END = TOKENIZER.eos_token_id
PROMPTS = ["hello", "hello", "world", "world", "world", "world"]


def ask(messages, base_url, api_key):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message


def one_turn(task, *, base_url, api_key):
    """Asks once; the reward is whether the answer has an a."""
    message = ask([{"role": "user", "content": task}], base_url, api_key)
    return float("a" in message.content)


def two_turns(task, *, base_url, api_key, seed):
    """Asks, and asks again with another question: thinking is dropped, a second row begins."""
    messages = [{"role": "user", "content": f"{task} {seed}"}]
    message = ask(messages, base_url, api_key)
    messages += [message.to_dict(), {"role": "user", "content": "more"}]
    ask(messages, base_url, api_key)
    return len(message.content) / 100


def answer(request, choice):
    letters = "abcdefgh"
    text = f"t\n</think>\n\n{letters[request.seed % 8] * (1 + request.seed % 5)}<|im_end|>"
    return odd_tokens(TOKENIZER, text, seed=request.seed)


@pytest.fixture
def trainer(monkeypatch, tmp_path):
    """What a collector uses of a trainer, and an engine in place of the trainer's own."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(seed=3, num_generations=2, max_completion_length=500, output_dir=str(tmp_path)),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
        model=SimpleNamespace(training=True),
        processing_class=TOKENIZER,
        eos_token_ids=[END],
        use_vllm=False,
        num_generations_eval=2,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        engines=[],
        answer=answer,
    )

    @contextlib.contextmanager
    def open_engine(given):
        assert given is trainer
        with ScriptedEngine(trainer.answer, end_ids=(END,), max_positions=1000) as engine:
            trainer.engines.append(engine)
            yield engine

    monkeypatch.setattr(collector_module, "open_engine", open_engine)
    return trainer


@pytest.fixture
def collect():
    """Makes collectors and stops their endpoints."""
    made = []

    def collect(agent, **settings):
        made.append(AgentRolloutCollector(agent, **{"timeout": 30, **settings}))
        return made[-1]

    yield collect
    for collector in made:
        collector.close()


def test_rows_and_rewards(trainer, collect):
    """Rows say whose episode they are; everything else has one entry an episode."""
    collector = collect(two_turns)
    out = collector(PROMPTS, trainer)
    assert out["episode"] == [index for index in range(6) for _ in range(2)]
    assert all(len(out[name]) == 12 for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask"))
    assert out["exact_env_mask"] is True
    check_rollouts(out, 6)
    assert out["num_turns"] == [2] * 6 and out["tree"] == [0, 0, 1, 1, 2, 2]
    assert out["agent_reward"] == [episode.result for episode in collector.last_episodes]
    assert agent_reward(prompts=PROMPTS, agent_reward=out["agent_reward"]) == out["agent_reward"]
    for episode, prompt in zip(collector.last_episodes, PROMPTS, strict=True):
        assert episode.task == prompt and [m["role"] for m in episode.messages] == [
            "user",
            "assistant",
            "user",
            "assistant",
        ]
    assert [sample.tree for sample in collector.last_rollouts] == [0] * 4 + [1] * 4 + [2] * 4
    metrics = trainer._metrics["train"]
    assert metrics["agent/turns"] == [2.0] and metrics["agent/histories/forked"] == [6.0]
    assert collector.last_sampling_tokens == trainer.engines[0].num_read_tokens > 0


def test_the_thread_that_calls_samples(trainer, collect):
    """With an engine in this process, it alone touches the model."""
    collect(one_turn)(PROMPTS, trainer)
    assert trainer.engines[0].threads == {threading.get_ident()}


def rows_of(out):
    return [out["prompt_ids"], out["completion_ids"], out["logprobs"], out["agent_reward"]]


@pytest.mark.exhaustive
def test_seeds_make_a_call_repeatable(trainer, collect):
    """The same seed, step, call and rank: the same rows, whatever runs first; any other: others."""
    first = rows_of(collect(two_turns)(PROMPTS, trainer))
    assert rows_of(collect(two_turns, max_concurrent=1)(PROMPTS, trainer)) == first
    again = collect(two_turns)
    again(PROMPTS, trainer)
    assert rows_of(again(PROMPTS, trainer)) != first  # a second call in the same step
    for change in ("step", "rank", "seed"):
        trainer.state.global_step = int(change == "step")
        trainer.accelerator.process_index = int(change == "rank")
        trainer.args.seed = 3 + (change == "seed")
        assert rows_of(collect(two_turns)(PROMPTS, trainer)) != first


def test_the_episodes_of_a_group_share_the_tasks_seed_and_no_other(trainer, collect):
    """The task is drawn alike, the turns are not."""
    out = collect(two_turns)(PROMPTS, trainer)
    prompts = [TOKENIZER.decode(ids) for ids in out["prompt_ids"][::2]]
    pairs = [prompts[start : start + 2] for start in (0, 2, 4)]
    assert all(first == second for first, second in pairs) and len(set(prompts)) == 3
    seeds = [request.seed for request in trainer.engines[0].requests]
    assert len(set(seeds)) == len(seeds) == 12


def test_groups_are_equal_prompts_in_a_row():
    """A process's share may begin within a group; two groups of one prompt are two."""
    assert group_prompts(["a", "a", "b", "b", "b", "b"], 4, first=6) == [1, 1, 2, 2, 2, 2]
    assert group_prompts(["a"] * 6, 4, first=6) == [1, 1, 2, 2, 2, 2]
    assert group_prompts(["a", "a", "a", "a"], 2, first=0) == [0, 0, 1, 1]
    assert group_prompts([{"x": 1}], 2, first=0) == [0]
    with pytest.raises(ValueError, match="expected groups of 2 equal prompts over all processes, got another prompt"):
        group_prompts(["a", "b"], 2, first=4)


@pytest.mark.exhaustive
def test_a_group_over_several_processes_has_one_task(trainer, collect):
    """Three processes of four prompts, groups of six: task seeds as in one process of twelve; turns differ."""
    trainer.args.num_generations = 6
    seen = []

    def agent(task, *, base_url, api_key, seed):
        seen.append(seed)
        return one_turn(task, base_url=base_url, api_key=api_key)

    def seeds(rank, num_processes):
        seen.clear()
        trainer.accelerator.process_index, trainer.accelerator.num_processes = rank, num_processes
        share = (["hello"] * 12)[rank * 12 // num_processes : (rank + 1) * 12 // num_processes]
        out = collect(agent, max_concurrent=1)(share, trainer)
        return list(seen), out["tree"], [request.seed for request in trainer.engines[-1].requests]

    whole, _, _ = seeds(0, 1)
    shares = [seeds(rank, 3) for rank in range(3)]
    assert [seed for tasks, _, _ in shares for seed in tasks] == whole == [whole[0]] * 6 + [whole[-1]] * 6
    assert whole[0] != whole[-1]
    assert [trees for _, trees, _ in shares] == [[0] * 4, [0, 0, 1, 1], [0] * 4]
    assert len({seed for _, _, requests in shares for seed in requests}) == 12


@pytest.mark.exhaustive
def test_an_evaluation_does_not_change_the_training(trainer, collect):
    """Its calls are counted by themselves."""
    collector = collect(two_turns)
    expected = [rows_of(collector(PROMPTS, trainer)) for _ in range(2)]
    collector = collect(two_turns)
    found = []
    for _ in range(2):
        found.append(rows_of(collector(PROMPTS, trainer)))
        trainer.model.training = False
        assert rows_of(collector(PROMPTS, trainer)) not in expected
        trainer.model.training = True
    assert found == expected


def test_the_reward_may_be_a_function(trainer, collect):
    """It sees the episode; the agent's own answer need not be a number."""

    def agent(task, *, base_url, api_key):
        one_turn(task, base_url=base_url, api_key=api_key)
        return {"notes": task}

    collector = collect(agent, reward=lambda episode: len(episode.result["notes"]) + episode.num_turns)
    assert collector(PROMPTS, trainer)["agent_reward"] == [6.0] * 6
    assert collect(agent)(PROMPTS, trainer)["agent_reward"] == [None] * 6


@pytest.mark.parametrize("made", [np.float32, np.int64, torch.tensor, Fraction, bool])
def test_whatever_becomes_a_number_is_a_reward(trainer, collect, made):
    """NumPy's and torch's numbers among them."""

    def agent(task, *, base_url, api_key):
        one_turn(task, base_url=base_url, api_key=api_key)
        return made(1)

    assert collect(agent)(PROMPTS, trainer)["agent_reward"] == [1.0] * 6


def test_agents_without_a_reward_are_counted_and_logged_once(trainer, collect, caplog):
    """A text is none, an array of several numbers is a failure."""

    def agent(task, *, base_url, api_key):
        one_turn(task, base_url=base_url, api_key=api_key)
        return "1.0" if task == "hello" else torch.ones(2)

    collector = collect(agent)
    for _ in range(2):
        assert collector(PROMPTS, trainer)["agent_reward"] == [None] * 6
        assert collector.last_metrics["agent/without_reward"] == 2
        assert collector.last_metrics["agent/failed/reward"] == 4
    assert caplog.text.count("expected agents to return a number as reward, got str from 2 of 6") == 1
    assert caplog.text.count("4 episodes have no reward") == 2


def test_a_reward_that_no_float_holds_does_not_cost_the_salvage(trainer, collect, tmp_path):
    """The rows are written without it."""

    def agent(task, *, base_url, api_key):
        one_turn(task, base_url=base_url, api_key=api_key)
        return 10**5000

    def broken(episode):
        raise KeyError("judge")

    with pytest.raises(KeyError):
        collect(agent, reward=broken)(PROMPTS, trainer)
    (path,) = (tmp_path / "salvaged").iterdir()
    rollouts = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rollouts) == 6 and not any("reward" in rollout for rollout in rollouts)


def sometimes(how):
    """An agent that fails in the first of its episodes, after a turn."""
    lock, seen = threading.Lock(), []

    def agent(task, *, base_url, api_key):
        with lock:
            seen.append(task)
            is_first = len(seen) == 1
        if is_first and how == "never asks":
            return 1.0
        reward = one_turn(task, base_url=base_url, api_key=api_key)
        if is_first and how == "raises":
            raise RuntimeError(f"no luck at {base_url}")
        if is_first and how == "exits":
            sys.exit(3)
        if is_first and how == "hangs":
            time.sleep(20)
        if is_first and how == "asks for ever":
            while True:
                one_turn(task, base_url=base_url, api_key=api_key)
        return float("nan") if is_first and how == "rewards nan" else reward

    return agent


FAILURES = {
    "raises": "raised",
    "exits": "raised",
    "hangs": "timeout",
    "never asks": "no_request",
    "asks for ever": "max_turns",
    "rewards nan": "reward",
}


@pytest.mark.essential("raises")
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_costs_its_episode(trainer, collect, caplog, how):
    """No reward, no samples, counted and logged without keys; the others are as they would be."""
    collector = collect(sometimes(how), max_turns=3, timeout=0.7 if how == "hangs" else 30, max_concurrent=1)
    with caplog.at_level(logging.WARNING):
        out = collector(PROMPTS, trainer)
    assert out["agent_reward"][0] is None and None not in out["agent_reward"][1:]
    assert out["episode"] == [1, 2, 3, 4, 5] and len(out["tree"]) == len(out["num_turns"]) == 6
    assert out["absent"] == [True, *[False] * 5]  # in no loss, those that average over rows included
    assert collector.last_metrics[f"agent/failed/{FAILURES[how]}"] == 1
    assert collector.last_metrics["agent/failed"] == pytest.approx(1 / 6)
    logged = "1 episodes have no reward" if how == "rewards nan" else f"of episode 0 failed ({FAILURES[how]})"
    assert logged in caplog.text
    assert "/episodes/" not in caplog.text.replace("/episodes/***", "")


@pytest.mark.exhaustive
def test_a_limit_that_ended_an_episode_is_said(trainer, collect):
    """Turns, time, a turn that takes all room; not an agent that raised, nor turns that may be short."""
    for how in ("asks for ever", "hangs", "raises"):
        collector = collect(
            sometimes(how), max_turns=3, timeout=0.7 if how == "hangs" else 30, max_concurrent=1, failure_reward=0.0
        )
        out = collector(PROMPTS, trainer)
        assert out["truncated"] == [how != "raises", *[False] * 5], how
        assert collector.last_metrics["agent/truncated"] == pytest.approx(sum(out["truncated"]) / 6)
    assert not any(collect(one_turn, max_turn_tokens=2)(PROMPTS, trainer)["truncated"])
    trainer.args.max_completion_length = 2
    assert all(collect(one_turn)(PROMPTS, trainer)["truncated"])


def test_the_first_failure_of_each_kind_is_logged(trainer, collect, caplog):
    """A rare kind is seen beside a frequent one."""
    lock, number = threading.Lock(), iter(range(6))

    def agent(task, *, base_url, api_key):
        with lock:
            index = next(number)
        if index == 4:
            return 1.0  # without a turn
        one_turn(task, base_url=base_url, api_key=api_key)
        if index < 4:
            raise KeyError("tool")
        return 1.0

    collect(agent, max_concurrent=1)(PROMPTS, trainer)
    assert [caplog.text.count(f"failed ({kind})") for kind in ("raised", "no_request")] == [1, 1]
    assert caplog.text.count("further failures of the same kinds are counted") == 1


def test_failures_may_have_a_reward(trainer, collect):
    """Then they are trained, with what they sampled."""
    out = collect(sometimes("raises"), failure_reward=-1.0, max_concurrent=1)(PROMPTS, trainer)
    assert out["agent_reward"][0] == -1.0 and out["episode"] == [0, 1, 2, 3, 4, 5]


def test_when_every_agent_fails_the_run_ends(trainer, collect):
    """An error that names how."""

    def agent(task, *, base_url, api_key):
        raise KeyError("tool")

    with pytest.raises(AgentError, match=r"expected an agent that comes to its end, got 6 failures \(6 raised\)"):
        collect(agent)(PROMPTS, trainer)


def test_failures_that_are_trained_do_not_end_the_run(trainer, collect):
    """A policy that always loops is to learn from it; agents that never ask are a fault of the set-up."""

    def loops(task, *, base_url, api_key):
        one_turn(task, base_url=base_url, api_key=api_key)
        raise KeyError("tool")

    out = collect(loops, failure_reward=-1.0)(PROMPTS, trainer)
    assert out["agent_reward"] == [-1.0] * 6 and out["episode"] == list(range(6))

    def never_asks(task, *, base_url, api_key):
        raise KeyError("tool")

    with pytest.raises(AgentError, match="got 6 failures"):
        collect(never_asks, failure_reward=-1.0)(PROMPTS, trainer)


def test_of_several_processes_one_may_have_bad_luck(trainer, collect):
    """A call without a sample is one of empty episodes; the second in a row ends the run."""
    trainer.accelerator.num_processes = 4

    def agent(task, *, base_url, api_key):
        if task == "hello":
            raise KeyError("tool")
        return one_turn(task, base_url=base_url, api_key=api_key)

    collector = collect(agent)
    for _ in range(2):
        out = collector(["hello"] * 2, trainer)
        assert out["episode"] == out["prompt_ids"] == [] and out["agent_reward"] == [None, None]
        check_rollouts(out, 2)
        assert read_episodes(out, 2, END)[1].is_empty.all()
        collector(PROMPTS, trainer)
    collector(["hello"] * 2, trainer)
    with pytest.raises(AgentError, match="got 2 failures"):
        collector(["hello"] * 2, trainer)


@pytest.mark.exhaustive
def test_an_engine_that_fails_ends_the_run(trainer, collect):
    """With the engine's own error, and without waiting for agents."""

    def fail(request, choice):
        raise EngineError("expected a server, got none")

    def patient(task, *, base_url, api_key):
        try:
            one_turn(task, base_url=base_url, api_key=api_key)
        except openai.APIError:
            time.sleep(2)

    trainer.answer = fail
    started = time.monotonic()
    with pytest.raises(EngineError, match="expected a server, got none"):
        collect(patient, timeout=60)(PROMPTS, trainer)
    assert time.monotonic() - started < 10


def test_what_was_sampled_before_a_failure_lies_on_disk(trainer, collect, tmp_path):
    """A reward function that fails after the agents' work: the exception names a rollout file."""

    def broken(episode):
        raise KeyError("judge")

    with pytest.raises(KeyError) as error:
        collect(two_turns, reward=broken)(PROMPTS, trainer)
    (path,) = (tmp_path / "salvaged").iterdir()
    assert str(path) in error.value.__notes__[0]
    rollouts = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rollouts) == 12 and {rollout["group"] for rollout in rollouts} == {0, 1, 2}
    assert all(len(one["token_ids"]) == len(one["loss_mask"]) == len(one["old_logprobs"]) for one in rollouts)
    assert all("reward" in one for one in rollouts)


def test_commands_play_episodes(trainer, collect):
    """An agent in a process of its own, in no more than the standard library."""
    code = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"messages": [{"role": "user", "content": task}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))
print(json.dumps({"reward": len(answer["choices"][0]["message"]["content"])}))
"""
    collector = collect(CommandAgent([sys.executable, "-S", "-c", code]))
    out = collector(PROMPTS[:2], trainer)
    assert out["agent_reward"] == [float(1 + request.seed % 5) for request in _in_order(trainer, out)]


def _in_order(trainer, out):
    by_row = {tuple(turns[0].token_ids): request for request, turns in _pairs(trainer)}
    return [by_row[tuple(ids)] for ids in out["completion_ids"]]


def _pairs(trainer):
    return zip(trainer.engines[0].requests, trainer.engines[0].turns, strict=True)


def test_evaluation_has_its_own_groups_and_metrics(trainer, collect):
    """As many generations as evaluation asks for."""
    trainer.model.training = False
    out = collect(one_turn)(["hello"] * 4, trainer)
    assert out["tree"] == [0, 0, 1, 1]
    assert trainer._metrics["eval"]["agent/turns"] == [1.0] and not trainer._metrics["train"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 0}, "expected max_turns of at least 1, got 0"),
        ({"max_concurrent": 0}, "expected max_concurrent of at least 1, got 0"),
        ({"max_turn_tokens": -1}, "expected max_turn_tokens of at least 1, got -1"),
        ({"timeout": 0}, "expected a timeout above 0, got 0"),
        ({"chat_format": "magic"}, "expected chat_format to be a function, 'vllm_chat' or None, got 'magic'"),
    ],
)
def test_settings_are_checked_when_it_is_made(settings, message):
    """Before any work is lost."""
    with pytest.raises(ValueError, match=message):
        AgentRolloutCollector(one_turn, **settings)
