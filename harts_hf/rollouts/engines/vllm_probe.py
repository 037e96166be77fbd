"""Does the server have the trainer's weights? A probe of log-probs after each synchronisation.

A server may be given new weights and go on with others: reloading has corrupted layers that hold recurrent states in
some versions of vLLM, a synchronisation may not reach every tensor, another model may be served. Training then goes on
with samples of another policy, and importance weights hide it. So before a step's first turn is sampled, the server
writes a little and the trainer scores it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object

from harts_hf.modeling.checkpointing import without_checkpointing
from harts_hf.rollouts.engines.engine import EngineError, SamplingSettings, TurnRequest

if TYPE_CHECKING:
    from harts_hf.rollouts.engines.vllm_server import VLLMServerEngine

# Nats. See docs/engines.md for what was measured.
DEFAULT_MAX_GAP = 0.1
# Longer than a chunk of the linear rules, twice over with the second part.
_FIRST, _SECOND = 96, 32
_COUNT = 2
_probed: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


class LogProbGapError(EngineError):
    """A server reports log-probs that are not the trainer's: other weights, another model, a corrupted state."""


@contextmanager
def agree(accelerator: Any) -> Iterator[None]:
    """What one process's block raises, every process raises; all of them enter it.

    Otherwise those without an error would wait for ever for the others.

    Raises:
        EngineError: another process failed; the text has its error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said = gather_object([None if failure is None else f"{type(failure).__name__}: {failure}"])
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if text is not None:
            raise EngineError(f"process {rank} of {accelerator.num_processes} failed: {text}")


def probe_once_a_step(trainer: Any, engine: "VLLMServerEngine", *, limit: float) -> float | None:
    """Compares log-probs, in the first call of each of the trainer's steps; collective.

    The policy writes ``2`` continuations of one token, and continues the first 64 tokens of each by 32: decoded from a
    short history and from a long one that was read at once. Every process has as many tokens, of its own draws.

    Args:
        trainer: whose ``_get_per_token_logps_and_entropies`` scores; its model's mode is left as it is.
        engine: of the server.
        limit: nats.

    Returns:
        The mean absolute difference over all tokens of all processes, in nats; None if this step was probed before.

    Raises:
        LogProbGapError: it is above ``limit``, or no number; on every process.
        EngineError: the server did not answer; on every process.
    """
    step = trainer.state.global_step
    if _probed.get(trainer) == step:
        return None
    accelerator = trainer.accelerator
    rows, given, compared = np.zeros((0, 0)), np.zeros((0, 0)), np.zeros((0, 0), bool)
    with agree(accelerator):
        rows, given, compared = _written(trainer, engine)
    differences = np.abs(given - _scored(trainer, rows))[compared]
    # Object by object: it works for every backend, and NaN stays NaN.
    sums = gather_object([(float(differences.sum()), len(differences), float(differences.max(initial=0.0)))])
    gap = sum(one[0] for one in sums) / sum(one[1] for one in sums)
    if not gap <= limit:  # NaN, too
        largest = max(one[2] for one in sums)
        raise LogProbGapError(
            f"expected the server at {engine.client.url} to have the trainer's weights at step {step}, got log-probs "
            f"that differ by {gap:.3g} nats in the mean over {sum(one[1] for one in sums)} tokens (at most "
            f"{largest:.3g}), above the limit {limit:g}. Is it the model that is trained, in the same precision? If "
            "it began after a synchronisation, the server's weights or states are corrupted: restart it, with "
            "another version of vLLM"
        )
    _probed[trainer] = step
    return gap


def _written(trainer: Any, engine: "VLLMServerEngine") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``[4, L]`` token ids; ``[4, L - 1]`` log-probs of all but the first, and where the server gave one."""
    # Nothing is cut off, as the trainer's log-probs are of whole distributions; no token ends a turn.
    settings = SamplingSettings(temperature=trainer.args.temperature)
    room = engine.max_positions - 1 if engine.max_positions is not None else _FIRST
    first = min(_FIRST, room)
    second = min(_SECOND, first - 1)
    if second < 1:
        raise EngineError(f"expected a server with room for 3 tokens, got {engine.max_positions}")
    rank, step = trainer.accelerator.process_index, trainer.state.global_step
    seeds = np.random.SeedSequence((trainer.args.seed, step, rank)).generate_state(1 + _COUNT).tolist()
    opening = (trainer.eos_token_ids[0],)  # what a text often begins with; every model has seen it
    begun = TurnRequest(history=opening, max_tokens=first, seed=seeds[0], count=_COUNT)
    turns = engine.submit_with(begun, settings).result()
    rows = [opening + turn.token_ids for turn in turns]
    given = [list(turn.logprobs) for turn in turns]
    kept = [row[: 1 + first - second] for row in rows]
    asked = [
        engine.submit_with(TurnRequest(history=history, max_tokens=second, seed=seed), settings)
        for history, seed in zip(kept, seeds[1:], strict=True)
    ]
    for history, future in zip(kept, asked, strict=True):
        (turn,) = future.result()
        rows.append(history + turn.token_ids)
        given.append([np.nan] * (first - second) + list(turn.logprobs))
    logprobs = np.array(given)
    return np.array(rows), logprobs, np.isfinite(logprobs)


def _scored(trainer: Any, rows: np.ndarray) -> np.ndarray:
    """``[B, L - 1]`` float64 log-probs of all tokens but the first, by the way that TRL's losses see the policy."""
    ids = torch.tensor(rows, device=trainer.accelerator.device)
    with torch.no_grad(), without_checkpointing(trainer.model, trainer.args.activation_checkpointing_kwargs):
        logprobs = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), ids.shape[1] - 1, batch_size=len(ids)
        )[0]
    return logprobs.double().cpu().numpy()
