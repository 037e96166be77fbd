"""Rows to experts and back: Triton's kernels (in its interpreter, or on a GPU in bf16 too) and the reference."""

import pytest
import torch

pytest.importorskip("triton")

from harts_hf.kernels import experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOKENS, CHOICES, EXPERTS = (29, 3, 300) if DEVICE == "cpu" else (4099, 8, 128)


def choices():
    """Each token's choices differ; some experts have none."""
    order = torch.rand(TOKENS, EXPERTS, device=DEVICE).argsort(dim=1)
    return order[:, :CHOICES].clamp(max=EXPERTS - 2)


def both_ways(run, inputs, dtype):
    """Results and gradients of the kernel, of the reference, and of the reference in float64."""
    found = []
    for backend, used in (("triton", dtype), ("reference", dtype), ("reference", torch.float64)):
        given = [one.detach().to(used).requires_grad_() for one in inputs]
        out = run(*given, backend=backend)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        found.append([out, *torch.autograd.grad(out, given, upstream)])
    return zip(*found, strict=True)


def test_order():
    """Rows of an expert stand together, in the order of tokens; ``rows`` is the inverse, ``ends`` count."""
    chosen = choices()
    order = experts.order_by_expert(chosen, EXPERTS)
    flat = chosen.reshape(-1)
    assert torch.equal(order.choices, flat.sort(stable=True).indices)
    assert torch.equal(order.choices[order.rows.reshape(-1).long()], torch.arange(len(flat), device=DEVICE))
    assert torch.equal(order.ends.long(), flat.bincount(minlength=EXPERTS).cumsum(0))
    assert order.ends.dtype == torch.int32 and order.count == CHOICES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["expand", "combine"])
def test_copies_and_sums(name, dtype):
    """Copies are exact; sums of a few terms are rounded once: 1e-6 of float32, half a unit of bf16 (2^-8)."""
    order = experts.order_by_expert(choices(), EXPERTS)
    rows = TOKENS if name == "expand" else TOKENS * CHOICES
    run = getattr(experts, name)
    inputs = [torch.randn(rows, 50, device=DEVICE)]
    kernel = list(both_ways(lambda x, backend: run(x, order, backend=backend), inputs, dtype))
    copied, summed = kernel if name == "expand" else kernel[::-1]
    assert torch.equal(copied[0], copied[1])
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    assert (summed[0].double() - summed[2]).norm() <= tolerance * summed[2].norm()
    assert torch.equal(summed[0], run(inputs[0].to(dtype), order, backend="triton")) or name == "expand"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_swiglu(dtype):
    """With the gradients of gates, ups and weights: at most 1.5 times the reference's error in the same dtype."""
    order = experts.order_by_expert(choices(), EXPERTS)
    inputs = [torch.randn(TOKENS * CHOICES, 2 * 40, device=DEVICE), torch.rand(TOKENS, CHOICES, device=DEVICE)]

    def run(both, weights, backend):
        return experts.weighted_swiglu(both, weights, order, backend=backend)

    for number, (kernel, stock, exact) in enumerate(both_ways(run, inputs, dtype)):
        error, theirs = ((one.double() - exact).norm() / exact.norm() for one in (kernel, stock))
        assert error <= 1.5 * theirs + 1e-6, f"result {number}: {error:.2e} against {theirs:.2e}"


@pytest.mark.essential("4-2-True-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (8, 8)])
def test_route(groups, kept, normalizes, dtype):
    """The same experts as the reference, ties included, in rows whose scores have few values; weights and gradients to
    1.5 times its error in the same dtype."""
    scores = (torch.rand(TOKENS, 32, device=DEVICE) * 8).round() / 8
    bias = 0.1 * torch.randn(32, device=DEVICE).round()
    options = {"groups": groups, "kept_groups": kept, "count": 5, "normalizes": normalizes, "factor": 2.5}
    chosen = []

    def run(scores, backend):
        weights, experts_of = experts.route(scores, bias.to(torch.float32), **options, backend=backend)
        chosen.append(experts_of)
        return weights

    results = both_ways(run, [scores], dtype)
    for number, (kernel, stock, exact) in enumerate(results):
        error, theirs = ((one.double() - exact).norm() / exact.norm() for one in (kernel, stock))
        assert error <= 1.5 * theirs + 1e-6, f"result {number}: {error:.2e} against {theirs:.2e}"
    assert torch.equal(chosen[0], chosen[1])


@pytest.mark.exhaustive
def test_route_chooses_as_stock_routers():
    """Transformers' own router of Ling and Kimi, on scores of bf16, which have many ties: the same sets of experts and
    the same weight of each."""
    from support.models import tiny_model

    router = tiny_model("bailing_hybrid", num_local_experts=32, n_group=8, topk_group=4, num_experts_per_tok=6)
    router = router.model.layers[-1].mlp.gate.to(DEVICE)
    with torch.no_grad():
        router.weight.mul_(0.3)
        hidden = torch.randn(1, 200, router.hidden_dim, device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits, weights, chosen = router(hidden)
            ours, experts_of = experts.route(
                logits.sigmoid(), router.e_score_correction_bias, groups=8, kept_groups=4, count=6,
                normalizes=router.norm_topk_prob, factor=router.routed_scaling_factor, backend="triton",
            )  # fmt: skip
    order, theirs = experts_of.sort(dim=1), chosen.sort(dim=1)
    assert torch.equal(order.values, theirs.values)
    # The sum of six scores is in float32 here; the CPU's autocast takes it in bf16: two units of 8 bits.
    torch.testing.assert_close(ours.gather(1, order.indices), weights.gather(1, theirs.indices), rtol=2**-6, atol=0)


def test_refusals():
    """What is wrong is named."""
    order = experts.order_by_expert(choices(), EXPERTS)
    with pytest.raises(ValueError, match=rf"expected x of shape \[{TOKENS}, D\]"):
        experts.expand(torch.zeros(1, 4, device=DEVICE), order)
    with pytest.raises(ValueError, match="got 6 experts in 4 groups, of which 2 are kept, and 1 chosen"):
        scores = torch.zeros(3, 6, device=DEVICE)
        experts.route(scores, scores[0], groups=4, kept_groups=2, count=1, normalizes=True, factor=1.0)
    with pytest.raises(ValueError, match="expected gates and ups of equal widths, got 5"):
        experts.weighted_swiglu(
            torch.zeros(TOKENS * CHOICES, 5, device=DEVICE), torch.zeros(TOKENS, CHOICES, device=DEVICE), order
        )
