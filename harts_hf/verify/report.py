"""A verdict as text."""

from collections.abc import Sequence

from harts_hf.verify.figures import Difference, Verdict
from harts_hf.verify.verdict import POOLED_FACTOR, SINGLE_FACTOR
from harts_hf.verify.ways import AGAIN, BATCHED, EXPANDED, JUDGED, ORACLE, ROUNDED, Way

SHARED = "shared"


def format_verdict(verdict: Verdict, untried: Sequence[str] = ()) -> str:
    """Tables of what was compared; the last line is ``PASS``, ``FAIL: ...``, or what was not tried.

    Args:
        verdict: to tell.
        untried: what the draws gave nothing to compare for, such as ``"shared"``. Where that is sharing itself, checks
            that pass show nothing of tree training, and the last line says so.
    """
    sections = [_log_probs(verdict), _gradients(verdict), _conclusion(verdict, untried)]
    return "\n\n".join(sections)


def _log_probs(verdict: Verdict) -> str:
    rows = [["log-probs", "largest", "RMS"]]
    rows += [[f"{way} - {EXPANDED}", *_two(verdict.differences[way])] for way in (AGAIN, BATCHED, *JUDGED)]
    rows += [[f"{way} - {ORACLE}", *_two(verdict.errors[way])] for way in verdict.errors]
    return _table(rows)


def _two(difference: Difference) -> list[str]:
    return [f"{difference.largest:.2e}", f"{difference.rms:.2e}"]


def _gradients(verdict: Verdict) -> str:
    has_oracle = verdict.reference == ORACLE
    ways: list[Way] = [AGAIN, BATCHED, *JUDGED]
    if has_oracle:
        ways.insert(0, EXPANDED)
    is_rounded = any(ROUNDED in kind.errors for kind in verdict.kinds)
    if is_rounded:
        ways.append(ROUNDED)
    baseline = EXPANDED if has_oracle else BATCHED
    rows = [["gradients of", "tensors", *ways, f"worse / {baseline}", "limit", "worst tensor"]]
    rows += [
        [
            kind.kind,
            str(kind.num_tensors),
            *(f"{kind.errors[way]:.2e}" for way in ways),
            f"{kind.ratio:.2f}",
            f"{kind.limit:.2f}",
            f"{kind.worst_ratio:.2f}",
        ]
        for kind in verdict.kinds
    ]
    if has_oracle:
        note = (
            f"RMS errors against float64, of the gradients' RMS. Limit: {POOLED_FACTOR}x expanded's error beyond the "
            f"scatter between the\ndraws (99.9 %; more draws make it sharper), at most {SINGLE_FACTOR:g}x; a single "
            f"tensor: {SINGLE_FACTOR:g}x."
        )
    else:
        note = (
            "RMS differences from expanded, of the gradients' RMS. No oracle: only errors far above rounding would "
            "be seen here."
        )
    if is_rounded:
        note += (
            "\nWhat roundings at random do to the expanded computation is nobody's error; a gradient that is lost in "
            "them is\nmeasured by what was summed to it."
        )
    return f"{_table(rows)}\n{note}"


def _conclusion(verdict: Verdict, untried: Sequence[str]) -> str:
    failures = verdict.failures
    lines = [f"{check.name}: {check.value:.3g}, at most {check.limit:.3g} expected" for check in failures]
    if verdict.passed:
        passed = f"{len(verdict.checks)} checks" + ("" if verdict.reference == ORACLE else ", without an oracle")
        if SHARED in untried:
            return (
                f"NOTHING SHARED: {passed} passed, but no two of these trajectories begin alike, so nothing of what "
                "tree training does was tried: give rollouts that share"
            )
        return f"PASS: {passed}" + "".join(f"; nothing {what} here" for what in untried)
    return "\n".join([*lines, f"FAIL: {len(failures)} of {len(verdict.checks)} checks, the first: {failures[0].name}"])


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
