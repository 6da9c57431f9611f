"""RoBERTa for classification: a small one from scratch, or a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from thinpipe.options import OptionError
from thinpipe.workloads.checkpoint import Weights
from thinpipe.workloads.task import Shape
from thinpipe.workloads.words import END, PADDING, START


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a RoBERTa from scratch is."""

    states: int  # values of each token's state
    layers: int
    heads: int
    inner: int  # times states: values inside a layer's feed-forward part
    dropout: float
    positions: int = 0  # at the least; the longest text may need more


ROBERTA_MODULES = ("transformers.models.roberta.modeling_roberta",)
ENDS = 2  # units beside the layers: embeddings and classifier
SMALL = Size(states=64, layers=4, heads=4, inner=2, dropout=0.0)  # six units; few epochs need no dropout
BASE = Size(states=768, layers=12, heads=12, inner=4, dropout=0.1)  # roberta-base's


def roberta_bytes(size: Size, width: float | None) -> int:
    """What the weights take at the least: the matrices of its layers."""
    states = size.states * (1.0 if width is None else width)
    return int(4 * size.layers * (4 + 2 * size.inner) * states**2)


def new_roberta(shape: Shape, size: Size, width: float | None = None) -> nn.Module:
    """RoBERTa with random weights, for the word tokenizer; ``width`` is a factor on its states."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    states = round(size.states * (1.0 if width is None else width))
    if states < size.heads or states % size.heads:
        raise OptionError(
            f"{{width}} times {size.states} values must be a multiple of {size.heads}, one part for each head; "
            f"got {width}, which makes {states}"
        )
    assert shape.vocabulary is not None
    assert shape.tokens is not None
    config = RobertaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=states,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner * states,
        # Positions are counted from after the padding's.
        max_position_embeddings=max(size.positions, shape.tokens + PADDING + 1),
        type_vocab_size=1,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        bos_token_id=START,
        pad_token_id=PADDING,
        eos_token_id=END,
    )
    config.num_labels = shape.classes
    return RobertaForSequenceClassification(config)


def pretrained_roberta(shape: Shape, weights: Weights) -> nn.Module:
    """A checkpoint's RoBERTa, with a new classifier."""
    from transformers import RobertaForSequenceClassification

    return weights.load(RobertaForSequenceClassification, shape.classes)
