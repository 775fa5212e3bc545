"""Twenty varied prompts as token ids of the bundled model: chat, code, unicode, block borders, one of 6,000 tokens."""

import random
from pathlib import Path

from kvrelay.config import BLOCK_TOKENS, DEFAULT_MODEL
from kvrelay.model.files import resolve
from kvrelay.model.text import TextModel, load_text

LONG_TOKENS = 6000
ROOT = Path(__file__).parents[2]

WORDS = "the relay of a long river carries stones and small boats past towns where people sell bread"
CHATS = (
    "Why is the sky blue?",
    "Write a haiku about a relay race.",
    "Explain how a hash table works to a ten-year-old.",
    "List three differences between TCP and UDP.",
    "Translate to French: The cat sleeps on the warm stone.",
    "What is 17 * 23? Show your steps.",
)
TEXTS = (
    "def fibonacci(n):\n    ",
    "SELECT name, count(*) FROM users\nWHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    "Übergrößenträger fahren über die Brücke. Straße, Maß, Äpfel —",
    "今日は天気がいいですね。散歩に",
    "🎉🚀✨ emoji and right-to-left text: שלום עולם, مرحبا بالعالم",
    '{"name": "kvrelay", "tags": ["grpc", "nixl"], "nested": {',
    "Once upon a time, in a village by the sea,",
)


def chat_ids(text: TextModel, question: str) -> list[int]:
    """Render one user message the way the model's template does (checked against the router elsewhere)."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = (("system", system), ("user", question))
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return encode(text, rendered + "<|im_start|>assistant\n")


def encode(text: TextModel, source: str) -> list[int]:
    """Tokenize without adding anything."""
    return text.tokenizer.encode(source, add_special_tokens=False).ids


def long_ids(text: TextModel, tokens: int, *, seed: int = 0) -> list[int]:
    """Return so many tokens of prose-like text, different for every seed."""
    words = WORDS.split()
    rng = random.Random(seed)
    ids: list[int] = []
    while len(ids) < tokens:
        sentence = " ".join(rng.choices(words, k=12)) + f" number {rng.randrange(10_000)}. "
        ids += encode(text, sentence.capitalize())
    return ids[:tokens]


def load() -> TextModel:
    """Load the bundled model's tokenizer."""
    return load_text(resolve(DEFAULT_MODEL))


def border_prompts(text: TextModel) -> list[list[int]]:
    """Prompts shorter than a block, exactly on a block border, one short of it and one over."""
    lengths = (5, 2 * BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1, BLOCK_TOKENS)
    return [long_ids(text, length, seed=length) for length in lengths]


def varied_prompts(text: TextModel) -> list[list[int]]:
    """Return the twenty prompts, the long one last."""
    short = [chat_ids(text, question) for question in CHATS] + [encode(text, source) for source in TEXTS]
    return [*short, *border_prompts(text), long_ids(text, LONG_TOKENS, seed=1)]
