"""GGUF files: the same logits as the model they were written from, the right end token, and a faithful conversion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from breakgraph.attention import make_attention
from breakgraph.errors import ConfigError, WeightsError
from breakgraph.models import HFModel, load_model, load_tokenizer, resolve_model
from breakgraph.models.gguf import CONVERT_STAGES, convert_gguf
from packed_driver import PackedDriver, TokenSequence
from unit.models.gguf_files import END, write_tiny_gguf

PROMPT = [5, 80, 3, 44, 44, 7, 60]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("tiny-gguf")
    return folder, write_tiny_gguf(folder / "tiny.gguf")


def packed_logits(model: HFModel) -> torch.Tensor:
    driver = PackedDriver(model, make_attention("sdpa", "cpu", model.dtype, model.layers))
    return driver.step([(TokenSequence(PROMPT), len(PROMPT))], padding=1)[0]


@torch.inference_mode()
def own_logits(model: LlamaForCausalLM) -> torch.Tensor:
    return model(torch.tensor([PROMPT]), use_cache=False).logits[0]


def test_a_folder_with_a_gguf_file(written: tuple[Path, LlamaForCausalLM]) -> None:
    folder, reference = written
    model = load_model(folder, dtype=torch.float32)
    assert model.eos_token_ids == (END,)
    assert model.max_position == 128
    torch.testing.assert_close(packed_logits(model), own_logits(reference), rtol=0, atol=1e-4)


def test_its_tokenizer_ends_where_the_file_says(written: tuple[Path, LlamaForCausalLM]) -> None:
    tokenizer = load_tokenizer(resolve_model(written[0]))
    assert tokenizer is not None
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", END)
    assert tokenizer.pad_token_id is not None
    assert tokenizer.decode(tokenizer("ab+c=d")["input_ids"], skip_special_tokens=True) == "ab+c=d"


def test_conversion_keeps_weights_ends_and_nothing_of_this_machine(
    written: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    folder, reference = written
    stages: list[str] = []
    convert_gguf(folder / "tiny.gguf", tmp_path, stages.append)
    assert tuple(stages) == CONVERT_STAGES
    source = resolve_model(tmp_path)
    assert source.dtype == torch.bfloat16
    model = load_model(source)
    assert (model.dtype, model.eos_token_ids) == (torch.bfloat16, (END,))
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    assert tokenizer.eos_token_id == END
    for name, weight in reference.named_parameters():
        assert torch.equal(model.module.get_parameter(name), weight.bfloat16()), name
    assert str(folder) not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not that")
    with pytest.raises(WeightsError, match=r"broken\.gguf is no GGUF file: it begins with b'not '"):
        resolve_model(tmp_path)


def test_a_truncated_file(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    whole = (written[0] / "tiny.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:300])
    with pytest.raises(WeightsError, match=r"short\.gguf cannot be read as GGUF"):
        resolve_model(tmp_path)


def test_truncated_tensors(written: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> None:
    whole = (written[0] / "tiny.gguf").read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[:-5000])
    with pytest.raises(WeightsError, match=r"short\.gguf"):
        load_model(tmp_path, dtype=torch.float32)


def test_two_files_are_one_too_many(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=r"2 \.gguf files; keep one: a\.gguf, b\.gguf"):
        resolve_model(tmp_path)


def test_without_the_gguf_package(written: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        resolve_model(written[0])
