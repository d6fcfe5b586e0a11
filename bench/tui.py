"""Key latency of the chat app while an answer streams: the time from writing a key to the terminal until the app
has written the changed prompt to it.

The app runs in a pseudo-terminal, so the time that a terminal takes to draw is not included. Meanwhile an endless
answer streams: paragraphs, lists, code and a table from a scripted model, at 200 tokens per second and with step
reports like an engine's, or one story after another from the model `demo`, as fast as its engine runs in the app's
process. Tokens per second are reported, too. Every key is a different letter that occurs nowhere else on the
screen, so its first occurrence in the output is its echo. The long conversation has 2,000 messages and 1 MB.

`python bench/tui.py [--scene NAME] [--keys N] [--save]` prints one JSON line; all scenes take eight minutes.
"""

import argparse
import os
import pty
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
APP = str(Path(__file__).with_name("tui_app.py"))
LETTERS = [
    chr(code) for code in (*range(0x391, 0x3CA), *range(0x410, 0x450), *range(0x531, 0x557)) if code != 0x3A2
]
ESCAPE, CTRL_C, ENTER, TAB, BACK_TAB, INSPECTOR = "\x1b", "\x03", "\r", "\t", "\x1b[Z", "\x1bOR"
PAGE_UP, PAGE_DOWN = "\x1b[5~", "\x1b[6~"
QUESTION = "Tell me a story"
TAKE_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
GAPS_S = (0.041, 0.071, 0.113)  # between keys; not multiples of a frame
SMALL, LARGE = (24, 80), (50, 160)


@dataclass(frozen=True)
class Scene:
    model: str = "played"
    turns: int = 0  # of the resumed conversation
    size: tuple[int, int] = SMALL
    view: str = ""  # key of the inspector's view; "" if it is closed


SCENES = {
    "played": Scene(),
    "demo": Scene("demo"),
    "long": Scene(turns=1000),
    "large": Scene("demo", size=LARGE),
    "inspected": Scene(view="1"),
    "inspected demo": Scene("demo", size=LARGE, view="2"),
}


class Terminal:
    """A pseudo-terminal with the app running in it."""

    def __init__(self, arguments: list[str], size: tuple[int, int]):
        self.fd, app_side = pty.openpty()
        termios.tcsetwinsize(self.fd, size)
        command = [sys.executable, "-c", TAKE_TERMINAL, sys.executable, APP, *arguments]
        environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=app_side, stdout=app_side, stderr=app_side, env=environment)
        os.close(app_side)

    def wait_for(self, text: str, timeout: float = 10.0) -> float:
        """Return the seconds from now until the app writes the text. Raises TimeoutError."""
        start = time.perf_counter()
        expected, output = text.encode(), b""
        while (remaining := start + timeout - time.perf_counter()) > 0:
            if select.select([self.fd], [], [], remaining)[0]:
                output = output[-16:] + os.read(self.fd, 1 << 16)
                if expected in output:
                    return time.perf_counter() - start
        raise TimeoutError(f"{text!r} was not shown within {timeout} s")

    def drain(self, seconds: float) -> None:
        """Discard output for this time."""
        end = time.perf_counter() + seconds
        while (remaining := end - time.perf_counter()) > 0:
            if select.select([self.fd], [], [], remaining)[0]:
                os.read(self.fd, 1 << 16)

    def settle(self, quiet: float = 0.25) -> tuple[float, float]:
        """Return the seconds from now until the first output and until the last, which `quiet` seconds without
        output follow.
        """
        start = time.perf_counter()
        first, last = None, start
        while select.select([self.fd], [], [], quiet if first else 10)[0]:
            os.read(self.fd, 1 << 16)
            last = time.perf_counter()
            first = first or last
        return (first or last) - start, last - start

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def press(self, *keys: str) -> None:
        for key in keys:
            self.type(key)
            self.drain(0.2)

    def resize(self, size: tuple[int, int]) -> None:
        termios.tcsetwinsize(self.fd, size)
        self.process.send_signal(signal.SIGWINCH)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


def in_ms(seconds: Iterable[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    percentiles = {f"p{p}": ordered[min(len(ordered) - 1, round(len(ordered) * p / 100))] for p in (95, 99)}
    return {
        name: round(1e3 * value, 1)
        for name, value in ({"median": statistics.median(ordered)} | percentiles | {"max": ordered[-1]}).items()
    }


def type_letters(
    terminal: Terminal, keys: int, before: Callable[[], None], after: Callable[[], None]
) -> dict[str, float]:
    """Type this many letters and measure their echo. before, after: called around every pass over all letters."""
    times = list[float]()
    while len(times) < keys:
        before()
        for letter in LETTERS[: keys - len(times)]:
            terminal.type(letter)
            times.append(terminal.wait_for(letter))
            terminal.drain(GAPS_S[len(times) % len(GAPS_S)])
        after()
    return in_ms(times)


def scroll_and_resize(terminal: Terminal) -> dict[str, object]:
    """Measure an idle conversation: times until the first output and until everything is drawn."""

    def summarize(name: str, times: list[tuple[float, float]]) -> dict[str, object]:
        firsts, lasts = zip(*times, strict=True)
        return {f"{name}_ms": in_ms(firsts), f"{name}_whole_ms": in_ms(lasts)}

    def press(key: str) -> tuple[float, float]:
        terminal.type(key)
        return terminal.settle()

    def resize(size: tuple[int, int]) -> tuple[float, float]:
        terminal.resize(size)
        return terminal.settle()

    return {
        **summarize("page_up", [press(PAGE_UP) for _ in range(40)]),
        **summarize("page_down", [press(PAGE_DOWN) for _ in range(40)]),
        **summarize("resize", [resize(size) for size in (LARGE, SMALL) * 5]),
    }


def measure(scene: Scene, keys: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as home:
        start = time.perf_counter()
        terminal = Terminal([scene.model, str(scene.turns), home], scene.size)
        try:
            terminal.wait_for("Say something", 60)
            result: dict[str, object] = {"opened_s": round(time.perf_counter() - start, 2)}
            terminal.settle()
            if scene.turns:
                result |= scroll_and_resize(terminal)
            if not scene.view:
                result["idle_ms"] = type_letters(
                    terminal, len(LETTERS), lambda: None, lambda: terminal.press(CTRL_C)
                )
            else:
                for key in (INSPECTOR, BACK_TAB, scene.view, TAB):
                    terminal.press(key)

            def ask() -> None:
                terminal.press(QUESTION, ENTER)
                terminal.drain(1.0)

            result["streaming_ms"] = type_letters(terminal, keys, ask, lambda: terminal.press(ESCAPE, CTRL_C))
        finally:
            terminal.close()
        tokens, seconds = 0, 0.0
        for line in (Path(home) / "rates").read_text().splitlines():
            tokens, seconds = tokens + int(line.split()[0]), seconds + float(line.split()[1])
    return result | {"tokens_per_s": round(tokens / seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", choices=SCENES, action="append", help="scene to measure; all by default")
    parser.add_argument("--keys", type=int, default=300, help="keys to type in each scene")
    parser.add_argument("--save", action="store_true", help="append the result to bench/results/tui.jsonl")
    options = parser.parse_args()
    result: dict[str, object] = {"keys": options.keys, "load_average_before": os.getloadavg()[0]}
    for name in options.scene or SCENES:
        result[name] = measure(SCENES[name], options.keys)
        print(name, result[name], file=sys.stderr)
    result["load_average_after"] = os.getloadavg()[0]
    from bench.report import finish

    finish("tui", result, options.save)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
