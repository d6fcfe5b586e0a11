"""The function that parses a checkpoint's configuration, by the class that its `config.json` names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.arch.config import ModelConfig
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import TensorLayout

Describe = Callable[[ConfigFields], ModelConfig]


@dataclass(frozen=True)
class Family:
    """`defaults`: fields that this family's config.json may omit, with the values of its `transformers` class."""

    describe: Describe
    layout: TensorLayout | Callable[[ConfigFields], TensorLayout]
    defaults: Mapping[str, Any]


FAMILIES: dict[str, Family] = {}


def family(
    *architectures: str,
    layout: TensorLayout | Callable[[ConfigFields], TensorLayout] | None = None,
    **defaults: Any,
) -> Callable[[Describe], Describe]:
    def register(describe: Describe) -> Describe:
        FAMILIES.update(dict.fromkeys(architectures, Family(describe, layout or TensorLayout(), defaults)))
        return describe

    return register
