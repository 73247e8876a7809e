"""How hard recall and tracking are: the standard keeps its bits, other sizes do what they say."""

from __future__ import annotations

import hashlib
import re
from collections import Counter

import numpy as np
import pytest

from driftgate.errors import UsageError
from driftgate.evals.tasks import make_streams
from driftgate.evals.tasks.build import Difficulty, make_layout

BOTH = ("recall", "tracking")
HASHES = {
    (64, 0): "e1271cb1d05b38f0e1b945f30dda8439c85dc57b5551ad7ba551757ee346904a",
    (333, 7): "cc002f480c91434fd53c57d2b7b6fbb8ed9252865113882578637dba2261bc12",
    (640, 1): "d60dcb6f9f1bc561b71e85c49a0dc5d3493f242cd178ee2c33da36f311883506",
    (1537, 0): "85fc159898dd8b353ffd44be7c4907217fa559248d187c6de29fdcd46b3c3895",
}
"""By (length, seed): tokens and questions of three streams, version 1 of both tasks."""


@pytest.mark.parametrize(("length", "seed"), HASHES)
def test_standard_streams_keep_their_bits(length, seed):
    streams = make_streams(tasks=BOTH, n_sequences=3, length=length, seed=seed)
    content = streams.token_ids.astype("<i8").tobytes() + repr(streams.questions).encode()
    assert hashlib.sha256(content).hexdigest() == HASHES[length, seed]


def test_sizes_are_those_asked_for():
    difficulty = Difficulty(pairs=5, pair_repeats=1, groups=9, margin=(0.0, 0.0))
    streams = make_streams(tasks=BOTH, n_sequences=2, length=900, seed=4, difficulty=difficulty)
    assert Counter(q.task for q in streams.questions) == {"recall": 10, "tracking": 18}
    for question in streams.questions:
        text = bytes(int(t) for t in streams.token_ids[question.sequence, 1 : streams.stream_positions]).decode()
        key = chr(streams.token_ids[question.sequence, question.position])
        ranked = Counter(re.findall(rf"{key}([-+*/])", text)).most_common()
        if question.task == "recall":
            assert ranked == [(chr(question.choices[question.gold]), 1)]
        else:
            assert ranked[0][1] - ranked[1][1] in (1, 2)  # the least lead, 2 where the count of events is even
            assert ranked[0][0] == chr(question.choices[question.gold])


def test_sizes_left_out_follow_the_length():
    standard, changed = make_layout(640), make_layout(640, Difficulty(groups=6))
    assert (changed.n_pairs, changed.pair_repeats, changed.margin) == (
        standard.n_pairs, standard.pair_repeats, standard.margin,
    )  # fmt: skip
    assert (standard.n_groups, changed.n_groups) == (14, 6)


def test_a_wider_margin_is_a_clearer_lead():
    leads = []
    for margin in ((0.02, 0.1), (0.4, 0.5)):
        streams = make_streams(
            tasks=["tracking"], n_sequences=2, length=1024, seed=4, difficulty=Difficulty(margin=margin)
        )
        text = bytes(int(t) for t in streams.token_ids[0, 1 : streams.stream_positions]).decode()
        own = [q for q in streams.questions if q.sequence == 0]
        keys = [chr(streams.token_ids[0, q.position]) for q in own]
        counts = [Counter(re.findall(rf"{key}([-+*/])", text)).most_common(2) for key in keys]
        leads.append(np.mean([first[1] - second[1] for first, second in counts]))
    assert leads[1] > 3 * leads[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pairs": 0}, "pairs"),
        ({"groups": 27}, "groups"),
        ({"pair_repeats": 0}, "pair_repeats"),
        ({"pairs": 20, "groups": 20}, "26 letters"),
        ({"margin": (0.3, 0.2)}, "margin"),
        ({"margin": (-0.1, 0.2)}, "margin"),
        ({"margin": (0.1, float("nan"))}, "margin"),
    ],
)
def test_sizes_out_of_range_are_named(fields, named):
    with pytest.raises(UsageError, match=named):
        Difficulty(**fields)


def test_sizes_that_do_not_fit_the_length_are_refused_in_one_line():
    with pytest.raises(UsageError, match="longer stream or fewer groups") as caught:
        make_streams(tasks=BOTH, n_sequences=1, length=200, seed=0, difficulty=Difficulty(groups=12))
    assert "\n" not in str(caught.value)
