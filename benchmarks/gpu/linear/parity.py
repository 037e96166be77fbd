"""Linear attention on the GPU against an fp64 oracle, beside the expanded baseline's own errors.

Rules alone (every input gradient) over decays, prefixes and forks, and small layers (every parameter gradient). Errors
are pooled as root mean squares over seeds.
"""

import argparse
from collections.abc import Callable, Iterable

import torch

from benchmarks.gpu import record
from benchmarks.gpu.compare import Errors, cu_seqlens, equal, first_occurrence, poison, report, sum_by_row
from benchmarks.gpu.linear.layers import LinearLayer, Mixer, expanded_mixer, make_layer, tree_mixer
from benchmarks.gpu.linear.oracle import oracle_mixer, recurrent_rule
from benchmarks.gpu.linear.states import states
from benchmarks.gpu.registry import LINEAR_KINDS
from benchmarks.gpu.trees import Forest, fork_layout, join, unshared
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kimi_delta_rule
from harts_hf.tree import RolloutTree

SEEDS = 5
PREFIXES = (1, 3, 63, 64, 65, 129)
DECAYS = (0.05, 1.0, 20.0)
NAMES = ("output", "q", "k", "v", "g", "beta")
RULES = {"gdn": tree_gated_delta_rule, "kda": tree_kimi_delta_rule}


def forked_forest() -> Forest:
    """For each prefix: three branches, the first of which forks again after 20 tokens, one path ending inside."""
    trees = [
        RolloutTree.from_shape([-1, 0, 0, 0, 1, 1], [prefix, 20, 100, 7, 70, 1], [2, 3, 4, 5, 1])
        for prefix in PREFIXES
    ]
    return join(trees)


def rule_inputs(forest: Forest, rule: str, decay: float, seed: int) -> list[torch.Tensor]:
    """q, k, v, g, beta on compact rows: 2 (KDA: 4) query and 4 value heads of 128."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    kimi = rule == "kda"
    rows, heads, value_heads, dim = forest.num_rows, 4 if kimi else 2, 4, 128

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    gate = rand(rows, value_heads, dim) if kimi else rand(rows, value_heads)
    g = -decay * torch.sigmoid(gate) * 2
    if decay >= 20:
        g = g.clamp_min(-decay)
    return [
        rand(rows, heads, dim).bfloat16(),
        rand(rows, heads, dim).bfloat16(),
        rand(rows, value_heads, dim).bfloat16(),
        g,
        rand(rows, value_heads).sigmoid().to(torch.float32 if kimi else torch.bfloat16),
    ]


def run_tree(inputs: list[torch.Tensor], forest: Forest, rule: str, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and every input's gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    poison()
    output = RULES[rule](*leaves, forest.linear_tables().to("cuda")).output
    return [output.detach(), *torch.autograd.grad(output, leaves, dy)]


def run_expanded(inputs: list[torch.Tensor], forest: Forest, rule: str, dy: torch.Tensor) -> list[torch.Tensor]:
    """Stock FLA on the trajectories; a row's output gradient goes to its first occurrence."""
    rows, first = torch.from_numpy(forest.expanded_rows).cuda(), first_occurrence(forest)
    leaves = [x.detach()[rows].requires_grad_() for x in inputs]
    mixer = expanded_mixer(cu_seqlens(forest.lengths))
    output = (mixer.kimi if rule == "kda" else mixer.gated)(*leaves)
    d_output = torch.zeros_like(output)
    d_output[first] = dy
    found = torch.autograd.grad(output, leaves, d_output)
    return [output.detach()[first], *(sum_by_row(d, rows, x) for x, d in zip(inputs, found, strict=True))]


def run_oracle(inputs: list[torch.Tensor], forest: Forest, dy: torch.Tensor) -> list[torch.Tensor]:
    """Token by token in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    output = recurrent_rule(*leaves, forest)
    return [output.detach(), *torch.autograd.grad(output, leaves, dy.double())]


def largest_difference(found: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Over all tensors."""
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(found, other, strict=True))


def check_rule(rule: str, forest: Forest, name: str) -> dict[str, dict]:
    """One rule alone, with every decay."""
    result = {}
    roots = torch.from_numpy(forest.depth == 0).cuda()
    for decay in DECAYS:
        errors, first_gate, reruns = Errors(), 0.0, {}
        for seed in range(SEEDS):
            inputs = rule_inputs(forest, rule, decay, seed)
            dy = torch.randn_like(inputs[2])
            ours = run_tree(inputs, forest, rule, dy)
            baseline = run_expanded(inputs, forest, rule, dy)
            oracle = run_oracle(inputs, forest, dy)
            for tensor, *values in zip(NAMES, ours, baseline, oracle, strict=True):
                errors.add(tensor, *values)
            first_gate = max(first_gate, ours[4][roots].abs().max().item())
            if seed == 0:
                again = run_expanded(inputs, forest, rule, dy)
                reruns = {
                    "two_runs_bitwise_equal": all(equal(ours, run_tree(inputs, forest, rule, dy))),
                    "baseline_rerun_difference": largest_difference(baseline, again),
                }
        key = f"{rule}-decay{decay:g}-{name}"
        result[key] = {"errors": errors.table(), **reruns, "first_token_gate_gradient": first_gate}
        report(key, result[key])
    return result


def one_token(rule: str) -> dict[str, dict]:
    """A prefix of 63 tokens and thousands of branches of one token."""
    return check_rule(rule, fork_layout(63, 2000, 1), "one_token")


def gradients(layer: LinearLayer, x: torch.Tensor, mixer: Mixer, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The layer's output, and gradients of its input and parameters."""
    leaf, parameters = x.detach().clone().requires_grad_(), dict(layer.named_parameters())
    output = layer(leaf, mixer)
    dx, *found = torch.autograd.grad(output, [leaf, *parameters.values()], dy)
    return {"output": output.detach(), "x": dx, **dict(zip(parameters, found, strict=True))}


def layers(kinds: Iterable[str], seeds: int = SEEDS) -> dict[str, dict]:
    """Small layers: projections, convolution, gates, norm, output projection."""
    result = {}
    forest = forked_forest()
    rows, first = torch.from_numpy(forest.expanded_rows).cuda(), first_occurrence(forest)
    for kind in kinds:
        errors = Errors()
        for seed in range(seeds):
            layer = make_layer(kind, seed=seed, small=True)
            double = make_layer(kind, seed=seed, small=True).double()
            double.norm.fused = False
            x = torch.randn(forest.num_rows, 256, device="cuda").bfloat16()
            dy = torch.randn_like(x)
            tree = tree_mixer(forest)
            poison()
            ours = gradients(layer, x, tree, dy)
            d_expanded = torch.zeros(len(rows), 256, device="cuda", dtype=dy.dtype)
            d_expanded[first] = dy
            baseline = gradients(layer, x[rows], expanded_mixer(cu_seqlens(forest.lengths)), d_expanded)
            baseline |= {"output": baseline["output"][first], "x": sum_by_row(baseline["x"], rows, x)}
            oracle = gradients(double, x.double(), oracle_mixer(forest), dy.double())
            for name, value in ours.items():
                errors.add(name.removesuffix(".weight").split(".")[0], value, baseline[name], oracle[name])
        result[kind] = {"errors": errors.table(), "seeds": seeds}
        report("layer " + kind, result[kind])
    return result


def alone(rule: str) -> bool:
    """Whether outputs and states of the tree are, bit by bit, those of the same kernels on each trajectory alone."""
    forest = forked_forest()
    inputs = rule_inputs(forest, rule, 1.0, 7)
    tables = forest.linear_tables()
    size, owner = tables.chunk_size, tables.output.index.numpy() // tables.chunk_size
    whole = RULES[rule](*inputs, tables.to("cuda"), export_nodes=torch.arange(tables.num_nodes, device="cuda"))
    equal_outputs = equal_states = True
    for path in forest.paths:
        own = unshared(len(path)).linear_tables()
        rows = torch.from_numpy(path).cuda()
        nodes = torch.arange(own.num_nodes, device="cuda")
        part = RULES[rule](*[x[rows] for x in inputs], own.to("cuda"), export_nodes=nodes)
        equal_outputs &= torch.equal(part.output, whole.output[rows])
        full = len(path) // size  # states at whole chunks; a shared last chunk may go on in the tree
        ends = [int(owner[path[(i + 1) * size - 1]]) for i in range(full)]
        equal_states &= torch.equal(part.states[:full], whole.states[ends])
    print("alone", rule, equal_outputs, equal_states, flush=True)
    return equal_outputs and equal_states


def handoff(rule: str) -> float:
    """How far a trajectory cut at a chunk boundary, its state handed over with its gradient, is from the whole."""
    whole = unshared(300)
    inputs = rule_inputs(whole, rule, 1.0, 3)
    dy = torch.randn_like(inputs[2])
    expected = run_tree(inputs, whole, rule, dy)
    leaves = [x.detach().requires_grad_() for x in inputs]
    head, tail = unshared(128).linear_tables().to("cuda"), unshared(172).linear_tables()
    tail.initial[tail.parent < 0] = 0
    first = RULES[rule](*[x[:128] for x in leaves], head, export_nodes=torch.tensor([1], device="cuda"))
    second = RULES[rule](*[x[128:] for x in leaves], tail.to("cuda"), initial_states=first.states)
    output = torch.cat([first.output, second.output])
    found = [output.detach(), *torch.autograd.grad(output, leaves, dy)]
    worst = largest_difference(found, expected)
    print("handoff", rule, equal(found, expected), worst, flush=True)
    return worst


def sizes() -> dict[str, bool]:
    """One token; 131,072 rows; chains x heads above 65,535: finite, and equal to the baseline to bf16 rounding."""
    result = {}
    forests = {"1": unshared(1), "131072": unshared(32768, 4), "20000 chains": fork_layout(3, 20000, 1)}
    for name, forest in forests.items():
        for rule in RULES:
            inputs = rule_inputs(forest, rule, 1.0, 1)
            dy = torch.randn_like(inputs[2])
            ours = run_tree(inputs, forest, rule, dy)
            fine = all(torch.isfinite(x).all().item() for x in ours)
            if name != "20000 chains":
                baseline = run_expanded(inputs, forest, rule, dy)
                baseline[4][torch.from_numpy(forest.depth == 0).cuda()] = 0  # exactly 0; FLA leaves rounding there
                fine &= all(
                    (a.double() - b.double()).norm() <= 0.02 * b.double().norm() + 1e-9
                    for a, b in zip(ours, baseline, strict=True)
                )
            result[f"{rule} {name}"] = bool(fine)
            print("size", name, rule, bool(fine), flush=True)
    return result


# By the registry's names.
CHECKS: dict[str, Callable[[], dict]] = {
    "gdn": lambda: {"rules": check_rule("gdn", forked_forest(), "forks")},
    "kda": lambda: {"rules": check_rule("kda", forked_forest(), "forks")},
    "one-token": lambda: {"rules": one_token("gdn") | one_token("kda")},
    "states": lambda: {"states": states(forked_forest())},
    "layers": lambda: {"layers": layers(LINEAR_KINDS)},
    "kda-16": lambda: {"layers": layers(("kda-16",), 12)},  # eight numbers of A_log a seed need more seeds
    "exact": lambda: {
        "alone": {rule: alone(rule) for rule in RULES},
        "handoff": {rule: handoff(rule) for rule in RULES},
        "sizes": sizes(),
    },
}


def main(options: argparse.Namespace) -> None:
    """One check of the registry."""
    found: dict = {**record.about(), "seeds": SEEDS, "failures": {}}
    try:
        found |= CHECKS[options.check]()
    except Exception:
        found["failures"][options.check] = record.failure()
    record.write(options.out, found)
