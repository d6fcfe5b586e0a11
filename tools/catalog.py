"""`python tools/catalog.py [NAME ...]` compares models.toml with the Hub and prints every fact that differs.

It reads listings, model cards and headers with the code of `localllm pull` and `plan`, and no weights. Of a gated
model it compares only licence and gate, unless HF_TOKEN grants access. The exit code is 1 if anything differs or
cannot be read.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

sys.path.insert(0, str(Path(__file__).parents[1]))

from localllm.arch.cost import parameter_count
from localllm.arch.describe import parse_config
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.remote import remote_header
from localllm.errors import LocalLLMError
from localllm.formatting import format_count
from localllm.hub import pull
from localllm.hub.catalog import CatalogEntry, catalog, catalog_entries
from localllm.hub.http import translate_errors
from localllm.hub.names import repo_of_entry

MAX_THREADS = 4
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
PARAMETER_TOLERANCE, BYTE_TOLERANCE = 0.02, 0.06  # relative; bytes are stated in two digits


def differences(entry: CatalogEntry) -> Iterator[str]:
    """Yield a sentence for each fact that differs on the Hub. Raises what `plan_pull` and `parse_config` raise."""
    repo = repo_of_entry(entry)
    assert repo
    with translate_errors(repo):
        page = HfApi().model_info(repo.repo, revision=repo.revision)
    license = stated_license(page.card_data)
    yield from compare_fact("license", entry.license, license or entry.license)  # copies often state none
    yield from compare_fact("gated", entry.gated, bool(page.gated))
    order = pull.plan_pull(repo, lambda text: None)
    yield from compare_fact("bytes", entry.bytes, order.total_bytes, BYTE_TOLERANCE)
    config = remote_header(order, lambda text: None).config
    check_quantization(config)
    model = parse_config(config)
    stated = entry.parameters and float(entry.parameters[:-1]) * UNITS[entry.parameters[-1]]
    if list(compare_fact("", stated, parameter_count(model), PARAMETER_TOLERANCE)):
        yield from compare_fact("parameters", entry.parameters, format_count(parameter_count(model)))
    yield from compare_fact("context", entry.context, model.max_context)


def stated_license(card: Any) -> str | None:
    """Licence of a model card, as `localllm show` prints it."""
    license = card.get("license") if card else None
    return card.get("license_name", license) if license == "other" else license


def compare_fact(fact: str, stated: Any, actual: Any, tolerance: float = 0.0) -> Iterator[str]:
    """Yield a sentence if the stated value differs from that of the Hub."""
    close = stated is not None and tolerance and abs(stated - actual) <= tolerance * stated
    if stated != actual and not close:
        here = "not stated here" if stated is None else f"{stated} here"
        yield f"{fact} is {here}, {actual} on the Hub"


def report(entry: CatalogEntry) -> list[str]:
    """Return the differences of one entry, and the error if it cannot be read."""
    lines: list[str] = []
    try:
        lines.extend(differences(entry))  # includes those before an error
    except LocalLLMError as error:
        lines.append(f"not read: {error}")
    return [f"{entry.name}: {line}" for line in lines]


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in catalog()]
    if unknown:
        print(f"models.toml has no {', '.join(unknown)}", file=sys.stderr)
        return 2
    entries = [entry for entry in [catalog()[name] for name in names] or catalog_entries() if entry.repo]
    differing = 0
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        for lines in threads.map(report, entries):
            differing += bool(lines)
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    print(f"{len(entries)} models, {differing} of them differ from the Hub or could not be read")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
