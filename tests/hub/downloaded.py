"""Caches filled by `huggingface_hub` itself, as another program would leave them."""

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import disable_progress_bars


def download(hub, repo, files, revision="main", **options):
    """Add a commit to the hub, download it into the cache, and return its folder."""
    disable_progress_bars()
    hub.add(repo, files, refs=[revision])
    cache = constants.HF_HUB_CACHE
    return Path(snapshot_download(repo, revision=revision, endpoint=hub.url, cache_dir=cache, **options))
