"""From logits to token ids. Knows nothing about requests, text or batches.

Shapes: R rows (requests), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from breakgraph.engine.sampling import SamplingParams
from breakgraph.errors import BreakgraphError


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

    def sample(
        self, logits_RV: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
    ) -> list[int]:
        """Token ids, one a row of `logits_RV` [R, V] (any float dtype; read as float32, not modified).

        Greedy rows are the exact argmax. Raises BreakgraphError when a row's largest logit is NaN or infinite.
        """
        logits_RV = logits_RV.float()
        best, token_ids = logits_RV.max(dim=-1)
        random_rows = [i for i, p in enumerate(params) if not p.is_greedy]
        if random_rows:
            drawn = self._draw(
                logits_RV[random_rows], [params[i] for i in random_rows], [generators[i] for i in random_rows]
            )
            token_ids[random_rows] = drawn
        # One transfer for both.
        ids, is_finite = torch.stack([token_ids, best.isfinite().to(token_ids.dtype)]).tolist()
        if not all(is_finite):
            raise BreakgraphError(
                f"the logits of batch row {is_finite.index(0)} are not finite, so no token was drawn; run again with "
                "prefill_backend='eager' and decode_backend='eager' to see whether the model or a capture is at fault"
            )
        return ids

    def _draw(
        self, logits_RV: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
    ) -> Tensor:
        probs_RV = filtered_probs(logits_RV, params)
        noise_RV = torch.empty_like(probs_RV)
        shared_rows = [i for i, g in enumerate(generators) if g is None]
        if shared_rows:
            noise_RV[shared_rows] = torch.empty_like(probs_RV[shared_rows]).exponential_(generator=self._shared)
        for i, generator in enumerate(generators):
            if generator is not None:
                noise_RV[i].exponential_(generator=generator)
        # argmax(p / Exp(1)) is a draw from p, and needs no host sync as multinomial does. Noise of 0 would make 0 / 0.
        return probs_RV.div_(noise_RV.clamp_min_(torch.finfo(torch.float32).tiny)).argmax(dim=-1)


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
    return torch.tensor(values, dtype=torch.float32).to(like.device)[:, None]
