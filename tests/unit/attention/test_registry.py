"""Choosing an implementation: by name, and by what device, dtype and layers allow."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from breakgraph.attention import ATTENTION_NAMES, GraphSupport, make_attention, registry
from breakgraph.attention.phase import PhaseAttention
from breakgraph.attention.sdpa import SdpaAttention
from breakgraph.attention.sized import SizedAttention
from breakgraph.attention.triton import TritonAttention
from breakgraph.errors import ConfigError, UnknownNameError
from triton_device import DEVICE
from unit.attention.ragged import LAYERS, PLAIN, ragged_batch


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    caplog.set_level(logging.INFO, "breakgraph.attention")
    return lambda: caplog.text


@pytest.fixture
def without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flashinfer" else find(name))
    for module in ("flashinfer", "breakgraph.attention.flashinfer_kernels"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)


class StandIn(SdpaAttention):
    """FlashInfer's name and its place, without the package: it takes any layer and no prefill graph."""

    name = "flashinfer"

    def graph_support(self, phase: str) -> GraphSupport:
        return "decode" if phase == "decode" else "none"


@pytest.fixture
def with_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True if name == "flashinfer" else find(name))
    made = registry._implementation
    monkeypatch.setattr(registry, "_implementation", lambda n: StandIn if n == "flashinfer" else made(n))


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="'flesh'; known: auto, flash, flashinfer, sdpa, triton"):
        make_attention("flesh", "cpu", torch.float32, [PLAIN])
    assert ATTENTION_NAMES == ("auto", "flash", "flashinfer", "sdpa", "triton")


def test_a_named_one_that_cannot_serve_says_why_and_what_can() -> None:
    with pytest.raises(ConfigError, match=r"'flash' cannot serve layer 0: it runs on CUDA, not on cpu; use .*'sdpa'"):
        make_attention("flash", "cpu", torch.bfloat16, [PLAIN])


def test_a_named_one_says_which_blocks_it_reads() -> None:
    with pytest.raises(ConfigError, match=r"'triton' cannot serve the KV cache: .*power of two, not 24; use .*'sdpa'"):
        make_attention("triton", DEVICE, torch.float32, [PLAIN], block_size=24)


def test_one_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "breakgraph.attention.triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"'triton' needs a package that does not import here .*triton.*'sdpa'"):
        make_attention("triton", "cpu", torch.float32, [PLAIN])


@pytest.mark.usefixtures("hopper", "without_flashinfer")
def test_an_extra_that_is_missing_says_how_to_install_it() -> None:
    layer = replace(PLAIN, head_dim=64, v_head_dim=64)
    with pytest.raises(
        ConfigError, match=r"does not import here .*; install it with pip install 'breakgraph\[flashinf"
    ):
        make_attention("flashinfer", "cuda", torch.bfloat16, [layer])


def test_auto_on_a_cpu_is_sdpa(logged: Callable[[], str]) -> None:
    """Not Triton either, whose interpreter is for tests."""
    attention = make_attention("auto", "cpu", torch.float32, [PLAIN], in_graph=("prefill", "decode"))
    assert isinstance(attention, SdpaAttention)
    assert "attention=sdpa for prefill: cpu, float32" in logged()
    assert "attention=sdpa for decode: cpu, float32" in logged()


@pytest.mark.usefixtures("hopper")
def test_auto_computes_float32_with_sdpa(logged: Callable[[], str]) -> None:
    assert isinstance(make_attention("auto", "cuda", torch.float32, [PLAIN]), SdpaAttention)
    assert "attention=sdpa for prefill: cuda, float32" in logged()


@pytest.mark.usefixtures("hopper", "without_flashinfer")
def test_auto_on_cuda_is_triton_without_the_extra(logged: Callable[[], str]) -> None:
    layers = [PLAIN, replace(LAYERS["all at once"], layer_id=1)]
    attention = make_attention("auto", "cuda", torch.bfloat16, layers, in_graph=("prefill", "decode"))
    assert isinstance(attention, TritonAttention)
    assert "attention=triton for prefill: flashinfer is not installed" in logged()
    assert "attention=triton for decode: first choice" in logged()


@pytest.mark.usefixtures("hopper", "with_flashinfer")
def test_auto_prefills_with_flashinfer_where_it_is_installed(logged: Callable[[], str]) -> None:
    attention = make_attention("auto", "cuda", torch.bfloat16, [PLAIN], in_graph=("decode",))
    assert isinstance(attention, PhaseAttention)
    names = [attention.for_phase(phase).name for phase in ("prefill", "decode")]
    assert names == ["triton or flashinfer", "triton"]
    sized = attention.for_phase("prefill")
    assert isinstance(sized, SizedAttention)
    assert isinstance(sized.short, TritonAttention)
    assert sized.short.is_short
    assert not make_attention("triton", "cuda", torch.bfloat16, [PLAIN]).is_short
    assert "attention=flashinfer for prefill: first choice" in logged()
    assert "attention=triton for prefill of little work: it plans nothing on the host" in logged()


@pytest.mark.usefixtures("hopper", "with_flashinfer")
def test_flashinfer_takes_all_prompts_where_triton_cannot_serve() -> None:
    attention = make_attention("auto", "cuda", torch.bfloat16, [PLAIN], in_graph=("decode",), block_size=24)
    assert attention.for_phase("prefill").name == "flashinfer"


@pytest.mark.usefixtures("hopper", "with_flashinfer")
def test_auto_takes_nothing_that_a_graph_cannot_hold(logged: Callable[[], str]) -> None:
    attention = make_attention("auto", "cuda", torch.bfloat16, [PLAIN], in_graph=("prefill", "decode"))
    assert attention.for_phase("prefill").name == "triton"
    assert "attention=triton for prefill: flashinfer cannot be in a graph there" in logged()


@pytest.mark.usefixtures("hopper", "without_flashinfer")
def test_auto_needs_every_layer_and_the_cache_to_fit(logged: Callable[[], str]) -> None:
    layers = [PLAIN, replace(PLAIN, layer_id=1, head_dim=512, v_head_dim=512)]
    assert isinstance(make_attention("auto", "cuda", torch.bfloat16, layers), SdpaAttention)
    assert "triton cannot serve layer 1: its head sizes go up to 256, not 512; flash cannot serve layer 1" in logged()
    blocks = make_attention("auto", "cuda", torch.bfloat16, [PLAIN], block_size=24)
    assert [blocks.for_phase(phase).name for phase in ("prefill", "decode")] == ["flash", "sdpa"]
    assert "triton cannot serve the KV cache: its block size is a power of two, not 24" in logged()


def test_a_step_goes_to_the_implementation_of_its_phase() -> None:
    default, decode = SdpaAttention([PLAIN]), SdpaAttention([PLAIN])
    attention = PhaseAttention(default, {"decode": decode})
    for phase, chosen in (("prefill", default), ("decode", decode)):
        batch = ragged_batch(PLAIN, [1, 1], [3, 9], phase=phase)
        out = batch.run(attention)
        assert attention.plan(batch.step).backend is chosen
        assert chosen.kv is batch.kv
        torch.testing.assert_close(out.double(), batch.expected(), rtol=0, atol=1e-5)
