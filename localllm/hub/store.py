"""The models on this machine: those in the box, and those in the Hugging Face cache. Never the network.

The cache is where `huggingface_hub` keeps it (HF_HUB_CACHE, HF_HOME), used in place and never copied.
"""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import CacheNotFound, constants, scan_cache_dir, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name

from localllm.errors import DamagedModel, UnsupportedModel
from localllm.files import read_json
from localllm.hub.folder import missing_files
from localllm.hub.gguf import models_in


def cached_folder(repo: str) -> Path | None:
    """The snapshot of the repository's main branch, complete or not; None if neither its config.json nor a GGUF
    file is here."""
    cache = Path(constants.HF_HUB_CACHE)
    config = try_to_load_from_cache(repo, "config.json", cache_dir=cache)
    if isinstance(config, str):
        return Path(config).parent
    root = cache / repo_folder_name(repo_id=repo, repo_type="model")
    try:
        snapshot = root / "snapshots" / (root / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if models_in(snapshot) else None


def cached_models() -> Iterator[tuple[str, Path]]:
    """Repository and folder of each complete language model in the cache; of GGUF models the file, with its path
    as the name where the repository has several."""
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda r: r.repo_id.lower()):
        folder = cached_folder(repo.repo_id) if repo.repo_type == "model" else None
        if folder and (files := models_in(folder)):
            yield from ((repo.repo_id if len(files) == 1 else str(file), file) for file in files)
        elif folder and _is_whole_language_model(folder):
            yield repo.repo_id, folder


def _is_whole_language_model(folder: Path) -> bool:
    """The cache also holds encoders, image models and downloads that were broken off."""
    try:
        config = read_json(folder / "config.json")
        stated = config.get("architectures")
        names = stated if isinstance(stated, list) else []
        reads_text = "text_config" in config or any(str(name).endswith("ForCausalLM") for name in names)
        return reads_text and not missing_files(folder)
    except (DamagedModel, UnsupportedModel):  # one broken repository must not hide the others
        return False
