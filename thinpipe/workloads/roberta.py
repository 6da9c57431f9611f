"""RoBERTa for classification: a small one from scratch, or a checkpoint's."""

from __future__ import annotations

from torch import nn

from thinpipe.workloads.task import Shape
from thinpipe.workloads.words import END, PADDING, START

SMALL_STATES, SMALL_LAYERS, SMALL_HEADS = 64, 4, 4  # six units: embeddings, four layers, classifier


def small_roberta(shape: Shape, width: float = 1.0) -> nn.Module:
    """Four layers, states of 64 values times ``width``, for the word tokenizer; no dropout: epochs are few."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    states = round(SMALL_STATES * width)
    if states < SMALL_HEADS or states % SMALL_HEADS:
        raise ValueError(
            f"width times {SMALL_STATES} values must be a multiple of {SMALL_HEADS}, one part for each head; "
            f"got width {width:g}, which makes {states}"
        )
    assert shape.vocabulary is not None
    assert shape.tokens is not None
    config = RobertaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=states,
        num_hidden_layers=SMALL_LAYERS,
        num_attention_heads=SMALL_HEADS,
        intermediate_size=2 * states,
        max_position_embeddings=shape.tokens + PADDING + 1,  # positions are counted from after the padding's
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        bos_token_id=START,
        pad_token_id=PADDING,
        eos_token_id=END,
    )
    config.num_labels = shape.classes
    return RobertaForSequenceClassification(config)
