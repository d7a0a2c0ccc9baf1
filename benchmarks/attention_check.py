"""Every attention implementation against float64, on random ragged batches at real sizes.

    PYTHONPATH=src python3 benchmarks/attention_check.py --out result.json

Batches of 1 to 64 requests with up to 9000 tokens, prefixes, windows, sinks, softcap, head sizes 64 to 256 and 1 to 8
query heads a key head, bfloat16; slots of the cache that no request owns hold NaN. A case is wrong where an element is
off by more than

    2^-8 |exact| + (2^-8 + 2^-10) * sum of weight * |value|

bfloat16 keeps 8 bits, so a rounding is off by 2^-8 of its number at most: once the result's, once each weight's before
it is multiplied with a value. Products and sums are made in float32, whose errors, with those of exp and tanh, the last
term covers. Inputs are rounded before both sides read them. Padding rows must be zero, in the decode phase finite.

FlashInfer runs the cases whose kernels are compiled (flashinfer_build.py): a kernel takes minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from attention_cases import DEVICE, DTYPE, LAYER, Case, make_case, of_size, reference, with_sinks

from breakgraph.attention import AttentionBackend, LayerAttention, make_attention
from breakgraph.bench.result import Metric, Result, Row, Shape, here, installed_version, write_result
from breakgraph.errors import ConfigError

LAYERS = {
    "32/8 128": LAYER,
    "8/8 128": of_size(LAYER, 8, 8, 128),
    "32/4 128": of_size(LAYER, 32, 4, 128),
    "10/2 128": of_size(LAYER, 10, 2, 128),
    "128 window 1": replace(LAYER, window=1),
    "128 window 4096": replace(LAYER, window=4096),
    "12/2 128 softcap": replace(of_size(LAYER, 12, 2, 128), softcap=30.0),
    "14/2 64": of_size(LAYER, 14, 2, 64),
    "64/8 64 sinks": with_sinks(of_size(LAYER, 64, 8, 64)),
    "64/8 64 sinks window 128": replace(with_sinks(of_size(LAYER, 64, 8, 64)), window=128),
    "8/8 96": of_size(LAYER, 8, 8, 96),
    "8/4 256 softcap window 1000": replace(of_size(LAYER, 8, 4, 256), softcap=50.0, window=1000),
    "16/2 256": of_size(LAYER, 16, 2, 256),
    "16/16 192/128": replace(of_size(LAYER, 16, 16, 192), v_head_dim=128),
}
ROUNDS = 11
LONGEST = 9000


def ragged(rng: random.Random, num_reqs: int, num_tokens: int) -> tuple[list[int], list[int]]:
    """New and cached lengths: some single tokens, the rest at random, more than half of them with a prefix."""
    q_lens: list[int] = []
    for left in range(num_reqs, 0, -1):
        room = max(1, num_tokens - sum(q_lens) - left + 1)
        q_lens.append(rng.choice([1, rng.randint(1, min(64, room)), rng.randint(1, min(room, 2 * room // left + 1))]))
    return q_lens, [rng.randint(0, LONGEST - n) if rng.random() < 0.6 else 0 for n in q_lens]


def cases(layer: LayerAttention, seed: int) -> Iterator[tuple[str, Case]]:
    rng = random.Random(seed)
    for index in range(ROUNDS):
        phase = "decode" if index % 2 else "prefill"
        num_reqs = (1, 1, 64, 64)[index] if index < 4 else rng.randint(1, 64)
        if phase == "decode":
            q_lens, cached = [1] * num_reqs, [rng.choice([0, rng.randint(0, 40), rng.randint(0, LONGEST - 1)])
                                              for _ in range(num_reqs)]  # fmt: skip
        else:
            q_lens, cached = ragged(rng, num_reqs, 3000)
        if index < 2:
            q_lens, cached = ([LONGEST], [0]) if phase == "prefill" else ([1], [LONGEST - 1])
        padding = rng.choice([0, 1, 37])
        what = f"{phase} of {num_reqs}, {sum(q_lens)} new tokens, seed {seed + index}"
        yield what, make_case(layer, q_lens, cached, phase=phase, padding=padding, seed=seed + index, holes=True)


@dataclass
class Tally:
    """What one implementation did over all cases."""

    checked: int = 0
    wrong: int = 0
    max_error: float = 0.0
    worst_of_bound: float = 0.0
    worst_case: str = "none"
    square_error: float = 0.0
    square_rounding: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, case: Case, out: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> None:
        live = case.step.num_tokens
        error = (out[:live].double() - exact).abs()
        bound = 2**-8 * exact.abs() + (2**-8 + 2**-10) * size
        of_bound = torch.where(error == 0, 0.0, error / bound).amax().item()  # a window of one may show a zero: 0 of 0
        tail = out[live:]
        padding = bool(tail.isfinite().all() if case.step.phase == "decode" else tail.eq(0).all())
        self.checked += 1
        if not of_bound <= 1 or not padding:
            self.wrong += 1
            print(f"WRONG {what}: {of_bound:.3g} of the bound, padding {'right' if padding else 'wrong'}", flush=True)
        if not of_bound <= self.worst_of_bound:
            self.worst_of_bound, self.worst_case = of_bound, what
        self.max_error = max(self.max_error, error.amax().item())
        self.square_error += error.square().sum().item()
        self.square_rounding += (exact.to(DTYPE).double() - exact).square().sum().item()

    @property
    def over_rounding(self) -> float:
        """Root mean square error, in units of that of the exact result rounded to bfloat16."""
        return float((self.square_error / self.square_rounding) ** 0.5) if self.square_rounding else 0.0

    def row(self, name: str) -> Row:
        metrics = {
            "checked": Metric(value=self.checked, unit="count"),
            "wrong": Metric(value=self.wrong, unit="count"),
            "skipped": Metric(value=self.skipped.total(), unit="count"),
        }
        numbers = {
            "max_error": self.max_error, "max_of_bound": self.worst_of_bound, "rms_over_rounding": self.over_rounding
        }  # fmt: skip
        # Where something came out as NaN the numbers say nothing; `wrong` does.
        metrics |= {k: Metric(value=v, unit="ratio") for k, v in numbers.items() if v == v and abs(v) != float("inf")}
        return Row(name=name, params={"worst_case": self.worst_case}, metrics=metrics)


def not_compiled(name: str, layer: LayerAttention) -> str | None:
    if name != "flashinfer":
        return None
    from flashinfer_build import missing_kernels

    missing = missing_kernels(layer, DTYPE)
    return f"kernel not compiled: {', '.join(missing)}" if missing else None


def attention_for(name: str, layer: LayerAttention, tally: Tally) -> AttentionBackend | None:
    """None where the implementation does not take the layer; the tally then says why."""
    try:
        made = make_attention(name, DEVICE, DTYPE, [layer])
    except ConfigError as refusal:
        tally.skipped[str(refusal).split("; ")[0].partition("layer 0: ")[2] or str(refusal)] += ROUNDS
        return None
    reason = not_compiled(name, layer)
    if reason is not None:
        tally.skipped[reason] += ROUNDS
        return None
    return made


@torch.inference_mode()
def check_layer(name: str, layer: LayerAttention, seed: int, tallies: dict[str, Tally]) -> None:
    attentions = {kind: attention_for(kind, layer, tally) for kind, tally in tallies.items()}
    for what, case in cases(layer, seed):
        right: tuple[torch.Tensor, torch.Tensor] | None = None
        for kind, attention in attentions.items():
            if attention is None:
                continue
            out = case.run(attention)
            if right is None:
                right = reference(case)
            tallies[kind].add(f"{kind}, {name}, {what}", case, out, *right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    names = ["sdpa", "flash", "triton"] + ["flashinfer"] * (importlib.util.find_spec("flashinfer") is not None)
    tallies = {name: Tally() for name in names}
    for index, (name, layer) in enumerate(LAYERS.items()):
        started = time.perf_counter()
        check_layer(name, layer, 100 * index, tallies)
        torch.cuda.empty_cache()
        print(f"{name:30} {time.perf_counter() - started:6.1f} s", flush=True)
    print(f"{'':11} checked wrong skipped  max error  of bound  rms/rounding  worst case")
    for name, t in tallies.items():
        print(f"{name:11} {t.checked:7} {t.wrong:5} {t.skipped.total():7}  {t.max_error:9.2e}", end="  ")
        print(f"{t.worst_of_bound:8.3f}  {t.over_rounding:12.3f}  {t.worst_case}")
        for reason, count in t.skipped.items():
            print(f"{'':11} skipped {count}: {reason}")
    run, where, versions = here(f"python3 benchmarks/attention_check.py {' '.join(sys.argv[1:-2])}".strip(), DEVICE)
    write_result(args.out, Result(
        run=run, where=where, versions=versions, shape=Shape(model={"layers": len(LAYERS)}, dtype="bfloat16"),
        rows=tuple(tally.row(name) for name, tally in tallies.items()),
        notes=(f"flashinfer-python {installed_version('flashinfer-python')}",
               "max_of_bound: the largest error over its bound, 2^-8 |exact| + (2^-8 + 2^-10) sum(weight * |value|)",
               "rms_over_rounding: root mean square error over that of the exact result rounded to bfloat16",
               *(f"{name} skipped {count}: {reason}" for name, tally in tallies.items()
                 for reason, count in tally.skipped.items())),
    ))  # fmt: skip
    wrong = sum(tally.wrong for tally in tallies.values())
    print(f"{wrong} WRONG" if wrong else "all right")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
