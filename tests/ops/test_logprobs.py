"""Log-probabilities and entropies: `pytest tests/ops/test_logprobs.py`."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from trl.kernels import ChunkedLogProbFunction

from harts_hf.kernels.logprobs import token_logprobs

VOCABULARY, WIDTH = 23, 6
NAMES = ("hidden", "weight", "bias")


def tensors(num_rows: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    shapes = ((num_rows, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@given(
    rows=st.lists(st.integers(0, 8), max_size=25).map(sorted),
    chunk_rows=st.integers(1, 9),
    temperature=st.sampled_from([1.0, 0.6]),
    logit_scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([None, 2.0]),
    has_bias=st.booleans(),
    return_entropy=st.booleans(),
)
@settings(max_examples=60)
def test_equals_all_logits_at_once(rows, chunk_rows, temperature, logit_scale, softcap, has_bias, return_entropy):
    """Values and all gradients equal the reference's to fp64 rounding, for any rows, labels and chunks."""
    rows = torch.tensor(rows, dtype=torch.int64)
    labels = (rows * 7 + torch.arange(len(rows)) // 2) % VOCABULARY  # a row may have a label twice
    results = []
    for backend in ("torch", "reference"):
        leaves = [x.requires_grad_() for x in tensors(9)]
        logp, entropy, _ = token_logprobs(
            leaves[0],
            leaves[1],
            leaves[2] if has_bias else None,
            rows,
            labels,
            temperature=temperature,
            logit_scale=logit_scale,
            softcap=softcap,
            return_entropy=return_entropy,
            max_chunk_elements=chunk_rows * VOCABULARY,
            backend=backend,
        )
        loss = (logp * torch.linspace(-1, 2, len(rows), dtype=torch.float64)).sum()
        if entropy is not None:
            loss = loss + (entropy * torch.linspace(1, -3, len(rows), dtype=torch.float64)).sum()
        loss.backward()
        results.append([logp, *([entropy] if return_entropy else []), *(x.grad for x in leaves if x.grad is not None)])
    assert len(results[0]) == len(results[1])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_likeliest_labels(backend):
    """The first of equal logits is the likeliest; a row says so of each of its labels, in chunks of one row."""
    logits = torch.tensor([[1.0, 3, 3, 0], [-1, -2, -3, -0.5], [5, 5, 5, 5]])
    rows, labels = torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.tensor([1, 2, 0, 3, 0, 0, 3])
    found = token_logprobs(
        logits, torch.eye(4), None, rows, labels, return_top1=True, max_chunk_elements=4, backend=backend
    )
    assert found.is_top1.tolist() == [1, 0, 0, 1, 0, 1, 0] and found.entropy is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_trl(dtype):
    """Where every row has one label, TRL's chunked function gives the same values and gradients to its rounding."""
    rows = torch.arange(9)
    labels = (rows * 5) % VOCABULARY
    ours, theirs = ([x.requires_grad_() for x in tensors(9, dtype)] for _ in range(2))
    mine = token_logprobs(*ours, rows, labels, temperature=0.7, softcap=3.0, return_entropy=True, return_top1=True)
    *stock, _, _, is_top1 = ChunkedLogProbFunction.apply(*theirs, labels, 0.7, 8, 3.0, 1.0, ("entropy", "is_top1"))
    assert torch.equal(mine.is_top1, is_top1.float()) and not mine.is_top1.requires_grad
    mine = mine[:2]
    for value, expected in zip(mine, stock, strict=True):
        assert value.dtype == torch.float32
        # Both in fp32 from equal logits; they add the same 23 terms in other orders. Measured 4.8e-7.
        torch.testing.assert_close(value, expected, rtol=0, atol=4e-6)
    for outputs in (mine, stock):
        (outputs[0].sum() + outputs[1].square().sum()).backward()
    for name, x, y in zip(NAMES, ours, theirs, strict=True):
        # Both round gradients to the dtype once or twice: a few units in the last position of the largest.
        step = torch.finfo(dtype).eps * y.grad.abs().max().item()
        torch.testing.assert_close(
            x.grad, y.grad, rtol=0, atol=4 * step, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_no_labels_stay_connected():
    """Without labels the backward gives hidden and weight gradients of zeros, not None."""
    leaves = [x.requires_grad_() for x in tensors(3)]
    none = torch.zeros(0, dtype=torch.int64)
    logp, entropy, _ = token_logprobs(*leaves, none, none, return_entropy=True)
    (logp.sum() + entropy.sum()).backward()
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_chunks_bound_the_logits(monkeypatch):
    """No matrix product yields more logits than allowed, forward or backward, and each row's are computed once."""
    from harts_hf.kernels.logprobs import torch as torch_backend

    sizes = []
    product = torch_backend._Head.product

    def counted(self, hidden, weight, bias):
        sizes.append(len(hidden) * len(weight))
        return product(self, hidden, weight, bias)

    monkeypatch.setattr(torch_backend._Head, "product", counted)
    leaves = [x.requires_grad_() for x in tensors(9)]
    rows = torch.arange(9).repeat_interleave(3)
    logp, *_ = token_logprobs(*leaves, rows, rows % VOCABULARY, max_chunk_elements=2 * VOCABULARY + 1)
    logp.sum().backward()
    assert max(sizes) <= 2 * VOCABULARY + 1
    assert sum(sizes) == 2 * 9 * VOCABULARY


def test_entropy_without_gradient_costs_no_gradient():
    """Logging an entropy leaves the gradients bitwise what they are without it."""
    grads = []
    for return_entropy in (False, True):
        leaves = [x.requires_grad_() for x in tensors(5)]
        logp, *_ = token_logprobs(*leaves, torch.arange(5), torch.arange(5), return_entropy=return_entropy)
        logp.sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert all(itertools.starmap(torch.equal, zip(*grads, strict=True)))


def test_frozen_head_needs_no_gradient():
    """Only what asks for a gradient gets one."""
    hidden, weight, bias = tensors(4)
    hidden.requires_grad_()
    logp, *_ = token_logprobs(hidden, weight, bias, torch.arange(4), torch.arange(4))
    logp.sum().backward()
    expected = torch.autograd.grad(
        -F.cross_entropy(hidden @ weight.T + bias, torch.arange(4), reduction="sum"), hidden
    )[0]
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-12, atol=1e-12)


def test_autocast_sets_the_dtype_of_the_product():
    """Under autocast fp32 tensors are multiplied in bf16, as the stock head does, and the backward agrees."""
    leaves = [x.requires_grad_() for x in tensors(4, torch.float32)]
    rows = torch.arange(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, *_ = token_logprobs(leaves[0], leaves[1], None, rows, rows)
        stock = torch.log_softmax(F.linear(leaves[0], leaves[1]).float(), -1)[rows, rows]
    torch.testing.assert_close(mine, stock, rtol=0, atol=1e-6)
    grads = [torch.autograd.grad(out.sum(), leaves[:2]) for out in (mine, stock)]
    for name, x, y in zip(NAMES, *grads, strict=False):
        assert x.dtype == torch.float32
        torch.testing.assert_close(
            x, y, rtol=0, atol=4 * 2**-8 * y.abs().max().item(), msg=lambda text, name=name: f"{name}: {text}"
        )


def test_bad_input_is_named():
    """Rows out of order, labels out of the vocabulary, other dtypes and settings are refused."""
    leaves, one = tensors(4), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected labels in \[0, 23\), got 23 to 23"):
        token_logprobs(*leaves, one, one + 23)
    with pytest.raises(ValueError, match=r"expected rows ascending in \[0, 4\)"):
        token_logprobs(*leaves, torch.tensor([1, 0]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="expected temperature to be more than 0, got 0"):
        token_logprobs(*leaves, one, one, temperature=0)
    with pytest.raises(ValueError, match="expected labels to be int64"):
        token_logprobs(*leaves, one, one.int())
    with pytest.raises(ValueError, match="expected weight of shape"):
        token_logprobs(leaves[0], leaves[1][:, :3], None, one, one)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_agrees_with_the_cpu(dtype):
    """The same path on a GPU: values and gradients of bf16 and fp32 inputs, sums over chunks in fp32."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rows = torch.arange(9).repeat_interleave(2)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in tensors(9, dtype)]
        labels = (rows * 7 + torch.arange(18)) % VOCABULARY
        logp, entropy, _ = token_logprobs(
            *leaves, rows.to(device), labels.to(device), return_entropy=True, max_chunk_elements=4 * VOCABULARY
        )
        (logp.sum() + entropy.square().sum()).backward()
        results.append([x.cpu() for x in (logp, entropy, *(leaf.grad for leaf in leaves))])
    for mine, expected in zip(*results, strict=True):
        # The products' sums of 6 or 23 terms may round to the neighbouring number of the dtype.
        step = torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(mine, expected, rtol=0, atol=8 * step)
