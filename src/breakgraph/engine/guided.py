"""Answers that keep to a grammar. Needs the extra `breakgraph[guided]`.

xgrammar (Dong et al. 2024, "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models")
compiles the grammar for the vocabulary and says before each token which ones may follow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from breakgraph.engine.guide import NO_TOKEN_FITS, Grammar, stop_mask
from breakgraph.engine.guided_params import GuidedDecodingParams
from breakgraph.engine.guided_worker import compile_grammar, reason_of
from breakgraph.errors import ConfigError

_CACHE_BYTES = 256 << 20
_MAX_THREADS = 4
CANNOT_BEGIN = "no token of the vocabulary can begin an answer of the form that is asked for"


class _MatcherGuide:
    """One answer. Owns: the matcher."""

    def __init__(self, compiled: Any, stop_token_ids: Iterable[int], vocab_size: int) -> None:
        from xgrammar import GrammarMatcher

        self.failure: str | None = None
        self._matcher = GrammarMatcher(compiled)
        self._stop_token_ids = tuple(stop_token_ids)
        self._num_words = -(-vocab_size // 32)

    def allowed(self) -> Tensor:
        bits_1W = torch.zeros(1, self._num_words, dtype=torch.int32)
        if not self._matcher.fill_next_token_bitmask(bits_1W):
            bits_1W.fill_(-1)
        if bits_1W.any():
            return bits_1W[0]
        self.failure = NO_TOKEN_FITS
        return stop_mask(self._stop_token_ids, self._num_words)

    def wait(self, timeout_sec: float) -> None:
        """It always knows."""

    def accept(self, token_id: int) -> None:
        if not self._matcher.accept_token(token_id):
            self.failure = NO_TOKEN_FITS


class _CompiledGrammar:
    def __init__(self, compiled: Any, stop_token_ids: Iterable[int], vocab_size: int) -> None:
        self._compiled = compiled
        self._stop_token_ids = tuple(stop_token_ids)
        self._vocab_size = vocab_size

    def guide(self) -> _MatcherGuide:
        return _MatcherGuide(self._compiled, self._stop_token_ids, self._vocab_size)


class GrammarCompiler:
    """Makes grammars for one tokenizer, in this process and without limits: for those that its user wrote. Thread-safe.

    A grammar that somebody holds is found again at once; of the others those used last are kept in a cache.

    Args:
        tokenizer: a Hugging Face tokenizer, or None, with which nothing can be guided.
        vocab_size: of the model, which may have more tokens than its tokenizer.
        eos_token_ids: what ends an answer where the grammar lets it end.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._compiler: Any | None = None
        self._held: WeakValueDictionary[GuidedDecodingParams, _CompiledGrammar] = WeakValueDictionary()

    def compile(self, params: GuidedDecodingParams) -> Grammar:
        """May take seconds, and minutes or all memory for nested repetitions.

        Raises ConfigError: xgrammar is not installed, there is no tokenizer or no end-of-sequence token, the schema or
        expression cannot be compiled, or the vocabulary has no token for its beginning.
        """
        grammar = self._held.get(params)
        if grammar is None:
            grammar = _CompiledGrammar(self._compiled(params), self._eos_token_ids, self._vocab_size)
            first = grammar.guide()
            first.allowed()
            if first.failure is not None:
                raise ConfigError(CANNOT_BEGIN)
            self._held[params] = grammar
        return grammar

    def _compiled(self, params: GuidedDecodingParams) -> Any:
        compiler = self._open()
        try:
            return compile_grammar(compiler, params.schema, params.regex)
        except Exception as error:  # of whatever class its C++ has for this
            raise ConfigError(unusable(params, reason_of(error))) from error

    def _open(self) -> Any:
        with self._lock:
            if self._compiler is None:
                vocabulary = open_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
                from xgrammar import GrammarCompiler

                self._compiler = GrammarCompiler(vocabulary, max_threads=_MAX_THREADS, cache_limit_bytes=_CACHE_BYTES)
            return self._compiler


def open_vocabulary(tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    """xgrammar's view of a vocabulary. Raises ConfigError without xgrammar, a tokenizer or an end-of-sequence token."""
    if tokenizer is None or not eos_token_ids:
        missing = "a tokenizer" if tokenizer is None else "an end-of-sequence token"
        raise ConfigError(f"guided decoding needs {missing}, and this model has none")
    try:
        from xgrammar import TokenizerInfo
    except ImportError as error:
        raise ConfigError("guided decoding needs xgrammar; run: pip install 'breakgraph[guided]'") from error
    return TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))


def kind_of(params: GuidedDecodingParams) -> str:
    return "regex" if params.schema is None else "JSON schema"


def unusable(params: GuidedDecodingParams, reason: str) -> str:
    """What to say of a form that xgrammar refuses."""
    return f"the {kind_of(params)} cannot be used: {reason}"
