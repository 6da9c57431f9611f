"""A tokenizer that is trained on texts: byte pairs, so that there is no text that it cannot encode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thinpipe.workloads.corpus import batches

VOCABULARY = 8192
END = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Of so many tokens, or of as many as the texts have pairs for; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(batches(texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
