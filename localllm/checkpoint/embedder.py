"""What the files beside config.json say of an embedder, in the form of sentence-transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.arch.fields import Fields
from localllm.errors import UnsupportedModel
from localllm.files import read_json
from localllm.hub.modules import CONFIG, SETTINGS, Module

# By the name of the field that is true for the one in use, and by what `pooling_mode` calls it.
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
OTHERWISE_NAMED = {"lasttoken": "last"}
ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh"}


def read_pooling(folder: Path, modules: Sequence[Module]) -> dict[str, Any]:
    """Raises DamagedModel for fields that make no sense, UnsupportedModel for a pooling that does not run."""
    sizes, texts = (Fields(read_json(folder / name)) for name in SETTINGS)
    return {
        "kind": kind(Fields(read_json(folder / modules[1].folder / CONFIG))),
        "dense": [dense(folder / module.folder) for module in modules if module.kind == "Dense"],
        "prompts": texts.part("prompts").values,
        "default_prompt": texts.text("default_prompt_name", ""),
        "most_tokens": sizes.size("max_seq_length", None),
    }


def kind(hf: Fields) -> str:
    if not hf.flag("include_prompt", True):
        raise UnsupportedModel(
            "an embedder that leaves its prompt out of the mean is not supported", "use another"
        )
    used = [name for field, name in MODES.items() if hf.flag(field)]
    mode = hf.values.get("pooling_mode", used)
    used = [mode] if isinstance(mode, str) else list(mode) if isinstance(mode, list | tuple) else [repr(mode)]
    if len(used) != 1:
        raise UnsupportedModel(f"a pooling of {len(used)} kinds at once is not supported", "use another model")
    return OTHERWISE_NAMED.get(used[0], used[0])


def dense(folder: Path) -> Mapping[str, Any]:
    hf = Fields(read_json(folder / CONFIG))
    named = hf.text("activation_function", "torch.nn.modules.activation.Tanh")
    return {
        "columns": hf.size("in_features"),
        "rows": hf.size("out_features"),
        "bias": hf.flag("bias", True),
        "activation": ACTIVATIONS.get(named, named),
    }
