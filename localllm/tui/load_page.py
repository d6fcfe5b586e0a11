"""What a person sees of a model on its way, as text of a given width. Knows how far it is, and no screen."""

from rich.text import Text

from localllm.errors import LocalLLMError
from localllm.formatting import format_bytes, format_seconds, one_line
from localllm.tui.offers import memory_and_speed, parameters_and_license
from localllm.tui.opening import DOWNLOAD, QUANTIZE, FileDownload, LoadTask, Phase

MAX_FILES = 6  # lines of a download, beside that for all
MAX_NOTES = 3
TOTAL_NAME = "in all"
DONE_STYLE, FAILED_STYLE, DIM_STYLE, ACTIVE_STYLE = "green", "red", "dim", "bold"


def render_load(task: LoadTask, now: float, width: int) -> Text:
    """now: by the clock of the opening, in seconds; width: in characters."""
    blocks = [model_lines(task, width)]
    if task.files and task.current_phase == DOWNLOAD:
        blocks.append(download_lines(task, now, width))
    if task.phases:
        blocks.append(join_lines([phase_line(task, phase, now, width) for phase in task.phases]))
    if task.error:
        blocks.append(error_lines(task.error))
    elif task.notes and task.current_phase:
        blocks.append(Text("\n".join(one_line(note) for note in task.notes[-MAX_NOTES:]), DIM_STYLE))
    return Text("\n\n").join(blocks)


def join_lines(rows: list[Text]) -> Text:
    return Text("\n").join(rows)


def model_lines(task: LoadTask, width: int) -> Text:
    """What it is; of a download what it takes."""
    rows = [Text(elide_middle(task.name, width), ACTIVE_STYLE)]
    if offer := task.offer:
        if offer.about:
            rows.append(Text(one_line(offer.about)))
        rows.append(
            Text(
                parameters_and_license(offer)
                + (f" · {format_bytes(offer.bytes)} to download" if offer.bytes else "")
            )
        )
        if said := memory_and_speed(offer):
            rows.append(Text(said, "" if offer.fits else FAILED_STYLE))
    return join_lines(rows)


def download_lines(task: LoadTask, now: float, width: int) -> Text:
    """A line for each file, verified ones last to go, and one for all."""
    files = list(task.files.values())
    verified = [file for file in files if file.verified]
    coming = [file for file in files if not file.verified]
    coming.sort(key=lambda file: file.began is None)
    shown = coming[:MAX_FILES]
    rows = [Text(f"✓ {files_summary(verified)} verified", DONE_STYLE)] if verified else []
    rows += [file_line(file, now, width) for file in shown]
    if len(coming) > len(shown):
        rows.append(Text(f"  {len(coming) - len(shown)} more wait", DIM_STYLE))
    if len(files) > 1:
        rows.append(file_line(total_download(files, task.here_bytes), now, width))
    return join_lines(rows)


def files_summary(files: list[FileDownload]) -> str:
    if len(files) == 1:
        return f"{one_line(files[0].path)}, {format_bytes(files[0].size_bytes)},"
    return f"{len(files)} files, {format_bytes(sum(file.size_bytes for file in files))},"


def total_download(files: list[FileDownload], here_bytes: int) -> FileDownload:
    begun = [file.began for file in files if file.began is not None]
    total, done = sum(file.size_bytes for file in files), sum(file.done_bytes for file in files)
    came = sum(file.received_bytes for file in files)
    return FileDownload(TOTAL_NAME, here_bytes + total, here_bytes + done, min(begun, default=None), came)


def file_line(file: FileDownload, now: float, width: int) -> Text:
    rate, left = file.rate(now), file.size_bytes - file.done_bytes
    speed = (
        f"{f'{format_bytes(rate)}/s':>9} {f'{rough_duration(left / rate)} left':>11}" if rate and left > 0 else ""
    )
    if left <= 0 and not file.verified and file.path != TOTAL_NAME:
        speed = "verifying"
    told = f"{format_bytes(file.done_bytes):>7} of {format_bytes(file.size_bytes):<7} {speed:<21}"
    rest = max(8, width - len(told) - 3)  # for a mark, the name and the bar
    name = rest * 3 // 4
    row = Text("  " + elide_middle(file.path, name - 1).ljust(name))
    row.append_text(progress_bar(file.done_bytes, file.size_bytes, rest - name))
    return row.append(f" {told}".rstrip())


def rough_duration(s: float) -> str:
    """Roughly, as nobody knows better: 38 s, 12 min, 3 h."""
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 90 * 60 else f"{s / 3600:.0f} h"


def phase_line(task: LoadTask, phase: Phase, now: float, width: int) -> Text:
    """Of a phase: a mark, its name, how long it takes, and how far it is."""
    over = phase.ended is not None
    broken = over and phase is task.phases[-1] and (task.error or task.cancelled)
    took = format_seconds((phase.ended if phase.ended is not None else now) - phase.began)
    row = Text().append(
        "✗ " if broken else "✓ " if over else "▸ ",
        FAILED_STYLE if broken else DONE_STYLE if over else ACTIVE_STYLE,
    )
    row.append(f"{phase.name:12}{took:>9}", "" if over else ACTIVE_STYLE)
    if phase.total:
        in_bytes = phase.name not in (DOWNLOAD, QUANTIZE)
        done, total = (
            (format_bytes(phase.done), format_bytes(phase.total)) if in_bytes else (phase.done, phase.total)
        )
        told = f"{done} of {total}" + ("" if in_bytes else " parts")
        if not over:
            row.append("  ").append_text(progress_bar(phase.done, phase.total, max(4, width - 26 - len(told))))
            row.append(f" {told}")
        elif not broken:
            row.append(f"  {total}" + ("" if in_bytes else " parts"), DIM_STYLE)
    elif over and not broken and phase.name == DOWNLOAD and task.files:
        row.append(f"  {format_bytes(sum(file.size_bytes for file in task.files.values()))}, verified", DIM_STYLE)
    return row


def error_lines(error: Exception) -> Text:
    """Its sentence, and what can be done."""
    message, remedy = (error.message, error.remedy) if isinstance(error, LocalLLMError) else (str(error), None)
    told = Text().append(one_line(message), FAILED_STYLE)
    return told.append(f"\n{one_line(remedy)}") if remedy else told


def progress_bar(done: int, total: int, width: int) -> Text:
    full = min(width, width * done // total) if total else width
    return Text("━" * full, ACTIVE_STYLE).append("─" * (width - full), DIM_STYLE)


def elide_middle(name: str, width: int) -> str:
    """With its beginning, which tells the parts of a model apart, and its end, which says what it is."""
    name = one_line(name)
    if len(name) <= width:
        return name
    end = width // 4
    return f"{name[: width - 1 - end]}…{name[len(name) - end :]}"
