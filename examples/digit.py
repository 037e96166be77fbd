"""An environment: guess a digit within three tries, with a hint after each. Used by the other examples."""

from harts_hf.rollouts import Environment, StepResult


class Digit(Environment):
    """The reward is 1 for the digit, else how near the last guess was."""

    def reset(self, prompt, *, seed):
        self.secret, self.guess, self.tries = seed % 10, None, 0
        return f"{prompt} Answer with a digit alone."

    def step(self, action):  # anything may come, also an empty text
        digits = [letter for letter in action if letter in "0123456789"]
        self.guess, self.tries = int(digits[-1]) if digits else self.guess, self.tries + 1
        hint = "That is no digit." if not digits else "Higher." if self.guess < self.secret else "Lower."
        return StepResult(hint, done=self.guess == self.secret or self.tries == 3)

    @property
    def reward(self):
        return 0.0 if self.guess is None else 1 - abs(self.guess - self.secret) / 10
