"""The environment protocol: forking, what is missing by default, dotted paths."""

import pytest

from harts_hf.rollouts.environment import Environment, StepResult, load_object


class Counter(Environment):
    """Counts words; its state is nested, so that a shallow copy would be found out."""

    def reset(self, prompt, *, seed):
        self.state = {"words": [], "seed": seed}
        return prompt

    def step(self, action):
        self.state["words"] += action.split()
        return StepResult(str(len(self.state["words"])), done=len(self.state["words"]) >= 3)

    @property
    def reward(self):
        return len(self.state["words"]) / 3


def test_a_fork_goes_on_by_itself():
    """What a fork does leaves the parent as it was, and the other way round."""
    parent = Counter()
    parent.reset("count", seed=5)
    parent.step("one")
    twin = parent.fork()
    twin.step("two three")
    assert parent.state == {"words": ["one"], "seed": 5}
    parent.step("other")
    assert twin.state["words"] == ["one", "two", "three"]
    assert (parent.reward, twin.reward) == (2 / 3, 1.0)


def test_what_cannot_be_copied_says_what_to_do():
    """The way out is named, and what it was that has no copy."""
    environment = Counter()
    environment.reset("count", seed=5)
    environment.state["words"] = (word for word in ())
    with pytest.raises(TypeError, match=r"Counter cannot be copied \(.*generator.*\): .* ReplayedEnvironment"):
        environment.fork()


def test_what_an_environment_lacks_is_named():
    """Without prompts or a tokenizer of its own, an environment says which recipe field is needed."""
    with pytest.raises(ValueError, match="Counter has no prompts of its own: set dataset_name"):
        Counter().prompts()
    with pytest.raises(ValueError, match="Counter has no tokenizer of its own: set model_name_or_path"):
        Counter().tokenizer()


@pytest.mark.parametrize(
    "path", ["harts_hf.rollouts.environment:load_object", "harts_hf.rollouts.environment.load_object"]
)
def test_dotted_paths(path):
    """A colon and a dot before the name mean the same."""
    assert load_object(path) is load_object


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Name", "expected a dotted path"),
        ("package:", "expected a dotted path"),
        (":Name", "expected a dotted path"),
        (".module:Name", "expected a dotted path"),
        ("package..module.Name", "expected a dotted path"),
        ("no_such_package.module:Name", "cannot import 'no_such_package.module'"),
        ("harts_hf.no_such_module:Name", "cannot import 'harts_hf.no_such_module'"),
        ("harts_hf.rollouts.environment:Nothing", "has no 'Nothing'"),
    ],
)
def test_paths_that_lead_nowhere(path, message):
    """Each part of a path that is wrong is named."""
    with pytest.raises(ValueError, match=message):
        load_object(path)


def test_a_missing_dependency_is_not_taken_for_a_wrong_path(tmp_path, monkeypatch):
    """A module that exists but lacks what it imports fails with the import's own error."""
    (tmp_path / "needs_something.py").write_text("import something_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="something_that_is_missing"):
        load_object("needs_something:Name")
