"""What tests of agents need: a tokenizer with a real chat template, and an engine that answers as it is told."""

import functools
import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_5_think_chat_template

from harts_hf.rollouts.engines import Engine, SampledTurn, TurnRequest

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_TEXT = "user assistant system tool function parameter hello world weather is the of in Paris city think call " * 20
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


@functools.cache
def _core() -> str:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=list(SPECIAL))
    core.train_from_iterator([_TEXT], trainer)
    return core.to_str()


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges, so that a text has many tokenisations, and Qwen3.5's template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core()), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = qwen3_5_think_chat_template
    return tokenizer


def odd_tokens(tokenizer, text: str, *, seed: int) -> list[int]:
    """Token ids of a text that are, as a rule, not those that the tokenizer would choose."""
    draw = random.Random(seed)
    ids, word = [], ""

    def flush() -> None:
        nonlocal word
        ids.extend(tokenizer(word, add_special_tokens=False)["input_ids"])
        word = ""

    place = 0
    while place < len(text):
        special = next((token for token in SPECIAL if text.startswith(token, place)), None)
        if special is not None:
            flush()
            ids.append(tokenizer.convert_tokens_to_ids(special))
            place += len(special)
            continue
        word += text[place]
        place += 1
        if draw.random() < 0.4:
            flush()
    flush()
    return ids


class ScriptedEngine(Engine):
    """Answers what ``answer(request, choice)`` says: token ids, to be cut at ``max_tokens``.

    Attributes:
        requests: all that were finished, in order.
        threads: idents of the threads that "computed".
    """

    vocab_size = 10_000

    def __init__(
        self,
        answer: Callable[[TurnRequest, int], list[int]],
        *,
        end_ids: tuple[int, ...],
        max_positions: int | None = None,
    ) -> None:
        self.max_positions = max_positions
        self.requests: list[TurnRequest] = []
        self.turns: list[list[SampledTurn]] = []
        self.threads: set[int] = set()
        self.hold = threading.Event()  # set: requests wait
        self._answer = answer
        self._end_ids = end_ids
        self._queue: queue.Queue = queue.Queue()

    def submit(self, request: TurnRequest) -> "Future[list[SampledTurn]]":
        future: Future[list[SampledTurn]] = Future()
        self._queue.put((request, future))
        return future

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            try:
                item = self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
            if item is None:
                continue
            if self.hold.is_set():
                self._queue.put(item)
                threading.Event().wait(0.01)
                continue
            request, future = item
            if not future.set_running_or_notify_cancel():
                continue
            self.threads.add(threading.get_ident())
            try:
                turns = [self._turn(request, choice) for choice in range(request.count)]
            except Exception as error:
                future.set_exception(error)
                continue
            self.requests.append(request)
            self.turns.append(turns)
            future.set_result(turns)

    def _turn(self, request: TurnRequest, choice: int) -> SampledTurn:
        ids = self._answer(request, choice)[: request.max_tokens]
        ended = "end_token" if ids[-1] in self._end_ids else "length"
        logprobs = tuple(-0.125 * (index + 1) for index in range(len(ids)))
        return SampledTurn(token_ids=tuple(ids), logprobs=logprobs, ended=ended)

    def wake(self) -> None:
        self._queue.put(None)

    @property
    def num_read_tokens(self) -> int:
        return sum(len(request.history) for request in self.requests)

    def close(self) -> None:
        while not self._queue.empty():
            item = self._queue.get()
            if item is not None:
                item[1].cancel()


@contextmanager
def running(engine: Engine):
    """Lets an engine run in a thread of its own."""
    stopped = threading.Event()
    thread = threading.Thread(target=engine.run, args=(stopped.is_set,))
    thread.start()
    try:
        yield engine
    finally:
        stopped.set()
        engine.wake()
        thread.join(10)
        engine.close()
