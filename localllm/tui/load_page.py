"""What a person sees of a model on its way, as text of a given width. Knows how far it is, and no screen."""

from rich.text import Text

from localllm.errors import LocalLLMError
from localllm.tui.offered import fit_of, kind_of
from localllm.tui.opening import DOWNLOAD, QUANTIZE, Coming, Opening, Phase
from localllm.units import seconds, size
from localllm.visible import one_line

MOST_FILES = 6  # lines of a download, beside that for all
MOST_NOTES = 3
ALL = "in all"
DONE, FAILED, DIM, LIVE = "green", "red", "dim", "bold"


def page(opening: Opening, now: float, width: int) -> Text:
    """now: by the clock of the opening, in seconds; width: in characters."""
    blocks = [about(opening, width)]
    if opening.files and opening.under_way == DOWNLOAD:
        blocks.append(download(opening, now, width))
    if opening.phases:
        blocks.append(lines([row(opening, phase, now, width) for phase in opening.phases]))
    if opening.fault:
        blocks.append(fault(opening.fault))
    elif opening.notes and opening.under_way:
        blocks.append(Text("\n".join(one_line(note) for note in opening.notes[-MOST_NOTES:]), DIM))
    return Text("\n\n").join(blocks)


def lines(rows: list[Text]) -> Text:
    return Text("\n").join(rows)


def about(opening: Opening, width: int) -> Text:
    """What it is; of a download what it takes."""
    rows = [Text(elided(opening.name, width), LIVE)]
    if offer := opening.offer:
        if offer.about:
            rows.append(Text(one_line(offer.about)))
        rows.append(Text(kind_of(offer) + (f" · {size(offer.bytes)} to download" if offer.bytes else "")))
        if said := fit_of(offer):
            rows.append(Text(said, "" if offer.fits else FAILED))
    return lines(rows)


def download(opening: Opening, now: float, width: int) -> Text:
    """A line for each file, verified ones last to go, and one for all."""
    files = list(opening.files.values())
    verified = [file for file in files if file.verified]
    coming = [file for file in files if not file.verified]
    coming.sort(key=lambda file: file.began is None)
    shown = coming[:MOST_FILES]
    rows = [Text(f"✓ {count_of(verified)} verified", DONE)] if verified else []
    rows += [file_row(file, now, width) for file in shown]
    if len(coming) > len(shown):
        rows.append(Text(f"  {len(coming) - len(shown)} more wait", DIM))
    if len(files) > 1:
        rows.append(file_row(in_all(files, opening.here_bytes), now, width))
    return lines(rows)


def count_of(files: list[Coming]) -> str:
    if len(files) == 1:
        return f"{one_line(files[0].path)}, {size(files[0].size)},"
    return f"{len(files)} files, {size(sum(file.size for file in files))},"


def in_all(files: list[Coming], here_bytes: int) -> Coming:
    begun = [file.began for file in files if file.began is not None]
    total, done = sum(file.size for file in files), sum(file.done for file in files)
    came = sum(file.came for file in files)
    return Coming(ALL, here_bytes + total, here_bytes + done, min(begun, default=None), came)


def file_row(file: Coming, now: float, width: int) -> Text:
    rate, left = file.rate(now), file.size - file.done
    speed = f"{f'{size(rate)}/s':>9} {f'{time_of(left / rate)} left':>11}" if rate and left > 0 else ""
    if left <= 0 and not file.verified and file.path != ALL:
        speed = "verifying"
    told = f"{size(file.done):>7} of {size(file.size):<7} {speed:<21}"
    rest = max(8, width - len(told) - 3)  # for a mark, the name and the bar
    name = rest * 3 // 4
    row = Text("  " + elided(file.path, name - 1).ljust(name))
    row.append_text(bar(file.done, file.size, rest - name))
    return row.append(f" {told}".rstrip())


def time_of(s: float) -> str:
    """Roughly, as nobody knows better: 38 s, 12 min, 3 h."""
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 90 * 60 else f"{s / 3600:.0f} h"


def row(opening: Opening, phase: Phase, now: float, width: int) -> Text:
    """Of a phase: a mark, its name, how long it takes, and how far it is."""
    over = phase.ended is not None
    broken = over and phase is opening.phases[-1] and (opening.fault or opening.cancelled)
    took = seconds((phase.ended if phase.ended is not None else now) - phase.began)
    row = Text().append("✗ " if broken else "✓ " if over else "▸ ", FAILED if broken else DONE if over else LIVE)
    row.append(f"{phase.name:12}{took:>9}", "" if over else LIVE)
    if phase.total:
        in_bytes = phase.name not in (DOWNLOAD, QUANTIZE)
        done, total = (size(phase.done), size(phase.total)) if in_bytes else (phase.done, phase.total)
        told = f"{done} of {total}" + ("" if in_bytes else " parts")
        if not over:
            row.append("  ").append_text(bar(phase.done, phase.total, max(4, width - 26 - len(told))))
            row.append(f" {told}")
        elif not broken:
            row.append(f"  {total}" + ("" if in_bytes else " parts"), DIM)
    elif over and not broken and phase.name == DOWNLOAD and opening.files:
        row.append(f"  {size(sum(file.size for file in opening.files.values()))}, verified", DIM)
    return row


def fault(error: Exception) -> Text:
    """Its sentence, and what can be done."""
    message, remedy = (error.message, error.remedy) if isinstance(error, LocalLLMError) else (str(error), None)
    told = Text().append(one_line(message), FAILED)
    return told.append(f"\n{one_line(remedy)}") if remedy else told


def bar(done: int, total: int, width: int) -> Text:
    full = min(width, width * done // total) if total else width
    return Text("━" * full, LIVE).append("─" * (width - full), DIM)


def elided(name: str, width: int) -> str:
    """With its beginning, which tells the parts of a model apart, and its end, which says what it is."""
    name = one_line(name)
    if len(name) <= width:
        return name
    end = width // 4
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"
