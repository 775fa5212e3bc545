"""The mock model's text: one token a byte, and words for the rest of a small vocabulary."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvrelay.model.text import TextModel, fingerprint

VOCAB_SIZE = 512
CONTEXT_TOKENS = 131_072
EOS_TOKEN = "<|end|>"  # noqa: S105 - a token of text, no secret
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def mock_text() -> TextModel:
    """Build it: id 0 ends an answer, ids 1 to 256 are bytes, the rest are words that no prompt text yields."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {EOS_TOKEN: 0} | {letter: index + 1 for index, letter in enumerate(alphabet)}
    vocab |= {f"Ġword{index}": index for index in range(len(vocab), VOCAB_SIZE)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN])
    return TextModel(
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
        eos_ids=(0,),
        bos_token="",
        eos_token=EOS_TOKEN,
        context_tokens=CONTEXT_TOKENS,
        vocab_size=VOCAB_SIZE,
        fingerprint=fingerprint(tokenizer, TEMPLATE),
    )
