"""benchmarks/scaling.py: one depth, the law that is fitted, what is refused, and a call that goes on."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import scaling


@pytest.mark.parametrize("shape", [scaling.WHOLE, scaling.DRY])
def test_more_branches_at_one_depth(shape):
    """Unique tokens are those that were asked for, paths as long at every size, only leaves trained."""
    for tokens in shape.sizes[1:3]:
        group = shape.group(tokens)
        assert group.tree.num_tokens == tokens
        assert group.tree.depth.max() + 1 == shape.trunk + shape.middle + max(shape.leaves)
        trained = [int(rollout.loss_mask.sum()) for rollout in group.rollouts]
        assert trained == list(shape.leaves) * (len(trained) // len(shape.leaves))


def test_fit():
    """A constant and a time per token; another law shows in the residual and in the power."""
    tokens = 2.0 ** np.arange(16, 21)
    found = scaling.fit([{"tokens": n, "seconds": 0.2 + 1e-5 * n} for n in tokens], "seconds")
    assert found["constant"] == pytest.approx(0.2) and found["per_token"] == pytest.approx(1e-5)
    assert found["largest_residual"] < 1e-9 and found["exponent"] < 1
    found = scaling.fit([{"tokens": n, "seconds": 1e-11 * n**2} for n in tokens], "seconds")
    assert found["largest_residual"] > 0.3 and found["exponent"] == pytest.approx(2)


@pytest.mark.exhaustive
def test_runs_go_on_and_refuse(tmp_path, monkeypatch, capsys):
    """The first size sets the limit of handed bytes; what is done is not done again; nothing is timed without parity,
    nor begun that would end too late."""
    passed, limits, begun = [True], [], []

    def built(setting, step):
        begun.append(step.rollouts.tree.num_tokens)
        limits.append(step.args.tree_max_handoff_bytes)

    def timed(side, rollouts, until):
        tokens = rollouts.tree.num_tokens
        return {"tokens": tokens, "first_seconds": tokens / 100, "seconds": tokens / 200, "peak_memory": None,
                "forward_backward_seconds": tokens / 300, "peak_handoff_bytes": 77, "depth": 752}  # fmt: skip

    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=4), zero_grad=lambda **_: None)
    monkeypatch.setattr(scaling, "build", lambda name, dry, layers: model)
    monkeypatch.setattr(scaling, "vocab_size_of", lambda model: 512)
    monkeypatch.setattr(scaling, "compared", lambda *_: {"passed": passed[0], "failures": ["gradients differ"]})
    monkeypatch.setattr(scaling, "build_side", built)
    monkeypatch.setattr(scaling, "timed", timed)
    out = tmp_path / "s.json"
    call = ["--dry-run", "--out", str(out), "--seconds"]
    scaling.main([*call, "100"])
    assert begun == [1536, 2048, 4096] and limits == [None, 77, 77]
    assert "no time left for 8,192 tokens" in capsys.readouterr().out
    scaling.main([*call, "6000", "--tokens", "2048", "8192"])
    result = json.loads(out.read_text())
    assert begun == [1536, 2048, 4096, 8192] and [row["tokens"] for row in result["rows"]] == begun
    assert result["fit"]["seconds"]["per_token"] == pytest.approx(1 / 200) and out.with_suffix(".png").exists()
    passed[0] = False
    with pytest.raises(SystemExit, match=r"of {'model'.*'nested', 'budget': 1024}"):
        scaling.main([*call, "60", "--execution", "replay"])
    monkeypatch.setenv("HARTS_COMMIT", "another")
    with pytest.raises(SystemExit, match=r"expected --out to be of commit another, got .*s.json of "):
        scaling.main([*call, "60"])
    assert json.loads(out.read_text()) == result
    call[2] = str(tmp_path / "t.json")
    with pytest.raises(SystemExit, match="refused: gradients differ"):
        scaling.main([*call, "60", "--execution", "replay"])
    assert len(begun) == 4
