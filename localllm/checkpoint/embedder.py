"""What the files beside config.json say of an embedder, in the form of sentence-transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.arch.fields import ConfigFields
from localllm.errors import UnsupportedModel
from localllm.files import read_json
from localllm.hub.modules import CONFIG_FILE, SETTINGS_FILES, ModuleEntry

# By the name of the field that is true for the one in use, and by what `pooling_mode` calls it.
POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
POOLING_ALIASES = {"lasttoken": "last"}
DENSE_ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh"}


def read_pooling(folder: Path, modules: Sequence[ModuleEntry]) -> dict[str, Any]:
    """Raises DamagedModel for fields that make no sense, UnsupportedModel for a pooling that does not run."""
    sizes, texts = (ConfigFields(read_json(folder / name)) for name in SETTINGS_FILES)
    return {
        "kind": pooling_type(ConfigFields(read_json(folder / modules[1].folder / CONFIG_FILE))),
        "dense": [dense_config(folder / module.folder) for module in modules if module.module_type == "Dense"],
        "prompts": texts.section("prompts").values,
        "default_prompt": texts.text("default_prompt_name", ""),
        "most_tokens": sizes.size("max_seq_length", None),
    }


def pooling_type(hf: ConfigFields) -> str:
    if not hf.flag("include_prompt", True):
        raise UnsupportedModel(
            "an embedder that leaves its prompt out of the mean is not supported", "use another"
        )
    used = [name for field, name in POOLING_MODES.items() if hf.flag(field)]
    mode = hf.values.get("pooling_mode", used)
    used = [mode] if isinstance(mode, str) else list(mode) if isinstance(mode, list | tuple) else [repr(mode)]
    if len(used) != 1:
        raise UnsupportedModel(f"a pooling of {len(used)} kinds at once is not supported", "use another model")
    return POOLING_ALIASES.get(used[0], used[0])


def dense_config(folder: Path) -> Mapping[str, Any]:
    hf = ConfigFields(read_json(folder / CONFIG_FILE))
    named = hf.text("activation_function", "torch.nn.modules.activation.Tanh")
    return {
        "columns": hf.size("in_features"),
        "rows": hf.size("out_features"),
        "bias": hf.flag("bias", True),
        "activation": DENSE_ACTIVATIONS.get(named, named),
    }
