"""Linear attention on the GPU against an fp64 oracle, beside the expanded baseline's own errors.

    python parity_linear.py OUT.json SECTION      gdn, kda (the rules), one-token, states, layers,
                                               kda-16 (again, more seeds) or exact
    python parity_linear.py OUT.json PART.json ...    merges what the sections wrote

Rules alone (every input gradient) over decays, prefixes and forks, and small layers (every parameter gradient). Errors
are pooled as root mean squares over seeds; ``ratio`` is ours over the baseline's.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from layers import LinearLayer, Mixer, expanded_mixer, make_layer, tree_mixer
from measure import failure, within_limits
from oracle import oracle_mixer, recurrent_rule
from parity_states import STATE_LIMITS, states
from trees import Forest, join

from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kimi_delta_rule
from harts_hf.tree import RolloutTree

SEEDS = 5
PREFIXES = (1, 3, 63, 64, 65, 129)
DECAYS = (0.05, 1.0, 20.0)
NAMES = ("output", "q", "k", "v", "g", "beta")


def forked_forest() -> Forest:
    """For each prefix: three branches, the first of which forks again after 20 tokens, one path ending inside."""
    trees = [
        RolloutTree.from_shape([-1, 0, 0, 0, 1, 1], [prefix, 20, 100, 7, 70, 1], [2, 3, 4, 5, 1])
        for prefix in PREFIXES
    ]
    return join(trees)


def one_token_forest(branches: int = 2000) -> Forest:
    """A prefix of 63 tokens and thousands of branches of one token."""
    return join([RolloutTree.from_shape([-1] + [0] * branches, [63] + [1] * branches, list(range(1, branches + 1)))])


def poison() -> None:
    """Fills memory that the allocator will hand out next with NaN.

    Blocks of up to 1 MiB are never cut from larger ones, so small tables need small blocks, and many: they fill holes.
    """
    sizes = [28, 26, 24, 22, 20] * 2 + [size for size in range(18, 6, -1) for _ in range(32)]
    blocks = [torch.full((1 << size,), float("nan"), device="cuda") for size in sizes]
    del blocks
    torch.cuda.synchronize()


def cu_seqlens(forest: Forest) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], forest.lengths.cumsum()])).cuda()


class Errors:
    """Squared errors and squared references by name, of ours and of the baseline."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.worst: dict[str, float] = defaultdict(float)

    def add(self, name: str, ours: torch.Tensor, baseline: torch.Tensor, oracle: torch.Tensor) -> None:
        if not torch.isfinite(ours).all():
            raise AssertionError(f"{name} is not finite")
        squares = [(x.double() - oracle).pow(2).sum().item() for x in (ours, baseline)]
        for place, square in enumerate((*squares, oracle.pow(2).sum().item())):
            self.sums[name][place] += square
        if squares[1] > 0:
            self.worst[name] = max(self.worst[name], (squares[0] / squares[1]) ** 0.5)

    def table(self) -> dict[str, dict[str, float]]:
        return {
            name: {
                "ours": (ours / max(total, 1e-300)) ** 0.5,
                "baseline": (baseline / max(total, 1e-300)) ** 0.5,
                "ratio": (ours / max(baseline, 1e-300)) ** 0.5,
                "worst_single": self.worst[name],
            }
            for name, (ours, baseline, total) in self.sums.items()
        }


def rule_inputs(forest: Forest, kimi: bool, decay: float, seed: int) -> list[torch.Tensor]:
    """q, k, v, g, beta on compact rows: 2 (KDA: 4) query and 4 value heads of 128."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
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


def run_tree(inputs: list[torch.Tensor], forest: Forest, kimi: bool, dy: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    rule = tree_kimi_delta_rule if kimi else tree_gated_delta_rule
    poison()
    output = rule(*leaves, forest.linear_tables().to("cuda")).output
    return [output.detach(), *torch.autograd.grad(output, leaves, dy)]


def run_expanded(inputs: list[torch.Tensor], forest: Forest, kimi: bool, dy: torch.Tensor) -> list[torch.Tensor]:
    """Stock FLA on the trajectories; a row's output gradient goes to its first occurrence.

    Gradients are summed over occurrences in fp64 and rounded to the input's dtype once, as ours are.
    """
    rows = torch.from_numpy(forest.expanded_rows).cuda()
    first = first_occurrence(forest)
    leaves = [x.detach()[rows].requires_grad_() for x in inputs]
    mixer = expanded_mixer(cu_seqlens(forest))
    output = (mixer.kimi if kimi else mixer.gated)(*leaves)
    d_output = torch.zeros_like(output)
    d_output[first] = dy
    gradients = torch.autograd.grad(output, leaves, d_output)
    summed = [
        torch.zeros(x.shape, dtype=torch.float64, device="cuda").index_add_(0, rows, d.double()).to(x.dtype)
        for x, d in zip(inputs, gradients, strict=True)
    ]
    return [output.detach()[first], *summed]


def first_occurrence(forest: Forest) -> torch.Tensor:
    place = np.full(forest.num_rows, -1, np.int64)
    rows = forest.expanded_rows
    place[rows[::-1]] = np.arange(len(rows))[::-1]
    return torch.from_numpy(place).cuda()


def run_oracle(inputs: list[torch.Tensor], forest: Forest, dy: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    output = recurrent_rule(*leaves, forest)
    return [output.detach(), *torch.autograd.grad(output, leaves, dy.double())]


def rules(kimi: bool, only: str | None = None) -> dict[str, dict]:
    """One rule alone; branches of one token with one decay unless they are all that is asked for."""
    result = {}
    forests = {"forks": forked_forest(), "one_token": one_token_forest()}
    for decay in DECAYS:
        for name, forest in forests.items():
            if name == only or (only is None and (name == "forks" or decay == 1.0)):
                errors, rerun, repeat, first_gate = Errors(), 0.0, True, 0.0
                for seed in range(SEEDS):
                    inputs = rule_inputs(forest, kimi, decay, seed)
                    dy = torch.randn_like(inputs[2])
                    ours = run_tree(inputs, forest, kimi, dy)
                    baseline = run_expanded(inputs, forest, kimi, dy)
                    oracle = run_oracle(inputs, forest, dy)
                    for tensor, *values in zip(NAMES, ours, baseline, oracle, strict=True):
                        errors.add(tensor, *values)
                    first_gate = max(
                        first_gate, ours[4][torch.from_numpy(forest.depth == 0).cuda()].abs().max().item()
                    )
                    if seed == 0:
                        again = run_tree(inputs, forest, kimi, dy)
                        repeat = all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
                        other = run_expanded(inputs, forest, kimi, dy)
                        rerun = max(
                            (a.double() - b.double()).abs().max().item() for a, b in zip(baseline, other, strict=True)
                        )
                key = f"{'kda' if kimi else 'gdn'}-decay{decay:g}-{name}"
                result[key] = {
                    "errors": errors.table(),
                    "two_runs_bitwise_equal": repeat,
                    "baseline_rerun_difference": rerun,
                    "first_token_gate_gradient": first_gate,
                }
                report(key, result[key])
    return result


def report(key: str, entry: dict) -> None:
    parts = [f"{n} {e['ours']:.1e}/{e['baseline']:.1e}={e['ratio']:.2f}" for n, e in entry["errors"].items()]
    rest = {k: v for k, v in entry.items() if k != "errors"}
    print(key, "; ".join(parts), rest, flush=True)


def gradients(layer: LinearLayer, x: torch.Tensor, mixer: Mixer, dy: torch.Tensor, rows: torch.Tensor | None) -> dict:
    leaf = (x if rows is None else x[rows]).detach().clone().requires_grad_()
    parameters = dict(layer.named_parameters())
    output = layer(leaf, mixer)
    dx, *found = torch.autograd.grad(output, [leaf, *parameters.values()], dy)
    if rows is not None:
        dx = torch.zeros(x.shape, dtype=torch.float64, device="cuda").index_add_(0, rows, dx.double()).to(x.dtype)
    return {"output": output.detach(), "x": dx, **dict(zip(parameters, found, strict=True))}


def kind_of(parameter: str) -> str:
    return parameter.removesuffix(".weight").split(".")[0]


def layers(kinds: tuple[str, ...] = ("gdn-16/32", "kda-32", "kda-16"), seeds: int = SEEDS) -> dict[str, dict]:
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
            tree = tree_mixer(forest.linear_tables().to("cuda"), forest.conv_table(4).to("cuda"))
            poison()
            ours = gradients(layer, x, tree, dy, None)
            d_expanded = torch.zeros(len(rows), 256, device="cuda", dtype=dy.dtype)
            d_expanded[first] = dy
            baseline = gradients(layer, x, expanded_mixer(cu_seqlens(forest)), d_expanded, rows)
            baseline["output"] = baseline["output"][first]
            oracle = gradients(double, x.double(), oracle_mixer(forest), dy.double(), None)
            for name, value in ours.items():
                errors.add(kind_of(name), value, baseline[name], oracle[name])
        result[kind] = {"errors": errors.table(), "seeds": seeds}
        report("layer " + kind, result[kind])
    return result


def alone() -> dict[str, bool]:
    """Outputs and states of the tree equal, bitwise, those of the same kernels on each trajectory alone."""
    result = {}
    forest = forked_forest()
    for kimi in (False, True):
        inputs = rule_inputs(forest, kimi, 1.0, 7)
        rule = tree_kimi_delta_rule if kimi else tree_gated_delta_rule
        tables = forest.linear_tables()
        nodes = torch.arange(tables.num_nodes, device="cuda")
        whole = rule(*inputs, tables.to("cuda"), export_nodes=nodes)
        equal_outputs = equal_states = True
        owner = tables.output.index.numpy() // tables.chunk_size
        for path in forest.paths:
            one = join([RolloutTree.from_shape([-1], [len(path)], [0])])
            one_tables = one.linear_tables()
            rows = torch.from_numpy(path).cuda()
            last = torch.arange(one_tables.num_nodes, device="cuda")
            part = rule(*[x[rows] for x in inputs], one_tables.to("cuda"), export_nodes=last)
            equal_outputs &= torch.equal(part.output, whole.output[rows])
            full = len(path) // tables.chunk_size  # states at whole chunks; a shared last chunk may go on in the tree
            ends = [int(owner[path[(i + 1) * tables.chunk_size - 1]]) for i in range(full)]
            equal_states &= torch.equal(part.states[:full], whole.states[ends])
        result["kda" if kimi else "gdn"] = equal_outputs and equal_states
        print("alone", "kda" if kimi else "gdn", equal_outputs, equal_states, flush=True)
    return result


def handoff() -> dict[str, float]:
    """A trajectory cut at a chunk boundary, its state handed over with its gradient, equals the whole."""
    result = {}
    whole = join([RolloutTree.from_shape([-1], [300], [0])])
    for kimi in (False, True):
        inputs = rule_inputs(whole, kimi, 1.0, 3)
        rule = tree_kimi_delta_rule if kimi else tree_gated_delta_rule
        dy = torch.randn_like(inputs[2])
        expected = run_tree(inputs, whole, kimi, dy)
        leaves = [x.detach().requires_grad_() for x in inputs]
        head = join([RolloutTree.from_shape([-1], [128], [0])]).linear_tables().to("cuda")
        tail = join([RolloutTree.from_shape([-1], [172], [0])]).linear_tables()
        tail.initial[tail.parent < 0] = 0
        first = rule(*[x[:128] for x in leaves], head, export_nodes=torch.tensor([1], device="cuda"))
        second = rule(*[x[128:] for x in leaves], tail.to("cuda"), initial_states=first.states)
        output = torch.cat([first.output, second.output])
        found = [output.detach(), *torch.autograd.grad(output, leaves, dy)]
        same = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
        worst = max((a.double() - b.double()).abs().max().item() for a, b in zip(found, expected, strict=True))
        result["kda" if kimi else "gdn"] = worst
        print("handoff", "kda" if kimi else "gdn", same, worst, flush=True)
    return result


def sizes() -> dict[str, bool]:
    """One token; 131,072 rows; chains x heads above 65,535: finite, and equal to the baseline to bf16 rounding."""
    result = {}
    forests = {
        "1": join([RolloutTree.from_shape([-1], [1], [0])]),
        "131072": join([RolloutTree.from_shape([-1], [32768], [0]) for _ in range(4)]),
        "20000 chains": join([RolloutTree.from_shape([-1] + [0] * 20000, [3] + [1] * 20000, list(range(1, 20001)))]),
    }
    for name, forest in forests.items():
        for kimi in (False, True):
            inputs = rule_inputs(forest, kimi, 1.0, 1)
            dy = torch.randn_like(inputs[2])
            ours = run_tree(inputs, forest, kimi, dy)
            fine = all(torch.isfinite(x).all().item() for x in ours)
            if name != "20000 chains":
                baseline = run_expanded(inputs, forest, kimi, dy)
                baseline[4][torch.from_numpy(forest.depth == 0).cuda()] = 0  # exactly 0; FLA leaves rounding there
                fine &= all(
                    (a.double() - b.double()).norm() <= 0.02 * b.double().norm() + 1e-9
                    for a, b in zip(ours, baseline, strict=True)
                )
            result[f"{'kda' if kimi else 'gdn'} {name}"] = bool(fine)
            print("size", name, kimi, bool(fine), flush=True)
    return result


def passes(found: dict) -> bool:
    """Whether every pooled and single error is within the limits and every exact property holds."""
    fine = True
    for group in ("rules", "layers"):
        for entry in found.get(group, {}).values():
            fine &= within_limits(list(entry["errors"].values()))
            fine &= entry.get("two_runs_bitwise_equal", True) and entry.get("first_token_gate_gradient", 0.0) == 0.0
    fine &= all(found.get("alone", {"missing": False}).values())
    fine &= all(found.get("sizes", {"missing": False}).values())
    fine &= all(error <= STATE_LIMITS[key.split()[0]] for key, error in found.get("states", {}).items())
    return fine and not found.get("failures")


SECTIONS = {
    "gdn": lambda: {"rules": rules(False)},
    "kda": lambda: {"rules": rules(True)},
    "one-token": lambda: {"rules": rules(False, "one_token") | rules(True, "one_token")},
    "states": lambda: {"states": states(forked_forest())},
    "layers": lambda: {"layers": layers()},
    "kda-16": lambda: {"layers": layers(("kda-16",), 12)},  # eight numbers of A_log a seed need more seeds
    "exact": lambda: {"alone": alone(), "handoff": handoff(), "sizes": sizes()},
}


def main() -> None:
    out, *arguments = sys.argv[1:]
    found: dict = {"seeds": SEEDS, "failures": {}}
    if arguments[0] in SECTIONS:
        try:
            found |= SECTIONS[arguments[0]]()
        except Exception:
            found["failures"][arguments[0]] = failure()
    else:
        for part in map(json.loads, map(Path.read_text, map(Path, arguments))):
            for key, value in part.items():
                found[key] = found.get(key, {}) | value if isinstance(value, dict) else value
        found["passes"] = {"rules", "layers", "alone", "sizes"} <= found.keys() and passes(found)
        print("parity of linear attention passes:", found["passes"], flush=True)
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
