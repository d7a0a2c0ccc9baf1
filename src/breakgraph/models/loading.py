"""From a name or folder to a model on the device."""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from breakgraph.errors import WeightsError
from breakgraph.models.experts import LIVE_GROUPED_MM, TRITON, triton_refusals
from breakgraph.models.hf import HFModel
from breakgraph.models.hook import ATTENTION_NAME
from breakgraph.models.source import ModelSource, resolve_model
from breakgraph.models.support import build_model, check_supported, has_experts

logger = logging.getLogger(__name__)

# Its annotation knows nothing of output_loading_info, which adds a second result.
_from_pretrained: Any = AutoModelForCausalLM.from_pretrained

_GROUPED_MM_CAPABILITY = (9, 0)
_TRITON_CAPABILITY = (8, 0)


@contextmanager
def loading_bars(show: bool) -> Iterator[None]:
    """transformers shows its bars while weights load only if asked to, and only on a terminal."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    if not (show and sys.stderr.isatty()):
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()


def load_model(
    model: str | Path | ModelSource,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    cache_dir: str | Path | None = None,
) -> HFModel:
    """Loads a model, or fills one with random weights.

    Args:
        model: What `resolve_model` takes, or its result (then `load_format` and `cache_dir` are not used).
        dtype: Default the checkpoint's own, else float32.
        seed: Of random weights; the same seed gives the same weights on the same kind of device.

    Raises:
        ConfigError: what `resolve_model` and `check_supported` raise.
        WeightsError: the files do not fit the configuration.
    """
    source = (
        model if isinstance(model, ModelSource) else resolve_model(model, load_format=load_format, cache_dir=cache_dir)
    )
    device, dtype = torch.device(device), dtype or source.dtype or torch.float32
    check_supported(source.config, dtype)
    experts = _choose_experts(source, device, dtype)
    if source.folder is None:
        return HFModel(_random_model(source, device, dtype, experts, seed), source.name)
    return HFModel(_pretrained_model(source, source.folder, device, dtype, experts), source.name)


def _choose_experts(source: ModelSource, device: torch.device, dtype: torch.dtype) -> str:
    """Of the three implementations that a graph can hold, the fastest that computes this model there."""
    if not has_experts(source.config):
        return "batched_mm"
    refusals = _triton_refusals(source, device, dtype)
    grouped = (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) >= _GROUPED_MM_CAPABILITY
    )
    why_not = f"{TRITON} does not compute these experts: {', '.join(refusals)}"
    if not refusals:
        chosen, reason = TRITON, "padding rows reach no expert"
    elif grouped:
        chosen, reason = LIVE_GROUPED_MM, f"{why_not}; padding rows reach no expert here either"
    else:
        chosen, reason = "batched_mm", (
            f"{why_not}; grouped_mm would wait for the device in {dtype} on {device.type}; batched_mm copies "
            "the weights of each token's experts, so keep steps small"
        )
    logger.info("experts=%s: %s", chosen, reason)
    return chosen


def _triton_refusals(source: ModelSource, device: torch.device, dtype: torch.dtype) -> list[str]:
    if device.type != "cuda":
        return [f"it runs on CUDA, not on {device.type}"]
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed"]
    capability = torch.cuda.get_device_capability(device)
    if capability < _TRITON_CAPABILITY:
        return [f"it needs compute capability 8.0, not {capability[0]}.{capability[1]}"]
    with torch.device("meta"):
        return triton_refusals(build_model(source.config, dtype, experts="batched_mm"))


def _random_model(
    source: ModelSource, device: torch.device, dtype: torch.dtype, experts: str, seed: int
) -> PreTrainedModel:
    """Made where it stays and in its final dtype, with the initial values of the class: normal(0, 0.02), norms one.

    With experts, token embeddings are normal(0, sqrt(2 layers)). Smaller ones drown in what the layers add, which is
    the mean of many tokens: the tokens of a deep random model become alike (Dong et al., "Attention is not all you
    need", 2021), all go to the same few experts, and a step costs much less than with trained weights. The root keeps
    the sum of two additions a layer as small beside the embedding as GPT-2's initial values do (Radford et al., 2019,
    which divides the additions by it).
    """
    cuda_index = device.index if device.index is not None or device.type != "cuda" else torch.cuda.current_device()
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [cuda_index]), device:
        torch.manual_seed(seed)
        model = build_model(source.config, dtype, experts)
        if has_experts(source.config):
            embeddings = model.get_input_embeddings().weight
            assert isinstance(embeddings, torch.Tensor)
            torch.nn.init.normal_(embeddings, std=math.sqrt(2 * source.config.num_hidden_layers))
        return model


def _pretrained_model(
    source: ModelSource, folder: Path, device: torch.device, dtype: torch.dtype, experts: str
) -> PreTrainedModel:
    options: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {"use_safetensors": True}
    try:
        model, info = _from_pretrained(
            folder,
            config=copy.deepcopy(source.config),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=experts,
            local_files_only=True,
            output_loading_info=True,
            # Wrong shapes are reported by name below; the alternative is an error that points to a log.
            ignore_mismatched_sizes=True,
            **options,
        )
    except (RuntimeError, KeyError) as error:
        raise WeightsError(f"the weights in {folder} do not fit {source.config.model_type}: {error}") from error
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])] + [
        f"{name} is {tuple(found)}, not {tuple(expected)}" for name, found, expected in sorted(info["mismatched_keys"])
    ]
    if wrong:
        raise WeightsError(
            f"the weights in {folder} do not fit its configuration: {'; '.join(wrong[:5])}"
            + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        )
    moved: PreTrainedModel = model.to(device)
    return moved
