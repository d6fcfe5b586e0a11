"""What a model folder holds beside weights and config.json: tokenizer, templates, licence, and a card that says
what became of the model. Copies no program of a stranger's. No torch.
"""

from pathlib import Path

from localllm.hub.card import read_license
from localllm.hub.folder import INDEX_FILE, TEMPLATES_FOLDER
from localllm.quantize.disk import write_durably
from localllm.quantize.recipe import Recipe
from localllm.quantize.source import hub_revision

COMPANION_SUFFIXES = (".json", ".jinja", ".model", ".txt")
LEGAL_FILES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
EXCLUDED_FILES = ("config.json", INDEX_FILE, "recipe.json", "quality.json")
MODEL_CARD = "README.md"


def copy_companion_files(source: Path, target: Path, recipe: Recipe) -> None:
    folders = (source, source / TEMPLATES_FOLDER)
    for file in sorted(file for folder in folders if folder.is_dir() for file in folder.iterdir()):
        if file.is_file() and is_companion_file(file.name):
            place = target / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            write_durably(place, file.read_bytes())
    if license := read_license(source):
        write_durably(target / MODEL_CARD, write_model_card(source, license, recipe).encode())


def is_companion_file(name: str) -> bool:
    return name.upper().startswith(LEGAL_FILES) or (
        name.endswith(COMPANION_SUFFIXES) and name not in EXCLUDED_FILES
    )


def write_model_card(source: Path, license: str, recipe: Recipe) -> str:
    """The front matter that hubs and `localllm show` read, and a sentence."""
    revision = hub_revision(source)
    of = f"{revision[0]} at {revision[1]}" if revision else source.resolve().name
    base = f"base_model: {revision[0]}\nbase_model_relation: quantized\n" if revision else ""
    return f"---\nlicense: {license}\n{base}---\n\n{of}, quantized by localllm: {describe_recipe(recipe)}.\n"


def describe_recipe(recipe: Recipe) -> str:
    """`rtn, INT4 in groups of 128, symmetric, head INT8`"""
    group = f"in groups of {recipe.group}" if recipe.group else "with a scale a row"
    kind = "symmetric" if recipe.symmetric else "with zero points"
    head = f"head INT{recipe.head_bits}" if recipe.head_bits < 16 else "head as it was"
    activations = ["activations INT8"] if recipe.activations else []
    return ", ".join([recipe.method, f"INT{recipe.bits} {group}", kind, *activations, head])
