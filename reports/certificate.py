"""A certificate for a terminal and for CI: what was compared, what differs, and where the first difference is.

Bits are equal or not; a tolerance is kept or not. The two stand apart everywhere: a kernel that adds in another order
differs in bits and keeps its tolerance. ``reported`` names the invariants whose differences are told and fail nothing.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from driftgate.accuracy.records import BitwiseRecord

if TYPE_CHECKING:
    from driftgate.accuracy.records import ToleranceRecord

__all__ = [
    "bits_table",
    "bitwise_block",
    "describe_case",
    "failure_blocks",
    "find_failures",
    "summary_line",
    "tell_failure",
    "tolerance_block",
    "tolerance_table",
]

SHOWN_FAILURES = 10
WIDTH = 80
_TOLD = ("plan", "check", "activation", "key_heads", "value_heads", "d_k", "d_v")
"""Keys of a case that its one-line description uses up; a block tells the others."""
_QUIET = (
    "n_compared", "steps", "recurrence_format", "read_format", "readout", "length", "stochastic", "dot", "flushes",
)  # fmt: skip


def bits_table(records: Sequence[BitwiseRecord], *, reported: Collection[str] = ()) -> Table:
    """Cases, elements compared and failed cases by recurrence and invariant."""
    table = _make_table(
        ("Recurrence", "left"), ("Invariant", "left"), ("Cases", "right"), ("Elements compared", "right"),
        ("Failed", "right"),
    )  # fmt: skip
    for recurrence, invariant in dict.fromkeys((r.recurrence, r.invariant) for r in records):
        cases = [r for r in records if (r.recurrence, r.invariant) == (recurrence, invariant)]
        failed = sum(not r.equal for r in cases)
        style = "green" if not failed else "yellow" if invariant in reported else "red"
        told = f"{failed} (reported)" if failed and invariant in reported else str(failed)
        compared = sum(_count_elements(r) for r in cases)
        table.add_row(recurrence, invariant, str(len(cases)), f"{compared:,}", Text(told, style=style))
    return table


def tolerance_table(records: Sequence[ToleranceRecord]) -> Table:
    """Errors relative to the greatest FP64 result, by recurrence, readout, L, type and what was compared.

    Error is the greatest of all cases; Nearest and Bound are of the element nearest to its bound, which is what
    decides. A readout by matrix products in less than FP32 has the precision beside its name.
    """
    table = _make_table(
        ("Recurrence", "left"), ("Readout", "left"), ("L", "right"), ("Type", "left"), ("What", "left"),
        ("Error", "right"), ("Nearest", "right"), ("Bound", "right"), ("Within", "left"),
    )  # fmt: skip
    rows: dict[tuple[str, ...], list[ToleranceRecord]] = {}
    for record in records:
        rows.setdefault(_tolerance_key(record), []).append(record)
    for key, cases in rows.items():
        worst = max(cases, key=_strain)
        greatest = max(cases, key=lambda r: math.inf if r.greatest_error is None else r.greatest_error / (r.scale or 1))
        failed = sum(not r.within for r in cases)
        told = Text(f"{failed}/{len(cases)} no", style="red") if failed else Text("yes", style="green")
        numbers = (
            _tell_relative(greatest.greatest_error, greatest.scale),
            _tell_relative(worst.error, worst.scale),
            _tell_relative(worst.bound, worst.scale),
        )
        table.add_row(*key, *numbers, told)
    return table


def find_failures(
    bitwise: Sequence[BitwiseRecord], tolerance: Sequence[ToleranceRecord], *, reported: Collection[str] = ()
) -> list[BitwiseRecord | ToleranceRecord]:
    """Records that make a certificate fail, bits first."""
    bits = [r for r in bitwise if not r.equal and r.invariant not in reported]
    return [*bits, *(r for r in tolerance if not r.within)]


def summary_line(
    bitwise: Sequence[BitwiseRecord],
    tolerance: Sequence[ToleranceRecord],
    *,
    subject: str,
    reported: Collection[str] = (),
) -> str:
    """One line with both counts and the verdict; ``subject`` says what was certified, and on what."""
    unequal = sum(not r.equal for r in bitwise)
    outside = sum(not r.within for r in tolerance)
    verdict = "fail" if find_failures(bitwise, tolerance, reported=reported) else "pass"
    bits = f"bits: {len(bitwise) - unequal} of {len(bitwise)} cases equal"
    if any(not r.equal and r.invariant in reported for r in bitwise):
        bits += f" ({' '.join(sorted(reported))} reported only)"
    within = f"{len(tolerance) - outside} of {len(tolerance)} within" if tolerance else "not measured"
    return f"{verdict}: {subject}; {bits}; tolerance: {within}"


def describe_case(record: BitwiseRecord | ToleranceRecord) -> str:
    """One line that tells a case from all others of its recurrence and invariant."""
    case = record.case
    heads = f"heads {case.get('key_heads')}/{case.get('value_heads')}, {case.get('d_v')}x{case.get('d_k')}"
    parts = [case.get("check"), case.get("plan"), heads, case.get("activation")]
    if not isinstance(record, BitwiseRecord):
        parts = [record.what, case.get("plan"), f"{case.get('flushes')} flushes", heads, case.get("activation")]
    return ", ".join(str(part) for part in parts if part)


def bitwise_block(record: BitwiseRecord) -> str:
    """Lines about a case that differs: case, first difference, values, ulps, what it looks like."""
    first = record.first_different or {}
    element = first.get("element")
    place = f"step {first.get('step')}, row {first.get('row')}, head {first.get('head')}, element {element}"
    by_ulps = sorted(first.get("ulp_histogram", {}).items(), key=lambda entry: int(entry[0].partition("-")[0]))
    histogram = ", ".join(f"{ulps}: {n:,}" for ulps, n in by_ulps)
    lines = [
        f"{record.invariant} {record.recurrence}: {describe_case(record)}",
        f"  first difference: {first.get('what')} at {place}",
        f"  expected {_tell(first.get('expected'))}, got {_tell(first.get('got'))}",
        f"  {record.n_different:,} of {_count_elements(record):,} elements differ, at most {record.max_ulp:,} ulp",
        f"  elements by ulp: {histogram}",
        f"  looks like: {first.get('looks_like', 'unknown')}",
    ]
    return _wrap([*lines, *_tell_rest(record.case)])


def tolerance_block(record: ToleranceRecord) -> str:
    """Lines about a case outside its bound."""
    lines = [
        f"tolerance {record.recurrence}: {describe_case(record)}",
        f"  error {_tell_error(record.error)} against FP64, bound {record.bound:.2e} ({_strain(record):.3g} times)",
        f"  relative to the greatest result {record.scale:.3g}: error {_tell_relative(record.error, record.scale)}, "
        f"bound {_tell_relative(record.bound, record.scale)}",
    ]
    return _wrap([*lines, *_tell_rest(record.case)])


def failure_blocks(failures: Sequence[BitwiseRecord | ToleranceRecord]) -> list[str]:
    """A block for each of the first failures, and how many there are beyond."""
    blocks = [tell_failure(record) for record in failures[:SHOWN_FAILURES]]
    rest = len(failures) - len(blocks)
    return [*blocks, f"and {rest} more; --json and --junit have them all"] if rest else blocks


def tell_failure(record: BitwiseRecord | ToleranceRecord) -> str:
    """The block of either kind of record."""
    return bitwise_block(record) if isinstance(record, BitwiseRecord) else tolerance_block(record)


def _make_table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading, justify in columns:
        table.add_column(heading, justify=justify, no_wrap=True)
    return table


def _tolerance_key(record: ToleranceRecord) -> tuple[str, ...]:
    case = record.case
    readout, length, activation = (str(case.get(key, "-")) for key in ("readout", "length", "activation"))
    dot = case.get("dot", "ieee")
    return record.recurrence, readout if dot == "ieee" else f"{readout} {dot}", length, activation, record.what


def _strain(record: ToleranceRecord) -> float:
    """Error as a multiple of its bound; what is outside without a number counts as infinite."""
    if record.bound > 0 and record.error is not None:
        return record.error / record.bound
    return 0.0 if record.within else math.inf


def _count_elements(record: BitwiseRecord) -> int:
    n_compared: dict[str, int] = record.case.get("n_compared", {})
    return sum(n_compared.values())


def _tell_error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.2e}"


def _tell_relative(value: float | None, scale: float) -> str:
    """Seven characters; a result that is zero everywhere has no relative error."""
    if value is None:
        return "inf/nan"
    return f"{value / scale:.1e}" if scale else "-"


def _tell(value: object) -> str:
    """Nine digits tell every FP32 number from its neighbours."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _tell_rest(case: dict[str, Any]) -> list[str]:
    rest = {key: value for key, value in case.items() if key not in (*_TOLD, *_QUIET)}
    return [f"  {', '.join(f'{key} {value}' for key, value in rest.items())}"] if rest else []


def _wrap(lines: list[str]) -> str:
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
