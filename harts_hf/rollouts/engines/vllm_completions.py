"""vLLM's ``/v1/completions`` with token ids in and out: what is asked, and what an answer must be.

Of the endpoints that take token ids this one is part of every ``vllm serve``, and its answer says all that a turn
needs: tokens, log-probs, whether an end token or a text ended it. ``/inference/v1/generate`` wants
``--enable-scale-out``, does not say which of the two ended a turn (0.31), and loses continuations of one request in
versions before.
"""

import math
from typing import Any, Literal

import numpy as np

from harts_hf.rollouts.engines.engine import EngineError, SampledTurn, SamplingSettings, TurnRequest
from harts_hf.rollouts.engines.vllm_routes import FIELD, START, read_routes

PATH = "/v1/completions"
# vLLM raises temperatures between 0 and this to it.
MIN_TEMPERATURE = 0.01
# Rounding may leave a log-prob of a certain token a little above 0.
_ABOVE_ZERO = 1e-3
# vLLM writes this for minus infinity, which JSON lacks.
_MINUS_INFINITY = -9999.0


def completion_body(
    request: TurnRequest, settings: SamplingSettings, *, model: str, max_tokens: int, num_top_logprobs: int
) -> dict[str, Any]:
    """The request as JSON.

    Args:
        request: what is wanted.
        settings: how tokens are drawn.
        model: the served model's name.
        max_tokens: ``request.max_tokens``, cut to the server's room.
        num_top_logprobs: likeliest tokens whose log-probs are asked for if entropies are.
    """
    return {
        "model": model,
        "prompt": list(request.history),
        "n": request.count,
        "seed": spread_seed(request.seed),
        "max_tokens": max_tokens,
        # Everything that changes a distribution is said: what is left out comes from the model's generation_config.
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": settings.min_p or 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # The server's own end tokens may be others than the trainer's: only those named end a turn.
        "ignore_eos": True,
        "stop_token_ids": list(settings.end_token_ids),
        "stop": list(request.stop),
        "include_stop_str_in_output": True,
        # So that a stop text may be a special token's, and is sought in the text as it is.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": num_top_logprobs if request.entropies else 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **({} if request.routes_from is None else {START: request.routes_from}),
    }


def spread_seed(seed: int) -> int:
    """A seed of 62 bits that neighbours of ``seed`` do not share.

    vLLM draws continuation ``i`` with seed + ``i``: requests with seeds 1 and 2 would share all draws but one.
    """
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]) >> 2


def read_turns(
    answer: dict[str, Any], request: TurnRequest, settings: SamplingSettings, *, max_tokens: int, vocab_size: int
) -> list[SampledTurn]:
    """The turns of an answer, in the order of their indices.

    Args:
        answer: the JSON object.
        request: what was asked for.
        settings: how tokens were to be drawn.
        max_tokens: as asked for.
        vocab_size: the trainer's; token ids lie below it.

    Raises:
        EngineError: an answer that is not to this request, or lacks something; the text says what and where.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise EngineError(f"expected choices in the server's answer, got {_short(choices)}")
    by_index = {choice.get("index"): choice for choice in choices}
    if len(choices) != request.count or set(by_index) != set(range(request.count)):
        indices = [choice.get("index") for choice in choices]
        raise EngineError(f"expected {request.count} choices numbered from 0, got indices {_short(indices)}")
    turns = []
    for index in range(request.count):
        try:
            turns.append(_turn(by_index[index], request, settings, max_tokens, vocab_size))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"choice {index} of the server's answer: {_reason(error)}") from error
    return turns


def _turn(
    choice: dict[str, Any], request: TurnRequest, settings: SamplingSettings, max_tokens: int, vocab_size: int
) -> SampledTurn:
    tokens = _token_ids(choice.get("token_ids"), max_tokens, vocab_size)
    echoed = choice.get("prompt_token_ids")
    if echoed is not None and tuple(echoed) != request.history:
        raise ValueError(
            f"expected the history of {len(request.history)} tokens to be read as it was sent, got {len(echoed)} "
            "tokens that differ"
        )
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise ValueError(f"expected log-probs, got {_short(logprobs)}")
    names = [f"token_id:{token}" for token in tokens]
    if logprobs.get("tokens", names) != names:
        raise ValueError("expected log-probs of the tokens sampled, got those of others")
    num_read = len(request.history) + len(tokens) - 1
    return SampledTurn(
        token_ids=tuple(tokens),
        logprobs=_logprobs(logprobs.get("token_logprobs"), len(tokens)),
        ended=_ending(choice, tokens[-1], settings),
        entropies=_entropies(logprobs.get("top_logprobs"), len(tokens)) if request.entropies else None,
        routed_experts=(
            None if request.routes_from is None else read_routes(choice.get(FIELD), num_read - request.routes_from)
        ),
    )


def _token_ids(value: Any, max_tokens: int, vocab_size: int) -> list[int]:
    if value is None:
        raise ValueError("expected token_ids, got none: a server that does not know return_token_ids")
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise ValueError(f"expected token_ids to be a list of integers, got {_short(value)}")
    if not 1 <= len(value) <= max_tokens:
        raise ValueError(f"expected 1 to {max_tokens} token_ids, got {len(value)}")
    worst = max(value) if max(value) >= vocab_size else min(value)
    if not 0 <= worst < vocab_size:
        raise ValueError(
            f"expected token ids below the trainer's vocabulary size {vocab_size}, got {worst}: does the server serve "
            "another model or tokenizer?"
        )
    return value


def _logprobs(value: Any, size: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != size:
        raise ValueError(f"expected {size} token_logprobs, one per token, got {_short(value)}")
    for position, entry in enumerate(value):
        if not isinstance(entry, int | float) or not _MINUS_INFINITY < entry <= _ABOVE_ZERO:
            raise ValueError(f"expected log-probs that are finite and at most 0, got {entry} at position {position}")
    return tuple(min(float(entry), 0.0) for entry in value)


def _ending(
    choice: dict[str, Any], last: int, settings: SamplingSettings
) -> Literal["end_token", "stop_text", "length"]:
    finish, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if finish == "length":
        return "length"
    if finish != "stop":
        raise ValueError(f"expected finish_reason 'stop' or 'length', got {_short(finish)}")
    if isinstance(stop, str):
        return "stop_text"
    if last not in settings.end_token_ids:
        raise ValueError(f"expected a turn that one of the tokens {settings.end_token_ids} ended, got {last} there")
    return "end_token"


def _entropies(value: Any, size: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != size:
        raise ValueError(f"expected top_logprobs of {size} tokens, got {_short(value)}")
    return tuple(_entropy(np.fromiter(entries.values(), np.float64, len(entries))) for entries in value)


def _entropy(logprobs: np.ndarray) -> float:
    """Entropy in nats of the likeliest tokens and of one more that stands for all others."""
    if not len(logprobs) or not (logprobs <= _ABOVE_ZERO).all():  # NaN, too
        raise ValueError("expected top_logprobs of at most 0")
    logprobs = np.maximum(logprobs, _MINUS_INFINITY)
    probs = np.exp(logprobs)
    rest = max(1.0 - float(probs.sum()), 0.0)
    return max(float(-(probs * logprobs).sum()) - (rest * math.log(rest) if rest > 0 else 0.0), 0.0)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"malformed ({type(error).__name__}: {error})"
