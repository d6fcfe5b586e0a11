"""Layout of `--help`: options in panels, such as Sampling and Loading, as plain text."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from typer.core import TyperCommand


class Panel(StrEnum):
    """Headings of option groups, in the order in which help pages show them."""

    OPTIONS = "Options"
    NETWORK = "Network"
    LOAD_TEST = "Load test"
    MODEL = "Model"
    PROMPT = "Prompt"
    SAMPLING = "Sampling"
    OUTPUT = "Output"
    CONSTRAINED = "Constrained output"
    LOADING = "Loading"
    SPECULATION = "Speculation"
    ADVANCED = "Advanced"


def group_options(params: Iterable[Any]) -> dict[Panel, list[Any]]:
    """Options of a command by panel, without empty panels; options without a panel are under Panel.OPTIONS."""
    groups: dict[Panel, list[Any]] = {panel: [] for panel in Panel}
    for param in params:
        if param.param_type_name == "option" and not param.hidden:
            groups[Panel(getattr(param, "rich_help_panel", None) or Panel.OPTIONS)].append(param)
    return {panel: group for panel, group in groups.items() if group}


class PanelCommand(TyperCommand):
    """Command whose help page groups options by `rich_help_panel`, which Typer ignores without Rich markup."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups = {
            panel: [record for option in group if (record := option.get_help_record(ctx))]
            for panel, group in group_options(self.get_params(ctx)).items()
        }
        width = max(len(name) for records in groups.values() for name, _ in records)
        for panel, records in groups.items():
            with formatter.section(panel.value):
                formatter.write_dl([(name.ljust(width), text) for name, text in records])  # one column for all
