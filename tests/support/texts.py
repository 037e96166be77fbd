"""Rows of supervised data: turns of conversations, each with the history before it."""

import numpy as np
from datasets import Dataset

from support import recorded
from support.models import VOCAB


def conversations(count=6, seed=0):
    """Rows of ragged conversations: a row per turn with the history before it, its own turn labelled, shuffled."""
    rng = np.random.default_rng(seed)
    system = rng.integers(3, VOCAB, 9).tolist()
    rows = []
    for number in range(count):
        history = system + rng.integers(3, VOCAB, rng.integers(20, 50)).tolist()
        for _ in range(int(rng.integers(1, 6))):
            turn = rng.integers(3, VOCAB, rng.integers(1, 12)).tolist()
            rows.append(
                {
                    "input_ids": history + turn,
                    "labels": [-100] * len(history) + turn,
                    "conversation": number,
                    "weight": float(rng.uniform(0, 2)),
                }
            )
            history = history + turn + rng.integers(3, VOCAB, rng.integers(1, 30)).tolist()
    # One whole text with loss on all tokens, one row twice, one with tokens after its last label.
    rows.append({**rows[0], "labels": rows[0]["input_ids"]})
    rows.append(rows[2])
    rows.append({**rows[1], "input_ids": rows[1]["input_ids"] + [5, 6], "labels": rows[1]["labels"] + [-100] * 2})
    return [rows[i] for i in rng.permutation(len(rows))]


def dataset(*without):
    return Dataset.from_list([{k: v for k, v in row.items() if k not in without} for row in conversations()])


def arguments(folder, **options):
    given = recorded.arguments(folder, **{"max_length": None, "train_sampling_strategy": "sequential", **options})
    return {k: v for k, v in given.items() if k not in ("num_generations", "max_completion_length", "temperature")}
