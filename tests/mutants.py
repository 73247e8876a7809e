"""Faulty copies of the Triton modules: ``write_mutant`` makes one, ``load_mutant`` imports it beside the real ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
MODULES = (
    "quant.device_elements",
    "quant.device_codecs",
    "quant.device",
    "quant.device_products",
    "kernels.step",
    "kernels.readout",
    "kernels.launch",
    "kernels.replay",
    "kernels.dispatch",
    "kernels.gdn.decode",
    "kernels.kda.decode",
    "kernels.mamba2.decode",
)
"""Everything with jitted functions or launches; what they share with the rest (pool, contract) stays the real one."""


def write_mutant(folder: Path, old: str, new: str) -> Path:
    """A package in ``folder`` with ``old`` replaced by ``new``, a text that stands once in all the modules together."""
    package = folder / f"mutant_{abs(hash(str(folder)))}"
    package.mkdir()
    (package / "__init__.py").touch()
    found = 0
    for module in MODULES:
        source = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        found += source.count(old)
        source = source.replace(old, new)
        for other in MODULES:
            source = source.replace(f"driftgate.{other} ", f"{package.name}.{other.replace('.', '_')} ")
        (package / (module.replace(".", "_") + ".py")).write_text(source)
    assert found == 1, f"this text stands {found} times in the kernels, expected once:\n{old}"
    return package


def load_mutant(package: str | Path, room: str = "gdn") -> ModuleType:
    """The mutant's counterpart of ``driftgate.kernels.<room>.decode``."""
    path = Path(package)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(f"{path.name}.kernels_{room}_decode")
