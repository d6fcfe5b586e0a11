"""Real models, tokenizers and texts in `shared/`, next to a checkout; tests that need them are skipped if it is
missing.
"""

from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "shared" / "data"


def shared(name: str) -> Path:
    """Return a path in the shared data, or skip the test with the reason."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"shared/data/{name} is not beside this checkout")
    return path
