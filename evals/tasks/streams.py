"""Token streams for the shipped tasks: pairs, a long middle of tallies and filler, questions at the end.

Everything is a pure function of ``(seed, index, layout)``; bits come from ``numpy.random.Philox.random_raw`` keyed by
``(seed, index)``, so a stream does not depend on how many others are made, nor on numpy's distribution code.

A stream is text (token ids are byte values; one ``<bos>`` in front)::

    <bos> Q7 B0 ...          n_pairs pairs: an upper-case key and a digit
    a+ .; k/ a- Q3 ...       the middle, units of two tokens: an event (a group letter and one of + - * /),
                             filler (two steps of a random walk on a ring of 24 signs), a rewrite (a pair key, a digit)
    ?a+ ?Q3 ?k/ ...          questions: '?', a group letter and its most frequent sign, or '?', a pair key and its
                             latest digit; the right answer follows, so later questions see it

Every group has the same number of events, so only the conjunction of letter and sign is informative: no single-token
statistic answers a tracking question. Within a group the counts are fixed by the margin (gold count minus the
runner-up's count) and the order is random, or biased so that the runner-up leads early and the gold sign catches up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "BOS",
    "DIGITS",
    "EOS",
    "FILLER",
    "GROUPS",
    "PAD",
    "PAIR_KEYS",
    "QUESTION",
    "SIGNS",
    "StreamBatch",
    "StreamLayout",
    "generate_streams",
]

PAD, BOS, EOS = 256, 257, 258
QUESTION = ord("?")
PAIR_KEYS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", dtype=np.uint8).astype(np.int64)
DIGITS = np.frombuffer(b"0123456789", dtype=np.uint8).astype(np.int64)
GROUPS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8).astype(np.int64)
SIGNS = np.frombuffer(b"+-*/", dtype=np.uint8).astype(np.int64)
FILLER = np.frombuffer(b"!\"#$%&'(),.:;<=>@[]^_{|}", dtype=np.uint8).astype(np.int64)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StreamLayout:
    """Sizes of one kind of stream.

    Args:
        length: tokens in all, ``<bos>`` and answers included.
        n_pairs: key-digit pairs at the start (at most 26).
        n_groups: tallied groups (at most 26).
        n_recall: recall questions, at most n_pairs.
        n_tracking: tracking questions, at most n_groups.
        event_share: share of the middle's units that are events.
        rewrite_share: share of the middle's units that give a pair key a new digit.
        sign_pairs: pairs are a letter that is no group and a sign (so a pair looks like a single event), instead of
            an upper-case key and a digit.
        pair_repeats: how often the block of pairs is given.
        margin: least and greatest margin of a group as a share of its events (uniform between; at least 1 event).
        late_share: share of groups whose runner-up leads early and whose gold sign comes late.
        early_share: share of groups with the opposite order.
        order_bias: how far those are apart; 0 is no bias, 1 is a clean cut.
    """

    length: int
    n_pairs: int = 16
    n_groups: int = 16
    n_recall: int = 16
    n_tracking: int = 16
    event_share: float = 0.75
    rewrite_share: float = 0.0
    sign_pairs: bool = False
    pair_repeats: int = 1
    margin: tuple[float, float] = (0.05, 0.3)
    late_share: float = 0.4
    early_share: float = 0.2
    order_bias: float = 0.35

    def __post_init__(self) -> None:
        if not 1 <= self.n_pairs <= len(PAIR_KEYS) or not 1 <= self.n_groups <= len(GROUPS) or self.pair_repeats < 1:
            raise ValueError(
                f"n_pairs and n_groups must be 1..26 and pair_repeats 1 or more, got {self.n_pairs}, {self.n_groups}, "
                f"{self.pair_repeats}"
            )
        if not 0 <= self.n_recall <= self.n_pairs or not 0 <= self.n_tracking <= self.n_groups:
            raise ValueError("n_recall must be 0..n_pairs and n_tracking 0..n_groups")
        if self.n_questions < 1:
            raise ValueError("a stream needs at least one question")
        if not (self.event_share >= 0 and self.rewrite_share >= 0 and self.event_share + self.rewrite_share <= 1):
            raise ValueError("event_share and rewrite_share must be non-negative and at most 1 together")
        if self.sign_pairs and (self.rewrite_share or self.n_pairs + self.n_groups > len(GROUPS)):
            raise ValueError("sign pairs allow no rewrites, and at most 26 pairs and groups together")
        if self.events_per_group < 6:
            raise ValueError(
                f"length {self.length} leaves {self.events_per_group} events for each of {self.n_groups} groups; "
                "at least 6 are needed: take a longer stream or fewer groups"
            )

    @property
    def n_questions(self) -> int:
        """Questions in a stream, recall and tracking together."""
        return self.n_recall + self.n_tracking

    @property
    def question_start(self) -> int:
        """Position of the first question mark."""
        return self.length - 3 * self.n_questions

    @property
    def middle_start(self) -> int:
        """Position of the first token after the pairs."""
        return 1 + 2 * self.n_pairs * self.pair_repeats

    @property
    def n_units(self) -> int:
        """Two-token units in the middle."""
        return (self.question_start - self.middle_start) // 2

    @property
    def events_per_group(self) -> int:
        """Events of each group; what does not divide evenly is filler."""
        return int(self.event_share * self.n_units) // self.n_groups


@dataclass(frozen=True)
class StreamBatch:
    """Streams of one layout; questions in the order in which they are asked.

    Axes: B streams, Q questions. ``answer_positions`` is the index of the answer token itself; the logits that
    predict it stand one position earlier.
    """

    layout: StreamLayout
    token_ids: Ints  # [B, length]
    answer_positions: Ints  # [Q], the same in every stream
    is_tracking: npt.NDArray[np.bool_]  # [B, Q]
    answers: Ints  # [B, Q] token ids
    margins: Ints  # [B, Q] gold count minus runner-up, 0 for recall
    late: npt.NDArray[np.bool_]  # [B, Q] the group's runner-up led early


class _Uniforms:
    """Hands out blocks of uniform numbers in [0, 1): row b depends on (seed, indices[b]) alone."""

    def __init__(self, seed: int, indices: Ints) -> None:
        self._sources = [np.random.Philox(key=[seed, int(index)]) for index in indices]

    def draw(self, *shape: int) -> Floats:
        size = int(np.prod(shape))
        raw = np.stack([source.random_raw(size) for source in self._sources])
        uniforms = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return uniforms.reshape(len(self._sources), *shape)


def _composition(layout: StreamLayout, uniforms: Floats) -> Ints:
    """Counts [B, G, 4] of gold, runner-up and the two others; gold is the strict maximum. uniforms [B, G, 2]."""
    n = layout.events_per_group
    low, high = layout.margin
    margin = np.maximum(1, np.rint((low + (high - low) * uniforms[..., 0]) * n)).astype(np.int64)
    other = np.floor(n * (0.08 + 0.12 * uniforms[..., 1])).astype(np.int64)
    margin = np.minimum(margin, n - 2 * other)
    margin -= (n - 2 * other - margin) % 2
    margin = np.where(margin < 1, margin + 2, margin)
    runner = (n - 2 * other - margin) // 2
    return np.stack([runner + margin, runner, other, other], axis=-1)


def _order_signs(layout: StreamLayout, counts: Ints, uniforms: Floats, mode: Floats) -> Ints:
    """Ranks 0..3 (gold, runner-up, others) of each group's events in time, [B, G, n]."""
    n = layout.events_per_group
    slots = np.arange(n)
    rank = (slots >= np.cumsum(counts, axis=-1)[..., :3, None]).sum(axis=-2)
    sign = np.where(mode < layout.late_share, 1.0, 0.0)
    sign = np.where((mode >= layout.late_share) & (mode < layout.late_share + layout.early_share), -1.0, sign)
    push = np.array([1.0, -1.0, 0.0, 0.0])[rank] * sign[..., None] * layout.order_bias
    in_time: Ints = np.take_along_axis(rank, np.argsort(uniforms + push, axis=-1, kind="stable"), axis=-1)
    return in_time


def _walk(uniforms: Floats) -> Ints:
    """A walk on the ring of filler signs: one step back, stay, one step on with 0.1, 0.1, 0.8; [B, n] token ids."""
    steps = np.where(uniforms < 0.1, -1, np.where(uniforms < 0.2, 0, 1))
    steps[:, 0] = np.floor(uniforms[:, 0] * len(FILLER)).astype(np.int64)
    places: Ints = np.cumsum(steps, axis=1) % len(FILLER)
    return FILLER[places]


@dataclass(frozen=True)
class _Tallies:
    """What happens in the groups of B streams: the sign of each rank, counts by rank, order bias, events in time."""

    letters: Ints  # [B, G]
    signs: Ints  # [B, G, 4] by rank: gold, runner-up, others
    counts: Ints  # [B, G, 4]
    mode: Floats  # [B, G]
    ranks: Ints  # [B, G, n] rank of a group's events in time
    group_of: Ints  # [B, G n] group of every event in time


def _draw_pairs(layout: StreamLayout, source: _Uniforms) -> tuple[Ints, Ints, Ints]:
    """Pair keys and values [B, P], and group letters [B, G], as token ids."""
    upper = np.argsort(source.draw(len(PAIR_KEYS)), axis=1)
    u = source.draw(layout.n_pairs)
    letters = GROUPS[np.argsort(source.draw(len(GROUPS)), axis=1)]
    groups, others = letters[:, : layout.n_groups], letters[:, layout.n_groups :]
    if layout.sign_pairs:
        return others[:, : layout.n_pairs], SIGNS[np.argsort(np.argsort(u, axis=1), axis=1) % len(SIGNS)], groups
    return PAIR_KEYS[upper[:, : layout.n_pairs]], DIGITS[np.floor(u * 10).astype(np.int64)], groups


def _draw_tallies(layout: StreamLayout, source: _Uniforms, letters: Ints) -> _Tallies:
    n_groups, n = layout.n_groups, layout.events_per_group
    signs = SIGNS[np.argsort(source.draw(n_groups, 4), axis=2)]
    counts = _composition(layout, source.draw(n_groups, 2))
    mode = source.draw(n_groups)
    ranks = _order_signs(layout, counts, source.draw(n_groups, n), mode)
    group_of = np.argsort(np.argsort(source.draw(n_groups * n), axis=1), axis=1) % n_groups
    return _Tallies(letters, signs, counts, mode, ranks, group_of)


def _place_events(units: Ints, slots: Ints, tallies: _Tallies) -> None:
    """Write the events over these slots [B, G n] of units [B, U, 2], in time."""
    rows, group_of = np.arange(len(units)), tallies.group_of
    seen = np.zeros(tallies.letters.shape, dtype=np.int64)
    nth = np.empty_like(group_of)
    for j in range(group_of.shape[1]):
        nth[:, j] = seen[rows, group_of[:, j]]
        seen[rows, group_of[:, j]] += 1
    row = rows[:, None]
    units[row, slots, 0] = tallies.letters[row, group_of]
    units[row, slots, 1] = tallies.signs[row, group_of, tallies.ranks[row, group_of, nth]]


def _place_rewrites(units: Ints, slots: Ints, uniforms: Floats, keys: Ints, values: Ints) -> Ints:
    """Write rewrites of pair keys over these slots [B, R]; returns the latest values [B, P]."""
    rows, latest = np.arange(len(units)), values.copy()
    for j in range(slots.shape[1]):
        key = np.floor(uniforms[:, j, 0] * keys.shape[1]).astype(np.int64)
        digit = DIGITS[np.floor(uniforms[:, j, 1] * 10).astype(np.int64)]
        units[rows, slots[:, j], 0] = keys[rows, key]
        units[rows, slots[:, j], 1] = digit
        latest[rows, key] = digit
    return latest


def generate_streams(layout: StreamLayout, *, seed: int, indices: npt.ArrayLike) -> StreamBatch:
    """Generate the streams with these indices.

    Args:
        layout: sizes, the same for all of them.
        seed: non-negative, below 2**64.
        indices: [B] non-negative stream indices; stream i is the same whatever else is asked for.
    """
    index = np.asarray(indices, dtype=np.int64)
    rows, count, n_units = np.arange(len(index))[:, None], len(index), layout.n_units
    source = _Uniforms(seed, index)
    keys, values, letters = _draw_pairs(layout, source)
    tallies = _draw_tallies(layout, source, letters)
    walk = _walk(source.draw(2 * n_units + 1))
    slots = np.argsort(source.draw(n_units), axis=1)
    n_events, n_rewrites = tallies.group_of.shape[1], int(layout.rewrite_share * n_units)
    rewrites = source.draw(max(n_rewrites, 1), 2)
    order = np.argsort(source.draw(layout.n_questions), axis=1)
    recall_of = np.argsort(source.draw(layout.n_pairs), axis=1)[:, : layout.n_recall]
    tracking_of = np.argsort(source.draw(layout.n_groups), axis=1)[:, : layout.n_tracking]

    units = walk[:, : 2 * n_units].reshape(count, n_units, 2).copy()
    _place_events(units, np.sort(slots[:, :n_events], axis=1), tallies)
    rewrite_slots = np.sort(slots[:, n_events : n_events + n_rewrites], axis=1)
    latest = _place_rewrites(units, rewrite_slots, rewrites, keys, values)

    none = np.zeros_like(recall_of)
    margin = tallies.counts[..., 0] - tallies.counts[..., 1]
    is_late = (tallies.mode < layout.late_share).astype(np.int64)
    asked, answers, margins, late = (
        np.concatenate([recalled, tracked[rows, tracking_of]], axis=1)[rows, order]
        for recalled, tracked in (
            (keys[rows, recall_of], letters),
            (latest[rows, recall_of], tallies.signs[..., 0]),
            (none, margin),
            (none, is_late),
        )
    )
    block = np.stack([np.full_like(asked, QUESTION), asked, answers], axis=2)
    pairs = np.tile(np.stack([keys, values], axis=2).reshape(count, -1), layout.pair_repeats)
    spare = walk[:, 2 * n_units : 2 * n_units + layout.question_start - layout.middle_start - 2 * n_units]
    parts = [np.full((count, 1), BOS), pairs, units.reshape(count, -1), spare, block.reshape(count, -1)]
    return StreamBatch(
        layout=layout,
        token_ids=np.concatenate(parts, axis=1).astype(np.int64),
        answer_positions=layout.question_start + 3 * np.arange(layout.n_questions) + 2,
        is_tracking=order >= layout.n_recall,
        answers=answers,
        margins=margins,
        late=late.astype(bool),
    )
