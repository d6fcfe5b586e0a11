"""`python tools/catalog.py [NAME ...]` compares models.toml with the Hub and tells each fact that differs.

Reads listings, model cards and headers, by the code that `localllm pull` and `plan` use, and no weights. Of gated
models only licence and gate, unless HF_TOKEN has access. Ends with 1 where anything differs or cannot be read.
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

AT_A_TIME = 4
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
PARAMETERS_WITHIN, BYTES_WITHIN = 0.02, 0.06  # of what is stated; bytes are stated in two digits


def differences(entry: CatalogEntry) -> Iterator[str]:
    """What the Hub says otherwise, a sentence for each. Raises what `pull` and `describe` raise."""
    repo = repo_of_entry(entry)
    assert repo
    with translate_errors(repo):
        page = HfApi().model_info(repo.repo, revision=repo.revision)
    license = stated_license(page.card_data)
    yield from differing("license", entry.license, license or entry.license)  # copies often state none
    yield from differing("gated", entry.gated, bool(page.gated))
    order = pull.plan_pull(repo, lambda text: None)
    yield from differing("bytes", entry.bytes, order.total_bytes, BYTES_WITHIN)
    config = remote_header(order, lambda text: None).config
    check_quantization(config)
    model = parse_config(config)
    stated = entry.parameters and float(entry.parameters[:-1]) * UNITS[entry.parameters[-1]]
    if list(differing("", stated, parameter_count(model), PARAMETERS_WITHIN)):
        yield from differing("parameters", entry.parameters, format_count(parameter_count(model)))
    yield from differing("context", entry.context, model.max_context)


def stated_license(card: Any) -> str | None:
    """As `localllm show` names it."""
    license = card.get("license") if card else None
    return card.get("license_name", license) if license == "other" else license


def differing(fact: str, stated: Any, found: Any, within: float = 0.0) -> Iterator[str]:
    near = stated is not None and within and abs(stated - found) <= within * stated
    if stated != found and not near:
        here = "not stated here" if stated is None else f"{stated} here"
        yield f"{fact} is {here}, {found} on the Hub"


def report(entry: CatalogEntry) -> list[str]:
    """All differences of one entry; what cannot be read is one, too."""
    found: list[str] = []
    try:
        found.extend(differences(entry))  # keeps what came before an error
    except LocalLLMError as error:
        found.append(f"not read: {error}")
    return [f"{entry.name}: {line}" for line in found]


def main(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in catalog()]
    if unknown:
        print(f"models.toml has no {', '.join(unknown)}", file=sys.stderr)
        return 2
    chosen = [catalog()[name] for name in names] or catalog_entries()
    of_the_hub = [entry for entry in chosen if entry.repo]
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        reports = []
        for lines in threads.map(report, of_the_hub):
            reports.append(lines)
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    differ = sum(map(bool, reports))
    print(f"{len(reports)} models, {differ} of them differ from the Hub or could not be read")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
