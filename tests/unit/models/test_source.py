"""What a name or path stands for, and which broken folders are seen before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from breakgraph.errors import ConfigError, ModelNotFoundError, UnsupportedModelError, WeightsError
from breakgraph.models import PRESETS, load_tokenizer, resolve_model
from tiny_models import save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    save_tiny_model("llama", path)
    return path


def split_weights(folder: Path) -> list[str]:
    """Rewrites the weights as shards with an index; their file names."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1
    return shards


def test_a_folder(folder: Path) -> None:
    source = resolve_model(folder)
    assert (source.name, source.folder, source.gguf_file) == ("tiny", folder, None)
    assert (source.dtype, source.max_position) == (torch.float32, 512)
    assert load_tokenizer(source) is None


def test_a_folder_in_shards(folder: Path) -> None:
    split_weights(folder)
    assert resolve_model(str(folder)).folder == folder


def test_random_weights_need_the_configuration_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    source = resolve_model(folder, load_format="dummy")
    assert source.folder is None
    assert source.config.model_type == "llama"
    assert load_tokenizer(source) is None


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_shapes_only(name: str) -> None:
    source = resolve_model(name, load_format="dummy")
    assert source.folder is None
    assert source.dtype == torch.bfloat16
    assert source.max_position >= 8192


def test_a_preset_has_no_weights() -> None:
    with pytest.raises(ConfigError, match="'qwen3-8b' is a shape without weights; use load_format='dummy'"):
        resolve_model("qwen3-8b")


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nowhere does not exist.*gpt-oss-20b.*qwen3-8b.*smollm2"):
        resolve_model(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match="file is no folder"):
        resolve_model(tmp_path / "file")


def test_an_unknown_load_format(folder: Path) -> None:
    with pytest.raises(ConfigError, match="one of auto, dummy, got 'pt'"):
        resolve_model(folder, load_format="pt")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], object], type[ConfigError], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ModelNotFoundError, "holds no config.json"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), ConfigError, "config.json is not a model config"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), ConfigError, "config.json is not a model config"),
    "generation no JSON": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": 3'),
        ConfigError,
        "generation_config.json is no generation configuration in JSON.*or remove it",
    ),
    "generation a list": (lambda f: (f / "generation_config.json").write_text("[1]"), ConfigError, "no generation"),
    "an end in words": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "67"}'),
        ConfigError,
        "eos_token_id must be a token id or a list of them, got '67'",
    ),
    "wrong kind of value": (
        lambda f: edit_config(f, hidden_size="wide"),
        ConfigError,
        r"config\.json is refused by transformers: .*hidden_size",
    ),
    "no such architecture": (
        lambda f: edit_config(f, model_type="llama9000"),
        UnsupportedModelError,
        "no architecture for model_type 'llama9000'",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), WeightsError, r"no weights: expected \*.safetensors"),
    "truncated": (lambda f: truncate(f / "model.safetensors"), WeightsError, "model.safetensors cannot be read"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), WeightsError, "model.safetensors cannot be read"),
    "garbage": (
        lambda f: (f / "model.safetensors").write_bytes(b"x" * 5000),
        WeightsError,
        "model.safetensors cannot be read",
    ),
    "a missing shard": (
        lambda f: (f / split_weights(f)[1]).unlink(),
        WeightsError,
        "lacks weights files that its index lists: model-00002-of",
    ),
    "a truncated shard": (lambda f: truncate(f / split_weights(f)[1]), WeightsError, "model-00002-of.* cannot be read"),
    "a broken index": (
        lambda f: (split_weights(f), (f / "model.safetensors.index.json").write_text("{}")),
        WeightsError,
        "index.json is not an index",
    ),
}


@pytest.mark.parametrize(("damage", "kind", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_folders(folder: Path, damage: Callable[[Path], object], kind: type[ConfigError], message: str) -> None:
    damage(folder)
    with pytest.raises(kind, match=message):
        resolve_model(folder)


def test_a_broken_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the tokenizer in .*tiny cannot be read"):
        load_tokenizer(resolve_model(folder))
