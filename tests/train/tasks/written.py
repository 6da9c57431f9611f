"""Small data sets and checkpoints, written to disk in the formats of the real ones."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

datasets = pytest.importorskip("datasets")
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value  # noqa: E402

datasets.disable_progress_bars()

Format = Literal["saved", "parquet"]

SENTENCES = (
    "the cat sat on the mat",
    "a dog ran after the ball in the garden",
    "nobody has ever seen the sea from here",
    "they said that she had left the town",
)


def write_cifar10(path: Path, *, rows: int = 40, form: Format = "parquet") -> Path:
    """Pictures of 32 x 32 pixels in ``img``; the hub has them in the folder ``plain_text``."""
    features = Features({"img": Image(), "label": ClassLabel(num_classes=10)})
    return _write(path, {"train": rows, "test": rows // 2}, features, form, "plain_text", size=(32, 32))


def write_cifar100(path: Path, *, rows: int = 200, form: Format = "parquet") -> Path:
    """As CIFAR-10, with two labels."""
    features = Features(
        {"img": Image(), "fine_label": ClassLabel(num_classes=100), "coarse_label": ClassLabel(num_classes=20)}
    )
    return _write(path, {"train": rows, "test": rows // 2}, features, form, "cifar100", size=(32, 32))


def write_fashion_mnist_rows(path: Path, *, rows: int = 40, form: Format = "parquet") -> Path:
    """Grey pictures of 28 x 28 pixels in ``image``, as the hub has them."""
    features = Features({"image": Image(mode="L"), "label": ClassLabel(num_classes=10)})
    return _write(path, {"train": rows, "test": rows // 2}, features, form, "fashion_mnist", size=(28, 28))


def write_food101(path: Path, *, rows: int = 202, form: Format = "parquet") -> Path:
    """Pictures of several sizes in ``image``; the hub has them in the folder ``data``, in several files."""
    features = Features({"image": Image(), "label": ClassLabel(num_classes=101)})
    return _write(path, {"train": rows, "validation": rows // 2}, features, form, "data", size=None)


def write_glue(path: Path, part: Literal["rte", "cola"], *, rows: int = 40, form: Format = "parquet") -> Path:
    """RTE has two sentences, CoLA one; the hub has both in one repository, each in its folder."""
    texts = ("sentence1", "sentence2") if part == "rte" else ("sentence",)
    features = Features(
        {**{name: Value("string") for name in texts}, "label": ClassLabel(num_classes=2), "idx": Value("int32")}
    )
    return _write(path, {"train": rows, "validation": rows // 2, "test": 4}, features, form, part, size=None)


def write_mobilenet(path: Path) -> Path:
    """A narrow MobileNetV2 of 1001 classes, as Google's has."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.1, finegrained_output=False, num_labels=1001)
    MobileNetV2ForImageClassification(config).save_pretrained(path)
    return path


def write_roberta(path: Path) -> Path:
    """A narrow RoBERTa of six layers with a byte-pair tokenizer, both as roberta-base has them; no classifier yet."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    vocabulary = _write_tokenizer(path)
    config = RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=130 + 2,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    RobertaForMaskedLM(config).save_pretrained(path)
    return path


def write_text_classifier(path: Path, name: str = "bert", **facts: Any) -> Path:
    """A small model of a type with a tokenizer of words; BERT's marks pairs of texts, GPT-2's cannot fill up texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from thinpipe.train.models.tiny import shrunken

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*special, *words])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"unk_token": "[UNK]", "eos_token": "[SEP]"}
    if name == "bert":
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        pair = "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
        made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair=pair, special_tokens=ends)
        tokens |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names = ["input_ids", "token_type_ids", "attention_mask"] if name == "bert" else ["input_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=names, **tokens).save_pretrained(path)
    torch.manual_seed(0)
    config = shrunken(CONFIG_MAPPING[name](**facts))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return path


def write_image_classifier(path: Path, name: str = "vit", **facts: Any) -> Path:
    """A small model of a type for 1000 classes, with the description of an image processor."""
    from transformers import AutoModelForImageClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from thinpipe.train.models.tiny import shrunken

    torch.manual_seed(0)
    config = shrunken(CONFIG_MAPPING[name](num_labels=1000, **facts))
    AutoModelForImageClassification.from_config(config).save_pretrained(path)
    size = getattr(config, "image_size", 64)
    processor = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "size": {"height": size, "width": size}}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def write_fashion_mnist(folder: Path, *, train: int = 40, test: int = 20, packed: bool = True) -> Path:
    """The four idx files."""
    folder.mkdir(parents=True)
    for begins, count in (("train", train), ("t10k", test)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        kinds = (np.arange(count) % 10).astype(np.uint8)
        write_idx(folder / f"{begins}-images-idx3-ubyte", pixels, packed=packed)
        write_idx(folder / f"{begins}-labels-idx1-ubyte", kinds, packed=packed)
    return folder


def write_idx(path: Path, values: np.ndarray, *, packed: bool) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    content = bytes((0, 0, 8, values.ndim)) + sizes + values.tobytes()
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def write_picture(path: Path, seed: int = 0, size: tuple[int, int] = (40, 30)) -> Path:
    """One picture file; the ending says which kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _picture(seed, size).save(path)
    return path


def _write_tokenizer(path: Path) -> int:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(SENTENCES, vocab_size=300, min_frequency=1, special_tokens=special)
    path.mkdir(parents=True, exist_ok=True)
    trained.save_model(str(path))  # vocab.json and merges.txt
    tokenizer = RobertaTokenizerFast.from_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return len(tokenizer)


def _write(
    path: Path, splits: dict[str, int], features: Features, form: Format, folder: str, size: tuple[int, int] | None
) -> Path:
    whole = DatasetDict(
        {
            split: Dataset.from_list([_row(features, index, size) for index in range(rows)], features=features)
            for split, rows in splits.items()
        }
    )
    if form == "saved":
        whole.save_to_disk(str(path))
        return path
    (path / folder).mkdir(parents=True)
    for split, rows in whole.items():
        for shard in range(2):
            rows.shard(2, shard, contiguous=True).to_parquet(path / folder / f"{split}-{shard:05}-of-00002.parquet")
    return path


def _row(features: Features, index: int, size: tuple[int, int] | None) -> dict[str, Any]:
    return {name: _cell(feature, index, size) for name, feature in features.items()}


def _cell(feature: Any, index: int, size: tuple[int, int] | None) -> Any:
    if isinstance(feature, Image):
        return _picture(index, size or (50 + index % 7, 40 + index % 5)).convert(feature.mode or "RGB")
    if isinstance(feature, ClassLabel):
        return index % feature.num_classes
    if feature.dtype == "int32":
        return index
    words = SENTENCES[index % len(SENTENCES)].split()
    random.Random(index).shuffle(words)
    return " ".join(words)


def _picture(seed: int, size: tuple[int, int]) -> Pillow.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Pillow.fromarray(pixels)


def write_language_model(folder: Path, text: str, *, tied: bool = True) -> None:
    """A small Llama with random weights, and a tokenizer made for a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
