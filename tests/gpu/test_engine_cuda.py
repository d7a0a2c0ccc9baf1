"""The engine on a GPU: each step of a generation is bit-equal to eager on the same padded batch, in poisoned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from breakgraph import LLM, SamplingParams
from breakgraph.errors import ConfigError
from breakgraph.runners import StepBatch
from no_waiting import no_waiting

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "bfloat16", "device": "cuda", "max_model_len": 512, "max_num_batched_tokens": 64,
    "max_num_seqs": 8, "num_gpu_blocks_override": 300, "use_tqdm": False,
}  # fmt: skip
PROMPTS = [list(range(1, 1 + n)) for n in (3, 150, 40, 1, 65, 64, 200, 9, 30)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    LlamaConfig(
        vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return str(tmp_path)


@pytest.mark.parametrize(
    "backends",
    [
        {"attention": "auto"},
        {"attention": "sdpa"},
        {"attention": "flash", "decode_backend": "breakable"},
        {"prefill_backend": "debug_eager", "decode_backend": "debug_eager"},
        {"prefill_backend": "auto", "decode_backend": "auto"},
        {"fusion": "inductor"},
        {"fusion": "inductor", "prefill_backend": "full"},
    ],
)
def test_every_step_has_the_bits_of_a_padded_eager_one(
    folder: str, monkeypatch: pytest.MonkeyPatch, backends: dict[str, str]
) -> None:
    compared: list[str] = []
    with LLM(folder, **OPTIONS, **backends) as llm:
        for phase, runner in llm.engine.runners.items():

            def run_both(batch: StepBatch, phase: str = phase, runner: Any = runner, run: Any = runner.run) -> Any:
                expected = runner.run_padded_eager(batch)
                llm.engine.family.poison()
                logits = run(batch)
                assert torch.equal(logits, expected), (phase, batch.q_lens)
                compared.append(phase)
                return logits

            monkeypatch.setattr(runner, "run", run_both)
        params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats = llm.stats()["runners"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * len(PROMPTS)
    assert compared.count("prefill") >= 5
    assert compared.count("decode") >= 10
    assert all(not runner["num_eager_steps_by_reason"] for runner in stats.values())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(top_p=0.9, top_k=40, min_p=0.01, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(frequency_penalty=1.0, repetition_penalty=1.2, max_tokens=40, ignore_eos=True),
    ],
)
def test_a_step_that_has_one_behind_it_waits_for_nothing_but_its_tokens(folder: str, params: SamplingParams) -> None:
    with LLM(folder, **OPTIONS, attention="triton") as llm:
        engine = llm.engine
        requests = [engine.make_request(prompt, params) for prompt in PROMPTS[:5]]
        for request in requests:
            engine.add(request)
        while engine.stats()["steps_ahead"]["num_launched"] < 2:
            engine.step()
        with no_waiting(torch.device("cuda")):
            for _ in range(10):
                engine.step()
            engine.abort([requests[2].request_id])  # its row is void
            for _ in range(3):
                engine.step()
        counts = engine.stats()["steps_ahead"]
        engine.abort([request.request_id for request in requests])
    assert counts["num_launched"] >= 15
    assert counts["num_void_rows"] == 1


def test_flash_inside_a_graph_is_refused_by_name(folder: str) -> None:
    with pytest.raises(ConfigError, match="attention 'flash' has 'none'"):
        LLM(folder, **OPTIONS, attention="flash")


def test_a_closed_engine_gives_its_memory_back(folder: str) -> None:
    def open_and_close() -> int:
        with LLM(folder, **OPTIONS) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
        del llm
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    first = open_and_close()
    assert open_and_close() <= first + (1 << 20)
