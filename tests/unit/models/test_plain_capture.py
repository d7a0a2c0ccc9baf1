"""Models of transformers as they come, captured whole: no hazard, no break, and replays with the bits of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import breakgraph

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, **_SIZES}
_EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_VISION = {"image_size": 32, "patch_size": 8, **_SIZES}
_SPEECH = {
    "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16]}

Forward = Callable[[Any, Tensor], Any]


def _masked(model: Any, ids: Tensor) -> Any:
    return model(input_ids=ids, attention_mask=(ids > 9).long())


def _plain(model: Any, ids: Tensor) -> Any:
    return model(input_ids=ids, use_cache=False)


def _masked_and_plain(model: Any, ids: Tensor) -> Any:
    return model(input_ids=ids, attention_mask=(ids > 9).long(), use_cache=False)


def _decoder_too(model: Any, ids: Tensor) -> Any:
    return model(input_ids=ids, decoder_input_ids=ids, use_cache=False)


def _pixels(model: Any, pixels: Tensor) -> Any:
    return model(pixel_values=pixels)


def _speech(model: Any, features: Tensor) -> Any:
    ids = (features[:, 0, :12].abs() * 30).long().clamp(max=99)
    return model(input_features=features, decoder_input_ids=ids, use_cache=False)


IDS, IMAGE, SOUND = (2, 12), (2, 3, 32, 32), (2, 8, 32)
CASES: dict[str, tuple[str, dict[str, Any], Forward, tuple[int, ...]]] = {
    "bert": ("Bert", _TEXT, _masked, IDS),
    "modernbert": ("ModernBert", {**_TEXT, "local_attention": 8}, _masked, IDS),
    "llama": ("Llama", _TEXT, _plain, IDS),
    "llama with a mask": ("Llama", _TEXT, _masked_and_plain, IDS),
    "mixtral": ("Mixtral", {**_TEXT, **_EXPERTS}, _plain, IDS),
    "gpt2": ("GPT2", {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4}, _plain, IDS),
    "bloom": ("Bloom", {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _plain, IDS),
    "mamba": ("Mamba", {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, _plain, IDS),
    "t5": ("T5", _T5, _decoder_too, IDS),
    "bart": ("Bart", _SPEECH, _decoder_too, IDS),
    "whisper": ("Whisper", _SPEECH, _speech, SOUND),
    "vit": ("ViT", _VISION, _pixels, IMAGE),
    "swin": ("Swin", {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
             _pixels, IMAGE),
    "convnext": ("ConvNext", {**_STAGES, "num_stages": 2}, _pixels, IMAGE),
    "resnet": ("ResNet", {**_STAGES, "embedding_size": 8}, _pixels, IMAGE),
}  # fmt: skip


def fresh(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(3, 99, shape, device=device) if shape is IDS else torch.randn(shape, device=device)


@pytest.mark.parametrize("name", CASES)
def test_replays_are_right_and_nothing_is_left_outside(name: str, device: torch.device) -> None:
    architecture, options, forward, shape = CASES[name]
    config = getattr(transformers, f"{architecture}Config")(**options)
    model = getattr(transformers, f"{architecture}Model")(config).to(device).eval()
    if device.type == "cuda" and name == "mixtral":
        model.bfloat16()  # in float32 torch multiplies one expert after the other, and reads on the host how many rows
    x = fresh(shape, device)
    with torch.no_grad(), breakgraph.capture(lambda x: forward(model, x), x, verify=True) as captured:
        assert captured.explain().num_breaks == 0
        x.copy_(fresh(shape, device))
        got, want = captured.replay(), forward(model, x)
        for key in want:
            if isinstance(want[key], Tensor):
                # Where nothing is masked, the model itself leaves the mask out, and rounds otherwise.
                loose = {"rtol": 1e-4, "atol": 1e-5} if want[key].dtype == torch.float32 else {}
                torch.testing.assert_close(got[key], want[key], **loose)
