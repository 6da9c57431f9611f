"""MobileNetV2 for classification: from scratch at any width, or from a checkpoint."""

from __future__ import annotations

from torch import nn

from thinpipe.train.tasks.task import Shape

MOBILENET_MODULES = ("transformers.models.mobilenet_v2.modeling_mobilenet_v2",)
SMALL_IMAGE = 96  # pixels; below, the original's strides leave 2 x 2 values of an image or fewer
BATCH_NORM_MOMENTUM = 0.1  # torch's; transformers' 0.997 would keep the statistics of the last step only
BATCH_NORM_MOST = 0.5
UNITS = 20  # first convolution, rest of the stem, 16 blocks, last convolution, classifier
DROPOUT = 0.2  # as in the original paper; transformers' default of 0.8 is that of its checkpoint


def mobilenet_bytes(width: float) -> int:
    """Return a lower bound of the weights' bytes: quadratic in the width, from 2.24 million parameters at width 1."""
    return int(4 * 2.1e6 * width**2)


def new_mobilenet(shape: Shape, width: float, *, small: bool | None = None) -> nn.Module:
    """Return a MobileNetV2 with random weights, sized for its images; ``small=False``: as published, for any size.

    The original reduces an image 32 times: of 32 pixels one would be left, and the batch norms of half the layers would
    see one value per image and channel. So small images are reduced 8 times, without the dilations that would keep a
    layer's window as wide as the full image. Padding is symmetric, which is faster, the last convolution is as narrow
    as the others, and there is no dropout.
    """
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    if width <= 0:
        raise ValueError(f"a width is above 0, and 1 is the original's; got {width:g}")
    assert shape.image_size is not None
    small = shape.image_size < SMALL_IMAGE if small is None else small
    config = MobileNetV2Config(
        image_size=shape.image_size,
        depth_multiplier=width,
        output_stride=8 if small else 32,
        finegrained_output=not small,
        tf_padding=not small,
        classifier_dropout_prob=0.0 if small else DROPOUT,
    )
    config.num_labels = shape.classes
    model = MobileNetV2ForImageClassification(config)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
            if small and module.dilation != (1, 1):
                module.dilation = module.padding = (1, 1)
    return with_plain_statistics(model)


def with_plain_statistics(model: nn.Module) -> nn.Module:
    """Set torch's momentum in batch norms with TensorFlow's, which torch would read as keeping only the last step."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and (module.momentum or 0) > BATCH_NORM_MOST:
            module.momentum = BATCH_NORM_MOMENTUM
    return model
