"""Triton's interpreter, corrected: every result here is compared exactly, NaN by class.

One process with TRITON_INTERPRET=1 (tests/interpreter_cases.py, warnings are errors) runs all kernels; the
expected values come from NumPy, ml_dtypes, exact fractions and the published vectors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "quant"
NARROW = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
GOLDEN_NAMES = {"bf16": "bf16", "fp16": "f16", "e4m3": "e4m3fn_sat", "e5m2": "e5m2_sat"}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def hard_products(dtype: type, seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operands of x*y + z on which rounding twice is wrong: cancellation, ties, small terms, subnormals."""
    rng = np.random.default_rng(seed)
    x, y = (rng.standard_normal(n).astype(dtype) for _ in range(2))
    quarter = n // 4
    z = np.empty(n, dtype)
    z[:quarter] = -(x[:quarter] * y[:quarter])
    bits = np.finfo(dtype).nmant
    # (1 + a)(1 - a) is a square below 1, so the sum is half a last place of z less some 2^-69: no float64
    # holds that.
    a = 2.0**-bits * rng.integers(1, 8, quarter)
    x[quarter : 2 * quarter] = 1 + a
    y[quarter : 2 * quarter] = (1 - a) * 2.0 ** -(bits + 1)
    z[quarter : 2 * quarter] = 1 + 2.0**-bits * rng.integers(0, 8, quarter)
    z[2 * quarter : 3 * quarter] = (rng.standard_normal(quarter) * 2.0**-bits * 2.0**-2).astype(dtype)
    tiny = np.finfo(dtype).tiny
    x[3 * quarter :] = (x[3 * quarter :] * np.sqrt(tiny)).astype(dtype)
    y[3 * quarter :] = (y[3 * quarter :] * np.sqrt(tiny)).astype(dtype)
    z[3 * quarter :] = (rng.integers(-3, 4, n - 3 * quarter) * np.finfo(dtype).smallest_subnormal).astype(dtype)
    return x, y, z


def nearest(value: Fraction, dtype: type) -> float:
    """The number of ``dtype`` nearest to an exact value within its range, ties to even."""
    guess = dtype(float(value))
    steps = (np.nextafter(guess, dtype(-np.inf)), guess, np.nextafter(guess, dtype(np.inf)))
    near = min(steps, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(f"u{c.itemsize}")) & 1))
    return float(near)


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(20)
    inputs = {
        "random": rng.integers(0, 2**32, 65536, dtype=np.uint64).astype(np.uint32).view(np.float32),
        "golden": np.load(GOLDEN / "cast_f32.npz")["x"],
        "dot/a": rng.integers(-8, 9, (16, 32)).astype(np.float32),
        "dot/b": rng.integers(-8, 9, (32, 16)).astype(np.float32),
        "bf16/x": (rng.standard_normal(1024) * 3).astype(ml_dtypes.bfloat16).view(np.uint16),
        "bf16/y": (rng.standard_normal(1024) * 3).astype(ml_dtypes.bfloat16).view(np.uint16),
        "quotient/x": rng.standard_normal(4096).astype(np.float32),
        "quotient/y": rng.standard_normal(4096).astype(np.float32),
        "shapes": rng.integers(1, 100, (8, 16)).astype(np.float32),
        "nan/x": np.array([np.nan, 1, np.nan, 2, -3, np.inf, -np.inf, 0.5], np.float32),
        "nan/y": np.array([1, np.nan, np.nan, 1, -4, 1, -1, 0.25], np.float32),
        "high/x": np.array([-1, 2**31 - 1, -(2**31), 12345], np.int32),
        "high/y": np.array([-1, -2, -(2**31), -777], np.int32),
        "sums": rng.standard_normal((16, 64)).astype(np.float32),
    }
    for seed, (kind, dtype) in enumerate((("fp32", np.float32), ("fp16", np.float16))):
        for letter, array in zip("xyz", hard_products(dtype, seed, 2048), strict=True):
            inputs[f"fma/{kind}/{letter}"] = array
    return inputs


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    return make_inputs()


@pytest.fixture(scope="module")
def outputs(inputs: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("interpreter")
    np.savez(folder / "inputs.npz", **inputs)
    command = [sys.executable, "-P", "-W", "error::RuntimeWarning", HERE / "interpreter_cases.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, folder / "inputs.npz", folder / "outputs.npz"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "outputs.npz"))


@pytest.fixture(scope="module")
def refusals(outputs: dict[str, np.ndarray]) -> dict[str, str]:
    found: dict[str, str] = json.loads(str(outputs["refusals"]))
    return found


def assert_same_codes(got: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Codes equal; a NaN may be any NaN of the type."""
    values = [codes.view(NARROW[name]).astype(np.float32) for codes in (got, expected)]
    both_nan = np.isnan(values[0]) & np.isnan(values[1])
    np.testing.assert_array_equal(np.where(both_nan, 0, got), np.where(both_nan, 0, expected))


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal values, signs of zero included; NaN at the same places."""
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(got)])


@pytest.mark.parametrize("name", NARROW)
def test_every_code_widens_to_its_value(outputs: dict[str, np.ndarray], name: str) -> None:
    codes = np.arange(len(outputs[f"widen/{name}"])).astype(f"u{np.dtype(NARROW[name]).itemsize}")
    assert_same_bits(outputs[f"widen/{name}"], codes.view(NARROW[name]).astype(np.float32))


@pytest.mark.parametrize("how", ["cast", "store"])
@pytest.mark.parametrize("name", NARROW)
def test_random_floats_round_to_nearest_even(
    inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], name: str, how: str
) -> None:
    x = inputs["random"]
    if name in LARGEST:
        x = np.clip(x, -LARGEST[name], LARGEST[name])
    with np.errstate(all="ignore"):
        expected = x.astype(NARROW[name])
    got = outputs[f"narrow/{name}/random/{how}"]
    assert_same_codes(got, expected.view(got.dtype), name)


@pytest.mark.parametrize("how", ["cast", "store"])
@pytest.mark.parametrize("name", NARROW)
def test_published_casts(outputs: dict[str, np.ndarray], name: str, how: str) -> None:
    expected = np.load(GOLDEN / "cast_f32.npz")[GOLDEN_NAMES[name]]
    assert_same_codes(outputs[f"narrow/{name}/golden/{how}"], expected, name)


@pytest.mark.parametrize(("kind", "dtype"), [("fp32", np.float32), ("fp16", np.float16)])
def test_fma_rounds_once(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], kind: str, dtype: type) -> None:
    x, y, z = (inputs[f"fma/{kind}/{i}"].astype(np.float64) for i in "xyz")
    expected = [
        nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)), dtype)
        for a, b, c in zip(x, y, z, strict=True)
    ]
    np.testing.assert_array_equal(outputs[f"fma/{kind}"].astype(np.float64), expected)


def test_fma_cases_tell_fused_from_unfused(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    x, y, z = (inputs[f"fma/fp32/{i}"] for i in "xyz")
    unfused = x * y + z
    through_double = (x.astype(np.float64) * y + z).astype(np.float32)
    assert np.count_nonzero(unfused != outputs["fma/fp32"]) > 400
    assert np.count_nonzero(through_double != outputs["fma/fp32"]) > 0


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "fp16"])
def test_dot_multiplies_values(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], kind: str) -> None:
    # Integers up to 8 are exact in each type and 32 products of them are exact in float32.
    np.testing.assert_array_equal(outputs[f"dot/{kind}"], inputs["dot/a"] @ inputs["dot/b"])


@pytest.mark.parametrize("name", ["total", "product", "less", "scaled", "bigger", "counted"])
def test_bfloat16_arithmetic(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], name: str) -> None:
    x, y = (inputs[f"bf16/{i}"].view(ml_dtypes.bfloat16).astype(np.float32) for i in "xy")
    constant = np.float32(ml_dtypes.bfloat16(0.3))
    expected = {
        "total": x + y,
        "product": x * y,
        "less": (x < y).astype(np.float32),
        "scaled": x * constant,
        "bigger": np.maximum(x, y),
        "counted": np.arange(len(x), dtype=np.float32) * 3 - 100,
    }[name]
    np.testing.assert_array_equal(outputs[f"bf16/{name}"], expected.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_div_rn_and_sqrt_rn_are_correctly_rounded(
    inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> None:
    # A float64 quotient or root of float32 numbers rounds to the right float32: 53 >= 2*24 + 2 bits.
    x, y = (inputs[f"quotient/{i}"].astype(np.float64) for i in "xy")
    np.testing.assert_array_equal(outputs["quotient"], (x / y).astype(np.float32))
    np.testing.assert_array_equal(outputs["root"], np.sqrt(np.abs(x)).astype(np.float32))


def test_shape_operations(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    x = inputs["shapes"]
    expected = {
        "suffix": np.cumsum(x[:, ::-1], axis=1)[:, ::-1],
        "joined": np.stack([x, -x], axis=-1).reshape(len(x), -1),
        "transposed": x.T,
        "woven": np.stack([x, 2 * x], axis=-1).reshape(len(x), -1),
        "low": x[:, 0::2],
        "high": x[:, 1::2],
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[f"shapes/{name}"], array, err_msg=name)


def test_nan_rules(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    x, y = inputs["nan/x"], inputs["nan/y"]
    np.testing.assert_array_equal(outputs["nan/larger"], np.fmax(x, y))
    np.testing.assert_array_equal(outputs["nan/kept"], np.maximum(x, y))
    np.testing.assert_array_equal(outputs["nan/clamped"], np.fmin(np.fmax(x, -1), 1))
    np.testing.assert_array_equal(outputs["nan/row_max"][:2], [np.inf, np.nan])


def test_umulhi_is_unsigned(inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    x, y = (inputs[f"high/{i}"].view(np.uint32).astype(np.uint64) for i in "xy")
    np.testing.assert_array_equal(outputs["high"].view(np.uint32), (x * y) >> np.uint64(32))


def test_sums_do_not_depend_on_the_layout_in_memory(outputs: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(outputs["sums_plain"], outputs["sums_strided"])


def test_device_functions_see_the_interpreted_language(outputs: dict[str, np.ndarray]) -> None:
    x = np.arange(8.0)
    for _ in range(2):
        x = 4 * x + (4 * x).sum()
    np.testing.assert_array_equal(outputs["nested"], x)


def test_a_launch_leaves_the_language_as_it_was(outputs: dict[str, np.ndarray]) -> None:
    assert outputs["language_restored"]


def test_install_twice_is_install_once(outputs: dict[str, np.ndarray]) -> None:
    assert outputs["installed_once"]


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("tf32_dot", "tl.dot in TF32"),
        ("bf16_sum", "reductions and scans of bf16"),
        ("bf16_fma", "tl.fma in bf16"),
        ("bf16_from_double", "conversions from fp64 to bf16"),
        ("fp8_toward_zero", "rounding toward zero from fp32 to fp8e4nv"),
    ],
)
def test_what_is_not_corrected_raises(refusals: dict[str, str], kernel: str, expected: str) -> None:
    assert expected in refusals[kernel]


@pytest.mark.parametrize("release", ["3.10.0", "3.5.1", "4.0.0+git"])
def test_unchecked_releases_are_refused(refusals: dict[str, str], release: str) -> None:
    assert refusals[release].startswith(f"RuntimeError: Triton {release}: its interpreter was not checked")


def test_install_needs_the_interpreter() -> None:
    program = "from driftgate.kernels import interpreter as i; print(i.is_interpreted()); i.install()"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "False\n"
    assert "RuntimeError: TRITON_INTERPRET is not on" in done.stderr
