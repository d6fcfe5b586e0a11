"""The provenance parts of a receipt: which model was used, and its setup."""

from pathlib import Path

import torch

from localllm.arch.stages import Position
from localllm.checkpoint.digest import combine_digests, digest_model
from localllm.checkpoint.facts import tensor_formats
from localllm.checkpoint.header import read_header
from localllm.hardware.device import cpu_features, device_name
from localllm.hardware.processor import library_versions
from localllm.hub.catalog import bundled_folder, catalog_entries
from localllm.hub.hf_cache import parse_snapshot_path
from localllm.hub.names import RepoName
from localllm.receipts.receipt import Model, Setup

# Libraries that compute, tokenize, apply grammars, or render templates.
LIBRARIES = ("torch", "triton", "llvmlite", "numpy", "tokenizers", "llguidance", "jinja2", "gguf")


def model(name: str, path: Path, source: Path, quant: str | None) -> Model:
    """Return the identity of a model. path: of the loaded files; source: of the files that `quant` was applied
    to."""
    files = digest_model(path)
    stored = {form.name: form.nbytes for form in tensor_formats(read_header(path))}
    return Model(name, source_name(source), quant, stored, *combine_digests(files), files)


def source_name(path: Path) -> str:
    """Return a name that identifies this very model: a repository at a commit, the bundled model, or an
    absolute path.
    """
    if parts := parse_snapshot_path(path):
        repo, commit, inner = parts
        return str(RepoName(repo, commit, inner.as_posix() if inner.parts else None))
    bundled_names = (entry.name for entry in catalog_entries() if bundled_folder(entry) == path)
    return next(bundled_names, str(path.absolute()))


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
    position: Position,
) -> Setup:
    """Return the setup of a model on a device, with the versions of the libraries. position: of this process among
    those that compute it"""
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
        tensor_parallel=position.tensor_size,
        pipeline_parallel=position.stage_count,
        expert_parallel=position.whole_experts,
    )
