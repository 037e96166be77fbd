"""A model family of one's own, and whether it is the same training (docs/model-families.md).

    python examples/new_family.py

The model is a stand-in for yours: Transformers' Olmo Hybrid under other names, as a fork of it would begin. What this
package needs of a family is the entry below.
"""

import importlib
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from harts_hf.kernels.linear_attention import tree_gated_delta_rule
from harts_hf.modeling import Family, gated_delta_shape, grouped_keys, register_family
from harts_hf.planner import PlannerConfig
from harts_hf.verify import format_verdict, verify


def write_package(folder):
    """A package `my_hybrid`: a modeling file and a configuration, the names of their classes changed."""
    source = Path(transformers.__file__).parent / "models" / "olmo_hybrid"
    package = Path(folder) / "my_hybrid"
    package.mkdir()
    (package / "__init__.py").touch()
    for kind in ("configuration", "modeling"):
        text = (source / f"{kind}_olmo_hybrid.py").read_text()
        text = text.replace("OlmoHybrid", "MyHybrid").replace("olmo_hybrid", "my_hybrid")
        text = text.replace("from ... ", "from transformers ").replace("from ...", "from transformers.")
        (package / f"{kind}_my_hybrid.py").write_text(text)
    sys.path.insert(0, str(folder))


FAMILY = Family(
    model_type="my_hybrid",
    module_name="my_hybrid.modeling_my_hybrid",
    linear_mixer="MyHybridGatedDeltaNet",
    full_mixer="MyHybridAttention",
    rule=tree_gated_delta_rule,  # on trees, in place of the function
    rule_function="torch_chunk_gated_delta_rule",  # that the linear mixer calls by this name
    linear_shape=gated_delta_shape,
    key_elements=grouped_keys,
    gate_projections=("a_proj", "b_proj"),
)

if __name__ == "__main__":
    write_package(tempfile.mkdtemp())
    modeling = importlib.import_module(FAMILY.module_name)
    AutoConfig.register("my_hybrid", modeling.MyHybridConfig)
    AutoModelForCausalLM.register(modeling.MyHybridConfig, modeling.MyHybridForCausalLM)
    register_family(FAMILY)

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "my_hybrid",
        vocab_size=64,
        pad_token_id=0,
        eos_token_id=1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    draw = np.random.default_rng(0)
    tokens = lambda count: draw.integers(3, 64, count).tolist()  # noqa: E731
    draws = []
    for _ in range(3):  # trees of three trajectories, two of which part late
        prompt, shared = tokens(70), tokens(30)
        draws.append([prompt + shared + tokens(9), prompt + shared + tokens(40), prompt + tokens(20)])
    verdict = verify(model, draws, planner=PlannerConfig(sharing="always"))
    print(format_verdict(verdict))
    sys.exit(not verdict.passed)
