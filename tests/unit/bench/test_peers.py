"""Peers: each in a process of its own, where it can run."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

from breakgraph.bench.config import PrefillBench, ServeBench
from breakgraph.bench.peers import PeerTask, compiled, continuous, peer_notes, plain, run_apart, run_peer
from breakgraph.bench.result import Row
from breakgraph.errors import ConfigError
from unit.bench.conftest import TINY_CEILINGS, MakeSetting

FAKE = '''
import os
import signal
import threading
import time
from pathlib import Path
from breakgraph.bench.result import Metric, Row

def hang():
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGINT)
    threading.Event().wait()

def measure(task):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path("peer").write_text(str(os.getpid()))
    if task.config.model == "hangs":
        hang()
    if task.config.model == "lingers":
        threading.Thread(target=hang).start()
    if task.config.model == "dies":
        os._exit(3)
    if task.config.model == "fails":
        raise RuntimeError("no kernel\\nfor this")
    return [Row(name="serve", params={"process": os.getpid(), "dtype": task.dtype},
                metrics={"time": Metric(value=1.0, unit="s")})]
'''


@pytest.fixture
def fake_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fake_peer.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "fake_peer"


@pytest.mark.parametrize(
    ("model", "answer"),
    [
        ("runs", None),
        ("dies", "its process died; what it printed above says more"),
        ("fails", "RuntimeError: no kernel for this"),
    ],
)
def test_a_peer_ends_no_benchmark(fake_peer: str, model: str, answer: str | None) -> None:
    found = run_apart(fake_peer, PeerTask(ServeBench(model=model), "bfloat16"))
    if answer is not None:
        assert found == answer
        return
    (row,) = found
    assert isinstance(row, Row)
    assert row.params["dtype"] == "bfloat16"
    assert row.params["process"] != os.getpid()


@pytest.mark.parametrize("what", ["hangs", "lingers"])
def test_an_interrupt_ends_a_peer_that_does_not_end_by_itself(
    fake_peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Before it has answered, or after."""
    from breakgraph.bench import peers

    monkeypatch.setattr(peers, "_GRACE_SEC", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run_apart(fake_peer, PeerTask(ServeBench(model=what), "bfloat16"))
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "peer").read_text()), 0)


def test_the_emulated_device_compares_nothing(tiny_folder: str, make_setting: MakeSetting) -> None:
    setting = make_setting(ServeBench(model=tiny_folder), None)
    assert run_peer("vllm", setting) == "the emulated device claims no speed, so there is nothing to compare"


def test_vllm_is_named_where_it_is_missing(
    tiny_folder: str, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    from breakgraph.bench.peers import vllm_api

    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"vllm does not import .*; install it in this environment to compare"):
        vllm_api.measure(PeerTask(ServeBench(model=tiny_folder, device="cpu"), "float32"))


def test_reduce_overhead_needs_a_gpu(tiny_folder: str) -> None:
    with pytest.raises(ConfigError, match="mode 'reduce-overhead' makes CUDA graphs, got device 'cpu'"):
        compiled.measure(PeerTask(PrefillBench(model=tiny_folder, device="cpu"), "float32"))


# Raised by torch itself, when its compiler is first imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_the_compiled_body_is_that_of_the_same_class(tiny_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With compilation left out, which takes a GPU to be what it is there."""
    from transformers import AutoModelForCausalLM

    from breakgraph.models import resolve_model

    asked: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda body, **options: asked.append(options) or body)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    config = PrefillBench(model=tiny_folder, device="cpu", rounds=3)
    model = AutoModelForCausalLM.from_config(resolve_model(tiny_folder, load_format="dummy").config).eval()
    with torch.no_grad():
        row = compiled._case(config, model, 8, torch.device("cpu"))
    assert asked == [{"mode": "reduce-overhead", "dynamic": False}]
    assert (row.params["tokens"], row.params["attention"]) == (8, "sdpa")
    assert row.metrics["time"].value > 0


def test_the_plain_call_of_transformers_is_timed_for_every_size(tiny_folder: str) -> None:
    config = PrefillBench(model=tiny_folder, device="cpu", tokens=(8, 4), requests=(1,), rounds=10)
    rows = plain.measure(PeerTask(config, "float32"))
    assert [row.params["tokens"] for row in rows] == [4, 8]
    assert {(row.params["backend"], row.params["attention"]) for row in rows} == {("transformers, eager", "sdpa")}
    assert all(row.metrics["time"].value > 0 for row in rows)


def test_continuous_batching_of_transformers_gives_whole_answers(
    tiny_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Left alone it takes most of the memory for its cache.
    few_blocks = functools.partial(continuous.ContinuousBatchingConfig, num_blocks=8)
    monkeypatch.setattr(continuous, "ContinuousBatchingConfig", few_blocks)
    config = ServeBench(
        model=tiny_folder, device="cpu", num_requests=3, prompt_len=12, answer_len=4, max_num_batched_tokens=64,
        rounds=1,
    )  # fmt: skip
    (row,) = continuous.measure(PeerTask(config, "float32"))
    assert row.params["attention"] == "paged|sdpa"
    assert row.metrics["answer_tokens"].value == 12
    assert row.metrics["time"].value > 0


def test_versions_of_what_is_installed() -> None:
    assert peer_notes(["torch.compile"]) == [f"peer torch.compile: torch {torch.__version__}"]
    assert peer_notes([]) == []


def test_a_setting_with_ceilings_runs_its_peer(
    fake_peer: str, tiny_folder: str, make_setting: MakeSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    from breakgraph.bench import peers

    monkeypatch.setitem(peers._WHERE, ("serve", "vllm"), fake_peer)
    (row,) = run_peer("vllm", make_setting(ServeBench(model=tiny_folder), TINY_CEILINGS))
    assert row.params["dtype"] == "float32"  # type: ignore[union-attr]
