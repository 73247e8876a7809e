"""Faults that only compiled code has fail the checks of test_compile.py: layouts, divisions, the fused multiply-add."""

from __future__ import annotations

from typing import Any

import pytest
from mutants import write_mutant
from test_compile import SMALL, baseline_of, case, check_layouts, compile_all, key

TINY = (1, 2, 16, 16)
PLAIN_LOAD = (
    "        b_tile = tl.reshape(b_values, [BV, BK])\n    return b_tile",
    "        b_tile = tl.reshape(b_values, [BV, BK])\n"
    "    if FORMAT == _FP32:\n"
    "        p_tile = codes + o_v[:, None] * D_K + tl.arange(0, BK)[None, :]\n"
    "        b_tile = tl.load(p_tile, mask=in_rows[:, None] & (tl.arange(0, BK) < D_K)[None, :], other=0.0)\n"
    "    return b_tile",
)
TILE_COPY = (
    "tl.store(p_codes, tl.reshape(b_codes, [BV, BK // WIDTH, WIDTH]), mask=mask)",
    "tl.store(codes + o_v[:, None] * D_K + tl.arange(0, BK)[None, :], tl.reshape(b_codes, [BV, BK]),\n"
    "                 mask=in_rows[:, None] & (tl.arange(0, BK) < D_K)[None, :])",
)
# Text, what takes its place, the format that is stored.
ARITHMETIC = {
    "scale of a row, approximate": ("tl.div_rn(TOP, b_amax)", "(TOP / b_amax)", "fp8"),
    "scale of a row's blocks, approximate": ("tl.div_rn(2688.0, b_amax)", "(2688.0 / b_amax)", "nvfp4"),
    "product and sum apart": (
        "return tl.fma(u, tl.broadcast_to(b_k[None, :], (BV, BK)), b_S)",
        "return b_S + u * tl.broadcast_to(b_k[None, :], (BV, BK))",
        "fp32",
    ),
}
# Accesses, and whether the sums then have the layouts of the baseline, which has them too but stores no copy. The state
# is loaded as a plain tile: the widest access of its shape chooses the layout then, whatever else load_tile does.
ACCESSES = {
    "state loaded as a tile": ((PLAIN_LOAD,), True),
    "state loaded and copy stored as tiles": ((PLAIN_LOAD, TILE_COPY), False),
}
COPIES = ("fp8", "bf16")
Compiled = dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """By fault, the plan that has it, with what all plans compiled to; one process compiles them."""
    folder = tmp_path_factory.mktemp("mutants")

    def write(name: str, *faults: tuple[str, str]) -> str:
        place = folder / name.replace(" ", "_").replace("'", "").replace(",", "")
        place.mkdir()
        package = write_mutant(place, *faults[0])
        for old, new in faults[1:]:
            (file,) = [f for f in package.glob("*.py") if old in f.read_text()]
            file.write_text(file.read_text().replace(old, new))
        return str(package)

    plans, baselines = {}, {}
    for name, (old, new, fmt) in ARITHMETIC.items():
        plans[name] = case(fmt, shape=SMALL, full=True, mutant=write(name, (old, new)))
    for name, (faults, _) in ACCESSES.items():
        path = write(name, *faults)
        for fmt in COPIES:
            plan = plans[f"{name}, {fmt}"] = case("fp32", fmt, shape=TINY, mutant=path)
            baselines[f"{name}, {fmt}"] = baseline_of(plan) | {"mutant": path}
    found = compile_all([*plans.values(), *baselines.values()], folder)
    return {
        name: (
            plan,
            found | ({key(baseline_of(plan)): found[key(baselines[name])]} if name in baselines else {}),
        )
        for name, plan in plans.items()
    }


@pytest.mark.parametrize("fmt", COPIES)
@pytest.mark.parametrize("name", ACCESSES)
def test_a_copy_stored_as_a_tile_must_not_choose_the_layout_of_the_sums(
    compiled: Compiled, name: str, fmt: str
) -> None:
    plan, found = compiled[f"{name}, {fmt}"]
    if ACCESSES[name][1]:
        check_layouts(plan, found)
    else:
        with pytest.raises(AssertionError):
            check_layouts(plan, found)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_of_the_exact_route_is_checked(compiled: Compiled, name: str) -> None:
    plan, found = compiled[name]
    result = found[key(plan)]
    if "approximate" in name:
        assert result["plain_divisions"] > 0
        assert any(text.startswith("div.full") for text in result["approximate"])
    else:
        assert not result["fma"]
