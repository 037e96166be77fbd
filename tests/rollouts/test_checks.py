"""What a rollout function may return."""

import math

import numpy as np
import pytest
import torch

from harts_hf.rollouts.checks import check_rollouts


def output(**changes):
    """Two good rows."""
    rows = {
        "prompt_ids": [[1, 2], [3]],
        "completion_ids": [[4, 5, 6], [7]],
        "logprobs": [[-0.1, 0.0, -2.0], [-1.0]],
        "env_mask": [[1, 0, 1], [1]],
    }
    return {**rows, **changes}


def test_good_rows_pass():
    """With and without log-probs and a mask."""
    check_rollouts(output(), 2, vocab_size=8)
    check_rollouts(output(logprobs=None, env_mask=None), 2)
    # Masks of bools, numbers that are unknown, rows that are arrays, and more numbers than are looked at together.
    unknown = [[None, math.nan, -1.0], [0]]
    check_rollouts(output(env_mask=[[True, False, 1.0], np.ones(1, np.uint8)], logprobs=unknown), 2, vocab_size=8)
    ids, mask = np.arange(70_000) % 8, [1] * 70_000
    check_rollouts(
        output(completion_ids=[ids, [7]], env_mask=[mask, [0]], logprobs=[-0.5 * ids, [0]]), 2, vocab_size=8
    )


@pytest.mark.parametrize(
    ("changes", "num_prompts", "message"),
    [
        ({}, 4, r"return 4 rows for 4 prompts .* got 2 in 'prompt_ids'"),
        ({"completion_ids": [[4, 5, 6]]}, 2, "got 1 in 'completion_ids'"),
        ({"env_mask": [[1, 0, 1]]}, 2, "got 1 in 'env_mask'"),
        ({"completion_ids": [[4, 5, 6], [4, 5.5]]}, 2, r"expected integers in completion_ids\[1\], got 5.5"),
        ({"completion_ids": [[4, 5, 6], []]}, 2, r"expected completion_ids\[1\] to hold at least one token"),
        ({"prompt_ids": [[], [3]]}, 2, r"expected prompt_ids\[0\] to hold at least one token"),
        ({"completion_ids": [[4, 8, 6], [7]]}, 2, r"token ids in \[0, 8\) in completion_ids\[0\], got 8"),
        ({"prompt_ids": [[1, -2], [3]]}, 2, r"in prompt_ids\[0\], got -2"),
        ({"logprobs": [[-0.1, 0.0], [-1.0]]}, 2, r"logprobs\[0\] to have 3 entries, .* got 2"),
        ({"env_mask": [[1, 0, 1], [1, 1]]}, 2, r"env_mask\[1\] to have 1 entries, .* got 2"),
        ({"env_mask": [[1, 2, 1], [1]]}, 2, r"expected 0 or 1 in env_mask\[0\], got 2 at position 1"),
        ({"logprobs": [[-0.1, math.inf, -1], [-1.0]]}, 2, r"finite numbers in logprobs\[0\], got inf at position 1"),
        ({"advantages": [[0.0, 1.0, math.inf], [1.0]]}, 2, r"finite numbers in advantages\[0\], got inf"),
        # The first of several errors; beside a row that is no array; of numbers beyond 64 bits.
        ({"prompt_ids": [[1], [9]], "env_mask": [[1, 0], [1]]}, 2, r"env_mask\[0\] to have 3 entries"),
        ({"logprobs": [[None, 0.0, -1.0], [-math.inf]]}, 2, r"finite numbers in logprobs\[1\], got -inf"),
        ({"logprobs": [[None, math.inf, -1.0], [-1.0]]}, 2, r"finite numbers in logprobs\[0\], got inf at position 1"),
        ({"completion_ids": [[4, 5, 2**70], [7]]}, 2, r"in completion_ids\[0\], got 1180591620717411303424"),
        ({"logprobs": [[0.1, 0.9, 0.3], [-1.0]]}, 2, r"at most 0 in logprobs\[0\], got 0.9 at position 1 .*probab"),
        ({"logprobs": [[None, 0.9, 0.3], [-1.0]]}, 2, r"at most 0 in logprobs\[0\], got 0.9 at position 1"),
        # Integers only: TRL would pad floats into integers.
        ({"completion_ids": [[4, 5.5, 6], [7]]}, 2, r"integers in completion_ids\[0\], got 5.5 at position 1"),
        ({"prompt_ids": [[1, 2], np.array([3.0])]}, 2, r"integers in prompt_ids\[1\], got .*3.0.* at position 0"),
        ({"prompt_ids": [[True, False], [3]]}, 2, r"integers in prompt_ids\[0\], got True at position 0"),
        ({"prompt_ids": [[1, 2], torch.tensor([3.5])]}, 2, r"integers in prompt_ids\[1\], got tensor.3.5"),
        ({"completion_ids": [torch.tensor([True] * 3), [7]]}, 2, r"integers in completion_ids\[0\], got tensor.True"),
        ({"prompt_ids": [[1, 2], [torch.tensor(3.0)]]}, 2, r"integers in prompt_ids\[1\], got tensor.3"),
        ({"prompt_ids": [[1, 2], torch.ones(1, 1).long()]}, 2, r"integers in prompt_ids\[1\], got tensor"),
        ({"completion_ids": ["abc", [7]]}, 2, r"integers in completion_ids\[0\], got 'a'"),
        # Of what reward functions get, TRL would hand out the first entries, or miss the last.
        ({"answer": ["a"]}, 2, r"'answer' to have 2 entries, one per row .*, got 1"),
        ({"answer": ["a", "b", "c"]}, 2, r"'answer' to have 2 entries, one per row .*, got 3"),
        ({"answer": ["a", "b"], "episode": [0, 1, 2]}, 3, r"'answer' to have 3 entries, one per episode .*, got 2"),
        ({"env_mask": [[1, 0.5, 1], [1]]}, 2, r"expected 0 or 1 in env_mask\[0\], got 0.5 at position 1"),
    ],
)
def test_bad_rows_are_named_with_numbers(changes, num_prompts, message):
    """The message says which row, what was expected and what came."""
    with pytest.raises(ValueError, match=message):
        check_rollouts(output(**changes), num_prompts, vocab_size=8)


def test_missing_keys_are_named():
    """All of TRL's required keys must be there."""
    rows = output()
    del rows["logprobs"]
    with pytest.raises(ValueError, match="got no logprobs"):
        check_rollouts(rows, 2)
