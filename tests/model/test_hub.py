"""A model name on the Hugging Face Hub is found in the cache or downloaded: only the files that are read. Errors are
clear."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import flashspan
from flashspan.attention import attention
from flashspan.data.prepare import prepare
from flashspan.generate import command
from flashspan.model import Llama, LlamaConfig, find_model, is_hub_name, save_llama
from flashspan.model.hub import UNWANTED, WANTED
from flashspan.plan.command import plan
from flashspan.train import parse, run

huggingface_hub = pytest.importorskip("huggingface_hub")
NAME = "some-org/Llama-9.9-tiny"
CONFIG = LlamaConfig(257, 16, 2, 4, 2, 32, max_tokens=64)


class Hub:
    """A Hub with one model. Its cache is a folder of links to files elsewhere, as in huggingface_hub."""

    def __init__(self, folder: Path) -> None:
        self.blobs, self.snapshot = folder / "blobs", folder / "snapshots" / "0123abc"
        model = Llama(CONFIG, attention=attention)
        model.initialize(0)
        save_llama(model, self.blobs, shard_bytes=4000)
        (self.blobs / "pytorch_model.bin").write_bytes(b"a pickle")
        (self.blobs / "consolidated.00.safetensors").write_bytes(b"the weights once more")
        self.asked: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def cache(self, names: list[str]) -> None:
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not (self.snapshot / name).exists():
                (self.snapshot / name).symlink_to(self.blobs / name)

    def snapshot_download(self, name: str, *, local_files_only: bool = False, **patterns: Any) -> str:
        from huggingface_hub.utils import filter_repo_objects

        assert name == NAME
        self.asked.append({"local_files_only": local_files_only, **patterns})
        if local_files_only:
            if not self.snapshot.exists():
                raise huggingface_hub.errors.LocalEntryNotFoundError("no snapshot")
            return str(self.snapshot)
        if self.error is not None:
            raise self.error
        files = [path.name for path in self.blobs.iterdir()] + ["original/params.json", "original/x.safetensors"]
        self.cache(list(filter_repo_objects(files, **patterns)))
        return str(self.snapshot)

    @property
    def num_downloads(self) -> int:
        return sum(not asked["local_files_only"] for asked in self.asked)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return made


def test_a_model_is_downloaded_once_without_pickles(hub: Hub) -> None:
    found = find_model(NAME)
    assert found == str(hub.snapshot) == find_model(NAME)
    assert hub.num_downloads == 1
    assert hub.asked[-1] == {"local_files_only": True, "allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    names = {path.name for path in hub.snapshot.iterdir()}
    assert "config.json" in names
    assert names == {path.name for path in hub.blobs.iterdir()} - {"pytorch_model.bin", "consolidated.00.safetensors"}


def test_a_download_that_was_interrupted_is_completed(hub: Hub) -> None:
    assert find_model(NAME, config_only=True) == str(hub.snapshot)
    assert [path.name for path in hub.snapshot.iterdir()] == ["config.json"]
    find_model(NAME, config_only=True)
    assert hub.num_downloads == 1
    hub.cache(["model.safetensors.index.json", "model-00001-of-00010.safetensors"])
    find_model(NAME)
    assert hub.num_downloads == 2
    assert len(list(hub.snapshot.glob("model-*.safetensors"))) == len(list(hub.blobs.glob("model-*.safetensors"))) > 1


def test_a_folder_wins_and_a_path_is_not_a_name(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    for path in (
        NAME,
        "some-org/missing",
        "runs/tiny",
        "tiny",
        "a/b/c",
        "./a/b",
        "/a/b",
        "a/",
        "~/a",
        "a b/c",
        "..",
        "",
    ):
        assert not is_hub_name(path)
        assert find_model(path) == path
    assert not hub.asked


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError("Name or service not known\nhttps://..."), "Name or service not known"),
        (RuntimeError("disk"), "disk"),
        ("GatedRepoError", "hf auth login"),
        ("RepositoryNotFoundError", "does not exist"),
    ],
)
def test_a_failure_is_one_line_with_the_command(hub: Hub, error: Exception | str, says: str) -> None:
    if isinstance(error, str):
        made: type[Exception] = getattr(huggingface_hub.errors, error)
        error = made.__new__(made, "401 Client Error\nmore")
    hub.error = error
    with pytest.raises(ValueError, match=says) as raised:
        find_model(NAME)
    assert f"hf download {NAME} --exclude 'original/*' --local-dir Llama-9.9-tiny`" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_nothing_is_downloaded_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"HF_HUB_OFFLINE.*hf download {NAME} "):
        find_model(NAME)
    assert hub.num_downloads == 0


def test_without_the_library_the_extra_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"flashspan\[hub\]"):
        find_model(NAME)


def test_text_is_generated_by_name(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.generate(NAME, prompt="One", tokens=3, temperature=0, device="cpu") == 0
    printed = capsys.readouterr().out
    assert flashspan.generate(NAME, "One", tokens=3, temperature=0) in printed
    assert flashspan.generate(hub.snapshot, "One", tokens=3, temperature=0) in printed
    assert hub.num_downloads == 1


def test_training_begins_with_its_weights(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"--model.load={NAME}",
        "--data.sequence=32",
        "--train.batch=2",
        "--train.steps=1",
        "--parallel.device=cpu",
    ]
    prepare(folder=str(tmp_path / "data"), synthetic=5000)
    config = parse([*words, f"--data.train={tmp_path / 'data'}", f"--checkpoint.folder={tmp_path / 'out'}"])
    with pytest.raises(ValueError, match=f"dry run downloads nothing.*hf download {NAME} "):
        run.run(config, dry_run=True)
    assert hub.num_downloads == 0
    find_model(NAME)
    assert run.run(config, dry_run=True) == "done"
    assert str(hub.snapshot) in capsys.readouterr().out
    loaded: list[str] = []
    monkeypatch.setattr(run, "_start", lambda config, *_: loaded.append(config.model.load) or "done")
    assert run.run(config) == "done"
    assert loaded == [str(hub.snapshot)]


def test_a_plan_reads_the_config_only(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(NAME, tokens=64, batch=2, devices=2) == 0
    assert f"--model.load {NAME}" in capsys.readouterr().out
    assert [path.name for path in hub.snapshot.iterdir()] == ["config.json"]


def test_usual_names_are_names(hub: Hub) -> None:
    names = ["meta-llama/Llama-3.2-1B", "HuggingFaceTB/SmolLM2-135M", "01-ai/Yi-6B", "a/b"]
    assert all(map(is_hub_name, names))
