"""A chat template, its tokenizer, and the same written once more in Python, to count samples without either."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# As the templates of thinking models: thoughts before the last user's message are left out, and the prompt for an
# answer opens a thought. Unknown roles are skipped; contents are texts; arguments of calls are objects.
TEMPLATE = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{- "<|im_start|>tools\n" + tools | tojson + "<|im_end|>\n" }}{%- endif %}
{%- for m in messages %}{%- if m.role in ("system", "user", "assistant", "tool") %}
{{- "<|im_start|>" + m.role + "\n" }}
{%- if m.role == "assistant" and loop.index0 > ns.last %}
{{- "<think>" + (m.reasoning_content or "") + "</think>" }}{%- endif %}
{{- m.content if m.content is string else "" }}
{%- for call in m.tool_calls or () %}{{- "<call>" + call.function.name + "(" }}
{%- for key, value in call.function.arguments | items %}{{- key + "=" + value | string + ";" }}{%- endfor %}{{- ")" }}
{%- endfor %}{{- "<|im_end|>\n" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n<think>" }}{%- endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>")
SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer(template=TEMPLATE, special=SPECIAL):
    """A tokenizer of Transformers with one token per byte and some special ones."""
    core = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(SYMBOLS)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = template
    return tokenizer


def text_of(ids, tokenizer=None):
    """The text of token ids."""
    return (tokenizer or byte_tokenizer()).decode([int(token) for token in ids], skip_special_tokens=False)


def written(messages, tools=None):
    """What ``TEMPLATE`` writes, and where each message begins and ends in it: ``(text, [(start, end), ...])``."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    text, places = "", []
    assert tools is None
    for i, message in enumerate(messages):
        start = len(text)
        text += f"<|im_start|>{message['role']}\n"
        if message["role"] == "assistant" and i > last:
            text += f"<think>{message.get('reasoning_content') or ''}</think>"
        text += message.get("content") or ""
        for call in message.get("tool_calls", ()):
            arguments = "".join(f"{k}={v};" for k, v in call["function"]["arguments"].items())
            text += f"<call>{call['function']['name']}({arguments})"
        text += "<|im_end|>\n"
        places.append((start, len(text)))
    return text, places


def turn_texts(messages, turns):
    """For each turn the text before it, its prompt included, and the turn's own, its end token included."""
    found = []
    for turn in turns:
        text, places = written(messages[: turn + 1])
        start = places[turn][0] + len("<|im_start|>assistant\n<think>")
        found.append((text[:start], text[start : places[turn][1] - 1]))
    return found


def count(text):
    """Tokens of a text: one per byte, one per special token."""
    size = len(text.encode())
    return size - sum(text.count(token) * (len(token) - 1) for token in SPECIAL)


def trie_size(texts):
    """Distinct prefixes of texts of one-byte characters, in tokens."""
    split = []
    for text in texts:
        for number, token in enumerate(SPECIAL):
            text = text.replace(token, chr(number))
        split.append(text)
    return len({text[:end] for text in split for end in range(1, len(text) + 1)})
