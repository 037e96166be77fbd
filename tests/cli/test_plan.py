"""`harts plan` and the command line's entry."""

import json
import re
import subprocess
import sys
import time

import pytest
from shared_data import shape_file

from harts_hf.cli.main import main
from harts_hf.planner import Schedule


@pytest.fixture
def rollouts(tmp_path):
    """Two groups: one that shares 6 of 8 tokens, one of a single trajectory."""
    rows = [
        {"group": "a", "token_ids": [*range(6), 10, 11], "reward": 1},
        {"group": "a", "token_ids": [*range(6), 20], "reward": 0},
        {"group": "b", "token_ids": [1, 2, 3]},
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_table(rollouts, capsys):
    """The gain; one line per group and a total; each column in a line."""
    assert main(["plan", str(rollouts)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 trajectories of 2 groups, trained once:"
    assert lines[2].split() == ["tokens", "18", "12", "1.50x", "fewer"]
    names = ["group", "trajectories", "expanded", "unique", "ratio", "depth", "replay", "calls", "calls (ends)"]
    (start,) = [index for index, line in enumerate(lines) if line.split()[:2] == names[:2]]
    assert re.split("  +", lines[start]) == names
    assert lines[start + 1].split() == ["a", "2", "15", "9", "1.67", "8", "6", "1", "1"]
    assert lines[start + 2].split() == ["b", "1", "3", "3", "1.00", "3", "0", "1", "1"]
    assert lines[start + 3].split() == ["all", "3", "18", "12", "1.50", "8", "6", "1", "1"]
    assert [re.split("  +", line)[1] for line in lines[start + 5 :][: len(names)]] == names
    assert "1 microbatch of at most 16,384 tokens on 1 rank, nested execution" in lines
    assert not any("ranks" in line for line in lines)


def test_real_shapes_with_picture_and_json(tmp_path, capsys):
    """The whole command on a real file; the JSON holds the table and a schedule that can be loaded and proven."""
    path = shape_file("lats_webshop")
    out = tmp_path / "out.json"
    arguments = ["--max-tokens-per-microbatch", "1024", "--world-size", "2", "--verbose"]
    assert main(["plan", str(path), *arguments, "--plot", str(tmp_path / "out.png"), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "14.97" in text and "estimated" in text and "rank 1:" in text
    assert (tmp_path / "out.png").stat().st_size > 10_000
    content = json.loads(out.read_text())
    assert content["total"]["unique"] == 4520 and content["total"]["expanded"] == 67_669
    Schedule.from_json(json.dumps(content["schedule"])).validate()


def test_all_ranks_are_counted(tmp_path, capsys):
    """Balance, repeated rows, dummies and bytes of the whole world in table and JSON, and a picture of all ranks."""
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--world-size", "20", "--json", str(out), "--plot", str(picture)]
    assert main(["plan", str(shape_file("vmcts_dafny_bst")), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("all 20 ranks together:")
    names = [line.split("  ")[0] for line in lines[start + 1 : start + 7]]
    assert names == ["balance", "waiting", "idle ranks", "repeated rows", "dummies", "exchanged"]
    content = json.loads(out.read_text())
    world, plan = content["world"], content["plan"]
    assert world["repeated_tokens"] == plan["forward_tokens"] - content["total"]["unique"] > 0
    assert 0 < world["balance"] <= 1 and world["slowest_seconds"] <= plan["estimated_seconds"]
    assert world["exchanged_bytes"] == 8 * (content["total"]["expanded"] + 2 * content["total"]["unique"])
    assert f"{world['repeated_tokens']:,}" in lines[start + 4]
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("command", ["plan", "verify", "bench"])
def test_several_files_are_named(command, capsys):
    """In words, and not as unknown arguments; an unknown option stays one, and so does a file that is left out."""
    model = [] if command == "plan" else ["--model", "m"]
    assert main([command, "a.jsonl", "b.jsonl", *model]) == 2
    error = capsys.readouterr().err
    assert "expected one file of rollouts, got 2: a.jsonl, b.jsonl" in error and "usage" not in error
    assert main([command, "a.jsonl", "--nope", "b.jsonl", *model]) == 2
    error = capsys.readouterr().err
    assert "unrecognized arguments: --nope b.jsonl" in error and "usage" not in error
    assert main([command, *model]) == 2
    assert (
        capsys.readouterr().err
        == f"harts {command}: expected ROLLOUTS, got none (harts {command} --help says what there is)\n"
    )


def test_too_many_ranks_are_refused_at_once(tmp_path, capsys):
    """Before the file is read: it need not even be one."""
    assert main(["plan", str(tmp_path / "nowhere.jsonl"), "--world-size", "100000"]) == 2
    assert "expected world_size of at most 4096, got 100000" in capsys.readouterr().err


def test_plans_what_a_step_does(rollouts, tmp_path, capsys):
    """A loss that needs log-probs is scored first, as are recorded ones; limits that nothing meets are raised."""
    plan, out = ["plan", str(rollouts), "--json", str(tmp_path / "out.json")], []
    for options in ([], ["--scoring", "needed"]):
        assert main([*plan, *options]) == 0
        out.append((capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())["plan"]))
    # One microbatch is not scored apart.
    assert [(plan["execution"], plan["scores"]) for _, plan in out] == [("nested", False)] * 2
    assert "scored before" not in out[1][0] and not any(p["limits_raised"] for _, p in out)
    row = {"group": "a", "token_ids": list(range(100)), "old_logprobs": [0.0] * 100}
    rollouts.write_text(json.dumps(row) + "\n")
    assert main([*plan, "--max-tokens-per-microbatch", "64", "--max-handoff-bytes", "0"]) == 0
    text = capsys.readouterr().out
    assert (
        "replay execution, scored before the loss" in text
        and "limits raised: no schedule keeps within max_handoff_bytes=0" in text
    )


def test_many_groups_are_cut_short(capsys):
    """A hundred groups are counted, not listed."""
    assert main(["plan", str(shape_file("tot_game24"))]) == 0
    assert "... 80 more groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-tokens-per-microbatch", "10"], "max_tokens_per_microbatch of at least 64"),
        (["--world-size", "0"], "world_size of at least 1"),
        (["--sharing", "some"], "sharing to be one of auto, always, never"),
        (["--cost", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_options(rollouts, capsys, arguments, message):
    """An option that cannot work is named, without a traceback."""
    assert main(["plan", str(rollouts), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_broken_file(tmp_path, capsys):
    """A broken line is named, without a traceback."""
    path = tmp_path / "r.jsonl"
    path.write_text('{"group": "a", "token_ids": [1]}\n{"group": "a", "token_ids": []}\n')
    assert main(["plan", str(path)]) == 2
    assert "r.jsonl, line 2: expected token_ids of at least one value" in capsys.readouterr().err


def test_unknown_command(capsys):
    """The known commands are listed."""
    assert main(["plann"]) == 2
    assert "plan" in capsys.readouterr().err
    assert main([]) == 2


def test_help_is_quick():
    """`harts --help` starts in under a second (the best of three) and says what there is."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "harts_hf.cli", "--help"], capture_output=True, text=True, check=True
        )
        seconds.append(time.perf_counter() - start)
        assert "harts plan ROLLOUTS" in done.stdout
    assert min(seconds) < 1.0


def test_version(capsys):
    """The version is that of the package."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()
