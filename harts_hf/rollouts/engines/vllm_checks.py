"""Is it the right server? Asked before anything is sampled: alive, model, vocabulary, kind of log-probs."""

import time
from dataclasses import dataclass
from typing import Any

from harts_hf.rollouts.engines.engine import EngineError, SamplingSettings, TurnRequest
from harts_hf.rollouts.engines.vllm_completions import PATH, completion_body, read_turns
from harts_hf.rollouts.engines.vllm_http import HTTPAnswerError, ServerClient

_POLL, _HEALTH_TIMEOUT = 0.5, 10.0  # seconds
# Letters with marks, other scripts, digits, white space and code: what tokenizers cut differently.
_TEXT = 'Größe, 数字 и числа: 1234.5\n\tdef f(x): return {"a": [x, -1]}  # \N{SNOWMAN}'
_TRIAL = SamplingSettings()
_TRIAL_TOKENS = 4
_CERTAIN = 1e-3  # nats


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a server serves.

    Attributes:
        name: its name in requests.
        max_positions: tokens of history and turn together; None if the server does not say.
    """

    name: str
    max_positions: int | None


def wait_until_ready(client: ServerClient, timeout: float) -> None:
    """Waits until ``/health`` answers.

    Args:
        client: of the server.
        timeout: seconds.

    Raises:
        EngineError: it did not within ``timeout``; the text has the last failure.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            client.start(client.request("GET", "/health", retries=0, timeout=_HEALTH_TIMEOUT)).result()
            return
        except EngineError as error:
            if time.monotonic() + _POLL > end:
                raise EngineError(
                    f"expected a vLLM server at {client.url} within {timeout:g} seconds (vllm_server_timeout); "
                    f"start one with `vllm serve`. Last: {error}"
                ) from error
        time.sleep(_POLL)


def served_model(client: ServerClient, name: str | None = None) -> ServedModel:
    """The model of this name, or the first one that is no adapter.

    Raises:
        EngineError: there is none; the answer is not a list of models.
    """
    models = client.get("/v1/models").get("data")
    if not isinstance(models, list) or not all(isinstance(one, dict) and "id" in one for one in models):
        raise EngineError(f"{client.url}/v1/models: expected a list of models, got {str(models)[:80]}")
    fitting = [one for one in models if (one["id"] == name if name else one.get("parent") is None)]
    if not fitting:
        served = ", ".join(str(one["id"]) for one in models) or "none"
        raise EngineError(f"expected the server at {client.url} to serve {name or 'a model'}, got {served}")
    return ServedModel(name=fitting[0]["id"], max_positions=fitting[0].get("max_model_len"))


def check_tokenizer(client: ServerClient, model: str, tokenizer: Any) -> None:
    """Checks that the server cuts a text as the trainer does.

    A server without ``/tokenize`` is not asked.

    Args:
        client: of the server.
        model: the served model's name.
        tokenizer: the trainer's.

    Raises:
        EngineError: other token ids.
    """
    own = tokenizer.encode(_TEXT, add_special_tokens=False)
    try:
        theirs = client.post("/tokenize", {"model": model, "prompt": _TEXT, "add_special_tokens": False}).get("tokens")
    except HTTPAnswerError as error:
        if error.status == 404:
            return
        raise
    if theirs != own:
        raise EngineError(
            f"expected the server at {client.url} to have the trainer's tokenizer, got one that cuts a text "
            f"otherwise: {str(theirs)[:80]} where the trainer's gives {str(own)[:80]}. Serve the model that is trained"
        )


def check_sampling(client: ServerClient, model: str, vocab_size: int, *, returns_routes: bool = False) -> None:
    """Checks by a few tokens that log-probs are those of the distribution that tokens are drawn from.

    Where a single token is allowed, it is drawn with probability one. A server that reports anything else
    (``raw_logprobs``, vLLM's default, or logits) does not report what it drew from. The history is the vocabulary's
    last token, which a smaller vocabulary lacks.

    Args:
        client: of the server.
        model: the served model's name.
        vocab_size: the trainer's.
        returns_routes: whether experts have to come with tokens.

    Raises:
        EngineError: other log-probs; a smaller vocabulary; an answer without token ids, log-probs or routes.
    """
    routes_from = 0 if returns_routes else None
    request = TurnRequest(history=(vocab_size - 1,), max_tokens=_TRIAL_TOKENS, seed=0, routes_from=routes_from)
    body = completion_body(request, _TRIAL, model=model, max_tokens=_TRIAL_TOKENS, num_top_logprobs=0)
    # Any token will do that the policy does not repeat all by itself.
    body["allowed_token_ids"] = [vocab_size // 2]
    try:
        answer = client.post(PATH, body)
    except HTTPAnswerError as error:
        if error.status == 400:
            raise EngineError(
                f"expected the server to continue the last of the trainer's {vocab_size} tokens: is it another "
                f"model's? {error}"
            ) from error
        raise
    try:
        (turn,) = read_turns(answer, request, _TRIAL, max_tokens=_TRIAL_TOKENS, vocab_size=vocab_size)
    except EngineError as error:
        raise EngineError(f"{client.url}{PATH}: {error}") from error
    if min(turn.logprobs) < -_CERTAIN:
        raise EngineError(
            f"expected the server at {client.url} to report log-probs of what it draws from, got others: start it "
            "with `vllm serve ... --logprobs-mode processed_logprobs`"
        )
