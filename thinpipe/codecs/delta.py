"""delta(SPEC): what changed of a sample since it was last sent, against a copy that both ends of a link keep.

This is only its name and its two codecs: there is nothing to encode without the copies, and those belong to links
(``pipeline/copies.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinpipe.codecs.base import Codec
from thinpipe.codecs.buckets import Buckets
from thinpipe.codecs.tile import Tile
from thinpipe.codecs.uniform import Uniform

# Of the first pass: its error is small beside what a pass over the data changes, at a quarter of the bytes.
DEFAULT_FIRST = Uniform(8)


@dataclass(frozen=True)
class Delta(Codec):
    """A chunk whose samples both ends have seen travels as its change, another one as it is."""

    change: Codec
    first: Codec = DEFAULT_FIRST

    def __post_init__(self) -> None:
        if isinstance(self.change, Delta) or isinstance(self.first, Delta):
            raise ValueError("a change of changes is not sent: there is one delta in a spec")
        for each in (self.change, self.first):
            if not each.decodes_alike:
                raise ValueError(
                    f"both ends of a link must decode the same bits, and {each.spec} does not promise that"
                )
        if self.change.spec == "none":
            raise ValueError("a change that travels as it is saves nothing; none alone sends the same bytes")
        if isinstance(self.change, Uniform | Buckets | Tile) and self.change.bits == 1:
            raise ValueError(
                f"the two levels of {self.change.spec} are the ends of what it covers: what it leaves of a change is "
                "as wide as the change was, and copies drift away pass by pass. Take 2 bits or more, or kmeans:1"
            )

    @property
    def spec(self) -> str:
        first = "" if self.first == DEFAULT_FIRST else f",first={self.first.spec}"
        return f"delta({self.change.spec}{first})"

    def misplaced(self) -> ValueError:
        """What to tell whoever takes this for a codec of single tensors."""
        return ValueError(
            f"{self.spec} sends changes against copies that both ends of a link keep: it is for the activations of a "
            f"pipeline, PipelineStage(forward=...) or thinpipe train --compress-forward; here take {self.change.spec} "
            "or another codec"
        )

    def not_for_gradients(self) -> ValueError:
        """What to tell whoever sends gradients through this."""
        return ValueError(
            f"{self.spec} is for activations, which settle as training goes on. The gradient of a sample says little "
            "about its next one, so their difference is no smaller than they are. Give gradients another codec: "
            f"backward={self.change.spec!r}, --compress-backward {self.change.spec}"
        )

    def float_bytes(self, *_: Any) -> int:
        raise self.misplaced()

    def encode_floats(self, *_: Any) -> None:
        raise self.misplaced()

    def decode_floats(self, *_: Any) -> None:
        raise self.misplaced()
