"""A chat model that says what a script says: its tokenizer, and an engine that samples it."""

from pathlib import Path

import trl

from harts_hf.rollouts.engines.engine import SampledTurn
from support.chat import byte_tokenizer
from support.engines import SeededEngine

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def chat_tokenizer(name="qwen3", special=SPECIAL):
    """A tokenizer of bytes with one of the chat templates that come with TRL; ``<|im_end|>`` is its EOS."""
    tokenizer = byte_tokenizer((TEMPLATES / f"{name}.jinja").read_text(), special)
    tokenizer.pad_token, tokenizer.eos_token, tokenizer.padding_side = special[0], special[-1], "left"
    return tokenizer


def encoded(tokenizer, text):
    """Token ids of a text with marks in it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class ScriptedEngine(SeededEngine):
    """Says what ``script(history, branch)`` does; the texts' marks are tokens."""

    def __init__(self, tokenizer, script, **options):
        super().__init__(len(tokenizer), tokenizer.eos_token_id, **options)
        self._tokenizer = tokenizer
        self._script = script

    def _turn(self, request, index):
        history = self._tokenizer.decode(list(request.history), skip_special_tokens=False)
        ids = tuple(encoded(self._tokenizer, self._script(history, index))[: request.max_tokens])
        ended = "end_token" if ids[-1] == self._end_token_id else "length"
        return SampledTurn(token_ids=ids, logprobs=(-1.0,) * len(ids), ended=ended)
