"""LLM: load a model, generate text. The names and the behaviour of vLLM's class where it has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from breakgraph.engine.config import EngineConfig
from breakgraph.engine.engine import CaptureProgress
from breakgraph.engine.loading import load_engine
from breakgraph.engine.outputs import RequestOutput
from breakgraph.engine.prompts import Prompt, TokenPrompt, apply_chat_template, as_prompt_list, encode, tokenize
from breakgraph.engine.sampling import SamplingParams
from breakgraph.errors import ConfigError, UnknownNameError
from breakgraph.runners import Runner

if TYPE_CHECKING:
    from breakgraph.engine.memory_report import MemoryReport
    from breakgraph.graph import PlanReport, ShapeKey
    from breakgraph.verify import VerifySummary

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}"""


class LLM:
    """A loaded and captured model. Close it, or use it as a context manager.

    Not thread-safe. Owns: the engine.

    Args:
        model: a folder, a preset name, or "smollm2".
        use_tqdm: show bars on stderr while loading and capturing, when stderr is a terminal.
        options: see EngineConfig.

    Raises:
        ConfigError: an option that cannot be used, or a model that cannot be loaded.
        CaptureError: a bucket could not be captured, or (VerificationError) verify="startup" found a replay that
            differs from eager. Like a Ctrl-C, it leaves nothing behind.
    """

    def __init__(self, model: str | Path, *, use_tqdm: bool = True, **options: Any) -> None:
        from breakgraph.models import loading_bars  # takes seconds: not when this module is imported

        known = EngineConfig.__dataclass_fields__.keys() - {"model"}
        for name in options:
            if name not in known:
                raise UnknownNameError("LLM option", name, known)
        with loading_bars(use_tqdm):
            self.engine = load_engine(EngineConfig(model=str(model), **options))
        try:
            with _CaptureBars(use_tqdm) as bars:
                self.engine.capture(bars.start)
        except BaseException:
            self.engine.close()
            raise

    @property
    def config(self) -> EngineConfig:
        """The options in effect, with every open choice settled."""
        return self.engine.config

    @property
    def tokenizer(self) -> Any | None:
        """The Hugging Face tokenizer; None for dummy weights."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to the prompts, in their order.

        All prompts are checked before the first one runs. When anything goes wrong later, a Ctrl-C included, all of
        this call's requests are dropped and the LLM can be used again.

        Args:
            prompts: text, token ids ([1, 2, 3]), {"prompt_token_ids": [1, 2, 3]}, or a list of these.
            sampling_params: one for all, or one a prompt; None is SamplingParams().
            use_tqdm: show a bar on stderr, when that is a terminal.

        Raises:
            PromptError: a prompt that can never be served, with the reason.
            ConfigError: text for a model without a tokenizer; a wrong number of sampling_params.
        """
        return self._run(
            [tokenize(prompt, self._encode) for prompt in as_prompt_list(prompts)], sampling_params, use_tqdm
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The next message of one conversation or of several, through the tokenizer's chat template.

        Raises as `generate` does, and ConfigError when there is no chat template.
        """
        is_one = isinstance(messages, str | Mapping) or (bool(messages) and isinstance(messages[0], Mapping))
        conversations: list[Any] = [messages] if is_one else list(messages)
        return self._run(
            [self._apply_template(conversation) for conversation in conversations], sampling_params, use_tqdm
        )

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of finished requests. Call it after changing weights: what is cached comes from the old."""
        self.engine.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """What was captured and what ran how, for each runner; JSON-able, units in the names."""
        return self.engine.stats()

    def verify(self) -> VerifySummary:
        """Compares every captured bucket with eager on random steps. Takes seconds; ask for it while nothing runs.

        Raises:
            ConfigError: there are requests.
        """
        return self.engine.verify()

    def memory_report(self) -> MemoryReport:
        """What each captured bucket needs and what is held in all, in bytes; `to_dict()` of it is JSON-able."""
        return self.engine.memory_report()

    def explain(self) -> dict[ShapeKey, PlanReport]:
        """The report of every captured plan; str() of one is for people."""
        return self.engine.explain()

    def close(self) -> None:
        """Closes the plans and gives the memory back. A second call does nothing."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[TokenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(prompts))
        answers = [
            [self.engine.make_request(p.token_ids, s, p.text, index=index) for index in range(s.n)]
            for p, s in zip(prompts, params, strict=True)
        ]
        requests = [request for group in answers for request in group]
        with tqdm(total=len(requests), desc="generate", unit="answer", disable=None if use_tqdm else True) as bar:
            try:
                for request in requests:
                    self.engine.add(request)
                while self.engine.has_requests:
                    bar.update(len(self.engine.step()))
            except BaseException:
                self.engine.abort([request.request_id for request in requests])
                raise
        return [_merged([request.output() for request in group]) for group in answers]

    def _encode(self, text: str) -> list[int]:
        return encode(self._need_tokenizer("text prompts"), text)

    def _apply_template(self, conversation: Sequence[Message]) -> TokenPrompt:
        return apply_chat_template(self._need_tokenizer("chat"), conversation, self.config.model)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            why = "load_format='dummy' has none" if self.config.load_format == "dummy" else "the model folder has none"
            raise ConfigError(f'{what} need a tokenizer, and {why}; pass token ids: {{"prompt_token_ids": [1, 2, 3]}}')
        return self.tokenizer


def _merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output with the answers of all."""
    return dataclasses.replace(outputs[0], outputs=[completion for output in outputs for completion in output.outputs])


def _one_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if isinstance(sampling_params, str | Mapping) or not isinstance(sampling_params, Sequence):
        raise ConfigError(f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r:.200}")
    wrong = next((each for each in sampling_params if not isinstance(each, SamplingParams)), sampling_params)
    if wrong is not sampling_params:
        raise ConfigError(f"each of sampling_params must be SamplingParams, got {wrong!r:.200}")
    if len(sampling_params) != num_prompts:
        raise ConfigError(
            f"sampling_params must be one SamplingParams or one for each of the {num_prompts} prompts, "
            f"got {len(sampling_params)}"
        )
    return sampling_params


class _CaptureBars:
    """One bar a runner."""

    def __init__(self, use_tqdm: bool) -> None:
        self._disable = None if use_tqdm else True
        self._bar: tqdm | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def start(self, runner: Runner) -> CaptureProgress | None:
        self.__exit__()
        if not runner.backend.captures:
            return None
        bar = self._bar = tqdm(
            total=len(runner.spec.ladder), desc=f"capture {runner.spec.phase}", unit="bucket", disable=self._disable
        )

        def update(key: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(key, refresh=False)
            bar.update(done - bar.n)

        return update
