"""What stands in a receipt besides question and answer: which model it was, and what it ran on, with and in."""

from pathlib import Path

import torch

from localllm.checkpoint.digest import combine_digests, digest_model
from localllm.checkpoint.facts import tensor_formats
from localllm.checkpoint.header import read_header
from localllm.hardware.device import cpu_features, device_name
from localllm.hardware.versions import library_versions
from localllm.hub.catalog import boxed_folder, catalog_entries
from localllm.hub.names import RepoName
from localllm.hub.store import parse_snapshot_path
from localllm.receipts.receipt import Model, Setup

# What computes, tokenizes, draws by grammars, or renders templates.
LIBRARIES = ("torch", "triton", "llvmlite", "numpy", "tokenizers", "llguidance", "jinja2", "gguf")


def model(name: str, path: Path, source: Path, quant: str | None) -> Model:
    """path: what was loaded; source: what that was made of, where `quant` made it."""
    files = digest_model(path)
    stored = {form.name: form.nbytes for form in tensor_formats(read_header(path))}
    return Model(name, source_name(source), quant, stored, *combine_digests(files), files)


def source_name(path: Path) -> str:
    """By which the very same model is found: a repository at a commit, the boxed model, else an absolute path."""
    if found := parse_snapshot_path(path):
        repo, commit, inner = found
        return str(RepoName(repo, commit, inner.as_posix() if inner.parts else None))
    boxed = (entry.name for entry in catalog_entries() if boxed_folder(entry) == path)
    return next(boxed, str(path.absolute()))


def setup(
    device: torch.device,
    *,
    dtype: str,
    kv_dtype: str,
    activation_bits: int,
    threads: int,
    context: int,
    token_budget: int,
    block_size: int,
    draft: str,
    draft_model: str | None,
    deterministic: bool,
) -> Setup:
    return Setup(
        device=str(device),
        device_name=device_name(device),
        instructions=tuple(cpu_features()),
        threads=threads,
        dtype=dtype,
        kv_dtype=kv_dtype,
        activation_bits=activation_bits,
        context=context,
        token_budget=token_budget,
        block_size=block_size,
        draft=draft,
        draft_model=draft_model,
        deterministic=deterministic,
        versions=library_versions(LIBRARIES),
    )
