"""Word-level tokenizers for tiny models that learn one environment from random weights."""

from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_SPECIAL = ("<pad>", "<end>", "<unk>")
_SPLITTER = pre_tokenizers.Whitespace()


def words_of(texts: Iterable[str]) -> list[str]:
    """The different words and punctuation marks of ``texts``, in the order in which they first come."""
    return list(dict.fromkeys(word for text in texts for word, _ in _SPLITTER.pre_tokenize_str(text)))


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerBase:
    """A tokenizer with one token for each word; ``<end>`` is its EOS, ``<pad>`` its padding, ``<unk>`` any other word.

    Text is split at white space and around punctuation; decoded words are joined by spaces.

    Args:
        words: the vocabulary; repeated words count once.
    """
    vocabulary = dict.fromkeys((*_SPECIAL, *words))
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = _SPLITTER
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", padding_side="left"
    )
