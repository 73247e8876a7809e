"""Plan texts: parse, print, refuse; every refusal is one line for exit code 2."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftgate.accuracy.plans import BASELINE, MAX_LENGTH, PrecisionPlan, Role
from driftgate.errors import UsageError
from driftgate.kernels.contract import Fold, Readout
from driftgate.quant.formats import FORMATS

PAIRS = [
    (read.name, recurrence.name)
    for read, recurrence in itertools.product(FORMATS.values(), repeat=2)
    if read.bits <= recurrence.bits
]
ONE_OF_EACH = st.tuples(
    st.sampled_from(["", "+exact", "+cached"]),
    st.sampled_from(["", "+output_only", "+exact_readout", "+state_output"]),
    st.sampled_from(["", "+buf=fp32", "+buf=bf16"]),
    st.one_of(st.just(""), st.integers(1, 10**9 - 1).map(lambda n: f"+track={n}")),
)


def refusal(text: str) -> str:
    """The one line that a plan text is refused with."""
    with pytest.raises(UsageError) as caught:
        PrecisionPlan.parse(text)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert message.splitlines() == [message]
    return message


@pytest.mark.parametrize(
    "text",
    [
        "baseline",
        "fp32@1",
        "fp32@16",
        "nvfp4@16",
        "nvfp4/fp32@16",
        "fp8/fp16@16",
        "nvfp4/fp8@8",
        "bf16/fp16@3",
        "nvfp4/fp32@16+cached+exact_readout+buf=bf16+track=64",
        "fp32@16+cached+state_output+buf=bf16+dot=tf32",
        "nvfp4/fp8@8+sr+spec=4",
        f"fp8@{MAX_LENGTH}",
    ],
)
def test_a_canonical_text_is_printed_as_it_was_written(text):
    assert str(PrecisionPlan.parse(text)) == text


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("fp8_e4m3@16", "fp8@16"),
        ("nvfp4/fp8_e4m3@8", "nvfp4/fp8@8"),
        ("fp32/fp32@16", "fp32@16"),
        ("fp8/fp8_e4m3@4", "fp8@4"),
        ("  nvfp4@16 ", "nvfp4@16"),
        ("fp32@016", "fp32@16"),
        ("nvfp4/fp32@16+exact+output_only+buf=fp32", "nvfp4/fp32@16"),
        ("fp8@8+track=5+buf=bf16+exact_readout+cached", "fp8@8+cached+exact_readout+buf=bf16+track=5"),
    ],
)
def test_aliases_defaults_and_order_become_canonical(written, canonical):
    assert str(PrecisionPlan.parse(written)) == canonical
    assert PrecisionPlan.parse(written) == PrecisionPlan.parse(canonical)


@given(
    pair=st.sampled_from(PAIRS), length=st.integers(1, MAX_LENGTH), options=ONE_OF_EACH, order=st.permutations(range(4))
)
def test_every_combination_of_options_round_trips_in_every_order(pair, length, options, order):
    read, recurrence = pair
    written = f"{read}/{recurrence}@{length}" + "".join(options[i] for i in order)
    fold, readout, buffer, track = options
    if buffer and fold != "+cached" and readout == "+exact_readout":
        assert "+buf has no effect" in refusal(written)
        return
    plan = PrecisionPlan.parse(written)
    assert PrecisionPlan.parse(str(plan)) == plan
    assert str(PrecisionPlan.parse(str(plan))) == str(plan)
    assert (plan.options.read, plan.options.recurrence, plan.options.length) == (read, recurrence, length)
    assert plan.options.fold is (Fold.CACHED if fold == "+cached" else Fold.EXACT)
    assert plan.options.readout is Readout(readout.removeprefix("+") or "output_only")
    assert plan.options.buffer == (buffer.removeprefix("+buf=") or "fp32")
    assert plan.options.track == int(track.removeprefix("+track=") or 0)
    for default in ("+exact+", "+output_only", "+buf=fp32"):
        assert default not in str(plan) + "+"
    head = f"{read}@" if read == recurrence else f"{read}/{recurrence}@"
    assert str(plan).startswith(f"{head}{length}")


@given(text=st.text(max_size=30))
def test_any_other_text_is_refused_in_one_line(text):
    try:
        plan = PrecisionPlan.parse(text)
    except UsageError:
        refusal(text)
    else:
        assert PrecisionPlan.parse(str(plan)) == plan


@given(option=st.text(max_size=12))
def test_any_other_option_is_refused_in_one_line(option):
    try:
        plan = PrecisionPlan.parse(f"nvfp4@16+{option}")
    except UsageError:
        refusal(f"nvfp4@16+{option}")
    else:
        assert PrecisionPlan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nvfp@16", "unknown format 'nvfp'; did you mean nvfp4"),
        ("nvfp4/fp23@16", "unknown format 'fp23'"),
        ("fp32/nvfp4@16", "READ fp32 is wider than RECURRENCE nvfp4; write nvfp4@16"),
        ("fp16/fp8@4", "READ fp16 is wider than RECURRENCE fp8"),
        ("fp32@0", "L must be 1 to 256, got 0"),
        ("fp32@-3", "L must be 1 to 256, got -3"),
        ("fp32@257", "L must be 1 to 256, got 257"),
        ("fp32@16+exact+cached", "+cached contradicts or repeats"),
        ("fp32@16+cached+cached", "+cached contradicts or repeats"),
        ("fp32@16+output_only+exact_readout", "+exact_readout contradicts or repeats"),
        ("fp32@16+buf=fp32+buf=bf16", "+buf=bf16 contradicts or repeats"),
        ("fp32@16+track=2+track=2", "+track=2 contradicts or repeats"),
        ("fp32@16+cache", "unknown option +cache; known: +exact"),
        ("fp32@16+cached=1", "unknown option +cached=1"),
        ("fp32@16+buf=fp16", "unknown option +buf=fp16"),
        ("fp32@16+buf", "unknown option +buf"),
        ("fp32@16+track=0", "unknown option +track=0"),
        ("fp32@16+track=-4", "unknown option +track=-4"),
        ("fp32@16+track", "unknown option +track"),
        ("fp32@16+", "unknown option +;"),
        ("fp32@16+exact_readout+buf=bf16", "+buf has no effect"),
        ("nvfp4/fp32@16+sr", "+sr: fp32 is rounded to nearest alone"),
        ("mxfp4@16+sr", "+sr: mxfp4 is rounded to nearest alone"),
        ("nvfp4@16+head", "+head is not available in this version"),
        ("fp32@16+spec=17", "+spec: expected 0 to 16, got 17"),
        ("fp32@7+spec=4", "+spec: expected 2 T <= L = 7, got T = 4"),
        ("fp32@16+spec=4+track=3", "+spec: has neither forced flushes"),
        ("fp32@16+spec=4+state_output", "+spec: has neither forced flushes"),
        ("fp32@16+dot=tf32", "+dot: only state_output has a matrix product"),
        ("fp32@16+state_output+dot=fp16", "unknown option +dot=fp16"),
        ("fp32", "expected READ[/RECURRENCE]@L"),
        ("", "expected READ[/RECURRENCE]@L"),
        ("baseline@1", "unknown format 'baseline'"),
        ("baseline+exact", "expected READ[/RECURRENCE]@L"),
        ("nvfp4/fp32/fp32@16", "expected READ[/RECURRENCE]@L"),
        ("fp32@1.5", "expected READ[/RECURRENCE]@L"),
        ("fp32@" + "9" * 5000, "expected READ[/RECURRENCE]@L"),
        ("fp32@16+track=" + "9" * 5000, "unknown option +track=9"),
        ("fp32@16 +exact", "expected READ[/RECURRENCE]@L"),
        ("fp32@16+a\nb", "expected READ[/RECURRENCE]@L"),
    ],
)  # fmt: skip
def test_a_refusal_names_what_is_wrong(text, named):
    assert named in refusal(text)


def test_the_baseline_is_the_step_by_step_kernel():
    assert PrecisionPlan.parse("baseline") is BASELINE
    assert BASELINE.options.step_by_step
    assert not BASELINE.low_precision


@pytest.mark.parametrize(
    ("text", "low"), [("fp32@16", False), ("nvfp4/fp32@16", True), ("fp8@4", True), ("bf16@1", True)]
)
def test_low_precision_is_any_format_below_fp32(text, low):
    assert PrecisionPlan.parse(text).low_precision is low


def test_roles_are_named_as_in_suites():
    assert [role.value for role in Role] == ["candidate", "control"]


def test_parsing_imports_no_torch():
    code = (
        "import sys; from driftgate import PrecisionPlan; str(PrecisionPlan.parse('nvfp4/fp8@8+cached'));"
        "print(sorted({'torch', 'triton', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
