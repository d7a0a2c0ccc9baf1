"""Tiny models in folders, and where a benchmark of them runs: on the CPU device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from breakgraph.bench.arms import Setting
from breakgraph.bench.ceilings import Ceilings
from breakgraph.bench.config import BenchConfig
from breakgraph.models import resolve_model
from tiny_models import tiny_config

MakeSetting = Callable[[BenchConfig, Ceilings | None], Setting]
TINY_CEILINGS = Ceilings(copy_gb_per_sec=2.0, matrix_tflop_per_sec=0.5, launch_us=10.0, dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration alone: weights are random."""
    folder: Path = tmp_path_factory.mktemp("shapes") / "tiny-llama"
    tiny_config("llama").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make_setting() -> MakeSetting:
    """With ceilings made up, a benchmark times on the CPU as it would on a GPU."""

    def make(config: BenchConfig, ceilings: Ceilings | None) -> Setting:
        source = resolve_model(config.model, load_format="dummy")
        return Setting(config, source, torch.device("cpu"), torch.float32, ceilings, lambda line: None)

    return make
