"""Claims whose process is gone: a run that was killed early leaves nothing in the way of the next."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from driftgate.errors import InputError
from driftgate.run_folder import CLAIM, check_out, claim
from driftgate.run_request import REQUEST

GONE = f"999999999 {socket.gethostname()}\n"
OTHER_HOST = "1 another-host\n"


@pytest.fixture
def out(tmp_path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_a_claim_of_a_process_that_is_gone_is_taken_over(out):
    """Killed while its model was loaded: there is nothing to resume, and --out is free."""
    (out / CLAIM).write_text(GONE)
    check_out(out)
    assert (out / CLAIM).read_text() == GONE, "a look changes nothing"
    folder = claim(out)
    assert (out / CLAIM).read_text().split()[0] == str(os.getpid())
    folder.release()
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    "owner", [f"{os.getpid()} {socket.gethostname()}\n", OTHER_HOST], ids=["this process", "another machine"]
)
def test_a_claim_that_may_be_alive_is_left_alone(out, owner):
    (out / CLAIM).write_text(owner)
    for look in (check_out, claim):
        with pytest.raises(InputError, match="still going on"):
            look(out)
    assert (out / CLAIM).read_text() == owner


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([REQUEST], "holds an interrupted run; give --resume"),
        (["results.json", REQUEST], "holds another run"),
        (["results.json"], "holds another run"),
        (["notes.txt"], r"holds other files \(notes\.txt\)"),
    ],
)
def test_what_a_killed_run_left_behind_is_told_for_what_it_is(out, names, says):
    (out / CLAIM).write_text(GONE)
    for name in names:
        (out / name).write_text("{}")
    for look in (check_out, claim):
        with pytest.raises(InputError, match=says):
            look(out)
    assert (out / CLAIM).read_text() == GONE
    assert all((out / name).exists() for name in names)


@pytest.mark.parametrize("content", ["", "12", "a b"])
def test_a_claim_that_is_damaged_is_one_line(out, content):
    (out / CLAIM).write_text(content)
    with pytest.raises(InputError, match="is damaged; delete it if no run is going on"):
        claim(out)
