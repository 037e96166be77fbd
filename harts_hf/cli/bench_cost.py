"""`harts bench --fit-cost`: fits the planner's cost model to a model on this machine and writes it as JSON.

harts bench --fit-cost --model MODEL --out cost.json
harts plan ROLLOUTS --cost cost.json
"""

import argparse
import platform
from collections.abc import Sequence

import torch

from harts_hf.cli.checks import check_output_file, find_device, refuse_to_overwrite, seed
from harts_hf.cli.loading import load_model
from harts_hf.cli.output import printable, replacing
from harts_hf.cli.parsing import CommandParser
from harts_hf.names import check_model_name
from harts_hf.planner.cost import FEATURES
from harts_hf.runtime.costing import fit_cost_model


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    options = _parser().parse_args(argv)
    device = find_device(options.device)
    refuse_to_overwrite(options.out, options.model)
    check_output_file("--out", options.out)
    check_model_name("--model", options.model)
    model = load_model(
        options.model, getattr(torch, options.dtype), seed=options.seed, random_weights=options.random_weights
    )
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    cost = fit_cost_model(
        model.to(device),
        max_rows=options.max_rows,
        source=f"fitted: {options.model} in {options.dtype} on {where}, up to {options.max_rows} rows",
        repeats=options.repeats,
        seed=options.seed,
        progress=lambda text: print(text, flush=True),
    )
    with replacing(options.out) as new:
        cost.save(new)
    print(f"\n{'seconds per unit':<16}{'forward':>12}{'backward':>12}")
    for name in FEATURES:
        print(f"{name:<16}{getattr(cost.forward, name):>12.3g}{getattr(cost.backward, name):>12.3g}")
    print(f"handed bytes: {cost.handoff_bytes_per_row:.3g} per row, {cost.handoff_bytes_per_state:.3g} per boundary")
    print(f"wrote {printable(options.out)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="harts bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit-cost", action="store_true", required=True, help="what to measure: the cost model")
    parser.add_argument("--model", required=True, help="name or folder of a Hugging Face model")
    parser.add_argument("--random-weights", action="store_true", help="read the configuration only")
    parser.add_argument("--out", default="cost.json", help="the file to write (default: %(default)s)")
    parser.add_argument("--max-rows", type=int, default=16384, help="rows of the largest microbatch")
    parser.add_argument("--repeats", type=int, default=3, help="runs per window after a first; the fastest counts")
    parser.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float64"))
    parser.add_argument("--seed", type=seed, default=0)
    return parser
