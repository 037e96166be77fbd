"""Rows of episodes against brute force: every request's tokens, each draw trained once."""

import json
import random

import numpy as np
import pytest
from support.agents import chat_tokenizer, odd_tokens

from harts_hf.rollouts.checks import check_rollouts
from harts_hf.rollouts.engines import SampledTurn
from harts_hf.rollouts.gateway.formats import TrlFormat
from harts_hf.rollouts.gateway.recording import Recording
from harts_hf.rollouts.gateway.requests import read_request
from harts_hf.rollouts.gateway.splicing import Drift
from harts_hf.tree import RolloutTree

TOKENIZER = chat_tokenizer()
FORMAT = TrlFormat(TOKENIZER)
END = TOKENIZER.eos_token_id
ANSWERS = ("hello", "world\n", " the weather", "hello\n</think>\n\nworld", "\n</think>\n\n\nthe city")


def request(messages):
    return read_request(json.dumps({"messages": messages}).encode())


def turn(ids, *, start=0.5, read=None):
    """A turn whose log-probs tell its tokens apart; ``read``: token ids that stand for the experts that were taken."""
    ended = "end_token" if ids[-1] == END else "length"
    logprobs = tuple(-(start + index) for index in range(len(ids)))
    routes = None if read is None else np.array(read)[:, None, None]
    return SampledTurn(token_ids=tuple(ids), logprobs=logprobs, ended=ended, routed_experts=routes)


def wander(seed, *, num_requests=12):
    """A restless agent: goes on, retries, compacts, edits, asks sub-agents, samples several answers.

    Returns:
        Its recording, and for each sampled turn the history and the ids.
    """
    draw = random.Random(seed)
    recording, asked = Recording(FORMAT, [END]), []
    threads = [[{"role": "user", "content": "hello"}]]
    for number in range(num_requests):
        messages = draw.choice(threads)
        asking = request(messages)
        rendered = FORMAT.render(asking)
        history = recording.splice(rendered)
        assert TOKENIZER.decode(history.ids).replace(" ", "").replace("\n", "") == TOKENIZER.decode(rendered).replace(
            " ", ""
        ).replace("\n", "")
        turns = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            text = draw.choice(ANSWERS) + draw.choice(("", "<|im_end|>", "<|im_end|>"))
            ids = odd_tokens(TOKENIZER, text, seed=draw.randrange(3))
            read = [*history.ids, *ids][recording.num_routed(history) : -1]
            turns.append(turn(ids, start=number, read=read))
        recording.record(history, turns, asking)
        asked += [(history.ids, list(one.token_ids), list(one.logprobs)) for one in turns]
        said = FORMAT.parse(draw.choice(turns).token_ids, asking, history=history.ids)
        answer = {"role": "assistant", "content": said.content, "reasoning_content": said.reasoning_content}
        what = draw.random()
        if what < 0.5:  # goes on
            messages += [answer, {"role": "tool", "tool_call_id": "c", "content": draw.choice(("a", "b"))}]
        elif what < 0.65:  # another question: thinking is dropped
            messages += [answer, {"role": "user", "content": "more"}]
        elif what < 0.8:  # compacts
            messages[:] = [{"role": "user", "content": draw.choice(("hello", "summary"))}]
        elif what < 0.9:  # a sub-agent that knows what happened so far
            threads.append([*messages, answer, {"role": "user", "content": "sub"}])
        # else: asks the same again
    return recording, asked


def brute_force(asked):
    """Rows, masks and log-probs: a request continues the longest row that it begins with, the latest of those."""
    rows = []  # token ids, the prompt's length, which were sampled, log-probs
    for index, (history, sampled, logprobs) in enumerate(asked):
        # Of several answers to one history only the first continues.
        is_first = index == 0 or asked[index - 1][0] is not history
        fits = [row for row in rows if history[: len(row[0])] == row[0]] if is_first else []
        if fits:
            row = max(reversed(fits), key=lambda row: len(row[0]))
            fill = len(history) - len(row[0])
            row[0][:] = history
            row[2].extend([0] * fill)
            row[3].extend([0.0] * fill)
        else:
            row = (list(history), len(history), [], [])
            rows.append(row)
        row[0].extend(sampled)
        row[2].extend([1] * len(sampled))
        row[3].extend(logprobs)
    return [(ids[:prompt], ids[prompt:], sampled, logprobs) for ids, prompt, sampled, logprobs in rows]


@pytest.mark.parametrize("seed", range(25))
def test_rows_equal_brute_force(seed):
    """Prompts, completions, masks and log-probs of a restless agent's episode."""
    recording, asked = wander(seed)
    rows = recording.rows()
    found = [(row.prompt_ids, row.completion_ids, row.env_mask, row.logprobs) for row in rows]
    assert found == brute_force(asked)
    assert recording.num_turns == len(asked)
    assert sum(recording.drifts.values()) == len(asked) - 1
    for row in rows:  # of every token but the last, from the request that read it first
        read = np.concatenate(row.routed_experts)[:, 0, 0].tolist()
        assert read == [*row.prompt_ids, *row.completion_ids][:-1]


@pytest.mark.parametrize("seed", range(5))
def test_the_rows_tree_is_the_trie_of_all_requests(seed):
    """No token of any request is missing, and none is in the tree twice."""
    recording, asked = wander(seed)
    trie = {
        tuple(ids[: end + 1])
        for history, sampled, _ in asked
        for ids in [history + sampled]
        for end in range(len(ids))
    }
    tree = RolloutTree.from_trajectories([row.prompt_ids + row.completion_ids for row in recording.rows()])
    assert tree.num_tokens == len(trie)


def test_the_restless_agent_does_everything():
    """What brute force is compared on: all drifts, draws that coincide, several rows."""
    drifts, recurs, num_rows = set(), False, 0
    for seed in range(25):
        recording, asked = wander(seed)
        drifts |= set(recording.drifts)
        rows = recording.rows()
        num_rows += len(rows)
        draws = [(*history, *sampled[: end + 1]) for history, sampled, _ in asked for end in range(len(sampled))]
        recurs |= len(set(draws)) < len(draws)
        assert sum(sum(row.env_mask) for row in rows) == len(draws)
    assert drifts == set(Drift) and recurs and num_rows > 60


def test_an_agent_without_drift_has_the_row_that_trl_has():
    """Turns that extend one another are one row: prompt, then turns (mask 1) and tools' answers (mask 0)."""
    recording = Recording(FORMAT, [END])
    messages, expected = [{"role": "user", "content": "hello"}], []
    prompt = FORMAT.render(request(messages))
    row = list(prompt)
    for number in range(4):
        asking = request(messages)
        history = recording.splice(FORMAT.render(asking))
        expected += [0] * (len(history.ids) - len(row))
        ids = odd_tokens(TOKENIZER, f"t{number}\n</think>\n\nhello<|im_end|>", seed=number)
        recording.record(history, [turn(ids)], asking)
        row = history.ids + ids
        expected += [1] * len(ids)
        said = FORMAT.parse(ids, asking, history=history.ids)
        messages.append({"role": "assistant", "content": said.content, "reasoning_content": said.reasoning_content})
        messages.append({"role": "tool", "tool_call_id": "c", "content": "world"})
    (found,) = recording.rows()
    assert found.prompt_ids == prompt and found.prompt_ids + found.completion_ids == row
    assert found.env_mask == expected
    assert recording.drifts == {Drift.CLEAN: 3}
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
    check_rollouts({name: [getattr(found, name)] for name in names}, 1)


def test_a_row_that_grew_meanwhile_is_not_continued():
    """Two requests that extend one row are in flight: the first one's turn continues it, the other's begins a row."""
    recording = Recording(FORMAT, [END])
    messages = [{"role": "user", "content": "hello"}]
    asking = request(messages)
    ids = odd_tokens(TOKENIZER, "a\n</think>\n\nb<|im_end|>", seed=0)
    recording.record(recording.splice(FORMAT.render(asking)), [turn(ids)], asking)
    said = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    both = [request([*messages, said, {"role": "tool", "tool_call_id": "c", "content": text}]) for text in "xy"]
    histories = [recording.splice(FORMAT.render(asking)) for asking in both]
    assert [history.drift for history in histories] == [Drift.CLEAN, Drift.CLEAN]
    for asking, history in zip(both, histories, strict=True):
        recording.record(history, [turn(ids)], asking)
    first, second = recording.rows()
    assert first.routed_experts is second.routed_experts is None
    assert sum(first.env_mask) == 2 * len(ids) and second.env_mask == [1] * len(ids)
    assert second.prompt_ids == histories[1].ids
    assert recording.drifts == {Drift.CLEAN: 1, Drift.FORK: 1}


def test_draws_that_coincide_are_trained_each():
    """Two equal choices of one request are two draws: else the gradient would not be that of the policy."""
    recording, asking = Recording(FORMAT, [END]), request([{"role": "user", "content": "hello"}])
    ids = odd_tokens(TOKENIZER, "hello<|im_end|>", seed=0)
    recording.record(recording.splice(FORMAT.render(asking)), [turn(ids), turn(ids)], asking)
    assert [row.env_mask for row in recording.rows()] == [[1] * len(ids)] * 2


def test_an_episode_without_turns_has_no_rows():
    """A history that was never answered leaves nothing."""
    recording = Recording(FORMAT, [END])
    recording.splice(FORMAT.render(request([{"role": "user", "content": "hello"}])))
    assert recording.rows() == []
