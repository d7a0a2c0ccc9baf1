"""Tests that need a CUDA device. They are collected when this folder is named: `pytest tests/gpu`."""

from __future__ import annotations

import importlib.util

import pytest
import torch

# An extra: whoever has not installed it tests the rest.
collect_ignore = [] if importlib.util.find_spec("flashinfer") else ["test_flashinfer.py"]


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs a CUDA device, torch finds none; `make test` runs the other tests")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The CUDA device alone: what runs on the CPU device too belongs in tests/unit."""
    return torch.device("cuda")
