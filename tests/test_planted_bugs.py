"""Mutation tests: the suite's own tests fail, for the planted reason, when a known bug is planted.

The bugs are those that other prefix-sharing trainers have had; docs/planted-bugs.md is their table. Each entry runs a
test of the suite, the very function, twice: as it is, when it must pass, and with the bug planted, when it must fail
with an assertion that matches the entry's pattern.
"""

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import planted, planted_ranks, planted_windows

from harts_hf.modeling.handoff import HandoffError

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "planted-bugs.md"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A planted bug and the test that catches it.

    Attributes:
        plant: plants the bug.
        file: the test's file, from the folder of the tests.
        test: the test's function.
        arguments: of the function.
        failure: a pattern of the failing assertion and its message.
        error: what is raised; an error of the code itself where it refuses what the bug does.
    """

    plant: Callable[[Any], None]
    file: str
    test: str
    arguments: dict[str, Any] = field(default_factory=dict)
    failure: str
    error: type[Exception] = AssertionError


PARITY, CONTRACT, LINEAR = (
    "runtime/test_logprobs_parity.py",
    "trainers/test_trl_contract.py",
    "ops/test_linear_attention.py",
)
CORNERS = "trainers/test_corner_rows.py"
WINDOWS, HANDOFF = "runtime/test_windows.py", "runtime/test_handoff.py"
LOG_PROBS = r"log-probs of trajectory \d+ differ by"
WRONG_GRADIENT = r"an error of .* times what is allowed"
WRONG_TRAINING = r"[\w.]+: [\d.e+-]+, training moved it by"


def parity(plant: Callable[[Any], None], *, family: str = "qwen3_5_text", depth: int = 65) -> Case:
    """Caught by the fp64 comparison of log-probs on a tree that branches at ``depth``."""
    arguments = {"family": family, "depth": depth}
    return Case(plant=plant, file=PARITY, test="test_branch_depths", arguments=arguments, failure=LOG_PROBS)


def training(plant: Callable[[Any], None], name: str, *, file: str = CONTRACT, test: str = "test_grpo") -> Case:
    """Caught by the parameters after some steps of TRL's trainer on the same rollouts, under the options ``name``."""
    return Case(plant=plant, file=file, test=test, arguments={"name": name}, failure=WRONG_TRAINING)


def window(
    plant: Callable[[Any], None], *, test: str = "test_planned_windows", failure: str = LOG_PROBS, **options: Any
) -> Case:
    """Caught by the fp64 comparison of a tree that is cut into trunks inside trunks."""
    arguments = {"family": "qwen3_5_text", "execution": "replay"}
    return Case(plant=plant, file=WINDOWS, test=test, arguments=arguments, failure=failure, **options)


def ranks(plant: Callable[[Any], None], name: str = "actor_critic") -> Case:
    """Caught by the fp64 comparison of the gradients of two ranks that share one forest."""
    arguments = {"name": name, "count": 2}
    return Case(
        plant=plant, file="runtime/test_ranks.py", test="test_one_forest", arguments=arguments, failure=WRONG_GRADIENT
    )


CASES = [
    parity(planted.sequential_positions, depth=2),
    parity(planted.one_label_per_row),
    parity(planted.attention_sees_siblings),
    parity(planted.conv_over_branches),
    parity(planted.state_of_the_node_before),
    parity(planted.replay_one_token_short),
    parity(planted.class_name_trap, family="kimi_linear"),
    Case(
        plant=planted.temperature_ignored,
        file=PARITY,
        test="test_random_tree",
        arguments={"family": "qwen3_5_text", "checkpointing": False},
        failure=LOG_PROBS,
    ),
    Case(
        plant=planted.later_labels_scored_as_the_first,
        file=PARITY,
        test="test_cuts_that_compute_prefixes_again",
        arguments={"family": "qwen3_5_text", "budget": 150},
        failure=WRONG_GRADIENT,
    ),
    Case(
        plant=planted.silu_in_bfloat16,
        file="ops/test_conv.py",
        test="test_bfloat16_is_rounded_once",
        arguments={"weight_dtype": torch.float32},
        failure="assert different < 1e-3",
    ),
    Case(
        plant=planted.gather_gradient_in_bfloat16,
        file="ops/test_gather.py",
        test="test_bfloat16_gradients_are_rounded_once",
        failure=r"assert x\.grad\.item\(\) == 1\.5",
    ),
    Case(
        plant=planted.states_in_bfloat16,
        file=LINEAR,
        test="test_a_cut_with_the_state_handed_over_equals_the_whole",
        arguments={"rule": "gated", "dtype": torch.float32},
        failure=r"assert torch\.equal\(output, expected\)",
    ),
    Case(
        plant=planted.state_before_the_first_token,
        file=LINEAR,
        test="test_the_first_gate_has_no_gradient",
        arguments={"rule": "gated", "decay": 0.1},
        failure=r"assert not leaves\[3\]\.grad\[first\]\.any\(\)",
    ),
    training(planted.last_trajectory_wins, "loss-grpo"),
    training(planted.stale_indices, "loss-grpo"),
    training(planted.padding_in_the_tree, "loss-grpo"),
    training(planted.normaliser_of_unique_tokens, "loss-dapo"),
    training(planted.old_log_probs_of_another_path, "off-policy-grpo"),
    training(planted.entropy_dropped, "entropy-bonus"),
    Case(
        plant=planted.router_counts_of_one,
        file="runtime/test_router_sums.py",
        test="test_losses_of_slices",
        arguments={"count": 1, "placement": "global", "execution": "replay"},
        failure=r"assert seen\[number\]\.item\(\) == pytest\.approx",
    ),
    Case(
        plant=planted.load_of_unique_tokens,
        file="runtime/test_router_sums.py",
        test="test_load_of_experts",
        arguments={"family": "bailing_hybrid"},
        failure=r"assert torch\.equal\(load, expected\)",
    ),
    training(planted.nominal_accumulation_steps, "short-last-step", file=CORNERS, test="test_corner_rows"),
    training(planted.interior_ends_lost, "ends-and-duplicates", file=CORNERS, test="test_corner_rows"),
    training(planted.duplicates_counted_once, "ends-and-duplicates", file=CORNERS, test="test_corner_rows"),
    training(
        planted.entropy_of_clipped_tokens_dropped, "entropy-of-clipped-tokens", file=CORNERS, test="test_corner_rows"
    ),
    Case(
        plant=planted.loss_not_divided_for_accumulation,
        file=CONTRACT,
        test="test_rloo",
        arguments={"options": {}},
        failure=WRONG_TRAINING,
    ),
    Case(
        plant=planted.nothing_is_shared,
        file="trainers/test_grpo_equals_trl.py",
        test="test_default_loss",
        arguments={"family": "qwen3_5_text", "accumulation": 1},
        failure=r"assert log\[.tree/sharing_ratio.\]",
    ),
    window(planted_windows.one_token_too_few_handed_over),
    window(planted_windows.conv_rows_dropped),
    window(planted_windows.handed_rows_in_another_order),
    window(planted_windows.handed_states_in_bfloat16),
    window(planted_windows.last_dependents_gradients_only, failure=WRONG_GRADIENT),
    window(
        planted_windows.exported_twice_under_recompute, test="test_activation_checkpointing", failure=WRONG_GRADIENT
    ),
    window(planted_windows.dependent_before_its_trunk, failure="before any forward of it", error=HandoffError),
    window(
        planted_windows.freed_before_the_recompute,
        test="test_activation_checkpointing",
        failure="which were freed or never computed",
        error=HandoffError,
    ),
    Case(
        plant=planted_windows.leaf_gradients_in_bfloat16,
        file=HANDOFF,
        test="test_bfloat16_gradients_are_summed_in_float32",
        failure=r"assert keys\.grad\.flatten\(\)\.tolist\(\) == \[1\.5\] \* 3",
    ),
    Case(
        plant=planted_windows.row_without_weight_scored,
        file=HANDOFF,
        test="test_overflowing_logits_of_a_trunk_without_loss",
        arguments={"execution": "replay", "signs": (1.0, -1.0)},
        failure="a gradient that is not finite",
    ),
    ranks(planted_ranks.coefficients_of_one_rank),
    ranks(planted_ranks.values_of_a_rank_missing),
    ranks(planted_ranks.own_trajectories_first),
    ranks(planted_ranks.sums_of_one_rank, "sums"),
    Case(
        plant=planted_ranks.dummies_left_out,
        file="runtime/test_outputs.py",
        test="test_every_backward_touches_every_parameter",
        arguments={"family": "qwen3_5_text"},
        failure=r"assert len\(touched\) == 12|12 >",
    ),
]


@cache
def suite_module(file: str) -> ModuleType:
    """A file of the suite."""
    spec = spec_from_file_location(f"planted_{Path(file).stem}", TESTS / file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(case: Case, folder: Path) -> None:
    """Runs the case's test."""
    function = getattr(suite_module(case.file), case.test)
    with_folder = {"tmp_path": folder} if "tmp_path" in function.__code__.co_varnames else {}
    torch.manual_seed(0)
    function(**case.arguments, **with_folder)


_PASSED: set[str] = set()


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Bugs that only a training or a window of many microbatches or ranks shows take one or two of them each."""
    is_large = case.file.startswith(("trainers/", "runtime/")) and case.file not in (PARITY, HANDOFF)
    return [pytest.mark.exhaustive] if is_large else []


@pytest.mark.parametrize("case", [pytest.param(case, id=case.plant.__name__, marks=marks(case)) for case in CASES])
def test_is_caught(case, tmp_path, monkeypatch):
    """The named test passes as it is and fails with the bug planted."""
    key = f"{case.file} {case.test} {case.arguments}"
    if key not in _PASSED:
        run(case, tmp_path / "sound")
        _PASSED.add(key)
    case.plant(monkeypatch)
    with pytest.raises(case.error) as caught:
        run(case, tmp_path / "planted")
    statement = traceback.extract_tb(caught.value.__traceback__)[-1].line
    assert re.search(case.failure, f"{statement}: {caught.value}")


def test_the_table_names_these_bugs_and_tests():
    """docs/planted-bugs.md has a line for each case, in order, with its bug, what it breaks and the test."""
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .*\| `tests/([\w/]+\.py)::(\w+)` \|$", TABLE.read_text(), re.MULTILINE)
    expected = [
        (case.plant.__name__, " ".join((case.plant.__doc__ or "").split()).rstrip("."), case.file, case.test)
        for case in CASES
    ]
    assert rows == expected
