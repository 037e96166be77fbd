"""README's and the documentation's commands, typed by somebody who installed the wheel."""

import json
import os
import re
import resource
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest.mock import patch

import pytest
from support.launching import SPENT, made_once, write_python
from support.pages import BLOCK, PAGES, ROOT, commands

HERE = Path(__file__).parent
TRANSCRIPTS = sorted(HERE.glob("*.txt"))
# However busy the machine is, a command that takes longer than this has stopped.
SECONDS_PER_COMMAND = 400
# CPU seconds that imports of others' packages take, at most, each time that Python starts.
IMPORTS = 7


def built_wheel(folder):
    """The wheel, built from what a source distribution holds, outside the checkout, without a network."""
    source = folder / "source"
    shutil.copytree(ROOT / "harts_hf", source / "harts_hf", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", folder, source], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(folder):
    """In ``venv`` the wheel is installed; programs of ``forks`` are forks that have imported others' packages."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=120)
    (own,) = venv.glob("lib/python*/site-packages")
    # Dependencies are those of the tests; of this package only the wheel: paths in a .pth are read, .pth files there
    # (such as that of an editable install) are not.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(venv / "bin" / "python")]
    options = ["install", "--quiet", "--no-deps", "--no-index", str(built_wheel(folder))]
    subprocess.run([*pip, *options], check=True, timeout=120)
    (forks := folder / "forks").mkdir()
    python = write_python(forks / "python", "packages", (str(own),))
    harts = (venv / "bin" / "harts").read_text()
    assert harts.startswith(f"#!{venv}/bin/python")
    torchrun = "#!\nfrom torch.distributed.run import main\nmain()\n"
    for name, text in (("harts", harts), ("torchrun", torchrun)):
        (forks / name).write_text(f"#!{python}\n{text.partition(chr(10))[2]}")
        (forks / name).chmod(0o755)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """A folder with `examples/` and `recipes/`, and environments of shells in which the wheel is installed.

    Of two: in the first Python starts as it does everywhere, in the second it is a fork that has imported others'
    packages and imports the wheel.
    """
    folder = tmp_path_factory.mktemp("newcomer")
    installed = made_once("installed", install)
    venv, forks, home = installed / "venv", installed / "forks", folder / "clone"
    home.mkdir()
    for name in ("examples", "recipes"):
        (home / name).symlink_to(ROOT / name)
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    common = {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    shells = [{**common, "PATH": f"{bin_folder}:{os.environ['PATH']}"} for bin_folder in (venv / "bin", forks)]
    shells[1][SPENT] = str(folder / "spent")
    for shell in shells:
        where = type_in("python -c 'import harts_hf.cli.main; print(harts_hf.__file__)'", home, shell)
        assert str(venv) in where, "expected the package of the wheel"
    with patch.object(sys, "argv", ["examples/tiny.py", str(home / "tiny")]):  # here, without another start
        runpy.run_path(str(ROOT / "examples" / "tiny.py"), run_name="__main__")
    return home, *shells


def type_in(command, folder, shell):
    """What a command printed, both streams; it has to end well."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=shell,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_PER_COMMAND,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


def shown_file(name, page):
    """The block of code that a page shows after it has named a file."""
    text = (ROOT / page).read_text()
    return BLOCK.search(text, text.index(f"`{name}`")).group(2)


def steps_of(transcript):
    """Commands with the patterns of their output, and files to write before: ``("$" or ">", words, patterns)``."""
    steps = []
    for line in transcript.read_text().splitlines():
        if line.startswith(("$ ", "> ")):
            steps.append((line[0], line[2:], []))
        elif line.strip() and not line.startswith("#"):
            steps[-1][2].append(line)
    return steps


def limit_of(transcript):
    """Seconds of CPU beside imports of others' packages; how often Python starts; whether it does so in forks."""
    seconds, starts, forks = re.search(
        r"^# limit (\d+) of (\d+) starts?( in forks)?$", transcript.read_text(), re.MULTILINE
    ).groups()
    return int(seconds), int(starts), forks is not None


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(transcript, newcomer):
    """Every command works as it stands and prints what it should, within its time, without warnings of others."""
    folder, *shells = newcomer
    limit, starts, forks = limit_of(transcript)
    shell, spent = shells[forks], Path(shells[1][SPENT])
    spent.write_text("")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for kind, words, patterns in steps_of(transcript):
        if kind == ">":
            name, page = words.split()
            (folder / name).write_text(shown_file(name, page))
            continue
        output = type_in(words, folder, shell)
        place = 0
        for pattern in patterns:
            found = re.compile(pattern).search(output, place)
            assert found, f"{words}: expected {pattern!r} in\n{output[-4000:]}"
            place = found.end()
        assert not re.search(r"\w+Warning:|Setting accelerator", output), output
        # Transformers' advice to install kernels of GPUs; `verify` from Python runs the stock model, which gives it.
        assert words.startswith("python ") or "falling back" not in output, output
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if forks:
        of_forks = list(map(float, spent.read_text().split()))
        assert len(of_forks) == starts
        seconds += sum(of_forks)
    else:
        limit += IMPORTS * starts
    assert seconds < limit, f"{seconds:.1f} s of CPU"


@pytest.mark.slow
def test_metrics_of_a_run_are_documented(newcomer):
    """Whatever a run logs below `tree/`, `environment/` and `agent/` stands on docs/metrics.md."""
    folder, _, shell = newcomer
    for name in ("riddle.py", "riddle.yaml"):
        (folder / name).write_text(shown_file(name, "docs/quickstart.md"))
    metrics = folder / "outputs" / "riddle" / "metrics.jsonl"
    if not metrics.is_file():
        type_in("harts train riddle.yaml --max_steps 1", folder, shell)
    page = (ROOT / "docs" / "metrics.md").read_text().replace("`.../", "`environment/failed/")
    logged = json.loads(metrics.read_text().splitlines()[0])
    names = [name for name in logged if name.startswith(("tree/", "environment/")) and "scoring_needed_by" not in name]
    assert len(names) > 20
    assert not [name for name in names if f"`{name}`" not in page]


def test_commands_stand_in_the_documentation():
    """To the letter; and together they stay within a minute and a half of CPU."""
    known = {line for page in PAGES for line in commands(page)}
    typed = [words for transcript in TRANSCRIPTS for kind, words, _ in steps_of(transcript) if kind == "$"]
    assert len(typed) >= 6
    assert not [words for words in typed if words not in known]
    limits = list(map(limit_of, TRANSCRIPTS))
    assert sum(seconds + IMPORTS * starts for seconds, starts, _ in limits) <= 90
    assert {forks for *_, forks in limits} == {True, False}
