"""The demo model's tokenizer: a byte-level BPE trained on the training documents.

Owns the vocabulary size, the special tokens and the chat template. Invariants: any
text round-trips through encode and decode unchanged (byte-level, no normalizer);
``<bos>`` is put before every text encoded with special tokens; the chat template
renders a conversation so that each longer conversation starts with the text of the
shorter one, because the model is a plain continuer without trained roles.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>")  # ids 0, 1, 2: the order Gemma 3 has
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], longest: int) -> PreTrainedTokenizerFast:
    """A ``VOCABULARY``-entry tokenizer for ``texts``; ``longest`` is the model's tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)]),
        ]
    )
    pad, eos, bos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,  # decoding must give back the exact text
        chat_template=CHAT_TEMPLATE,
    )
