"""Loading: the right weights in the right dtype, random ones by seed, and files that do not fit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from breakgraph.attention import make_attention
from breakgraph.errors import UnsupportedModelError, WeightsError
from breakgraph.models import HFModel, ModelSource, load_model, loading, resolve_model
from breakgraph.models.support import build_model
from packed_driver import PackedDriver, TokenSequence
from tiny_models import TINY_CONFIGS, save_tiny_model, tiny_config

PROMPT = [5, 80, 3, 44, 44, 7, 60]


def packed_logits(model: HFModel) -> torch.Tensor:
    driver = PackedDriver(model, make_attention("sdpa", "cpu", model.dtype, model.layers))
    return driver.step([(TokenSequence(PROMPT), len(PROMPT))], padding=1)[0]


def config_folder(folder: Path, name: str) -> Path:
    tiny_config(name).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_a_saved_model_gives_its_own_logits(name: str, tmp_path: Path) -> None:
    reference = save_tiny_model(name, tmp_path)
    model = load_model(tmp_path)
    assert model.dtype == torch.float32
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(packed_logits(model), expected, rtol=0, atol=1e-4)


def test_facts(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3")
    config.eos_token_id = [3, 4]
    config.save_pretrained(tmp_path)
    model = load_model(tmp_path, load_format="dummy", dtype=torch.bfloat16)
    assert (model.num_layers, model.vocab_size, model.max_position) == (2, 96, 512)
    assert model.eos_token_ids == (3, 4)
    assert (model.dtype, model.device) == (torch.bfloat16, torch.device("cpu"))
    assert model.kv_cache_shapes(8) == {0: ((8, 4, 24), (8, 4, 12)), 1: ((8, 4, 24), (8, 4, 12))}
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert not model.module.training


def test_end_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    transformers.GenerationConfig(eos_token_id=[7, 9]).save_pretrained(tmp_path)
    assert load_model(tmp_path).eos_token_ids == (7, 9)


def test_no_end_token_is_no_error(tmp_path: Path) -> None:
    assert load_model(config_folder(tmp_path, "llama"), load_format="dummy").eos_token_ids == ()


@pytest.mark.parametrize("name", TINY_CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_finite_and_follow_the_seed(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = config_folder(tmp_path, name)
    state = torch.get_rng_state()
    first, again, other = (load_model(folder, load_format="dummy", dtype=dtype, seed=seed).module for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    weights, same = dict(first.named_parameters()), dict(again.named_parameters())
    assert all(torch.equal(same[key], weight) for key, weight in weights.items())
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)
    for key, weight in weights.items():
        assert weight.dtype == dtype, key
        assert weight.isfinite().all(), key
        if weight.dim() >= 2 and "bias" not in key:
            has_experts = "embed_tokens" in key and hasattr(first.config, "num_experts_per_tok")
            spread = 50 * (2 * first.config.num_hidden_layers) ** 0.5 if has_experts else 1
            assert 0.01 < weight.float().std() / spread < 0.03, key
    assert packed_logits(HFModel(first, name)).isfinite().all()


def test_frequencies_stay_in_float32(tmp_path: Path) -> None:
    model = load_model(config_folder(tmp_path, "llama"), load_format="dummy", dtype=torch.bfloat16)
    assert model.module.model.rotary_emb.inv_freq.dtype == torch.float32


def test_random_experts_are_all_needed_however_deep(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    config.num_hidden_layers, config.num_experts, config.hidden_size, config.num_experts_per_tok = 16, 32, 128, 2
    config.save_pretrained(tmp_path)
    model = load_model(tmp_path, load_format="dummy", dtype=torch.float32)
    reached: list[int] = []
    for layer in model.module.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, args, out: reached.append(len(out[-1].unique())))
    driver = PackedDriver(model, make_attention("sdpa", "cpu", model.dtype, model.layers), max_blocks=32)
    driver.step([(TokenSequence([token % 96 for token in range(0, 700, 7)]), 100)])
    assert len(reached) == 16
    assert min(reached) >= 30


def test_random_weights_by_preset() -> None:
    source = resolve_model("qwen3-0.6b", load_format="dummy")
    source.config.update({"num_hidden_layers": 1, "layer_types": ["full_attention"], "vocab_size": 64})
    model = load_model(source, seed=3)
    assert (model.name, model.dtype, model.layers[0].head_dim) == ("qwen3-0.6b", torch.bfloat16, 128)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config.save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        load_model(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(32)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"up_proj\.weight is missing; model\.norm\.weight is \(32,\), not \(64,\)"):
        load_model(tmp_path)


def test_the_choice_of_experts_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "breakgraph.models")
    model = load_model(config_folder(tmp_path, "qwen3_moe"), load_format="dummy", dtype=torch.bfloat16)
    assert model.config._experts_implementation == "batched_mm"
    assert "experts=batched_mm: breakgraph_triton does not compute these experts: it runs on CUDA" in caplog.text
    assert "grouped_mm would wait for the device in torch.bfloat16 on cpu" in caplog.text


@pytest.mark.parametrize("name", TINY_CONFIGS)
@pytest.mark.parametrize(
    ("capability", "dtype", "plain", "biased"),
    [
        ((9, 0), torch.bfloat16, "breakgraph_triton", "breakgraph_grouped_mm"),
        ((9, 0), torch.float16, "breakgraph_triton", "batched_mm"),
        ((8, 0), torch.bfloat16, "breakgraph_triton", "batched_mm"),
        ((7, 5), torch.float16, "batched_mm", "batched_mm"),
    ],
)
def test_the_experts_of_each_gpu(
    name: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    plain: str,
    biased: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    source = ModelSource(name, tiny_config(name), folder=None)
    chosen = loading._choose_experts(source, torch.device("cuda", 0), dtype)
    is_dense = name in ("llama", "qwen3", "mistral", "gemma2", "gemma3")
    assert chosen == ("batched_mm" if is_dense else biased if name == "gpt_oss" else plain)
    with torch.device("meta"):
        model = build_model(source.config, dtype, chosen)  # a class that cannot take it raises here
    assert model.config._experts_implementation == chosen
