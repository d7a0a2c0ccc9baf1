"""A tokenizer for the tiny models: one token a byte, so that their random answers also hold broken characters."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS, USER = "<eos>", "<user>"
CHAT_TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"

# As byte-level BPE writes them: 90 of ASCII, then bytes of which "é" and the start of an emoji are made.
_ASCII = ["Ġ", *map(chr, range(33, 122))]
_HIGH = [chr(0xC3), chr(0xA9), chr(0xF0), chr(289 + 0x9F - 127)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """96 tokens, as many as the tiny models have."""
    return _tokenizer([*_ASCII, *_HIGH], [EOS, USER])


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """All that JSON needs, in 96 tokens; no special token for who speaks."""
    return _tokenizer(["Ġ", *map(chr, range(33, 127))], [EOS])


def _tokenizer(tokens: list[str], special: list[str]) -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate([*tokens, *special])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=CHAT_TEMPLATE)
