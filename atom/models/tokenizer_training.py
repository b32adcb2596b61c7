"""A byte-level BPE tokenizer with a chat template, learned from texts and written as a folder.

Digits are tokens of their own, each, so that numbers of any size are read and written the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atom.errors import BadInput
from atom.models.json_file import write_json

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

#: ChatML: each turn between its marks, then the mark that opens the assistant's turn
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: bytes are in every vocabulary, so that no text is unknown
_FEWEST_TOKENS = 256 + len(SPECIAL_TOKENS)


def train_tokenizer(folder: str | Path, texts: Iterable[str], vocab_size: int) -> int:
    """Learn a tokenizer and write ``tokenizer.json`` and ``tokenizer_config.json``.

    The same texts give the same files.

    Args:
        folder: made if need be.
        texts: what to learn from, as the model will see it but for the marks of turns.
        vocab_size: most tokens.

    Returns:
        The number of tokens, at most ``vocab_size``.

    Raises:
        BadInput: for a vocabulary that cannot hold all bytes.
    """
    if vocab_size < _FEWEST_TOKENS:
        raise BadInput(f"vocab_size={vocab_size}; expected at least {_FEWEST_TOKENS}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    write_json(path / "tokenizer_config.json", config)
    return int(tokenizer.get_vocab_size())
