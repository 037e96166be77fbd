"""For trainers: pictures are drawn where they are looked at."""

import pytest


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture of expert loads takes a third of a second at each checkpoint; its own tests draw it."""
    if request.path.name != "test_expert_load.py":
        monkeypatch.setattr("harts_hf.trainers.load_picture.plot_expert_load", lambda *_: None)
