"""Choosing an implementation: by name, and by what device, dtype and layers allow."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from breakgraph.attention import ATTENTION_NAMES, make_attention
from breakgraph.attention.flash import FlashAttention
from breakgraph.attention.registry import PhaseAttention
from breakgraph.attention.sdpa import SdpaAttention
from breakgraph.errors import ConfigError, UnknownNameError
from unit.attention.ragged import LAYERS, PLAIN, ragged_batch


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "breakgraph.attention")
    return lambda: caplog.text


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="'flesh'; known: auto, flash, sdpa, triton"):
        make_attention("flesh", "cpu", torch.float32, [PLAIN])
    assert ATTENTION_NAMES == ("auto", "flash", "sdpa", "triton")


def test_a_named_one_that_cannot_serve_says_why_and_what_can() -> None:
    with pytest.raises(ConfigError, match=r"'flash' cannot serve layer 0: it runs on CUDA, not on cpu; use .*'sdpa'"):
        make_attention("flash", "cpu", torch.bfloat16, [PLAIN])


def test_one_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "breakgraph.attention.triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"'triton' needs a package that does not import here .*triton.*'sdpa'"):
        make_attention("triton", "cpu", torch.float32, [PLAIN])


def test_auto_on_a_cpu_is_sdpa(logged: Callable[[], str]) -> None:
    attention = make_attention("auto", "cpu", torch.float32, [PLAIN])
    assert isinstance(attention, SdpaAttention)
    assert "attention=sdpa for all phases: flash cannot serve layer 0: it runs on CUDA" in logged()


@pytest.mark.usefixtures("hopper")
def test_auto_on_cuda_prefills_with_flash_and_decodes_with_sdpa(logged: Callable[[], str]) -> None:
    attention = make_attention("auto", "cuda", torch.bfloat16, [PLAIN, replace(LAYERS["window"], layer_id=1)])
    assert isinstance(attention, PhaseAttention)
    assert isinstance(attention.for_phase("prefill"), FlashAttention)
    assert isinstance(attention.for_phase("decode"), SdpaAttention)
    assert (attention.graph_support("prefill"), attention.graph_support("decode")) == ("none", "decode")
    assert "attention=flash" in logged()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["sinks", "softcap", "narrow values"])
def test_auto_needs_every_layer_to_fit(name: str, logged: Callable[[], str]) -> None:
    layers = [PLAIN, replace(LAYERS[name], layer_id=1)]
    assert isinstance(make_attention("auto", "cuda", torch.bfloat16, layers), SdpaAttention)
    assert "flash cannot serve layer 1" in logged()


def test_a_step_goes_to_the_implementation_of_its_phase() -> None:
    default, decode = SdpaAttention([PLAIN]), SdpaAttention([PLAIN])
    attention = PhaseAttention(default, {"decode": decode})
    for phase, chosen in (("prefill", default), ("decode", decode)):
        batch = ragged_batch(PLAIN, [1, 1], [3, 9], phase=phase)
        out = batch.run(attention)
        assert attention.plan(batch.step).backend is chosen
        assert chosen.kv is batch.kv
        torch.testing.assert_close(out.double(), batch.expected(), rtol=0, atol=1e-5)
