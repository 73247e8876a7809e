"""Swapping the decode function of a modeling module, without touching any other model of the process; its advice muted.

The module's global is replaced once by a dispatcher; a forward pre-hook on each mixer says, through a context
variable, whose forward is running. Without that context the dispatcher calls the original function.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["DecodeHook", "quiet_transformers"]

_ACTIVE: ContextVar[tuple[Callable[..., Any], int] | None] = ContextVar("driftgate_decode", default=None)
_ORIGINALS: dict[tuple[str, str], tuple[Callable[..., Any], int]] = {}


class DecodeHook:
    """Context manager: while it is entered, decode steps of these mixers go to ``decode``.

    Args:
        module, function: the modeling module and the global to replace.
        mixers: recurrent mixers in layer order.
        decode: called as decode(layer, args, kwargs) where layer counts recurrent layers from 0; returns what the
            original function would.
    """

    def __init__(
        self,
        module: str,
        function: str,
        mixers: list[torch.nn.Module],
        decode: Callable[[int, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        self._key = (module, function)
        self._mixers = mixers
        self._decode = decode
        self._handles: list[Any] = []
        self._tokens: list[Any] = []

    def __enter__(self) -> DecodeHook:
        _install(*self._key)
        for layer, mixer in enumerate(self._mixers):
            self._handles.append(mixer.register_forward_pre_hook(self._before(layer)))
            self._handles.append(mixer.register_forward_hook(self._after, always_call=True, prepend=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _uninstall(*self._key)

    def _before(self, layer: int) -> Callable[..., None]:
        def set_context(_mixer: torch.nn.Module, _args: Any) -> None:
            self._tokens.append(_ACTIVE.set((self._decode, layer)))

        return set_context

    def _after(self, _mixer: torch.nn.Module, _args: Any, _output: Any) -> None:
        _ACTIVE.reset(self._tokens.pop())


def _install(module: str, function: str) -> None:
    """Replace the global by a dispatcher; nested installs are counted."""
    key = (module, function)
    if key in _ORIGINALS:
        original, users = _ORIGINALS[key]
        _ORIGINALS[key] = (original, users + 1)
        return
    original = getattr(sys.modules[module], function)
    _ORIGINALS[key] = (original, 1)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        active = _ACTIVE.get()
        if active is None:
            return original(*args, **kwargs)
        decode, layer = active
        return decode(layer, args, kwargs)

    setattr(sys.modules[module], function, dispatch)


def _uninstall(module: str, function: str) -> None:
    """Put the original back once the last user has gone."""
    key = (module, function)
    original, users = _ORIGINALS[key]
    if users > 1:
        _ORIGINALS[key] = (original, users - 1)
        return
    del _ORIGINALS[key]
    setattr(sys.modules[module], function, original)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, and no advice to install the kernels that driftgate replaces; as it was afterwards."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
