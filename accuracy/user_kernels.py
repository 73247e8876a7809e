"""Somebody else's kernel, found by its name and brought to the shape that a certificate can run.

Two forms. A decode function takes one step per row on a state that it updates in place (kernels/README.md has its
signature): ``DecodeAdapter`` makes of it what driftgate's own kernels are at L = 1. An object with ``decode_step``,
``replay_step`` and ``flush_now``, called as ``driftgate.kernels.gdn`` has them, is taken as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from driftgate.accuracy.cases import CaseGroup, Check
from driftgate.errors import DriftgateError, InputError, UsageError, unknown_name
from driftgate.kernels.contract import HeadShape, Recurrence
from driftgate.kernels.pool import PAD_SLOT, StatePool
from driftgate.quant.formats import FORMATS, get_format

if TYPE_CHECKING:
    from driftgate.accuracy.certify import Kernels

__all__ = ["DecodeAdapter", "UserKernel", "limit_groups", "load_kernel", "pack_inputs"]

SIGNATURE = "(inputs, state, slots, *, scale, qk_l2norm, pad_slot)"
_METHODS = ("decode_step", "replay_step", "flush_now")


@dataclass(frozen=True, kw_only=True)
class UserKernel:
    """A kernel that was found.

    Attributes:
        name: ``package.module:function``, as the user wrote it.
        recurrence: what it computes.
        formats: formats of the state that it stores, by name; empty for kernels with a pool, which store any.
        kernels: its functions as a certificate calls them.
    """

    name: str
    recurrence: Recurrence
    formats: tuple[str, ...]
    kernels: Kernels

    @property
    def decode_only(self) -> bool:
        """Whether it is a function of one step, without replay."""
        return isinstance(self.kernels, DecodeAdapter)

    def beside(self, baseline: Kernels) -> Kernels:
        """What I1 compares: a baseline, with the decode function in the place of its replay at L = 1."""
        step, flush = self.kernels.replay_step, self.kernels.flush_now
        pair = SimpleNamespace(decode_step=baseline.decode_step, replay_step=step, flush_now=flush)
        return cast("Kernels", pair)


def load_kernel(text: str, *, recurrence: str | None = None) -> UserKernel:
    """Import a kernel; the current directory may hold its module.

    Args:
        text: ``package.module:name``, a function or an object (or class without arguments) with the three functions.
        recurrence: by name; None for what the kernel's attribute ``recurrence`` says, else ``gdn``.

    Raises:
        UsageError: no such form, an unknown recurrence, or another one than the kernel says.
        InputError: the module, the function or an attribute of it cannot be used; one line says why.
    """
    module_name, colon, path = text.partition(":")
    if not colon or not path or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"--kernel {text}: expected package.module:function")
    found: Any = _import(module_name, text)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise _missing(text, found, part) from error
    said = getattr(found, "recurrence", None)
    kind = _find_recurrence(text, said, recurrence)
    if all(callable(getattr(found, name, None)) for name in _METHODS):
        return UserKernel(name=text, recurrence=kind, formats=(), kernels=_make_object(text, found, kind))
    if not callable(found) or inspect.isclass(found):
        raise InputError(f"--kernel {text}: expected a function or an object with {', '.join(_METHODS)}")
    _check_call(text, found, SIGNATURE, (None, None, None), {"scale": 1.0, "qk_l2norm": True, "pad_slot": PAD_SLOT})
    packed = bool(getattr(found, "packed", False))
    if packed and not kind.delta_rule:
        raise InputError(
            f"--kernel {text}: packed inputs are q, k and v of gdn and kda; {kind.value} takes separate ones"
        )
    return UserKernel(
        name=text,
        recurrence=kind,
        formats=_find_formats(text, getattr(found, "formats", ("fp32",))),
        kernels=cast("Kernels", DecodeAdapter(found, name=text, packed=packed)),
    )


class DecodeAdapter:
    """A decode function under the names of driftgate's kernels.

    At L = 1 every step reads and writes the checkpoint, so that ``replay_step`` is the function itself and
    ``flush_now`` finds nothing to fold; longer buffers are refused.
    """

    def __init__(self, function: Callable[..., torch.Tensor], *, name: str, packed: bool) -> None:
        self.function, self.name, self.packed = function, name, packed

    def decode_step(
        self,
        *,
        pool: StatePool,
        layer: int,
        slots: torch.Tensor,
        pad_slot: int = PAD_SLOT,
        scale: float | None = None,
        qk_l2norm: bool = True,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """One step per row on the pool's checkpoint; arguments as ``driftgate.kernels.gdn.decode_step`` has them.

        Raises:
            InputError: the function raised, or returned something else than [B, HV, d_v] of v's type.
        """
        values = inputs["v" if pool.recurrence.delta_rule else "x"]
        if not pool.recurrence.delta_rule:
            scale, qk_l2norm = 1.0, False
        elif scale is None:
            scale = pool.shape.d_k**-0.5
        if not len(slots):  # engines launch nothing then
            return torch.empty_like(values)
        state = cast(torch.Tensor, pool.checkpoint.codes)[layer]
        given = pack_inputs(inputs) if self.packed else inputs
        try:
            out = self.function(given, state, slots, scale=scale, qk_l2norm=qk_l2norm, pad_slot=pad_slot)
        except DriftgateError:
            raise
        except Exception as error:
            told = " ".join(str(error).split()) or "no message"
            where = f"{_tell_shape(pool.shape)}, {values.dtype} activations, {state.dtype} state"
            raise InputError(
                f"--kernel {self.name} raised {type(error).__name__}: {told} (at {where}); --debug shows where"
            ) from error
        self._check_output(out, values)
        pool.checkpoint.forget()
        return out

    def replay_step(self, *, pool: StatePool, **arguments: Any) -> torch.Tensor:
        """``decode_step``, for a pool of L = 1.

        Raises:
            UsageError: a longer buffer.
        """
        if pool.options.length != 1:
            raise UsageError(
                f"--kernel {self.name}: a decode function has no buffer, expected L = 1, got {pool.options.length}"
            )
        return self.decode_step(pool=pool, **arguments)

    def flush_now(self, pool: StatePool, slots: torch.Tensor, **constants: torch.Tensor) -> None:
        """Nothing: at L = 1 no slot ever holds a buffered step."""

    def _check_output(self, out: object, values: torch.Tensor) -> None:
        expected = f"{tuple(values.shape)} {values.dtype} on {values.device}"
        if not isinstance(out, torch.Tensor):
            raise InputError(f"--kernel {self.name} returned {type(out).__name__}; expected the output {expected}")
        if (out.shape, out.dtype, out.device) != (values.shape, values.dtype, values.device):
            got = f"{tuple(out.shape)} {out.dtype} on {out.device}"
            raise InputError(f"--kernel {self.name} returned {got}; expected {expected}")


def limit_groups(groups: Sequence[CaseGroup]) -> list[CaseGroup]:
    """What can be asked of a decode function: groups of I1, to run ``beside`` a baseline, and groups of all else.

    Left out are plans with a copy, a longer buffer or stochastic rounding. The second kind asks each question of I1
    again, of the function against itself: what differs there are padded rows, slots of no row, or two runs.
    """
    limited = []
    for group in groups:
        cases = []
        for case in group.cases:
            plans = tuple(p for p in case.plans if p.length == 1 and not p.split and not p.stochastic)
            if plans:
                cases.append(replace(case, plans=plans[:1]))
        against = tuple(case for case in cases if case.check is Check.BASELINE)
        alone = tuple(replace(case, invariant="I4") if case in against else case for case in cases)
        limited += [replace(group, cases=part) for part in (against, alone) if part]
    return limited


def pack_inputs(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """q, k and v side by side, as engines keep them after the convolution.

    Args:
        inputs: q, k [B, H, d_k]; v [B, HV, d_v]; g, beta.

    Returns:
        mixed_qkv [B, 2·H·d_k + HV·d_v], all of q's heads, then k's, then v's; g and beta as they are. Where q is a view
        whose rows lie further apart than it is wide, so are the rows of mixed_qkv.
    """
    parts = [inputs[name].flatten(1) for name in ("q", "k", "v")]
    mixed = torch.cat(parts, dim=1)
    gap = inputs["q"].stride(0) - inputs["q"][0].numel()
    if gap > 0:
        mixed = torch.nn.functional.pad(mixed, (0, gap))[:, : mixed.shape[1]]
    return {"mixed_qkv": mixed} | {name: x for name, x in inputs.items() if name not in ("q", "k", "v")}


def _import(name: str, text: str) -> Any:
    """A module of the installed packages, else of the current directory."""
    try:
        with _current_directory(name, text):
            return importlib.import_module(name)
    except DriftgateError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(
                f"--kernel {text}: no module {error.name} in {Path.cwd()} or among the installed packages"
            ) from error
        raise InputError(f"--kernel {text}: {name} needs {error.name}, which is not installed") from error
    except (Exception, SystemExit) as error:
        told = " ".join(str(error).split()) or "no message"
        raise InputError(f"--kernel {text}: importing {name} raised {type(error).__name__}: {told}") from error


@contextmanager
def _current_directory(name: str, text: str) -> Iterator[None]:
    """Search the current directory last, during one import, where nothing installed has the name.

    Last, so that a file there takes the place of no package. driftgate's own root is refused: its folders ``kernels``
    and ``evals`` carry names that other packages look for.
    """
    top = name.partition(".")[0]
    if top in sys.modules or importlib.util.find_spec(top) is not None:
        yield
        return
    folder = Path.cwd()
    if (folder / "src" / "driftgate").is_dir() and (folder / "kernels").is_dir():
        raise InputError(
            f"--kernel {text}: {folder} is driftgate's own repository, whose folders would hide other packages; "
            "run it in the folder of your module"
        )
    entry = str(folder)
    sys.path.append(entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        importlib.invalidate_caches()


def _missing(text: str, owner: object, part: str) -> InputError:
    public = [name for name, value in vars(owner).items() if callable(value) and not name.startswith("_")]
    known = [name for name in public if getattr(getattr(owner, name), "__module__", None) == owner.__name__]  # type: ignore[attr-defined]
    told = str(unknown_name("function", part, known)) if known else f"unknown function {part!r}; it defines none"
    return InputError(f"--kernel {text}: {told}")


def _find_recurrence(text: str, said: object, wanted: str | None) -> Recurrence:
    known = {kind.value: kind for kind in Recurrence}
    if isinstance(said, Recurrence):
        said = said.value
    if said is not None and said not in known:
        raise InputError(f"--kernel {text}: its attribute recurrence is {said!r}; expected one of {', '.join(known)}")
    if wanted is not None and wanted not in known:
        raise unknown_name("recurrence", wanted, known)
    if said is not None and wanted is not None and said != wanted:
        raise UsageError(f"--recurrence {wanted}: {text} says that it computes {said}")
    return known[str(said or wanted or Recurrence.GDN.value)]


def _find_formats(text: str, said: object) -> tuple[str, ...]:
    plain = [name for name, fmt in FORMATS.items() if not fmt.scaled and fmt.storage != "uint8"]
    names = (said,) if isinstance(said, str) else tuple(said) if isinstance(said, list | tuple) else ()
    try:
        names = tuple(dict.fromkeys(get_format(name).name for name in names))
    except (DriftgateError, TypeError, AttributeError):
        names = ()
    if not names or not set(names) <= set(plain):
        raise InputError(
            f"--kernel {text}: its attribute formats is {said!r}; expected a tuple of {', '.join(plain)}, which one "
            "tensor holds; kernels of other formats are objects with decode_step, replay_step and flush_now"
        )
    return names


def _make_object(text: str, found: Any, recurrence: Recurrence) -> Kernels:
    """The object, made from its class where one was named, after a look at its signatures."""
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            told = " ".join(str(error).split()) or "no message"
            raise InputError(f"--kernel {text}: {found.__name__}() raised {type(error).__name__}: {told}") from error
    inputs = dict.fromkeys((*recurrence.inputs, *(() if recurrence.delta_rule else ("A", "D", "z"))))
    step = f"({', '.join(inputs)}, *, pool, layer, slots, pad_slot)"
    for name in ("decode_step", "replay_step"):
        keywords = inputs | {"pool": None, "layer": 0, "slots": None, "pad_slot": PAD_SLOT}
        _check_call(f"{text}.{name}", getattr(found, name), step, (), keywords)
    rates = {} if recurrence.delta_rule else {"A": None}
    _check_call(f"{text}.flush_now", found.flush_now, f"(pool, slots{', *, A' if rates else ''})", (None, None), rates)
    return found  # type: ignore[no-any-return]


def _check_call(
    text: str, function: Callable[..., Any], expected: str, positional: tuple[Any, ...], keywords: Mapping[str, Any]
) -> None:
    """Check that a function can be called with some arguments.

    Raises:
        InputError: shows both signatures.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # compiled code may have none; its first call tells
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise InputError(
            f"--kernel {text}: its signature is {' '.join(str(signature).split())}, expected {expected}: {error}"
        ) from error


def _tell_shape(shape: HeadShape) -> str:
    return f"H={shape.key_heads} HV={shape.value_heads} d_k={shape.d_k} d_v={shape.d_v}"
