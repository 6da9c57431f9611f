"""The common part of tasks that train a model that the user names."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from torch import nn

from thinpipe.train.models.function import FunctionModel
from thinpipe.train.models.pretrained import PretrainedModel
from thinpipe.train.models.weights import LoadWeights
from thinpipe.train.tasks.mobilenet import with_plain_statistics
from thinpipe.train.tasks.task import Shape, Source, Task

Model = PretrainedModel | FunctionModel


class ModelTask(Task):
    """A task with any transformers model, with a user's function that returns one, or with a model of its own."""

    @abstractmethod
    def model(self, source: Source) -> Model | None:
        """Return the model that the source names; None if the task's own is trained."""

    def model_without_data(self, source: Source) -> Model | None:
        """Return the same model on any worker: only the client has data and tokenizer."""
        return self.model(replace(source, tokenizer=None))

    def own_model(self, shape: Shape, source: Source) -> nn.Module:
        """Return the task's own model with its weights."""
        raise NotImplementedError

    def build(self, shape: Shape, source: Source) -> nn.Module:
        """Return the task's own model, or the named one: on the meta device, unless a function builds it."""
        model = self.model_without_data(source)
        if model is None:
            return self.own_model(shape, source)
        if isinstance(model, FunctionModel):
            return with_plain_statistics(model.build())
        if model.kind != "causal":
            model = replace(model, classes=shape.classes, labels=shape.labels)
        if shape.special is not None:
            assert shape.vocabulary is not None
            model = model.fitted(shape.vocabulary, shape.special)
        return with_plain_statistics(model.init_on_meta())

    def weight_loader(self, source: Source, seed: int) -> LoadWeights | None:
        model = self.model_without_data(source)
        if not isinstance(model, PretrainedModel):
            return None
        return model.weight_loader(pretrained=source.pretrained, seed=seed)

    def init_on_meta(self, source: Source) -> nn.Module | None:
        model = self.model_without_data(source)
        return model.init_on_meta() if isinstance(model, PretrainedModel) else None
