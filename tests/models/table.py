"""The table of docs/models.md: the result of each proof for each family."""

import re
from pathlib import Path

from tests.models.families import FAMILIES
from tests.models.proofs import PROOFS

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"

Results = dict[tuple[str, str], float | None]  # by family and proof
NONE = "-"  # the proof makes no sense for the family


def write(results: Results) -> None:
    """Replace the table. Every cell must have been measured."""
    head = ["family", *(f"{proof.title} (≤ {proof.tolerance:.0e})" for proof in PROOFS)]
    lines = [head, ["---"] * len(head)]
    lines += [[name, *(shown(results[name, proof.title]) for proof in PROOFS)] for name in FAMILIES]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + table + END + after)


def shown(worst: float | None) -> str:
    return NONE if worst is None else f"{worst:.0e}"


def rows_of(document: str) -> set[tuple[str, str]]:
    """Return (family, proof) of the cells that hold a number, or the sign for an unsupported proof."""
    table = document.partition(BEGIN)[2].partition(END)[0]
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    titles = [re.sub(r" \(.*", "", title) for title in head[1:]]
    cells = {(line[0], title): cell for line in lines for title, cell in zip(titles, line[1:], strict=True)}
    return {place for place, cell in cells.items() if cell == NONE or re.fullmatch(r"\de[+-]\d\d", cell)}
