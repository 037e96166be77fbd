"""Version checks of the GPU path; FLA itself is not needed."""

import pytest

from harts_hf.errors import UnsupportedModelError
from harts_hf.kernels.gpu_versions import check_fla, check_triton, parse_version, switch_off_fla_backends

HOPPER, AMPERE = (9, 0), (8, 0)


def test_versions_are_parsed_by_their_numbers():
    """Suffixes do not count."""
    assert parse_version("3.7.1+git1234") == (3, 7, 1)
    assert parse_version("0.6.0rc1") == (0, 6, 0)


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.7.0"])
def test_triton_with_wrong_gate_gradients_is_refused_on_hopper(version: str):
    """3.4 to 3.7.0 compute wrong gate gradients on Hopper only; the message says what to install."""
    with pytest.raises(UnsupportedModelError, match=r"got " + version + r" \(pip install 'triton>=3.7.1'\)"):
        check_triton(version, HOPPER)
    check_triton(version, AMPERE)


@pytest.mark.parametrize("version", ["3.3.1", "3.7.1", "3.9.0", "4.0"])
def test_other_tritons_pass(version: str):
    """Before and after the broken range."""
    check_triton(version, HOPPER)


@pytest.mark.parametrize("version", ["0.5.2", "0.7.0", "1.0"])
def test_other_fla_versions_are_refused(version: str):
    """Stage functions are no public interface: only the version that was read passes."""
    with pytest.raises(UnsupportedModelError, match=r"expected Flash Linear Attention 0.6.x, got "):
        check_fla(version)
    check_fla("0.6.3")


def test_forced_backends_are_refused_and_others_switched_off(monkeypatch: pytest.MonkeyPatch):
    """A backend that the environment forces on is named; else all are off afterwards."""
    for name in ("FLA_TILELANG", "FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_INTRACARD_CP", "FLA_GLUON", "FLA_CONV_GLUON"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("FLA_TILELANG", "1")
    with pytest.raises(UnsupportedModelError, match="got FLA_TILELANG set"):
        switch_off_fla_backends()
    monkeypatch.setenv("FLA_TILELANG", "0")
    switch_off_fla_backends()
