"""Real tokenizers that have a token for each byte: byte fallback as SentencePiece has it, and byte-level BPE."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_CHARACTERS = "▁abcdefghijklmnop"


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Decodes a run of byte tokens as one, to replacement characters only if one of them is broken."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_CHARACTERS]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def fallback_ids(tokenizer: PreTrainedTokenizerFast, raw: bytes) -> list[int]:
    """The byte tokens of `raw`."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in raw])
    assert isinstance(ids, list)
    return ids


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """The token of a byte is its number."""
    printable = {*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
