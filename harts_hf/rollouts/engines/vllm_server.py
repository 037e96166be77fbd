"""An engine that asks a vLLM server (``vllm serve``) over HTTP; nothing of vLLM is needed in this environment.

Each process has a client of its own and waits for nobody, so trees may be as ragged as they like, however the model
is sharded. Weights reach the server by TRL's own synchronisation (``use_vllm=True, vllm_mode="server"``), which has
happened when TRL calls a ``rollout_func``.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from harts_hf.rollouts.engines.engine import Engine, EngineError, SampledTurn, SamplingSettings, TurnRequest
from harts_hf.rollouts.engines.vllm_checks import check_sampling, check_tokenizer, served_model, wait_until_ready
from harts_hf.rollouts.engines.vllm_completions import MIN_TEMPERATURE, PATH, completion_body, read_turns
from harts_hf.rollouts.engines.vllm_http import ServerClient
from harts_hf.rollouts.engines.vllm_probe import DEFAULT_MAX_GAP, agree, probe_once_a_step

_ASK_EVERY = 0.1  # seconds


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server is asked.

    Attributes:
        timeout: seconds for which a turn is waited for; a long turn on a busy server may need more.
        retries: how often a request is repeated (with the same seed) if the connection fails, nothing comes in time,
            or the server says that it cannot at the moment.
        max_connections: requests under way at once, of one process; more wait here.
        num_top_logprobs: likeliest tokens from which entropies are made. vLLM refuses more than its
            ``--max-logprobs``, 20 by default.
        max_logprob_gap: mean difference in nats, over the tokens of a probe, between the server's log-probs and the
            trainer's, above which a run is stopped; None not to probe. See
            :mod:`harts_hf.rollouts.engines.vllm_probe`.

    Raises:
        ValueError: numbers outside their ranges.
    """

    timeout: float = 600.0
    retries: int = 3
    max_connections: int = 256
    num_top_logprobs: int = 20
    max_logprob_gap: float | None = DEFAULT_MAX_GAP

    def __post_init__(self) -> None:
        at_least = {"retries": 0, "max_connections": 1, "num_top_logprobs": 1}
        wrong = [name for name, least in at_least.items() if getattr(self, name) < least]
        if wrong or not self.timeout > 0:
            name, least = (wrong[0], f"at least {at_least[wrong[0]]}") if wrong else ("timeout", "above 0")
            raise ValueError(f"expected {name} {least}, got {getattr(self, name)}")
        if self.max_logprob_gap is not None and not self.max_logprob_gap > 0:
            raise ValueError(f"expected max_logprob_gap above 0, or None, got {self.max_logprob_gap}")


class VLLMServerEngine(Engine):
    """Samples turns on a vLLM server.

    A future's callbacks run in the client's thread, before ``until`` is asked.

    Example::

        settings = SamplingSettings(temperature=1.0, end_token_ids=(tokenizer.eos_token_id,))
        with VLLMServerEngine("http://localhost:8000", settings=settings, vocab_size=48) as engine:
            future = engine.submit(TurnRequest(history=tuple(ids), max_tokens=64, seed=0, count=8))
            engine.run(until=future.done)
            turns = future.result()

    Args:
        base_url: where the server is.
        settings: how tokens are drawn.
        vocab_size: the trainer's; token ids of the server have to lie below it.
        model: the served model's name; by default the first that is no adapter.
        max_positions: the trainer's limit, if any; the server's own is asked for.
        options: how the server is asked.
        server_timeout: seconds for which a server that is just starting is waited for.
        returns_routes: whether the server has to return routes (``--enable-return-routed-experts``).

    Attributes:
        model: the served model's name.
        client: for other requests to the same server.
        probe_gap: mean difference of log-probs that :meth:`from_trainer` found, in nats; None where it did not probe.

    Raises:
        ValueError: an address that is none; a temperature that vLLM would not keep.
        EngineError: no server, no such model, log-probs of another distribution than the drawn one, or no routes.
    """

    def __init__(
        self,
        base_url: str,
        *,
        settings: SamplingSettings,
        vocab_size: int,
        model: str | None = None,
        max_positions: int | None = None,
        options: ServerOptions | None = None,
        server_timeout: float = 0.0,
        returns_routes: bool = False,
    ) -> None:
        if settings.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"expected a temperature of at least {MIN_TEMPERATURE}, to which vLLM raises lower ones, got "
                f"{settings.temperature}"
            )
        self._settings, self._options = settings, options or ServerOptions()
        self.vocab_size, self.returns_routes = vocab_size, returns_routes
        self.probe_gap: float | None = None
        self._changed, self._count = threading.Event(), threading.Lock()
        self._num_read = 0
        self.client = ServerClient(
            base_url,
            timeout=self._options.timeout,
            retries=self._options.retries,
            max_connections=self._options.max_connections,
        )
        try:
            wait_until_ready(self.client, server_timeout)
            served = served_model(self.client, model)
            check_sampling(self.client, served.name, vocab_size, returns_routes=returns_routes)
        except BaseException:
            self.client.close()
            raise
        self.model = served.name
        limits = [limit for limit in (max_positions, served.max_positions) if limit is not None]
        self.max_positions = min(limits, default=None)

    @classmethod
    def from_trainer(
        cls, trainer: Any, *, options: ServerOptions | None = None, returns_routes: bool = False
    ) -> "VLLMServerEngine":
        """The engine of a TRL trainer with ``use_vllm=True, vllm_mode="server"``; every process calls it.

        Address, patience and sampling settings are the trainer's. The first call of a step, that is after each
        synchronisation, probes whether the server's log-probs are the trainer's, which is a collective operation:
        every process calls this equally often. What one process finds wrong, every process raises.

        Args:
            trainer: a ``GRPOTrainer``.
            options: how the server is asked.
            returns_routes: see the class.

        Raises:
            ValueError: another vLLM mode, or settings of the trainer that this engine would ignore.
            EngineError: see the class; a server with another tokenizer; log-probs too far from the trainer's.
        """
        args = trainer.args
        _check_arguments(args)
        settings = SamplingSettings.from_args(args, tuple(trainer.eos_token_ids))
        options = options or ServerOptions()
        config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        engine: VLLMServerEngine | None = None
        try:
            with agree(trainer.accelerator):
                engine = cls(
                    args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}",
                    settings=settings,
                    vocab_size=config.vocab_size,
                    max_positions=getattr(config, "max_position_embeddings", None),
                    options=options,
                    server_timeout=args.vllm_server_timeout,
                    returns_routes=returns_routes,
                )
                check_tokenizer(engine.client, engine.model, tokenizer)
            assert engine is not None
            if options.max_logprob_gap is not None:
                engine.probe_gap = probe_once_a_step(trainer, engine, limit=options.max_logprob_gap)
                engine._num_read = 0  # the probe's tokens are nobody's rollouts
        except BaseException:
            if engine is not None:
                engine.close()
            raise
        return engine

    def submit(self, request: TurnRequest) -> "Future[list[SampledTurn]]":
        """Sends a request at once; see :meth:`Engine.submit`. Cancelling the future drops it on the server, too."""
        return self.submit_with(request, self._settings)

    def submit_with(self, request: TurnRequest, settings: SamplingSettings) -> "Future[list[SampledTurn]]":
        """:meth:`submit` with other settings."""
        max_tokens = self._room(request)
        future: Future[list[SampledTurn]] = Future()
        sampling = self.client.start(self._sample(request, settings, max_tokens))
        sampling.add_done_callback(lambda done: self._hand_over(done, future))
        future.add_done_callback(lambda done: sampling.cancel() if done.cancelled() else None)
        return future

    def run(self, until: Callable[[], bool]) -> None:
        """Waits; the server samples."""
        while True:
            self._changed.clear()
            if until():
                return
            self._changed.wait(_ASK_EVERY)

    def wake(self) -> None:
        """See :meth:`Engine.wake`."""
        self._changed.set()

    @property
    def num_read_tokens(self) -> int:
        """Tokens of histories and turns so far; what the server found in its prefix cache only where it says so.

        It does under ``--enable-prompt-tokens-details``.
        """
        return self._num_read

    def close(self) -> None:
        """Cancels what is under way; the server keeps running."""
        self.client.close()

    def _room(self, request: TurnRequest) -> int:
        wrong = next((token for token in request.history if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"expected a history of token ids below {self.vocab_size}, got {wrong}")
        if request.routes_from is not None and not self.returns_routes:
            raise ValueError("expected returns_routes=True for requests with routes_from, got False")
        if self.max_positions is None:
            return request.max_tokens
        room = self.max_positions - len(request.history)
        if room < 1:
            raise ValueError(
                f"expected a history that leaves room for a token in {self.max_positions} positions, got "
                f"{len(request.history)} tokens"
            )
        return min(request.max_tokens, room)

    async def _sample(self, request: TurnRequest, settings: SamplingSettings, max_tokens: int) -> list[SampledTurn]:
        body = completion_body(
            request,
            settings,
            model=self.model,
            max_tokens=max_tokens,
            num_top_logprobs=self._options.num_top_logprobs,
        )
        answer = await self.client.request("POST", PATH, body)
        try:
            turns = read_turns(answer, request, settings, max_tokens=max_tokens, vocab_size=self.vocab_size)
        except EngineError as error:
            raise EngineError(f"POST {self.client.url}{PATH}: {error}") from error
        with self._count:
            self._num_read += len(request.history) - _num_cached(answer) + sum(len(turn.token_ids) for turn in turns)
        return turns

    def _hand_over(self, sampling: "Future[list[SampledTurn]]", future: "Future[list[SampledTurn]]") -> None:
        if sampling.cancelled():
            future.cancel()
        if future.set_running_or_notify_cancel():
            error = sampling.exception()
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(sampling.result())
        self._changed.set()


def _num_cached(answer: dict[str, Any]) -> int:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _check_arguments(args: Any) -> None:
    if not args.use_vllm or args.vllm_mode != "server":
        got = f"vllm_mode={args.vllm_mode!r}" if args.use_vllm else "use_vllm=False"
        raise ValueError(
            f"expected use_vllm=True and vllm_mode='server', got {got}: within the training processes, vLLM samples "
            "for all of them together, turn by turn impossible; start a server with `vllm serve`"
        )
    ignored = [name for name in ("generation_kwargs", "vllm_structured_outputs_regex") if getattr(args, name, None)]
    if ignored:
        raise ValueError(f"expected no {' and no '.join(ignored)} for turns from a vLLM server: they would be ignored")
