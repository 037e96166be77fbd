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


def test_refusals():
    """What is wrong is named."""
    order = experts.order_by_expert(choices(), EXPERTS)
    with pytest.raises(ValueError, match=rf"expected x of shape \[{TOKENS}, D\]"):
        experts.expand(torch.zeros(1, 4, device=DEVICE), order)
    with pytest.raises(ValueError, match="expected gates and ups of equal widths, got 5"):
        experts.weighted_swiglu(
            torch.zeros(TOKENS * CHOICES, 5, device=DEVICE), torch.zeros(TOKENS, CHOICES, device=DEVICE), order
        )
