"""Row gather: `pytest tests/ops/test_gather.py`."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts_hf.batch import GatherIndex
from harts_hf.kernels.checks import choose_backend
from harts_hf.kernels.gather import gather_rows


def sums_by_hand(grad: torch.Tensor, index: np.ndarray, num_rows: int) -> torch.Tensor:
    """Each row's positions added one after another in float32 or wider, rounded to the dtype of ``grad`` once."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    total = wide.new_zeros(num_rows, *grad.shape[1:])
    for position, row in enumerate(index.tolist()):
        if row >= 0:
            total[row] += wide[position]
    return total.to(grad.dtype)


@given(data=st.data(), num_rows=st.integers(1, 8), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=50)
def test_reads_rows_and_adds_their_gradients_in_order(data, num_rows, dtype):
    """Outputs are the rows, zeros at -1; gradients are the ordered wide sums, bit for bit."""
    index = np.array(data.draw(st.lists(st.integers(-1, num_rows - 1), max_size=40)), np.int64)
    x = torch.randn(num_rows, 2, 3).to(dtype).requires_grad_()
    out = gather_rows(x, GatherIndex.build(index, num_rows))
    expected = torch.cat([x.detach(), x.new_zeros(1, 2, 3)])[index]
    assert out.dtype == dtype and torch.equal(out, expected)
    grad = torch.randn(len(index), 2, 3).to(dtype)
    out.backward(grad)
    assert torch.equal(x.grad, sums_by_hand(grad, index, num_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [3, 40, 200])
def test_rows_read_many_times_keep_the_order(num_rows, dtype):
    """Many rounds with many rows, then a tail of few rows: still the ordered wide sum, bit for bit."""
    rng = np.random.default_rng(0)
    index = np.minimum(rng.geometric(min(0.9, 8 / num_rows), 3000) - 1, num_rows - 1)  # few rows are read very often
    x = torch.randn(num_rows, 5).to(dtype).requires_grad_()
    grad = torch.randn(len(index), 5).to(dtype)
    gather_rows(x, GatherIndex.build(index, num_rows)).backward(grad)
    assert torch.equal(x.grad, sums_by_hand(grad, index, num_rows))


def test_every_row_read_often_in_bfloat16():
    """Rounds that cover all rows add up in float32 too."""
    index = np.repeat(np.arange(40), 5)
    x = torch.zeros(40, 3, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(200, 3).bfloat16()
    gather_rows(x, GatherIndex.build(index, 40)).backward(grad)
    assert torch.equal(x.grad, sums_by_hand(grad, index, 40))


def test_bfloat16_gradients_are_rounded_once():
    """1 + 256 * 2^-9 is lost when every addition rounds to bfloat16, and kept when the sum is rounded once."""
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    table = GatherIndex.build(np.zeros(257, np.int64), 1)
    grad = torch.full((257, 1), 2.0**-9, dtype=torch.bfloat16)
    grad[0] = 1
    gather_rows(x, table).backward(grad)
    assert x.grad.item() == 1.5


def test_missing_rows_read_zeros_even_beside_nan():
    """A position of -1 is zero whatever the first row holds, and without rows all positions are."""
    x = torch.full((2, 3), float("nan"))
    assert torch.equal(gather_rows(x, GatherIndex.build(np.array([-1, -1]), 2)), torch.zeros(2, 3))
    assert torch.equal(gather_rows(x[:0], GatherIndex.build(np.array([-1]), 0)), torch.zeros(1, 3))


def test_a_gpu_has_no_default_of_its_own_for_float64():
    """Where its kernels compute in float32; asked for by name it is refused by the kernel itself."""
    chosen = partial(choose_backend, "op", None, torch.device("cuda"), by_device={"cpu": "torch", "cuda": "triton"})
    assert chosen(dtype=torch.float32) == chosen() == "triton" and chosen(dtype=torch.float64) == "torch"


def test_backends_agree():
    """The reference gives the same rows and, in float64, the same sums to rounding."""
    index = np.random.default_rng(1).integers(-1, 9, 60)
    table = GatherIndex.build(index, 9)
    grads = []
    for backend in ("torch", "reference"):
        x = torch.arange(27.0, dtype=torch.float64).view(9, 3).requires_grad_()
        out = gather_rows(x, table, backend=backend)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-15, atol=0)


def test_bad_input_is_named():
    """Wrong row counts, dtypes and backends say what was expected and what came."""
    table = GatherIndex.build(np.array([0, 1]), 2)
    with pytest.raises(ValueError, match=r"expected x with 2 rows, got shape \[3, 1\]"):
        gather_rows(torch.zeros(3, 1), table)
    with pytest.raises(ValueError, match=r"floating point, got torch.int64"):
        gather_rows(torch.zeros(2, 1, dtype=torch.int64), table)
    with pytest.raises(ValueError, match=r"one of \[.*'reference', 'torch'.*got 'numpy'"):
        gather_rows(torch.zeros(2, 1), table, backend="numpy")
