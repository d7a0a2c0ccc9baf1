"""The text and the bytes of single tokens, as log probabilities show them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_text(tokenizer: Any, token_id: int) -> str:
    """What a token stands for on its own; part of a character shows as replacement characters."""
    text = str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    # Decoders drop the space that a text begins with.
    begins_with_space = str(tokenizer.convert_ids_to_tokens(token_id)).startswith(_SPACE_MARK)
    return f" {text}" if begins_with_space and not text.startswith(" ") else text


def token_bytes(tokenizer: Any, token_id: int) -> list[int] | None:
    """The bytes of a token, also where they are part of a character only; None where nobody can tell."""
    text = token_text(tokenizer, token_id)
    if _REPLACEMENT not in text:
        return list(text.encode())
    token = str(tokenizer.convert_ids_to_tokens(token_id))
    if match := _BYTE_TOKEN.fullmatch(token):
        return [int(match.group(1), 16)]
    table = _byte_of_character()
    return [table[character] for character in token] if all(character in table for character in token) else None


@cache
def _byte_of_character() -> dict[str, int]:
    """Of byte-level BPE, which writes each byte as a printable character: its own, or one from 256 up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
