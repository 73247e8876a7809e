"""Models by hub id: from the cache without a network, in one line where they cannot be had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hub_cases import COMMIT, NAME, fill_cache, use_cache
from huggingface_hub import constants
from huggingface_hub import errors as hub

from driftgate.accuracy.hub import fetch_checkpoint, is_hub_id
from driftgate.accuracy.models import load_model
from driftgate.errors import InputError, UsageError
from driftgate.evals.find_models import find_model
from driftgate.main_job import check


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    return use_cache(tmp_path, monkeypatch)


@pytest.fixture
def cached(cache, tiny_checkpoint) -> Path:
    return fill_cache(cache, tiny_checkpoint)


def refused(name: str) -> str:
    with pytest.raises(InputError) as caught:
        find_model(name)
    message = str(caught.value)
    assert message.splitlines() == [message]
    assert len(message) < 600
    return message


@pytest.mark.parametrize("name", [NAME, f"{NAME}@{COMMIT}", f"{NAME}@main"])
def test_a_hub_id_is_its_snapshot_in_the_cache(cached, name):
    assert find_model(name) == cached
    assert load_model(find_model(name), name=name, device="cpu").name == name


def test_a_run_takes_a_hub_id(cached, tmp_path):
    checked = check("quick", out=tmp_path / "out", model=NAME, tasks=[], steps=8)
    assert (checked.folder, checked.suite.model) == (cached, NAME)
    assert checked.suite.stream == "generation"


def test_a_folder_comes_before_a_hub_id(cached, tiny_checkpoint):
    shutil.copytree(tiny_checkpoint, Path(NAME))
    assert find_model(NAME) == Path(NAME)


def test_a_folder_of_the_owners_name_makes_it_a_path(cached):
    Path("owner").mkdir()
    assert not is_hub_id(NAME)
    assert refused(NAME).startswith(f"model folder {NAME} does not exist; give a checkpoint folder")


@pytest.mark.parametrize("name", ["./a", "a/b/c", "/nowhere/a", "~/a", "../a/b", "a/", "a//b", "-a/b"])
def test_paths_are_no_hub_ids(cache, name):
    assert not is_hub_id(name)
    assert refused(name).startswith(f"model folder {name} does not exist")


def test_a_path_object_is_no_hub_id(cached):
    """``Path("./owner/name")`` has lost its point, and with it what tells it from a hub id."""
    with pytest.raises(InputError, match=f"model folder {NAME} does not exist"):
        find_model(Path(f"./{NAME}"))
    assert find_model(cached) == cached


def test_a_name_without_owner_stays_a_usage_error(cache):
    with pytest.raises(UsageError, match="unknown model 'tiny-gnd'; did you mean tiny-gdn"):
        find_model("tiny-gnd")


def test_what_is_not_cached_is_named_with_the_cache_and_the_mend(cache):
    message = refused("owner/absent@main")
    assert message.startswith(f"owner/absent@main is no folder and not in the cache {cache}, and the environment says")
    assert message.endswith("`hf download owner/absent`")


def test_a_snapshot_without_weights_is_named_before_anything_starts(cached, tmp_path):
    (cached / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"model\.safetensors is missing"):
        check("quick", out=tmp_path / "out", model=NAME, tasks=[], steps=8)


def test_a_model_that_is_not_covered_is_refused_before_its_weights_are_fetched(cached, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repository, **options):
        asked.append(options["allow_patterns"])
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetch_checkpoint(NAME)
    assert ["model.safetensors" in patterns for patterns in asked] == [False, True]
    config = json.loads((cached / "config.json").read_text())
    (cached / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": config["vocab_size"]}))
    assert "covered: bamba, " in refused(NAME)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (None, ["model.safetensors"]),
        ('{"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}',
         ["model-1.safetensors", "model-2.safetensors"]),
        ("{", ["*.safetensors"]),
    ],
)  # fmt: skip
def test_only_the_weight_files_of_the_model_are_fetched(cached, monkeypatch, index, wanted):
    """Some repositories hold the same weights twice, as consolidated.safetensors beside the shards."""
    import huggingface_hub

    asked = []

    def download(repository, **options):
        asked.append(options["allow_patterns"])
        return str(cached)

    if index is not None:
        (cached / "model.safetensors.index.json").write_text(index)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetch_checkpoint(NAME)
    assert [name for name in asked[1] if name.endswith(".safetensors")] == wanted


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (hub.GatedRepoError, "owner/tiny-model is gated; accept its terms"),
        (hub.RepositoryNotFoundError, "owner/tiny-model is neither a folder nor on the Hugging Face hub"),
        (hub.RevisionNotFoundError, "owner/tiny-model has no revision v2; leave @v2 out"),
        (hub.LocalEntryNotFoundError, "and the hub cannot be reached; fetch it first"),
        (hub.HfHubHTTPError, "cannot be fetched: of the hub and more"),
        (OSError, "cannot be fetched: of the hub and more"),
    ],
)
def test_what_the_hub_says_is_one_line(cache, monkeypatch, error, says):
    import huggingface_hub

    def download(*_: object, **__: object) -> str:
        raised = error.__new__(error)  # some want the response of a server
        raised.args = ("of the hub\nand more",)
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert says in refused(f"{NAME}@v2").replace("tiny-model@v2", "tiny-model")


def test_progress_bars_of_the_hub_are_as_they_were(cached):
    from huggingface_hub.utils import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    find_model(NAME)
    assert are_progress_bars_disabled() == before
