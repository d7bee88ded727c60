"""The tokenizer of the models that the project makes itself."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Byte-level names: AutoTokenizer rebuilds a byte-level Qwen2 tokenizer for this model type. verl needs the newline
# ("Ċ") to be one token; "Ġ" is the space.
_CHARACTERS = "0123456789+-=?ĠĊabcdefghijklmnopqrstuvwxyz"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(vocabulary_size: int = 0) -> PreTrainedTokenizerFast:
    """One token per character. vocabulary_size: fill up with tokens that no text has, so that every id has a text."""
    own = [*_SPECIAL, *_CHARACTERS]
    filler = [f"<{index}>" for index in range(len(own), vocabulary_size)]
    vocabulary = {token: index for index, token in enumerate([*own, *filler])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_SPECIAL),
        chat_template=_CHAT_TEMPLATE,
    )
