"""Recorded rollouts by themselves: what sources they take, how they cut and hand out, what they refuse."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

from harts_hf.rollouts import RecordedRollouts, recorded_reward
from harts_hf.rollouts.checks import check_rollouts
from harts_hf.rollouts.episodes import read_episodes
from harts_hf.rollouts.files import read_rollout_file, read_rollouts
from harts_hf.rollouts.recorded import Rollout, RolloutFile, RolloutGroup

# Group a: an episode of two samples and two of one; b: one that the policy began with its first token.
ROWS = [
    {"group": "a", "episode": 0, "token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "reward": 1.0},
    {"group": "b", "token_ids": [9, 3], "loss_mask": [1, 1], "reward": 0.5},
    {"group": "a", "episode": 1, "token_ids": [5, 6, 4], "loss_mask": [0, 0, 1], "reward": 2.0},
    {"group": "a", "episode": 0, "token_ids": [5, 7, 3, 3, 9], "loss_mask": [0, 1, 0, 1, 0]},
    {"group": "a", "episode": 2, "token_ids": [5, 6, 2], "loss_mask": [0, 0, 0], "reward": 3.0},
]


def with_values(rows=ROWS, **changes):
    """The rows with log-probs, minus a tenth of the token's position."""
    return [
        {**row, "old_logprobs": [-place / 10 for place in range(len(row["token_ids"]))], **changes} for row in rows
    ]


def by_hand(**changes):
    """A ``Rollout``, which checks nothing itself."""
    values = {"token_ids": [5, 6, 7], "loss_mask": [False, True, True], "old_logprobs": [0.0, -1.0, -2.0]}
    values = {**values, **changes}
    arrays = {key: np.array(value) for key, value in values.items() if isinstance(value, list)}
    return Rollout(**{**values, **arrays})


def trainer(size=3, *, rank=0, step=0, training=True, **changes):
    """What a trainer has that a recording looks at."""
    args = {"seed": 7, "max_completion_length": 512, "num_generations": size, "generation_batch_size": size}
    return SimpleNamespace(
        args=SimpleNamespace(**{**args, **changes}),
        num_generations=size,
        num_generations_eval=size,
        accelerator=SimpleNamespace(process_index=rank),
        model=SimpleNamespace(training=training),
        state=SimpleNamespace(global_step=step),
        train_dataset=None,
        eval_dataset=None,
        reward_funcs=[recorded_reward],
        tree_policy=SimpleNamespace(planner=SimpleNamespace(vocab_size=10)),
        accepts_token_advantages=True,
    )


def handed_out(recording, names=("b", "a"), size=3, **changes):
    output = recording([name for name in names for _ in range(size)], trainer(size, **changes))
    check_rollouts(output, len(names) * size, vocab_size=10)
    return output


def test_prompts_end_before_the_first_trained_token():
    """Rows by episode, in the order of the prompts; places that a group does not fill are absent."""
    output = handed_out(RecordedRollouts(with_values()))
    assert output["episode"] == [0, 3, 3, 4, 5]
    assert output["prompt_ids"] == [[9], [5, 6], [5], [5, 6], [5, 6]]
    assert output["completion_ids"] == [[3], [7, 8], [7, 3, 3, 9], [4], [2]]
    assert output["env_mask"] == [[1], [1, 1], [1, 0, 1, 0], [1], [0]]
    assert output["logprobs"] == [[-0.1], [-0.2, -0.3], [-0.1, 0.0, -0.3, 0.0], [-0.2], [0.0]]
    assert output["recorded_reward"] == [0.5, None, None, 1.0, 2.0, 3.0]
    assert recorded_reward(recorded_reward=output["recorded_reward"], completions=[]) == [0.5, 0.0, 0.0, 1.0, 2.0, 3.0]
    assert output["absent"] == [False, True, True, False, False, False]
    assert output["off_policy"] is True and "advantages" not in output


def test_rescored_uses_no_log_probs():
    """They may be absent, and are not handed out."""
    for rows in (ROWS, with_values()):
        output = handed_out(RecordedRollouts(rows, logprobs="rescored"))
        assert output["logprobs"] is None and output["off_policy"] is False


def test_sources(tmp_path):
    """A file, its groups, a data set of its rows, rows with arrays, rollouts: all the same."""
    rows = with_values()
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    expected = handed_out(RecordedRollouts(path))
    arrays = [
        {
            **row,
            "token_ids": np.array(row["token_ids"]),
            "old_logprobs": torch.tensor(row["old_logprobs"], dtype=torch.float64),
        }
        for row in rows
    ]
    for source in (
        str(path),
        [path],
        rows,
        iter(rows),
        arrays,
        Dataset.from_list(rows),
        read_rollouts(path),
        read_rollout_file(path),
    ):
        assert handed_out(RecordedRollouts(source)) == expected
    table = Dataset.from_list(rows).with_format("numpy")
    assert handed_out(RecordedRollouts(table)) == expected
    (group,) = [group for group in read_rollouts(path) if group.name == "a"]
    assert RecordedRollouts(group.rollouts).group_sizes == {"rollouts": 3}
    assert RecordedRollouts([{k: v for k, v in ROWS[0].items() if k != "group"}], logprobs="rescored").group_sizes == {
        "rows": 1
    }


def test_groups_of_several_files_stay_apart(tmp_path):
    """Files of two runs number their groups alike; only names that occur twice are changed."""
    paths = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for path, rows in zip(paths, (with_values()[:2], with_values()[1:2]), strict=True):
        path.write_text("\n".join(map(json.dumps, rows)))
    recording = RecordedRollouts(paths)
    assert recording.group_sizes == {"a": 1, f"{paths[0]}: b": 1, f"{paths[1]}: b": 1}
    assert recording.dataset()["prompt"] == list(recording.group_sizes)


def test_conversations(tmp_path):
    """A sample per turn; those of a conversation are one episode."""
    from support.chat import byte_tokenizer

    messages = [{"role": role, "content": text} for role, text in zip("uauaua", "abcdef", strict=True)]
    names = {"u": "user", "a": "assistant"}
    messages = [{**message, "role": names[message["role"]]} for message in messages]
    rows = [{"group": "g", "messages": messages, "reward": reward} for reward in (0.0, 1.0)]
    recording = RecordedRollouts(rows, tokenizer=byte_tokenizer(), logprobs="rescored")
    assert recording.group_sizes == {"g": 2}
    assert [len(episode.samples) for episode in recording.groups["g"].episodes] == [3, 3]


def test_a_group_may_lie_on_several_processes():
    """Whatever the cut, the ranks' parts together are what one process hands out."""
    recording = RecordedRollouts(with_values())
    whole = handed_out(recording)
    for parts in (2, 3, 6):
        size = 6 // parts
        prompts = ["b"] * 3 + ["a"] * 3
        of_ranks = [recording(prompts[rank * size :][:size], trainer(rank=rank)) for rank in range(parts)]
        for key in ("prompt_ids", "completion_ids", "recorded_reward", "absent"):
            assert [value for output in of_ranks for value in output[key]] == whole[key]


def test_a_process_may_have_nothing_but_absent_places():
    """Each is a row of which nothing is trained."""
    output = RecordedRollouts(with_values())(["b"] * 2, trainer(4, rank=1))
    check_rollouts(output, 2)
    rows, episodes = read_episodes(output, 2, 1)
    assert rows["completion_ids"] == [[1], [1]] and rows["env_mask"] == [[0], [0]] and episodes.is_absent.all()


def test_subsampled_groups_are_drawn_by_seed_and_step():
    """Without replacement; another step draws others, the same step of a resumed run the same, evaluation always."""
    rows = [{"token_ids": [1, token], "loss_mask": [0, 1], "reward": 0.0, "group": "a"} for token in range(10)]

    def drawn(recording=None, **changes):
        recording = recording or RecordedRollouts(rows, logprobs="rescored", oversized="subsample")
        return [ids[0] for ids in handed_out(recording, "a", 4, **changes)["completion_ids"]]

    assert all(len(set(drawn(step=step))) == 4 for step in range(5))
    assert len({tuple(drawn(step=step)) for step in range(20)}) > 10
    assert drawn(step=3) == drawn(step=3) != drawn(step=3, seed=8)
    recording = RecordedRollouts(rows, logprobs="rescored", oversized="subsample")
    assert drawn(recording, step=3) != drawn(recording, step=3)  # two generations of a step
    assert drawn(recording, training=False, step=1) == drawn(recording, training=False, step=9)


def test_long_completions_end_where_sampling_would_have():
    """All of a row's values are cut with it."""
    rows = with_values(advantage=1.5)
    rows[3]["advantage"] = [0.0, 1.0, 2.0, 3.0, 4.0]
    output = handed_out(RecordedRollouts(rows, too_long="truncate"), "a", max_completion_length=2)
    assert output["completion_ids"] == [[7, 8], [7, 3], [4], [2]]
    assert output["advantages"] == [[1.5, 1.5], [1.0, 2.0], [1.5], [1.5]]
    assert output["logprobs"] == [[-0.2, -0.3], [-0.1, 0.0], [-0.2], [0.0]]


def test_advantages_of_the_file_or_from_rewards():
    """Those of the file where it has them, unless rewards are asked for."""
    rows = with_values(advantage=2.0)
    assert handed_out(RecordedRollouts(rows), "b")["advantages"] == [[2.0]]
    assert "advantages" not in handed_out(RecordedRollouts(rows, advantages="rewards"), "b")


def test_unknown_log_probs():
    """Null and NaN are NaN where a token is trained."""
    rows = with_values()
    rows[0]["old_logprobs"] = [None, None, float("nan"), -1.0]
    unknown, known = handed_out(RecordedRollouts(rows), "a")["logprobs"][0]
    assert np.isnan(unknown) and known == -1.0


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            ROWS,
            {},
            r"old_logprobs in every row .*got none in row 1 .*; row 2 .* and 1 more: logprobs=",
        ),
        (
            with_values(loss_mask=None),
            {},
            "which tokens the policy wrote .*row 1 of group 'a'; row 2 of group 'a'; .* and 2 m",
        ),
        ([{"token_ids": [1], "loss_mask": [1]}], {}, r"at least two tokens, got 1 \(row 1 of group 'rows'\)"),
        (with_values(ROWS[:1]) + with_values(ROWS[3:4], reward=3.0), {}, r"one reward per episode, got \[1.0, 3.0\]"),
        ([{**ROWS[0], "old_logprobs": [0, 0, -1, 0.5]}], {}, "log-probs of at most 0, got 0.5 at position 3"),
        (
            [{**ROWS[0], "old_logprobs": [0, 0, -1, -9999.0]}],
            {},
            r"at least -80 \(null where .*got -9999.0 at position 3",
        ),
        ([{**ROWS[0], "old_logprobs": [0, 0, -1, -np.inf]}], {}, "row 1: expected old_logprobs to be finite"),
        (
            with_values(ROWS[:1], advantage=1.0) + with_values(ROWS[1:2]),
            {},
            "an advantage in every row, got none in row 1 of group 'b'",
        ),
        (with_values(), {"advantages": "recorded"}, "an advantage in every row, got none in row 1 of group 'a'"),
        (ROWS, {"logprobs": "old"}, "logprobs to be one of recorded, rescored, got 'old'"),
        (ROWS, {"oversized": "split"}, "oversized to be one of error, subsample"),
        (ROWS, {"format": "jsonl"}, "expected a format of rollouts, "),
        ([], {}, "at least one path, row, Rollout or RolloutGroup, got None"),
        (RolloutFile(groups=[], form="rollouts"), {}, "at least one group of rollouts, got none"),
        ([RolloutGroup(name="a", rollouts=())], {}, "groups of at least one rollout, got none in 'a'"),
        ([by_hand(loss_mask=[False, True])], {}, r"loss_mask of 3 values, one per token, got 2 \(row 1"),
        ([by_hand(old_logprobs=[-1.0] * 4)], {}, "old_logprobs of 3 values, one per token, got 4"),
        ([by_hand(advantage=[1.0])], {}, "advantage of 3 values, one per token, got 1"),
        ([by_hand(advantage=[0.0, 1.0, np.nan])], {}, "expected advantage to be finite"),
        ([by_hand(reward=np.nan)], {}, "expected reward to be finite, got nan"),
        ([by_hand(token_ids=[5, 6, 2**32 + 4])], {}, r"token ids in \[0, 2147483647\], got 4294967300"),
        ([by_hand(token_ids=[5, 6, -1])], {}, "token ids in .*, got -1"),
        ([by_hand(token_ids=[5.0, 6.0, 1.5])], {}, "token_ids to be a list of integers"),
        (ROWS[0], {}, "expected a path, several paths, a dataset"),
        (7, {}, "expected a path, several paths, a dataset"),
        ([{"parent": [-1], "length": [3], "sample_node": [0], "group": "s"}], {}, "got a shape without content"),
    ],
)
def test_what_cannot_be_trained_is_refused(rows, options, message):
    """When the recording is made, by the names of rows."""
    with pytest.raises(ValueError, match=message):
        RecordedRollouts(rows, **options)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (ROWS, {"size": 2}, r"at most num_generations=2 episodes, got larger ones: 'a' \(3\). Set num_generations=3"),
        (
            ROWS,
            {"max_completion_length": 3},
            r"got longer ones in row 3 of group 'a' \(4\): set max_completion_length=4, or too_long",
        ),
        (ROWS, {"use_vllm": True}, "neither use_vllm nor tools with recorded rollouts"),
        (
            [*ROWS, {**ROWS[1], "token_ids": [1, 10]}],
            {},
            r"below the model's 10, got others in row 2 of group 'b' \(token 10\)",
        ),
        ([*ROWS, {**ROWS[1], "reward": None}], {}, r"every episode \(the key reward .*got none in row 2 of group 'b'"),
        (ROWS[:2], {}, "groups of several episodes, .*got one episode in each"),
        (
            [{**row, "advantage": 1.0} for row in ROWS],
            {"tree_credit": "turn"},
            "tree_credit='trajectory' with recorded",
        ),
    ],
)
def test_what_a_trainer_cannot_train_is_refused(rows, changes, message):
    """Before anything is trained, with the numbers that work."""
    with pytest.raises(ValueError, match=message):
        RecordedRollouts(rows, logprobs="rescored").check_trainer(trainer(**changes))


def test_only_the_groups_that_are_used_count():
    """Those of the trainer's data sets, which have to be names of groups."""
    recording = RecordedRollouts([*ROWS, ROWS[1]], logprobs="rescored")
    of_two = trainer(2, generation_batch_size=4)
    of_two.train_dataset = Dataset.from_dict({"prompt": ["b"]})
    with pytest.raises(ValueError, match="at most 1 groups per generation, as many as are trained on, got 2"):
        recording.check_trainer(of_two)
    of_two.train_dataset = Dataset.from_dict({"prompt": ["b", "b"]})
    recording.check_trainer(of_two)
    of_two.eval_dataset = {"held out": Dataset.from_dict({"prompt": ["a"]})}
    with pytest.raises(ValueError, match="at most num_generations_eval=2 episodes"):
        recording.check_trainer(of_two)
    of_two.train_dataset = Dataset.from_dict({"prompt": ["c"]})
    with pytest.raises(ValueError, match=r"prompts of train_dataset to be names of recorded groups .*'c'"):
        recording.check_trainer(of_two)
    with pytest.raises(ValueError, match="got 'c'"):
        recording(["c"] * 3, trainer())
    with pytest.raises(ValueError, match="repeated 3 times in a row, got another at prompt 1"):
        recording(["a", "b", "b"], trainer())


def test_arguments_alone():
    """Of all groups, before there is a trainer."""
    recording = RecordedRollouts(ROWS, logprobs="rescored")
    recording.check(trainer().args)
    for changes, message in (
        ({"num_generations": 2}, "num_generations=2 episodes"),
        ({"generation_batch_size": 9}, "at most 2 groups per generation"),
        ({"max_completion_length": 3}, "max_completion_length=3 tokens"),
        ({"use_vllm": True}, "use_vllm=False"),
    ):
        with pytest.raises(ValueError, match=message):
            recording.check(SimpleNamespace(**{**vars(trainer().args), **changes}))


def test_own_reward_functions_need_no_recorded_rewards():
    """Nor groups of several."""
    other = trainer()
    other.reward_funcs = [lambda completions, **_: [0.0] * len(completions)]
    RecordedRollouts([{**ROWS[1], "reward": None}], logprobs="rescored").check_trainer(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"off_policy": "yes"}, "'off_policy' to be true or false, got 'yes'"),
        ({"logprobs": None, "off_policy": True}, "'logprobs' where 'off_policy' is set, got none"),
        ({"absent": [False, False, None]}, "'absent' to be a list of 3 of true and false, got"),
        ({"absent": [False, False, True]}, "no rows of an episode that is 'absent', got some of episode 2"),
        ({"absent": [False] * 2, "episode": None}, "to return 3 rows for 3 prompts"),
    ],
)
def test_the_contract_of_its_keys(changes, message):
    """Any rollout function may use them."""
    output = {**handed_out(RecordedRollouts(with_values()), "a"), **changes}
    with pytest.raises(ValueError, match=message):
        check_rollouts(output, 3)


def test_tokens_with_advantages_of_their_own():
    """Not for a trainer that knows one per trajectory."""
    rows = [{**row, "advantage": list(map(float, range(len(row["token_ids"]))))} for row in ROWS]
    gmpo = trainer()
    gmpo.accepts_token_advantages = False
    with pytest.raises(ValueError, match=r"one advantage per trajectory .* got several in row 1 of group 'a'"):
        RecordedRollouts(rows, logprobs="rescored").check_trainer(gmpo)


def test_stock_trainers_are_refused():
    """They would take neither episodes nor recorded log-probs, and say nothing."""
    stock = trainer()
    del stock.tree_policy
    with pytest.raises(ValueError, match="a TreeGRPOTrainer or a TreeGMPOTrainer, got SimpleNamespace"):
        RecordedRollouts(ROWS, logprobs="rescored")(["a"] * 3, stock)
