"""What the doctor says of a machine, and that it only says ``bad`` where the quick suite cannot run."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from driftgate import doctor
from driftgate.kernels import interpreter


def said(subject: str) -> doctor.Finding:
    (found,) = [f for f in doctor.examine() if f.subject == subject]
    return found


def versions(monkeypatch, **changes: str | None) -> None:
    """Let these packages have these versions, None for not installed; dashes are dots."""
    real = doctor.version

    def fake(name: str) -> str:
        if name not in changes:
            return real(name)
        if changes[name] is None:
            raise PackageNotFoundError(name)
        return changes[name]

    monkeypatch.setattr(doctor, "version", fake)


def test_a_machine_that_runs_these_tests_is_fit():
    findings = doctor.examine()
    assert [f for f in findings if f.status == "bad"] == []
    assert {"python", "torch", "triton", "transformers", "gpu", "interpreter", "checkpoint"} <= {
        f.subject for f in findings
    }
    assert all("\n" not in f.text for f in findings)


@pytest.mark.parametrize("package", ["torch", "triton", "transformers"])
@pytest.mark.parametrize(("found", "says"), [(None, "not installed"), ("1.9.1", "or later")])
def test_a_package_that_is_missing_or_old_is_bad(monkeypatch, package, found, says):
    versions(monkeypatch, **{package: found})
    finding = said(package)
    assert finding.status == "bad" and says in finding.text


def test_nothing_is_imported_from_packages_that_do_not_fit(monkeypatch):
    versions(monkeypatch, torch=None)
    assert {f.subject for f in doctor.examine()} >= {"python", "torch"}
    assert not {f.subject for f in doctor.examine()} & {"gpu", "interpreter", "checkpoint"}


@pytest.mark.parametrize("found", ["2.11", "2.11.0", "2.13.0+cu130", "2.12.0a0+git1", "3.0rc1", "10.0.dev20300101"])
def test_versions_of_any_spelling_that_are_new_enough_are_fit(monkeypatch, found):
    versions(monkeypatch, torch=found)
    assert said("torch").status == "ok"


@pytest.mark.parametrize("found", ["2.9.1", "2.10rc2", "1.13.1+cu117"])
def test_versions_are_compared_as_numbers(monkeypatch, found):
    versions(monkeypatch, torch=found)
    assert said("torch").status == "bad"


@pytest.mark.parametrize(("gpu", "status"), [(False, "bad"), (True, "note")])
def test_an_interpreter_that_was_not_checked_only_matters_without_a_gpu(monkeypatch, gpu, status):
    monkeypatch.setattr(interpreter, "CHECKED_RELEASES", ("3.0",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H")
    finding = said("interpreter")
    assert finding.status == status and "3.0" in finding.text


@pytest.mark.parametrize(("capability", "status"), [((9, 0), "ok"), ((8, 9), "ok"), ((8, 0), "note")])
def test_a_gpu_without_fp8_conversions_is_noted(monkeypatch, capability, status):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    finding = said("gpu")
    assert finding.status == status
    assert finding.text.startswith(f"2 x H (sm_{capability[0]}{capability[1]})")


def test_a_package_without_its_checkpoints_is_bad(monkeypatch):
    monkeypatch.setattr("driftgate.evals.checkpoints.list_checkpoints", dict)
    assert said("checkpoints").status == "bad"


def test_a_package_that_transformers_would_bind_is_noted(monkeypatch, tmp_path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said("fla").status == "note"
    assert "fla" not in sys.modules


def test_another_system_is_bad(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert said("python").status == "bad"
