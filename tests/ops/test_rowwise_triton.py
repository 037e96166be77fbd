"""Norms, gates and decays: Triton's kernels (in its interpreter, or on a GPU in bf16 too) and the reference.

Both are compared with the reference in float64. Tolerance: a kernel may be off by 1.5 times what the reference in the
kernel's own dtype is, plus 2e-6 of the tensor's size for float32 sums in another order (of at most 300 terms).
"""

import pytest
import torch

pytest.importorskip("triton")

from harts_hf.kernels import rowwise
from harts_hf.kernels.rowwise.triton_norm import _PROGRAMS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# Columns, then rows: padded columns; several rows in a tile; more tiles than programs on a GPU.
SIZES = [(48, (2, 37)), (128, (1, 21, 5)), (2100, (3,))] + [(128, (_PROGRAMS * 40,))] * (DEVICE == "cuda")


def draw(*shape, scale=1.0, dtype=torch.float32):
    """Normal numbers that require gradients."""
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype).requires_grad_()


def assert_as_good(run, inputs, **options):
    """Outputs and all gradients; the kernel reads and is given strided rows."""
    results = []
    for backend, dtype in (("triton", None), ("reference", None), ("reference", torch.float64)):
        given = [one.detach().to(dtype or one.dtype).requires_grad_() for one in inputs]
        made = {key: dtype if key == "dtype" and dtype else value for key, value in options.items()}
        out = run(*given, backend=backend, **made)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        results.append([out, *torch.autograd.grad(out, given, upstream)])
    for number, (kernel, stock, exact) in enumerate(zip(*results, strict=True)):
        assert kernel.dtype == stock.dtype and kernel.shape == stock.shape
        size = exact.norm()
        error, theirs = ((one.double() - exact).norm() / size for one in (kernel, stock))
        assert error <= 1.5 * theirs + 2e-6, f"result {number}: {error:.2e} against {theirs:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize(("offset", "rounds_first"), [(0.0, True), (0.0, False), (1.0, False)])
def test_rms_norm(columns, rows, offset, rounds_first, dtype):
    """As Llama, Olmo and Qwen3.5 have it."""
    inputs = [draw(*rows, columns, dtype=dtype), draw(columns, dtype=dtype)]
    assert_as_good(rowwise.rms_norm, inputs, eps=1e-6, offset=offset, rounds_first=rounds_first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize(("activation", "rounds_first"), [("sigmoid", False), ("silu", True)])
def test_gated_rms_norm(columns, rows, activation, rounds_first, dtype):
    """As KDA and GDN have it."""
    inputs = [draw(*rows, columns, dtype=dtype), draw(*rows, columns, dtype=dtype), draw(columns, dtype=dtype)]
    assert_as_good(rowwise.gated_rms_norm, inputs, eps=1e-5, activation=activation, rounds_first=rounds_first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_swiglu(columns, rows, dtype):
    """SiLU and product."""
    assert_as_good(rowwise.swiglu, [draw(*rows, columns, dtype=dtype), draw(*rows, columns, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_decay_gate(columns, rows, bound, dtype):
    """Bounded (Ling) and not (Kimi), inputs from -25 to 25 among them, where softplus is 0 or its input."""
    x = draw(*rows, columns, scale=8.0, dtype=dtype)
    inputs = [x, draw(4, scale=0.5), draw(columns)]
    assert_as_good(rowwise.decay_gate, inputs, bound=bound, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("columns", "turned"), [(24, 24), (40, 12), (256, 64)])
def test_rotate(columns, turned, interleaved, dtype):
    """All columns, or some; rows of heads that stand in a wider tensor, as slices of a projection do."""
    wide = draw(1, 9, 3, columns + 8, dtype=dtype).detach()
    angles = torch.randn(1, 9, turned // 2, device=DEVICE).repeat(1, 1, 2)
    x = wide[..., 8:].transpose(1, 2)

    def run(x, backend):
        return rowwise.rotate(x, angles.cos().to(x), angles.sin().to(x), interleaved=interleaved, backend=backend)

    assert_as_good(run, [x])
    # No turn is no change, and a quarter turn of the first pair is (a, b) -> (-b, a).
    still, none = torch.ones(1, 9, turned, device=DEVICE), torch.zeros(1, 9, turned, device=DEVICE)
    plain = rowwise.rotate(x.float(), still, none, interleaved=False, backend="triton")
    assert torch.equal(plain, x.float())
    quarter = rowwise.rotate(x.float(), none, still, interleaved=interleaved, backend="triton")
    assert torch.equal(quarter[..., 0], -x[..., 1 if interleaved else turned // 2].float())
    assert torch.equal(quarter[..., turned // 2], x[..., 0].float())


def test_norm_of_a_slice_and_of_nothing():
    """Rows of a wider tensor are read in place; a batch without rows has zero gradients."""
    wide, weight = draw(6, 10), draw(4)
    out = rowwise.rms_norm(wide[:, 3:7], weight, eps=1e-6, backend="triton")
    torch.testing.assert_close(out, rowwise.rms_norm(wide[:, 3:7], weight, eps=1e-6, backend="reference"))
    out.sum().backward()
    assert wide.grad[:, 3:7].all() and not wide.grad[:, :3].any()
    empty = draw(0, 4)
    rowwise.rms_norm(empty, weight, eps=1e-6, backend="triton").sum().backward()
    assert empty.grad.shape == (0, 4)


def test_wider_weights():
    """A float32 weight makes a row that is rounded first float32, as stock modules do."""
    x, weight = draw(5, 8).detach().to(torch.bfloat16).requires_grad_(), draw(8)
    for backend in ("triton", "reference"):
        assert rowwise.rms_norm(x, weight, eps=1e-6, rounds_first=True, backend=backend).dtype == torch.float32
        assert rowwise.rms_norm(x, weight, eps=1e-6, backend=backend).dtype == torch.bfloat16


def test_refusals():
    """What is wrong is named."""
    x = draw(3, 8)
    with pytest.raises(ValueError, match=r"expected weight of shape \[8\], got \[4\]"):
        rowwise.rms_norm(x, draw(4), eps=1e-6)
    with pytest.raises(ValueError, match=r"expected gate of shape \[3, 8\], got \[2, 8\]"):
        rowwise.gated_rms_norm(x, draw(2, 8), draw(8), eps=1e-6, activation="silu")
    with pytest.raises(ValueError, match="expected activation to be one of sigmoid, silu, got 'relu'"):
        rowwise.gated_rms_norm(x, x, draw(8), eps=1e-6, activation="relu")
    with pytest.raises(ValueError, match="expected gate and up of one dtype"):
        rowwise.swiglu(x, x.double())
    with pytest.raises(ValueError, match="expected x of a multiple of 3 columns, got 8"):
        rowwise.decay_gate(x, draw(3), draw(8), bound=None, dtype=torch.float32)
    with pytest.raises(ValueError, match="expected angles of an even number of at most 8 columns, got 10"):
        rowwise.rotate(draw(1, 2, 3, 8), draw(1, 3, 10), draw(1, 3, 10), interleaved=False)
    with pytest.raises(ValueError, match="expected at most float32, got float64"):
        rowwise.rms_norm(x.double(), draw(8).double(), eps=1e-6, backend="triton")
