"""``driftgate certify``: the bit-exact invariants and the tolerance, of driftgate's kernels or of somebody else's."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from driftgate.errors import DriftgateError, EmptyRunError, InputError, UsageError, unknown_name

if TYPE_CHECKING:
    from driftgate.accuracy.certify import CaseGroup, Kernels
    from driftgate.accuracy.records import BitwiseRecord, ToleranceRecord
    from driftgate.accuracy.tolerance import ToleranceGroup
    from driftgate.accuracy.user_kernels import UserKernel
    from driftgate.accuracy.workers import Task
    from driftgate.kernels.contract import Backend

__all__ = ["certify"]

R = TypeVar("R", bound="BitwiseRecord | ToleranceRecord")

DECODE_INVARIANTS = ("I1", "I4", "I7")
"""What can be asked of a function that takes one step: no buffer, no copy, no flush."""
YOURS_AGAINST_OURS = "your baseline against driftgate's"
MOST_JOBS = {"triton": 16, "triton-interpret": 2, "torch": 1}


class Bits(Enum):
    """What a difference in bits between a user's decode function and driftgate's baseline does."""

    REQUIRE = "require"
    REPORT = "report"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What to certify, checked; a worker makes everything else from it.

    Attributes:
        backend: by name, on ``device``.
        recurrences: by name.
        lengths, formats: empty for the defaults.
        seed: of inputs and states.
        kernel: ``package.module:function`` of somebody else's kernel, None for driftgate's own.
    """

    backend: Backend
    device: str
    recurrences: tuple[str, ...]
    lengths: tuple[int, ...]
    formats: tuple[str, ...]
    seed: int
    kernel: str | None = None


def certify(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, triton, triton-interpret or torch.")] = "auto",
    recurrence: Annotated[
        list[str] | None, typer.Option(help="gdn, kda or mamba2; repeatable; default all, or what --kernel says.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="L; repeatable; default 1 2 3 5 8 16, and 32 on a GPU.")
    ] = None,
    number_format: Annotated[
        list[str] | None, typer.Option("--format", help="Format; repeatable; default fp32 bf16 fp16 fp8 nvfp4.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    kernel: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Your kernel, e.g. mykernels:step; see kernels/README.md."),
    ] = None,
    bits: Annotated[
        Bits,
        typer.Option(help="Bits of a decode function of yours that differ from driftgate's baseline: fail, or tell."),
    ] = Bits.REQUIRE,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; default up to 16 on a GPU, 2 interpreted, 1 for torch.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit file, a test for each case.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on standard output and nothing else.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Certify kernels: bit-exact invariants, then the error of outputs and states against FP64.

    Without a GPU the Triton kernels run under Triton's interpreter, which takes minutes. With --kernel the same cases
    run on a kernel of yours. Exit code 1: bits differ or an error is above its bound.
    """
    from driftgate import console
    from driftgate.accuracy.workers import run_tasks

    choices = _choose(device, backend, recurrence, length, number_format, seed, kernel)
    if junit is not None and not junit.absolute().parent.is_dir():
        raise InputError(f"--junit {junit}: there is no folder {junit.absolute().parent}; make it first")
    _enter_interpreter(choices.backend.value)
    found, choices = _prepare(choices)
    if bits is Bits.REPORT and (found is None or not found.decode_only):
        raise UsageError("--bits report: only a decode function of --kernel is compared with driftgate's baseline")
    if bits is Bits.REPORT and found is not None and "fp32" not in found.formats:
        raise UsageError(f"--bits report: {found.name} stores no fp32 state, so that no tolerance would judge it")
    tasks, n_bitwise = _list_tasks(choices, found)
    jobs = jobs or min(MOST_JOBS[choices.backend.value], len(os.sched_getaffinity(0)))
    with console.progress("cases", sum(task.size for task in tasks), not (quiet or as_json)) as advance:
        results = run_tasks(tasks, jobs=jobs, progress=advance)
    bitwise = [record for records in results[:n_bitwise] for record in records]
    tolerance = [record for records in results[n_bitwise:] for record in records]
    reported = ("I1",) if bits is Bits.REPORT else ()
    raise typer.Exit(_report(choices, bitwise, tolerance, reported=reported, junit=junit, as_json=as_json, quiet=quiet))


def _choose(
    device: str,
    backend: str,
    recurrences: Sequence[str] | None,
    lengths: Sequence[int] | None,
    formats: Sequence[str] | None,
    seed: int,
    kernel: str | None,
) -> Choices:
    """Check what the command line alone shows.

    Raises:
        UsageError: an unknown name, or a backend that the device does not have.
    """
    from driftgate.accuracy.models import resolve_device
    from driftgate.kernels.contract import Backend, Recurrence
    from driftgate.quant import get_format

    known = [kind.value for kind in Recurrence]
    for name in recurrences or ():
        if name not in known:
            raise unknown_name("recurrence", name, known)
    if kernel is not None and recurrences is not None and len(set(recurrences)) > 1:
        raise UsageError("--kernel: one kernel computes one recurrence; give --recurrence once")
    if seed < 0:
        raise UsageError(f"--seed {seed}: expected 0 or more")
    backends = [kind.value for kind in Backend]
    if backend not in ("auto", *backends):
        raise unknown_name("backend", backend, ["auto", *backends])
    device = resolve_device("cpu" if device == "auto" and backend == Backend.TRITON_INTERPRET.value else device)
    on_gpu = device.startswith("cuda")
    if backend == "auto":
        backend = (Backend.TRITON if on_gpu else Backend.TRITON_INTERPRET).value
    if backend != Backend.TORCH.value and on_gpu != (backend == Backend.TRITON.value):
        raise UsageError(f"--backend {backend}: not on device {device}; give --device {'cpu' if on_gpu else 'cuda'}")
    return Choices(
        backend=Backend(backend),
        device=device,
        recurrences=tuple(dict.fromkeys(recurrences or ())),
        lengths=tuple(dict.fromkeys(lengths or ())),
        formats=tuple(dict.fromkeys(get_format(name).name for name in formats or ())),
        seed=seed,
        kernel=kernel,
    )


def _enter_interpreter(backend: str) -> None:
    """Begin again with TRITON_INTERPRET=1 where it has to be set, since Triton reads it when it is imported.

    Raises:
        UsageError: it is set and would keep the kernels from the GPU.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton-interpret" and not interpreted:
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], {**os.environ, "TRITON_INTERPRET": "1"})
    if backend == "triton" and interpreted:
        raise UsageError("--backend triton: TRITON_INTERPRET=1 is set; unset it, or give --device cpu")


def _prepare(choices: Choices) -> tuple[UserKernel | None, Choices]:
    """Find the kernel, if one was named, and what it limits the choices to.

    Raises:
        UsageError: a length or format that the kernel does not have.
        InputError: the kernel cannot be used.
    """
    from dataclasses import replace

    from driftgate.accuracy.user_kernels import load_kernel

    if choices.kernel is None:
        return None, choices
    found = load_kernel(choices.kernel, recurrence=next(iter(choices.recurrences), None))
    choices = replace(choices, recurrences=(found.recurrence.value,))
    if not found.decode_only:
        return found, choices
    if set(choices.lengths) - {1}:
        raise UsageError(f"--length: {found.name} takes one step and has no buffer, so L is 1; leave --length out")
    other = [name for name in choices.formats if name not in found.formats]
    if other:
        raise UsageError(
            f"--format {other[0]}: {found.name} says that it stores {', '.join(found.formats)}; "
            "its attribute formats can name fp32, bf16 and fp16"
        )
    return found, replace(choices, lengths=(1,), formats=choices.formats or found.formats)


def _list_tasks(choices: Choices, found: UserKernel | None) -> tuple[list[Task], int]:
    """Groups of bit-exact cases, then groups of tolerance cases, and how many of the former there are."""
    from driftgate.accuracy.certify import DEFAULT_LENGTHS, list_groups
    from driftgate.accuracy.tolerance import list_tolerance_groups
    from driftgate.accuracy.user_kernels import limit_groups
    from driftgate.accuracy.workers import Task
    from driftgate.kernels.contract import Backend, Readout, Recurrence

    common: dict[str, Any] = {"backend": choices.backend}
    if choices.recurrences:
        common["recurrences"] = tuple(Recurrence(name) for name in choices.recurrences)
    if choices.lengths:
        common["lengths"] = choices.lengths
    only: dict[str, Any] = {"formats": choices.formats} if choices.formats else {}
    if not choices.lengths and choices.backend is Backend.TRITON:
        only["lengths"] = (*DEFAULT_LENGTHS, 32)  # 65 steps: too slow for the interpreter
    if found is not None and found.decode_only:
        only["invariants"] = DECODE_INVARIANTS
    groups = list_groups(**common, **only)
    if found is not None and found.decode_only:
        groups = limit_groups(groups)
    measured = list_tolerance_groups(**common)
    if found is not None and found.decode_only:  # one way to form an output, and the bounds are those of FP32 states
        measured = [g for g in measured if g.plans[0].readout is Readout.OUTPUT_ONLY and "fp32" in found.formats]
    tasks = [Task(name=str(g), size=g.n_records, call=partial(certify_group, g, choices)) for g in groups]
    tasks += [Task(name=str(g), size=g.n_records, call=partial(measure_group, g, choices)) for g in measured]
    return tasks, len(groups)


def certify_group(group: CaseGroup, choices: Choices) -> list[BitwiseRecord]:
    """Run a group of bit-exact cases in this process; errors as ``driftgate.accuracy.certify.run_group`` has them."""
    from driftgate.accuracy.certify import find_kernels, run_group

    found = _load(choices)
    kernels = None if found is None else found.kernels
    if found is not None and found.decode_only and group.cases[0].invariant == "I1":
        kernels = found.beside(find_kernels(group.recurrence, choices.backend, group.shape))
    return _run(run_group, group, choices, found, kernels)


def measure_group(group: ToleranceGroup, choices: Choices) -> list[ToleranceRecord]:
    """Run a group of tolerance cases in this process."""
    from driftgate.accuracy.tolerance import run_tolerance_group

    found = _load(choices)
    return _run(run_tolerance_group, group, choices, found, None if found is None else found.kernels)


def _run(
    function: Callable[..., list[R]],
    group: CaseGroup | ToleranceGroup,
    choices: Choices,
    found: UserKernel | None,
    kernels: Kernels | None,
) -> list[R]:
    """Run a group; what a user's kernel raises is told as its own error."""
    where = {"backend": choices.backend, "device": choices.device, "seed": choices.seed}
    try:
        records = function(group, **where, implementation=kernels)
    except Exception as error:
        if found is None or (isinstance(error, DriftgateError) and not isinstance(error, EmptyRunError)):
            raise
        if isinstance(error, EmptyRunError):
            if not found.decode_only:
                raise
            raise InputError(f"--kernel {found.name}: it has to update state in place; {error}") from error
        told = " ".join(str(error).split()) or "no message"
        raise InputError(f"--kernel {found.name}: {type(error).__name__}: {told}; --debug shows where") from error
    return records if found is None else [_name_kernel(record, found) for record in records]


def _load(choices: Choices) -> UserKernel | None:
    from driftgate.accuracy.user_kernels import load_kernel

    return None if choices.kernel is None else load_kernel(choices.kernel, recurrence=choices.recurrences[0])


def _name_kernel(record: R, found: UserKernel) -> R:
    """The record with the kernel's name, and with what was done to it, in its case."""
    from driftgate.accuracy.cases import Check

    case: dict[str, Any] = {**record.case, "kernel": found.name}
    if found.decode_only and "readout" in case:
        case["readout"] = "decode"
    if found.decode_only and case.get("check") == Check.BASELINE.value:
        against_ours = getattr(record, "invariant", None) == "I1"
        case["check"] = YOURS_AGAINST_OURS if against_ours else "padded rows, slots of no row, two runs"
    return cast(R, record.model_copy(update={"case": case}))


def _report(
    choices: Choices,
    bitwise: Sequence[BitwiseRecord],
    tolerance: Sequence[ToleranceRecord],
    *,
    reported: tuple[str, ...],
    junit: Path | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Print and write what was found; the exit code."""
    from driftgate import console
    from driftgate.reports import certificate
    from driftgate.reports.junit import render_certificate

    failures = certificate.find_failures(bitwise, tolerance, reported=reported)
    subject = f"{choices.kernel or 'driftgate'} on {choices.backend.value}"
    summary = certificate.summary_line(bitwise, tolerance, subject=subject, reported=reported)
    if junit is not None:
        render_certificate(bitwise, tolerance, junit, summary=summary, reported=reported)
    if as_json:
        document = {
            "schema_version": 1,
            "bitwise": [record.model_dump() for record in bitwise],
            "tolerance": [record.model_dump() for record in tolerance],
        }
        console.write(json.dumps(document, indent=1) + "\n")
    elif not quiet:
        shown = [r for r in bitwise if not r.equal and r.invariant in reported] + failures
        blocks = [part for block in certificate.failure_blocks(shown) for part in ("", block)]
        tables: list[Any] = [certificate.bits_table(bitwise, reported=reported)]
        if tolerance:
            tables += ["", certificate.tolerance_table(tolerance)]
        console.show(*tables, *blocks, *_explain(choices, bitwise, reported), "", summary)
    return 1 if failures else 0


def _explain(choices: Choices, bitwise: Sequence[BitwiseRecord], reported: tuple[str, ...]) -> list[str]:
    """What a difference from driftgate's baseline means, where a user's kernel has one."""
    differ = [r for r in bitwise if r.invariant == "I1" and not r.equal]
    if choices.kernel is None or not any(r.case.get("check") == YOURS_AGAINST_OURS for r in differ):
        return []
    told = "told only (--bits report)" if reported else "a failure; --bits report judges by all else"
    return [
        "",
        "I1 compares bits with driftgate's baseline: another order of additions or",
        "another place of rounding differs there. Whether it is accurate is what the",
        f"tolerance says. Differing bits are {told}.",
    ]
