"""Which backend a name stands for, and what this process or device cannot run: one line, the same for every caller."""

from __future__ import annotations

import pytest

from driftgate.accuracy.backends import BACKENDS, check_backend, resolve_backend
from driftgate.errors import UsageError
from driftgate.kernels.contract import Backend
from driftgate.main_job import check
from driftgate.replay_command import pick_backend


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", "cpu", Backend.TORCH),
        ("auto", "cuda", Backend.TRITON),
        ("auto", "cuda:1", Backend.TRITON),
        ("torch", "cuda", Backend.TORCH),
        ("triton", "cuda", Backend.TRITON),
    ],
)
def test_a_name_is_a_backend_of_the_device(name, device, expected):
    assert resolve_backend(name, device) is expected


def test_the_interpreter_is_asked_for_by_name_and_environment(monkeypatch):
    with pytest.raises(UsageError, match="triton-interpret needs TRITON_INTERPRET=1 in the environment"):
        resolve_backend("triton-interpret", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend("triton-interpret", "cpu") is Backend.TRITON_INTERPRET
    for name, device in (("auto", "cpu"), ("torch", "cpu"), ("triton", "cuda")):
        with pytest.raises(UsageError, match="TRITON_INTERPRET=1 is set, so Triton cannot compile; unset it"):
            resolve_backend(name, device)


def test_compiled_kernels_need_a_gpu():
    with pytest.raises(UsageError, match="triton needs a GPU; use backend torch or triton-interpret, or device cuda"):
        resolve_backend("triton", "cpu")


def test_a_name_that_is_none_is_told_with_the_nearest():
    assert set(BACKENDS) == {"auto", *(backend.value for backend in Backend)}
    for name in BACKENDS:
        check_backend(name)
    for refuse in (check_backend, lambda name: resolve_backend(name, "cpu")):
        with pytest.raises(UsageError, match=r"^unknown backend 'trition'; did you mean triton"):
            refuse("trition")


def test_a_run_and_a_replay_say_the_same(tmp_path):
    said = []
    for refused in (
        lambda: resolve_backend("triton", "cpu"),
        lambda: check("quick", out=tmp_path / "out", device="cpu", backend="triton"),
        lambda: pick_backend("triton", "cpu"),
    ):
        with pytest.raises(UsageError) as caught:
            refused()
        said.append(str(caught.value))
    assert len(set(said)) == 1
