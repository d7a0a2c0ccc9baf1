"""From logits to token ids. Knows nothing about requests, text or batches.

Shapes: R rows (requests), V vocabulary, W words of 32 tokens, L tokens of the longest history, K alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from breakgraph.engine.sampling import SamplingParams
from breakgraph.errors import BreakgraphError


@dataclass(frozen=True)
class History:
    """The tokens of one row so far, for penalties."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities for one token of an answer.

    They come from the logits as the model gives them, before penalties, temperature and filters.
    """

    token_id: int
    logprob: float
    top_token_ids: list[int]
    """The likeliest tokens, the most likely first; the chosen one need not be among them."""
    top_logprobs: list[float]


class DrawnTokens:
    """Tokens that were drawn on the device, and are on their way to the host.

    Attributes:
        token_ids_R: on the device, behind what its stream does.
    """

    def __init__(self, token_ids_R: Tensor, is_finite_R: Tensor) -> None:
        self.token_ids_R = token_ids_R
        # One transfer for both.
        self._host_2R = torch.stack([token_ids_R, is_finite_R.to(token_ids_R.dtype)])
        self._copied: torch.cuda.Event | None = None
        if token_ids_R.is_cuda:
            on_device_2R = self._host_2R
            self._host_2R = torch.empty(on_device_2R.shape, dtype=on_device_2R.dtype, pin_memory=True)
            self._host_2R.copy_(on_device_2R, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(token_ids_R.device))

    def wait(self) -> list[int]:
        """The tokens on the host. What was given to the device after them is not waited for.

        Raises BreakgraphError when a row's largest logit is NaN or infinite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        ids: list[int]
        ids, is_finite = self._host_2R.tolist()
        if not all(is_finite):
            raise BreakgraphError(
                f"the logits of batch row {is_finite.index(0)} are not finite, so no token was drawn; run again with "
                "prefill_backend='eager' and decode_backend='eager' to see whether the model or a capture is at fault"
            )
        return ids


class Sampler:
    """Draws one token a row.

    Rows with a seed have a generator of their own, so their draw is the same whatever the rest of the batch is;
    the others share one that is seeded with the engine's seed.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self._shared = self.make_generator(seed)

    def make_generator(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(seed)

    def draw(
        self,
        logits_RV: Tensor,
        params: Sequence[SamplingParams],
        generators: Sequence[torch.Generator | None],
        histories: Sequence[History] = (),
        masks: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> DrawnTokens:
        """Token ids, one a row of `logits_RV` [R, V] (any float dtype; read as float32, not modified).

        Greedy rows are the exact argmax, after penalties. `histories` are one a row, and needed when a row has
        penalties. `masks` are of rows that may not have every token: bits as int32 [W] on the CPU, one at least set;
        they come before temperature and filters. The host waits for nothing that the device does, except with masks.
        """
        logits_RV = logits_RV.float()
        penalized_rows = [i for i, p in enumerate(params) if p.has_penalties]
        if penalized_rows:
            rows = put(penalized_rows, torch.int64, logits_RV.device)
            penalized_RV = penalized(
                logits_RV.index_select(0, rows),
                [params[i] for i in penalized_rows],
                [histories[i] for i in penalized_rows],
            )
            logits_RV = logits_RV.index_copy(0, rows, penalized_RV)
        if masks:
            rows = torch.tensor(list(masks), device=logits_RV.device)
            allowed_RV = unpacked(torch.stack(list(masks.values())).to(logits_RV.device), logits_RV.shape[-1])
            logits_RV = logits_RV.index_copy(0, rows, logits_RV[rows].masked_fill(~allowed_RV, -torch.inf))
        best, token_ids = logits_RV.max(dim=-1)
        random_rows = [i for i, p in enumerate(params) if not p.is_greedy]
        if random_rows:
            rows = put(random_rows, torch.int64, logits_RV.device)
            drawn = self._draw(
                logits_RV.index_select(0, rows), [params[i] for i in random_rows], [generators[i] for i in random_rows]
            )
            token_ids.index_copy_(0, rows, drawn)
        return DrawnTokens(token_ids, best.isfinite())

    def _draw(
        self, logits_RV: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
    ) -> Tensor:
        probs_RV = filtered_probs(logits_RV, params)
        noise_RV = torch.empty_like(probs_RV)
        shared_rows = [i for i, g in enumerate(generators) if g is None]
        if shared_rows:
            noise_SV = noise_RV.new_empty(len(shared_rows), noise_RV.shape[1]).exponential_(generator=self._shared)
            noise_RV.index_copy_(0, put(shared_rows, torch.int64, noise_RV.device), noise_SV)
        for i, generator in enumerate(generators):
            if generator is not None:
                noise_RV[i].exponential_(generator=generator)
        # argmax(p / Exp(1)) is a draw from p, and needs no host sync as multinomial does. Noise of 0 would make 0 / 0.
        return probs_RV.div_(noise_RV.clamp_min_(torch.finfo(torch.float32).tiny)).argmax(dim=-1)


def put(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A fresh tensor on the device, behind what its stream does: nothing waits."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def unpacked(bits_RW: Tensor, vocab_size: int) -> Tensor:
    """Bits of int32 words [R, W] as bool [R, V]; the lowest bit of a word is its first token."""
    places = torch.arange(32, dtype=torch.int32, device=bits_RW.device)
    return ((bits_RW[:, :, None] >> places) & 1).bool().flatten(1)[:, :vocab_size]


def penalized(logits_RV: Tensor, params: Sequence[SamplingParams], histories: Sequence[History]) -> Tensor:
    """Float32 logits [R, V] after the repetition penalty, then frequency and presence penalties.

    The repetition penalty is that of CTRL (Keskar et al. 2019): for tokens of prompt and answer it divides positive
    logits and multiplies the others. The other two are OpenAI's and count tokens of the answer only.
    """
    counts_RV = _token_counts(logits_RV, [h.output_token_ids for h in histories])
    seen_RV = counts_RV > 0
    if any(p.repetition_penalty != 1 for p in params):
        in_either_RV = seen_RV | (_token_counts(logits_RV, [h.prompt_token_ids for h in histories]) > 0)
        factor_R1 = _column(logits_RV, [p.repetition_penalty for p in params])
        repeated_RV = torch.where(logits_RV > 0, logits_RV / factor_R1, logits_RV * factor_R1)
        logits_RV = torch.where(in_either_RV, repeated_RV, logits_RV)
    logits_RV = logits_RV - counts_RV * _column(logits_RV, [p.frequency_penalty for p in params])
    return logits_RV - seen_RV * _column(logits_RV, [p.presence_penalty for p in params])


def _token_counts(logits_RV: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """How often each row has each token, [R, V] as float32. Rows are padded with a token of their own."""
    num_rows, vocab_size = logits_RV.shape
    longest = max(map(len, rows))
    padded = [[*row, *[vocab_size] * (longest - len(row))] for row in rows]
    ids_RL = put(padded, torch.int64, logits_RV.device).reshape(num_rows, longest)
    counts_RV = logits_RV.new_zeros(num_rows, vocab_size + 1)
    return counts_RV.scatter_add_(1, ids_RL, torch.ones_like(ids_RL, dtype=counts_RV.dtype))[:, :vocab_size]


def token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Of the chosen token of each row of `logits_RV` [R, V] and of the row's `num_top` likeliest."""
    logprobs_RV = logits_RV.float().log_softmax(dim=-1)
    chosen_R1 = torch.tensor(token_ids, dtype=torch.int64).to(logits_RV.device)[:, None]
    top_RK, top_ids_RK = logprobs_RV.topk(min(max(num_top), logprobs_RV.shape[-1]), dim=-1)
    chosen = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    rows = zip(token_ids, chosen, top_ids_RK.tolist(), top_RK.tolist(), num_top, strict=True)
    return [TokenLogprobs(token, value, ids[:count], tops[:count]) for token, value, ids, tops, count in rows]


def filtered_probs(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities [R, V] after temperature, min_p, top_k and top_p, in that order; each row sums to 1."""
    vocab_size = logits_RV.shape[-1]
    temperature_R1 = _column(logits_RV, [p.temperature for p in params])
    # The maximum goes first, so that a small temperature gives -inf and not inf - inf.
    logits_RV = (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature_R1
    if any(p.min_p > 0 for p in params):
        # p < min_p * p_max, as the maximum's logit is 0 here
        floor_R1 = _column(logits_RV, [p.min_p for p in params]).log()
        logits_RV = logits_RV.masked_fill(logits_RV < floor_R1, -torch.inf)
    if any(p.top_p < 1 or 0 < p.top_k < vocab_size for p in params):
        logits_RV = _keep_top(logits_RV, params)
    return logits_RV.softmax(dim=-1)


def _keep_top(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab_size = logits_RV.shape[-1]
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    top_k_R1 = _column(logits_RV, [p.top_k if p.top_k > 0 else vocab_size for p in params])
    rank_V = torch.arange(vocab_size, device=logits_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, -torch.inf)
    if any(p.top_p < 1 for p in params):
        sorted_probs_RV = sorted_RV.softmax(dim=-1)
        before_RV = sorted_probs_RV.cumsum(dim=-1) - sorted_probs_RV
        # top_p = 1 keeps all: rounding in the running sum must not drop the tail.
        top_p_R1 = _column(logits_RV, [p.top_p if p.top_p < 1 else 2.0 for p in params])
        drop_RV = before_RV >= top_p_R1
        drop_RV[:, 0] = False
        sorted_RV = sorted_RV.masked_fill(drop_RV, -torch.inf)
    return torch.empty_like(sorted_RV).scatter_(-1, order_RV, sorted_RV)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return put(values, torch.float32, like.device)[:, None]
