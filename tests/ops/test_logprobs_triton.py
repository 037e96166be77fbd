"""The head's kernels (in Triton's interpreter, or on a GPU in bf16 too) against the reference in float64.

Tolerance: 1.5 times the error of the torch backend in the same dtype, plus 2e-6 of the tensor's size (float32 sums of
5,000 terms in another order).
"""

import pytest
import torch

pytest.importorskip("triton")

from harts_hf.kernels.logprobs import token_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# Rows with one label, several, the same one twice, and none; more words than a block.
ROWS, LABELS = [0, 1, 1, 1, 3, 3, 4, 6], [5, 0, 4999, 4096, 7, 7, 4095, 12]
WORDS, WIDTH = 5000, 24


def inputs(dtype, bias):
    """Hidden rows, weights of logits of a few units, and a bias."""
    hidden = torch.randn(7, WIDTH, device=DEVICE)
    weight = 0.6 * torch.randn(WORDS, WIDTH, device=DEVICE)
    found = [hidden, weight] + ([torch.randn(WORDS, device=DEVICE)] if bias else [])
    return [one.to(dtype).requires_grad_() for one in found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", ["none", "read", "differentiated"])
def test_equals_reference(entropy, bias, dtype):
    """Log-probs, entropies and all gradients, in chunks of two rows; labels without a gradient take part in none."""
    rows, labels = torch.tensor(ROWS, device=DEVICE), torch.tensor(LABELS, device=DEVICE)
    upstream = torch.randn(2, len(rows), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    upstream[:, 4] = 0
    given = inputs(dtype, bias)
    found = []
    for backend, used in (("triton", dtype), ("torch", dtype), ("reference", torch.float64)):
        ours = [one.detach().to(used).requires_grad_() for one in given]
        logp, entropies, _ = token_logprobs(
            ours[0], ours[1], ours[2] if bias else None, rows, labels, temperature=0.8, logit_scale=1.3,
            return_entropy=entropy != "none", max_chunk_elements=2 * WORDS, backend=backend,
        )  # fmt: skip
        loss = (logp * upstream[0]).sum()
        if entropy == "differentiated":
            loss = loss + (entropies * upstream[1]).sum()
        values = [logp] if entropy == "none" else [logp, entropies]
        found.append([*values, *torch.autograd.grad(loss, ours)])
    for number, (kernel, stock, exact) in enumerate(zip(*found, strict=True)):
        assert kernel.dtype == stock.dtype
        error, theirs = ((one.double() - exact).norm() / exact.norm() for one in (kernel, stock))
        assert error <= 1.5 * theirs + 2e-6, f"result {number}: {error:.2e} against {theirs:.2e}"


def test_extreme_logits():
    """Logits far apart overflow nothing: a sure word has log-prob 0 and no entropy, an impossible one its logit."""
    hidden, weight = torch.ones(1, 1, device=DEVICE), torch.zeros(WORDS, 1, device=DEVICE)
    weight[3], weight[4] = 3e4, -3e4
    rows, labels = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.tensor([3, 4], device=DEVICE)
    logp, entropy, _ = token_logprobs(hidden, weight, None, rows, labels, return_entropy=True, backend="triton")
    assert logp.tolist() == [0, -6e4] and entropy.tolist() == [0, 0]


def test_likeliest_labels():
    """Which labels are the likeliest, row by row."""
    logits = torch.tensor([[1.0, 3, 3, 0], [-1, -2, -3, -0.5]], device=DEVICE)
    rows, labels = torch.tensor([0, 0, 1, 1], device=DEVICE), torch.tensor([1, 0, 3, 0], device=DEVICE)
    found = token_logprobs(
        logits, torch.eye(4, device=DEVICE), None, rows, labels, return_top1=True, max_chunk_elements=4,
        backend="triton",
    )  # fmt: skip
    assert found.is_top1.tolist() == [1, 0, 1, 0]


def test_no_labels():
    """Nothing to score stays connected, with zero gradients."""
    hidden, weight = inputs(torch.float32, False)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    logp, *_ = token_logprobs(hidden, weight, None, none, none, backend="triton")
    logp.sum().backward()
    assert logp.shape == (0,) and not hidden.grad.any() and not weight.grad.any()


def test_refuses_a_cap():
    """Which the kernels do not know; chosen by device, the torch backend runs."""
    hidden, weight = inputs(torch.float32, False)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="expected no cap and at most float32"):
        token_logprobs(hidden, weight, None, none, none, softcap=30.0, backend="triton")
