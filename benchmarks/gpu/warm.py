"""Compiles our own kernels at full size into Triton's cache on disk: python warm.py KIND."""

import sys

import torch
from layers import expanded_mixer, make_layer, pin_norm, tree_mixer
from parity_linear import cu_seqlens
from trees import fork_layout
from tune_states import KINDS, chains_of, inputs

from harts_hf.kernels.linear_attention.triton_states import run_states_backward, run_states_forward
from harts_hf.planner.chunks import CHUNK_SIZE

forest, kind = fork_layout(69, 3, 70), sys.argv[1]
pin_norm()
heads, value_heads, kimi = KINDS[("gdn-16/32", "kda-32", "kda-16").index(kind)]
chains = chains_of(forest)
x = inputs(chains, heads, value_heads, kimi)
for width in (16, 32, 64):
    for write in (True, False):
        run_states_forward(
            x["k"], x["w"], x["u"], x["g"], x["slots"], chains, chunk_size=CHUNK_SIZE, write_slots=write, block_v=width
        )
    if width < 64:
        gradients = x["do"], x["dv"], torch.zeros_like(x["slots"])
        run_states_backward(
            x["q"], x["k"], x["w"], x["g"], *gradients, chains, chunk_size=CHUNK_SIZE, scale=0.1, block_v=width
        )
layer = make_layer(kind)
mixers = {
    forest.num_rows: tree_mixer(forest.linear_tables().to("cuda"), forest.conv_table(4).to("cuda")),
    int(forest.lengths.sum()): expanded_mixer(cu_seqlens(forest)),
}
for rows, mixer in mixers.items():
    rows_in = torch.randn(rows, layer.in_proj_qkv.in_features, device="cuda").bfloat16().requires_grad_()
    out = layer(rows_in, mixer)
    torch.autograd.grad(out, [rows_in, *layer.parameters()], torch.randn_like(out))
torch.cuda.synchronize()
print("warm", kind, flush=True)
