"""Compiles what the linear benchmarks use into Triton's cache on disk: python warm.py KIND."""

import sys

import numpy as np
import torch
from layers import expanded_mixer, make_layer, tree_mixer
from parity_linear import cu_seqlens, rule_inputs, run_expanded, run_tree
from trees import fork_layout

forest = fork_layout(69, 3, 70)
kind = sys.argv[1]
for small in (True, False):
    layer = make_layer(kind, small=small)
    for mixer, rows in (
        (tree_mixer(forest.linear_tables().to("cuda"), forest.conv_table(4).to("cuda")), forest.num_rows),
        (expanded_mixer(cu_seqlens(forest)), int(np.sum(forest.lengths))),
    ):
        x = torch.randn(rows, layer.in_proj_qkv.in_features, device="cuda").bfloat16()
        y = layer(x.requires_grad_(), mixer)
        torch.autograd.grad(y, [x, *layer.parameters()], torch.randn_like(y))
inputs = rule_inputs(forest, kind != "gdn-16/32", 1.0, 0)
for run in (run_tree, run_expanded):
    run(inputs, forest, kind != "gdn-16/32", torch.randn_like(inputs[2]))
torch.cuda.synchronize()
print("warm", kind, flush=True)
