"""The shelf task."""

import pytest

from harts_hf.rollouts.environments.shelf import ShelfEnvironment


def begun(seed=0, **kwargs):
    """An environment after reset for the first item, and the shelf that it drew."""
    environment = ShelfEnvironment(**kwargs)
    environment.reset("lamp wanted", seed=seed)
    return environment, environment.fork().step("look lamp").observation.split()[0]


def test_an_episode_that_goes_well():
    """Look up, go, open: each step is worth a third, and opening ends the episode."""
    environment, shelf = begun()
    assert environment.reward == 0
    assert environment.step("look lamp") == (f"{shelf} listed", False)
    assert environment.reward == 1 / 3
    assert environment.step(f"go {shelf}") == (f"{shelf} reached", False)
    assert environment.reward == 2 / 3
    assert environment.step(f"open {shelf}") == ("", True)
    assert environment.reward == 1


@pytest.mark.parametrize(
    "action",
    [
        "",
        "look",
        "lamp look",
        "look book",
        "open lamp",
        "open s1",
        "open s9",
        "go s9",
        "go lamp",
        "<pad>",
        "look lamp2",
    ],
)
def test_wrong_calls_are_answered_and_may_be_retried(action):
    """A wrong call costs a turn and nothing else."""
    environment, shelf = begun()
    assert environment.step(action) == ("error", False)
    for right in ("look lamp", f"go {shelf}"):
        environment.step(right)
    assert environment.step(f"open {shelf}").done


def test_a_shelf_counts_only_while_the_policy_stands_there():
    """Leaving the shelf takes its step back, and an item cannot be opened from elsewhere."""
    environment, shelf = begun()
    other = next(name for name in ("s1", "s2") if name != shelf)
    environment.step("look lamp")
    environment.step(f"go {shelf}")
    environment.step(f"go {other}")
    assert environment.reward == 1 / 3
    assert environment.step(f"open {shelf}") == ("error", False)
    assert environment.step(f"go {other}") == ("error", False)  # it is there already


def test_words_after_the_call_are_ignored():
    """A turn may go on after its call."""
    environment, shelf = begun()
    assert environment.step("look lamp go s1 error").observation == f"{shelf} listed"


def test_the_seed_decides_the_shelf():
    """Equal seeds give equal shelves, and all shelves occur."""
    shelves = [begun(seed=seed)[1] for seed in range(40)]
    assert shelves == [begun(seed=seed)[1] for seed in range(40)]
    assert set(shelves) == {"s1", "s2", "s3", "s4"}


def test_forks_do_not_see_each_other():
    """A fork's steps leave the parent's state and reward alone."""
    environment, shelf = begun()
    environment.step("look lamp")
    twin = environment.fork()
    twin.step(f"go {shelf}")
    assert (environment.reward, twin.reward) == (1 / 3, 2 / 3)
    environment.step("go s1" if shelf != "s1" else "go s2")
    assert twin.step(f"open {shelf}").done


def test_the_tokenizer_knows_every_word():
    """All texts of an episode survive encoding and decoding, without an unknown token."""
    environment, shelf = begun(num_items=12, num_shelves=9)
    tokenizer = environment.tokenizer()
    texts = [*environment.prompts(), "look lamp", f"go {shelf}", "open s9", f"{shelf} listed", "s9 reached", "error"]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode([tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == ""


@pytest.mark.parametrize("prompt", ["lamp", "find lamp", "boat wanted", "", ["lamp wanted"], None])
def test_prompts_that_are_none_of_its_own(prompt):
    """Reset refuses a prompt that it cannot play, and shows one that it can."""
    with pytest.raises(ValueError, match="expected a prompt such as 'lamp wanted', got"):
        ShelfEnvironment().reset(prompt, seed=0)


@pytest.mark.parametrize("kwargs", [{"num_items": 0}, {"num_items": 13}, {"num_shelves": 0}])
def test_sizes_out_of_range(kwargs):
    """Sizes that no episode can have are refused."""
    with pytest.raises(ValueError, match="got"):
        ShelfEnvironment(**kwargs)
