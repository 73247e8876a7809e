"""``driftgate formats``: errors of every format on a file or an example, and one line for bad input."""

from __future__ import annotations

import json
import pickle
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from driftgate.errors import InputError, UsageError
from driftgate.formats_command import make_example, measure_formats
from driftgate.quant import FORMATS, get_format


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def save(folder: Path, x: np.ndarray) -> Path:
    np.save(folder / "x.npy", x)
    return folder / "x.npy"


def test_numbers_are_those_of_the_definition(tmp_path: Path) -> None:
    x = draw(2, 3, 8, 40)
    measured = measure_formats(save(tmp_path, x))
    assert [row.format for row in measured.rows] == list(FORMATS)
    for row in measured.rows:
        read = get_format(row.format).quantize(torch.from_numpy(x)).dequantize().numpy().astype(np.float64)
        relative = np.sqrt(((read - x) ** 2).sum() / (x.astype(np.float64) ** 2).sum())
        assert row.relative_error == pytest.approx(relative, rel=1e-12)
        assert row.max_abs_error == np.abs(read - x).max()
        assert row.bytes_per_row == get_format(row.format).bytes_per_row(40)
        if row.format == "fp32":
            assert (row.relative_error, row.snr_db, row.max_abs_error) == (0, None, 0)
        else:
            assert row.snr_db == pytest.approx(-20 * np.log10(relative), rel=1e-12)


# Measured on 2^24 normal values, in dB; 2^14 values are within 0.4 of it.
@pytest.mark.parametrize(
    ("name", "snr"),
    [("fp16", 73.7), ("bf16", 55.6), ("int16", 92.0), ("int8", 43.8), ("fp8", 31.8), ("fp8_e5m2", 25.8),
     ("mxfp8", 31.5), ("nvfp4", 20.4), ("mxfp4", 18.8)],
)  # fmt: skip
def test_normal_numbers_have_the_known_error(tmp_path: Path, name: str, snr: float) -> None:
    rows = {row.format: row for row in measure_formats(save(tmp_path, draw(128, 128))).rows}
    assert rows[name].snr_db == pytest.approx(snr, abs=0.4)


def test_without_a_file_an_example_is_used_and_named() -> None:
    measured = measure_formats(None)
    assert "built-in example" in measured.source
    assert any("built-in example" in line for line in measured.notes())
    assert measured.shapes == {"example": [1, 4, 64, 64]}
    assert torch.equal(make_example(), make_example())
    assert not torch.equal(make_example(), make_example(seed=1))


def test_scope_reaches_the_formats(tmp_path: Path) -> None:
    size = np.float32(2.0) ** np.linspace(-12, 0, 32, dtype=np.float32)
    path = save(tmp_path, draw(2, 2, 8, 32) * size.reshape(2, 2, 8, 1))
    row, tensor = ({r.format: r for r in measure_formats(path, scope=s).rows} for s in ("row", "tensor"))
    assert row["int8"].relative_error < tensor["int8"].relative_error
    assert row["mxfp8"] == tensor["mxfp8"]
    with pytest.raises(UsageError, match=r"^unknown scope 'rows'; did you mean row"):
        measure_formats(path, scope="rows")


def test_every_float_tensor_of_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {
        "a": torch.from_numpy(draw(4, 32)),
        "b": torch.from_numpy(draw(4, 32)).bfloat16(),
        "count": torch.arange(4),
        "double": torch.ones(4, dtype=torch.float64),
        "empty": torch.ones(0, 4),
        "scalar": torch.tensor(1.0),
        "wide": torch.ones(1, 1, 1, 1, 4),
    }
    save_file(tensors, path)
    measured = measure_formats(path)
    assert measured.shapes == {"a": [4, 32], "b": [4, 32]}
    assert len(measured.rows) == 2 * len(FORMATS)
    assert measured.skipped == {
        "count": "it is int64",
        "double": "it is float64",
        "empty": "it is empty, [0, 4]",
        "scalar": "expected one to four axes, [slots, heads, d_v, d_k], got 0",
        "wide": "expected one to four axes, [slots, heads, d_v, d_k], got 5",
    }
    assert {row.relative_error for row in measured.rows if row.tensor == "b" and row.format == "bf16"} == {0.0}


def test_float16_and_foreign_byte_order_are_read(tmp_path: Path) -> None:
    x = draw(4, 16)
    plain = measure_formats(save(tmp_path, x)).rows
    assert measure_formats(save(tmp_path, x.astype(">f4"))).rows == plain
    half = {row.format: row for row in measure_formats(save(tmp_path, x.astype(np.float16))).rows}
    assert half["fp16"].relative_error == 0


def test_overflow_and_zeros_are_null_in_json(tmp_path: Path) -> None:
    found = {row.format: row for row in measure_formats(save(tmp_path, np.full((2, 16), 1e30, np.float32))).rows}
    assert (found["fp16"].overflow, found["fp16"].relative_error, found["fp16"].max_abs_error) == (32, None, None)
    measured = measure_formats(save(tmp_path, np.zeros((2, 16), np.float32)))
    assert all((row.relative_error, row.snr_db, row.max_abs_error) == (None, None, 0) for row in measured.rows)
    document = json.loads(json.dumps(measured.as_dict(), allow_nan=False))
    assert document["rows"][0]["relative_error"] is None


def test_the_table_has_a_line_for_each_format() -> None:
    text = StringIO()
    Console(file=text, width=120).print(measure_formats(None).table())
    lines = text.getvalue().splitlines()
    assert len(lines) == 1 + len(FORMATS)
    assert lines[0].split()[:2] == ["format", "bits"]
    assert [line.split()[0] for line in lines[1:]] == list(FORMATS)


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npy", b"", "not a readable .npy file"),
        ("x.npy", b"nothing of the kind", "not a readable .npy file"),
        ("x.npy", pickle.dumps([1.0]), "not a readable .npy file"),
        ("x.safetensors", b"", "not a readable .safetensors file"),
        ("x.safetensors", b"\xff" * 64, "not a readable .safetensors file"),
        ("x.bin", b"1234", r"expected a \.npy or \.safetensors file, got '\.bin'"),
        ("x", b"1234", "got 'no suffix'"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_formats(write(tmp_path, name, content))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones((2, 16)), "expected float32 or float16, got float64"),
        (np.ones((2, 16), np.int8), "expected float32 or float16, got int8"),
        (np.ones((2, 16), np.complex64), "expected float32 or float16, got complex64"),
        (np.ones((0, 16), np.float32), "it is empty"),
        (np.float32(1), "expected one to four axes"),
        (np.ones((1, 1, 1, 1, 4), np.float32), "expected one to four axes"),
        (np.array([[1, np.nan]], np.float32), r"x\[0, 1\] is nan"),
        (np.array([[1, -np.inf]], np.float32), r"x\[0, 1\] is -inf"),
    ],
)
def test_arrays_that_are_no_state(tmp_path: Path, x: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        measure_formats(save(tmp_path, x))
    assert "\n" not in str(raised.value)


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([object()], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="without pickled objects"):
        measure_formats(tmp_path / "x.npy")


def test_an_archive_in_the_guise_of_an_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=draw(2, 16))
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    with pytest.raises(InputError, match=r"\.npy file|expected one array"):
        measure_formats(tmp_path / "x.npy")


def test_a_header_that_promises_more_than_there_is(tmp_path: Path) -> None:
    path = save(tmp_path, draw(2, 16))
    path.write_bytes(path.read_bytes().replace(b"(2, 16)", b"(9, 99)"))
    with pytest.raises(InputError, match="not a readable"):
        measure_formats(path)
    path = save(tmp_path, draw(2, 16))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match="not a readable"):
        measure_formats(path)


def test_nothing_to_measure_says_why(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"ids": torch.arange(4)}, path)
    with pytest.raises(InputError, match=r"nothing to measure \(ids: it is int64\)"):
        measure_formats(path)
    with pytest.raises(InputError, match="no such file"):
        measure_formats(tmp_path / "other.npy")
    with pytest.raises(InputError, match="no such file"):
        measure_formats(tmp_path)


def test_a_nonfinite_tensor_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"good": torch.ones(2, 16), "layers.3.state": torch.full((2, 16), torch.inf)}, path)
    with pytest.raises(InputError, match=r"layers\.3\.state\[0, 0\] is inf"):
        measure_formats(path)
