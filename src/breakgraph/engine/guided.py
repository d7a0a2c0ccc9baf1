"""Answers that keep to a grammar. Needs the extra `breakgraph[guided]`.

xgrammar (Dong et al. 2024, "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language Models")
compiles the grammar for the vocabulary and says before each token which ones may follow.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from breakgraph.engine.guided_params import GuidedDecodingParams
from breakgraph.errors import ConfigError

_CACHE_BYTES = 256 << 20
_MAX_THREADS = 4
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+: ")


class Guide:
    """Where one answer is in its grammar. Owns: the matcher.

    Attributes:
        is_stuck: no token that the model has fits here, so the answer can only be given up.
    """

    def __init__(self, compiled: Any, stop_token_ids: Iterable[int], vocab_size: int) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled)
        self._stop_token_ids = tuple(stop_token_ids)
        self._num_words = -(-vocab_size // 32)
        self.is_stuck = False

    def allowed(self) -> Tensor:
        """The tokens that may come next, as bits of int32 [ceil(V / 32)], the first of a word in its lowest bit.

        Stop tokens are among them where the answer may end; and where nothing fits, so that something can be drawn.
        """
        bits_1W = torch.zeros(1, self._num_words, dtype=torch.int32)
        if not self._matcher.fill_next_token_bitmask(bits_1W):
            bits_1W.fill_(-1)
        if not bits_1W.any():
            self.is_stuck = True
            for token_id in self._stop_token_ids:
                # The sign of a word is its highest bit.
                bits_1W[0, token_id // 32] |= torch.tensor(1 << token_id % 32).to(torch.int32)
        return bits_1W[0]

    def accept(self, token_id: int) -> None:
        """Goes on by a token that was allowed."""
        if not self._matcher.accept_token(token_id):
            self.is_stuck = True


class Grammar:
    """A compiled grammar; any number of answers at a time may be guided by it."""

    def __init__(self, compiled: Any, stop_token_ids: Iterable[int], vocab_size: int) -> None:
        self._compiled = compiled
        self._stop_token_ids = tuple(stop_token_ids)
        self._vocab_size = vocab_size

    def guide(self) -> Guide:
        """At the beginning of an answer."""
        return Guide(self._compiled, self._stop_token_ids, self._vocab_size)


class GrammarCompiler:
    """Makes grammars for one tokenizer. Thread-safe.

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
        self._held: WeakValueDictionary[GuidedDecodingParams, Grammar] = WeakValueDictionary()

    def compile(self, params: GuidedDecodingParams) -> Grammar:
        """May take seconds.

        Raises ConfigError: xgrammar is not installed, there is no tokenizer or no end-of-sequence token, the schema or
        expression cannot be compiled, or the vocabulary has no token for its beginning.
        """
        grammar = self._held.get(params)
        if grammar is None:
            grammar = Grammar(self._compiled(params), self._eos_token_ids, self._vocab_size)
            first = grammar.guide()
            first.allowed()
            if first.is_stuck:
                raise ConfigError("no token of the vocabulary can begin an answer of the form that is asked for")
            self._held[params] = grammar
        return grammar

    def _compiled(self, params: GuidedDecodingParams) -> Any:
        compiler = self._open()
        try:
            if params.schema is not None:
                return compiler.compile_json_schema(params.schema, any_whitespace=False, strict_mode=False)
            return compiler.compile_regex(params.regex)
        except Exception as error:  # of whatever class its C++ has for this
            kind = "regex" if params.schema is None else "JSON schema"
            raise ConfigError(f"the {kind} cannot be used: {_SOURCE_LINE.sub('', str(error)).strip()}") from error

    def _open(self) -> Any:
        if self._tokenizer is None or not self._eos_token_ids:
            missing = "a tokenizer" if self._tokenizer is None else "an end-of-sequence token"
            raise ConfigError(f"guided decoding needs {missing}, and this model has none")
        try:
            import xgrammar
        except ImportError as error:
            raise ConfigError("guided decoding needs xgrammar; run: pip install 'breakgraph[guided]'") from error
        with self._lock:
            if self._compiler is None:
                vocabulary = xgrammar.TokenizerInfo.from_huggingface(
                    self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids
                )
                self._compiler = xgrammar.GrammarCompiler(
                    vocabulary, max_threads=_MAX_THREADS, cache_limit_bytes=_CACHE_BYTES
                )
            return self._compiler
