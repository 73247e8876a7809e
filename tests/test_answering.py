"""From an item task to its items: whole batches, however they are shared out, stored and taken up again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from item_cases import TEXT, RandomTask

from driftgate.accuracy.plans import PrecisionPlan
from driftgate.errors import EmptyRunError, InputError
from driftgate.evals.answer_store import AnswerStore
from driftgate.evals.answering import Answers, BuiltTask, Decoder, answer, build_tasks
from driftgate.evals.tasks.item_task import TaskOptions
from driftgate.kernels.contract import Backend

PLANS = {name: PrecisionPlan.parse(name) for name in ("nvfp4@4", "nvfp4/fp32@4")}
BATCHES = 4  # 14 prompts in batches of 4


def make_built(*, limit: int | None = None, seed: int = 0) -> BuiltTask:
    task = RandomTask()
    return build_tasks([task], {task.name: TaskOptions(seed=seed)}, TEXT, limit=limit)[0]


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint: Path) -> Decoder:
    return Decoder(
        folder=tiny_checkpoint, name="tiny", device="cpu", dtype=None, backend=Backend.TORCH, plans=PLANS, batch=4,
        seed=0, vocab_size=96, identity={"model": "abc"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(decoder, tiny_model) -> Answers:
    """All answers from one process that stores nothing."""
    return answer(make_built(), decoder, model=tiny_model)


def test_every_plan_answers_every_item_and_repeat(whole):
    assert whole.again_equal
    assert len(whole.digests) == BATCHES
    counts = whole.items.groupby("plan")["item_id"].agg(["size", "nunique"])
    assert set(counts.index) == {"baseline", *PLANS}
    assert (counts["size"] == 14).all() and (counts["nunique"] == 7).all()


def test_reads_of_each_answer_stand_beside_it(whole):
    by_plan = whole.items.groupby("plan")["low_precision_reads"]
    assert by_plan.max()["baseline"] == 0
    assert by_plan.min()["nvfp4@4"] > by_plan.min()["nvfp4/fp32@4"] > 0


@pytest.mark.parametrize("jobs", [2, 3])
def test_items_are_the_same_in_any_number_of_shards(decoder, whole, jobs, tmp_path):
    """Row 21 of the public faults: 73-75 % over 1-8 GPUs."""
    found = answer(make_built(), decoder, jobs=jobs, store=AnswerStore(folder=tmp_path))
    for name, frame in (("one", whole.items), ("more", found.items)):
        frame.to_parquet(tmp_path / f"{name}.parquet", index=False)
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "more.parquet").read_bytes()
    assert found.answers == whole.answers
    assert found.digests == whole.digests


@pytest.mark.parametrize("limit", [1, 3])
def test_a_limit_takes_items_of_a_run_without_one(decoder, whole, tiny_model, limit):
    """Row 14: the bits of an item do not depend on it, and a later run without a limit has all items."""
    found = answer(make_built(limit=limit), decoder, model=tiny_model).items
    assert found["item_id"].nunique() == limit
    shared = whole.items[whole.items["item_id"].isin(found["item_id"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(found, shared)


class Interrupted(Exception):
    pass


def test_an_interrupted_task_goes_on_where_it_stopped(decoder, whole, tiny_model, tmp_path):
    store, done = AnswerStore(folder=tmp_path), []

    def stop_after_two(n: int) -> None:
        done.append(n)
        if len(done) == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        answer(make_built(), decoder, model=tiny_model, store=store, progress=stop_after_two)
    again: list[int] = []
    found = answer(make_built(), decoder, model=tiny_model, store=store, progress=again.append)
    assert len(again) == BATCHES - 2
    pd.testing.assert_frame_equal(found.items, whole.items)
    assert found.answers == whole.answers
    assert found.digests == whole.digests


def test_stored_answers_give_the_same_score_without_a_model(decoder, whole, tiny_model, tmp_path):
    store = AnswerStore(folder=tmp_path)
    answer(make_built(), decoder, model=tiny_model, store=store)
    unloadable = replace(decoder, folder=tmp_path / "no such folder")
    pd.testing.assert_frame_equal(answer(make_built(), unloadable, store=store).items, whole.items)


@pytest.mark.parametrize(
    "change",
    [
        {"plans": {"nvfp4@4": PLANS["nvfp4@4"]}},
        {"plans": {**PLANS, "fp8@4": PrecisionPlan.parse("fp8@4")}},
        {"identity": {"model": "abd"}},
        {"seed": 1},
        {"dtype": "bf16"},
        {"backend": Backend.TRITON},
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_is_served_under_another_identity(decoder, tiny_model, tmp_path, change):
    """Row 22: a cache that matches what it should not."""
    store, built = AnswerStore(folder=tmp_path), make_built(limit=1)
    answer(built, decoder, model=tiny_model, store=store)
    with pytest.raises(InputError, match=r"00000.txt was answered with another model, plan, version, seed or prompt"):
        answer(built, replace(decoder, **change), model=tiny_model, store=store)


def test_other_prompts_have_another_identity(decoder):
    task, prompts = RandomTask(), make_built().prompts[:4]
    base = decoder.identify(task, prompts)
    assert base == decoder.identify(task, make_built().prompts[:4])
    changes = [
        {"token_ids": (5, *prompts[0].token_ids[1:])}, {"item_id": "other"}, {"repeat": 9}, {"prefill": 2},
        {"temperature": 0.5}, {"max_new_tokens": 6}, {"choices": (1, 2, 3, 4)}, {"stop_ids": (7,)},
        {"forced": ((0, 5),)}, {"continuation": (5,)},
    ]  # fmt: skip
    others = {decoder.identify(task, [replace(prompts[0], **change), *prompts[1:]]) for change in changes}
    assert len(others | {base}) == len(changes) + 1


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"identity": "x"}', '{"identity": "x", "answers": {"p": [{"q": 1}]}}']
)
def test_a_damaged_batch_is_named(decoder, tiny_model, tmp_path, damage):
    store = AnswerStore(folder=tmp_path)
    path = store.path("random", 0)
    path.parent.mkdir()
    path.write_text(damage)
    with pytest.raises(InputError, match=r"random/00000.txt is no batch of answers or was edited") as caught:
        answer(make_built(limit=1), decoder, model=tiny_model, store=store)
    assert "\n" not in str(caught.value)


def test_a_batch_keeps_every_bit_on_disk(decoder, tiny_model, tmp_path):
    """Row 6: files that flush small numbers to zero; -inf of a masked token must come back, too."""
    store, prompts = AnswerStore(folder=tmp_path), list(make_built().prompts[:4])
    found = decoder.decode(prompts, model=tiny_model)
    first = replace(found.answers["baseline"][0], logprobs=(-1e-300, -float("inf"), 0.1 + 0.2), tie_margin=1e-9)
    found.answers["baseline"][0] = first
    store.write("a task/with:signs", 3, "id", found)
    assert store.read("a task/with:signs", 3, "id") == found
    content = store.path("a task/with:signs", 3).read_text().split("\n", 1)[1]
    assert json.loads(content)["identity"] == "id"


def test_an_answer_that_was_edited_is_not_served(decoder, tiny_model, tmp_path):
    store = AnswerStore(folder=tmp_path)
    answer(make_built(limit=1), decoder, model=tiny_model, store=store)
    path = store.path("random", 0)
    path.write_text(path.read_text().replace('"low_precision_reads": 0', '"low_precision_reads": 9', 1))
    with pytest.raises(InputError, match="was edited"):
        answer(make_built(limit=1), decoder, model=tiny_model, store=store)


def test_a_task_without_items_is_an_empty_run():
    task = RandomTask()
    task.n_items = 0
    with pytest.raises(EmptyRunError, match="task random: zero items"):
        build_tasks([task], {"random": TaskOptions()}, TEXT)


def test_prompts_that_exceed_the_context_are_refused_before_a_model_loads():
    task = RandomTask()
    with pytest.raises(InputError, match=r"task random, item q6: 12 tokens of prompt and 5 after it exceed .* 16"):
        build_tasks([task], {"random": TaskOptions()}, replace(TEXT, context=16))


def test_the_manifest_says_what_was_asked_without_text():
    described = make_built(limit=3).describe()
    assert described["items"] == 3 and described["decoded"] == 6 and described["version"] == 1
    assert described["options"] == {"seed": 0}
    assert described["first_token_ids"] == list(make_built().prompts[0].token_ids)
