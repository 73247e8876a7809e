"""The catalogue of formats: names, sizes, refusals, and that it needs no torch."""

import os
import subprocess
import sys

import pytest
import torch

from driftgate.errors import UsageError
from driftgate.quant import FORMATS, Format, ScaleKind, get_format
from driftgate.quant.codecs import CODECS
from driftgate.quant.formats import _index


def test_every_format_is_found_by_its_names():
    for name, fmt in FORMATS.items():
        assert fmt.name == name
        for known in (name, *fmt.aliases):
            assert get_format(known) is fmt


def test_fp8_e4m3_is_an_alias_of_fp8():
    assert get_format("fp8_e4m3").name == "fp8"


def test_every_format_has_a_codec_and_no_codec_lacks_a_format():
    assert set(CODECS) == set(FORMATS)


def test_unknown_format_names_near_ones():
    with pytest.raises(UsageError, match=r"^unknown format 'nvfp'; did you mean nvfp4"):
        get_format("nvfp")


@pytest.mark.parametrize("name", ["fp64", "FP8", "fp8 ", ""])
def test_a_name_that_no_format_has_is_a_usage_error(name):
    with pytest.raises(UsageError):
        get_format(name)


def test_two_formats_of_one_name_are_refused():
    record = get_format("fp8")
    with pytest.raises(ValueError, match="'fp8' is used twice"):
        _index([record, record])


def test_formats_are_ordered_by_width():
    assert [fmt.bits for fmt in FORMATS.values()] == [32, 16, 16, 16, 8, 8, 8, 8, 4, 4]


def test_formats_of_the_contract():
    known = {"fp32", "bf16", "fp16", "fp8", "fp8_e5m2", "int8", "int16", "nvfp4", "mxfp4", "mxfp8"}
    assert set(FORMATS) == known


def test_stochastic_rounding_is_for_elements_with_a_scale_of_their_own_or_none():
    names = {name for name, fmt in FORMATS.items() if fmt.stochastic}
    assert names == {"bf16", "fp16", "fp8", "fp8_e5m2", "int8", "int16", "nvfp4"}


def test_low_precision_is_everything_but_fp32():
    assert [name for name, fmt in FORMATS.items() if not fmt.low_precision] == ["fp32"]


@pytest.mark.parametrize(
    ("name", "d_k", "n_bytes"),
    [
        ("fp32", 64, 256),
        ("bf16", 64, 128),
        ("fp16", 17, 34),
        ("fp8", 64, 64 + 4),
        ("fp8", 17, 17 + 4),
        ("nvfp4", 128, 64 + 8 + 4),  # 0.5625 bytes an element and 4 a row
        ("nvfp4", 16, 8 + 1 + 4),
        ("nvfp4", 17, 16 + 2 + 4),
        ("nvfp4", 1, 8 + 1 + 4),
        ("fp8_e5m2", 64, 64 + 4),
        ("int8", 64, 64 + 4),
        ("int16", 17, 34 + 4),
        ("mxfp4", 128, 64 + 4),  # 0.53125 bytes an element
        ("mxfp4", 33, 32 + 2),
        ("mxfp8", 128, 128 + 4),
        ("mxfp8", 33, 33 + 2),  # elements of a byte are stored unpadded
    ],
)
def test_bytes_per_row(name, d_k, n_bytes):
    assert get_format(name).bytes_per_row(d_k) == n_bytes


def test_a_row_has_at_least_one_element():
    with pytest.raises(ValueError, match="d_k: expected 1 or more, got 0"):
        get_format("nvfp4").bytes_per_row(0)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_max_value_is_that_of_torch(name):
    fmt = get_format(name)
    assert fmt.max_value == torch.finfo(fmt.storage_dtype).max


def test_max_values_of_8_bits_and_integers_are_those_of_torch():
    assert get_format("fp8").max_value == get_format("mxfp8").max_value == torch.finfo(torch.float8_e4m3fn).max
    assert get_format("fp8_e5m2").max_value == torch.finfo(torch.float8_e5m2).max
    for name in ("int8", "int16"):
        assert get_format(name).max_value == torch.iinfo(get_format(name).storage_dtype).max


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"storage": "float8"}, "storage"),
        ({"bits": 3}, "bits"),
        ({"bits": 0}, "bits"),
        ({"max_value": 0.0}, "max_value"),
        ({"block": 16}, "block"),
        ({"scale": ScaleKind.BLOCK_AND_SCOPE}, "block"),
        ({"scale": ScaleKind.BLOCK_AND_SCOPE, "bits": 4, "block": 15}, "block"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change, argument):
    fields = {"name": "x", "title": "x", "bits": 8, "max_value": 1.0, "storage": "uint8"} | change
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        Format(**fields)


def test_importing_the_room_imports_no_torch():
    code = (
        "import sys; import driftgate.quant as q; q.get_format('nvfp4').bytes_per_row(64);"
        "assert set(q.__all__) >= {'get_format', 'encode_rows'};"
        "print([m for m in ('torch', 'triton', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.strip() == "[]"


def test_every_exported_name_exists():
    import driftgate.quant as room

    assert len(set(room.__all__)) == len(room.__all__)
    for name in room.__all__:
        assert getattr(room, name) is not None


def test_a_name_that_is_not_exported_is_an_attribute_error():
    import driftgate.quant as room

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = room.no_such_name
