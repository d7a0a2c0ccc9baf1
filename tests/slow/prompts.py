"""Prompts of chosen lengths, from sentences that a small model has something to say about."""

from __future__ import annotations

import random
from typing import Any

SENTENCES = (
    "The lighthouse keeper wrote down the weather every morning before the boats went out.",
    "Water boils at a lower temperature on a mountain than it does at the sea.",
    "My grandmother kept bees behind the house and sold the honey at the market on Saturdays.",
    "A stack is a list from which the last element that was added is taken first.",
    "The train to the north leaves at seven, and it is hardly ever late.",
    "In 1969 two people walked on the moon while a third flew around it.",
    "To make bread you need flour, water, salt and some patience.",
    "def area(width, height):\n    return width * height",
    "The committee could not agree on a name for the new bridge.",
    "Snow fell all night, and in the morning the village was silent.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "He counted the coins twice and put them back into the jar.",
    "A good map leaves out almost everything.",
    "The violin was older than anyone in the orchestra.",
    "Please send the report to the office in Madrid by the end of the week.",
    "Prices rose by three percent last year, mostly because of fuel.",
    "The cat looked at the closed door and then at me.",
    "An octopus has three hearts, nine brains and blue blood.",
    "It took the engineers eleven months to find the loose screw.",
    "Once the harvest was in, the whole valley smelled of apples.",
)

LENGTHS = (1, 2, 3, 5, 9, 15, 16, 17, 24, 40, 63, 64, 100, 180, 255, 256, 257, 400, 700, 1500)
"""Around the block size and the chunk size, and far from both."""


def prompts_of_lengths(tokenizer: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Token ids; each prompt has its own order of the sentences and the number of tokens asked for."""
    rng = random.Random(seed)
    prompts = []
    for length in lengths:
        token_ids: list[int] = []
        while len(token_ids) < length:
            token_ids += tokenizer(" ".join(rng.sample(SENTENCES, len(SENTENCES))) + "\n\n").input_ids
        prompts.append(token_ids[:length])
    return prompts
