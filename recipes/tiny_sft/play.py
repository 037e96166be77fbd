"""Plays the shelf task badly and writes what was said, the data of tiny_sft.yaml: `python recipes/tiny_sft/play.py`.

`conversations.jsonl` has a conversation per line, as chat models have them, with its reward and the group of its
prompt; `tokenizer/` a word for each token and a chat template.
"""

import json
import random
from pathlib import Path

from harts_hf.rollouts.environments.shelf import ShelfEnvironment
from harts_hf.rollouts.environments.words import word_tokenizer

FOLDER = Path(__file__).parent
GROUPS, PER_GROUP, TURNS = 64, 4, 5
RIGHT = 0.7  # how often the player knows what to do
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ' ' + message.content }}"
    "{{ '<end>' if message.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def play(seed: int, rng: random.Random) -> tuple[list[dict[str, str]], float]:
    """One conversation, and its reward."""
    environment = ShelfEnvironment()
    prompts = environment.prompts()
    said = environment.reset(prompts[seed % len(prompts)], seed=seed)
    messages, item, shelf, at = [{"role": "user", "content": said}], said.split()[0], "", ""
    for _ in range(TURNS):
        guess = f"s{rng.randint(1, 4)}"
        known = f"look {item}" if not shelf else f"open {shelf}" if at == shelf else f"go {shelf}"
        action = known if rng.random() < RIGHT else rng.choice([f"go {guess}", f"open {guess}"])
        messages.append({"role": "assistant", "content": action})
        result = environment.step(action)
        if result.done:
            break
        if result.observation.endswith("listed"):
            shelf = result.observation.split()[0]
        if result.observation.endswith("reached"):
            at = result.observation.split()[0]
        messages.append({"role": "user", "content": result.observation})
    return messages, environment.reward


def main() -> None:
    """Writes both."""
    rng = random.Random(0)
    with (FOLDER / "conversations.jsonl").open("w") as file:
        for group in range(GROUPS):
            for _ in range(PER_GROUP):
                messages, reward = play(group, rng)
                file.write(json.dumps({"group": group, "reward": round(reward, 3), "messages": messages}) + "\n")
    vocabulary = ShelfEnvironment().tokenizer().get_vocab()
    tokenizer = word_tokenizer(["user", "assistant", *sorted(vocabulary, key=vocabulary.__getitem__)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(FOLDER / "tokenizer")


if __name__ == "__main__":
    main()
