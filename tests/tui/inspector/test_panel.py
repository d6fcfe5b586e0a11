"""The inspector by keyboard and mouse."""

import pytest
from textual.events import MouseScrollDown, MouseScrollUp
from textual.pilot import Pilot
from textual.widget import Widget

from localllm.conversation.chat import Chat
from localllm.metrics import EngineStats, TierMove
from localllm.request import GenerationEvent, SamplingParams
from localllm.tui.answer_thread import AnswerThread
from localllm.tui.inspector.blocks import Blocks, block_grid
from localllm.tui.inspector.panel import CANDIDATES_PER_TOKEN
from localllm.tui.inspector.record import DraftStatus
from localllm.tui.inspector.timeline import Timeline
from localllm.tui.inspector.tokens import Candidates, Tokens, probability_band
from tests.tui.inspector_app import Inspected
from tests.tui.scripted_events import FakeModel, story
from tests.work import counted_lines

SIZES = [(80, 24), (160, 50)]


def shown(app: Inspected) -> str:
    """Text on the screen."""
    return "\n".join("".join(part.text for part in line) for line in app.screen._compositor.render_strips())


async def drawn(app: Inspected, pilot: Pilot[None]) -> None:
    """Draw now what is drawn ten times a second, and lay it out."""
    app.inspector.draw()
    await pilot.pause()
    app.inspector.draw()
    await pilot.pause()


@pytest.mark.parametrize("size", SIZES)
async def test_each_view_has_an_empty_state(size) -> None:
    app = Inspected()
    async with app.run_test(size=size) as pilot:
        for key in "123":
            await pilot.press(key)
            assert any(said in shown(app) for said in ("No steps yet", "No token yet"))


async def test_candidates_are_requested_only_while_it_is_open() -> None:
    app = Inspected(list(story(5)))
    async with app.run_test() as pilot:
        assert app.inspector.inspect == CANDIDATES_PER_TOKEN and isinstance(app.focused, Timeline)
        app.inspector.toggle()
        await pilot.pause()
        assert app.inspector.inspect == 0 and "Timeline" not in shown(app)
        app.inspector.toggle()
        await pilot.pause()
        assert app.inspector.inspect == CANDIDATES_PER_TOKEN and "5 steps" in shown(app)


@pytest.mark.parametrize(("key", "view"), [("1", Timeline), ("2", Tokens), ("3", Blocks)])
async def test_a_number_opens_a_view(key, view) -> None:
    app = Inspected(list(story(5)))
    async with app.run_test() as pilot:
        await pilot.press("2", key)
        assert isinstance(app.focused, view) and app.query_one(view).display


@pytest.mark.parametrize(("tab", "view"), [("timeline", Timeline), ("tokens", Tokens), ("blocks", Blocks)])
async def test_a_click_opens_a_view(tab, view) -> None:
    app = Inspected(list(story(5)))
    async with app.run_test() as pilot:
        await pilot.click("#tab-tokens")
        await pilot.click(f"#tab-{tab}")
        assert isinstance(app.focused, view) and app.query_one(view).display


async def test_steps_are_chosen_by_keys_and_the_newest_is_followed_again() -> None:
    app = Inspected()
    async with app.run_test() as pilot:
        view = app.query_one(Timeline)
        app.begin()
        events = list(story(60))
        app.tell(events[:30])
        await pilot.pause(0.25)
        newest = view.index
        assert view.selected is None and newest == len(view.steps) - 1
        await pilot.press("left", "left")
        assert view.index == newest - 2
        app.tell(events[30:40])
        await pilot.pause(0.25)
        assert view.index == newest - 2 < len(view.steps) - 3  # it stays where the person looks
        await pilot.press("home")
        assert view.index == 0 and "prefill 256 tokens" in shown(app)
        await pilot.press("right")
        assert view.index == 1
        await pilot.press("pagedown", "pageup")
        assert view.index == 1
        await pilot.press("end")
        app.tell(events[40:])
        await pilot.pause(0.25)
        assert view.index == len(view.steps) - 1


async def test_zoom_by_keys_and_wheel_and_steps_by_mouse() -> None:
    app = Inspected(list(story(60)))
    async with app.run_test() as pilot:
        view = app.query_one(Timeline)
        await drawn(app, pilot)
        before = view.scale
        await pilot.press("plus", "plus", "minus")
        assert view.scale.span_s == before.span_s / 2
        await pilot.press("minus", "minus", "minus")
        assert view.scale == before
        for kind, span in ((MouseScrollUp, before.span_s / 2), (MouseScrollDown, before.span_s)):
            view.post_message(kind(view, 9, 5, 0, 0, 0, False, False, False))
            await pilot.pause()
            assert view.scale.span_s == span
        await pilot.click(Timeline, offset=(8 + 12, 3))  # in the time of the first piece
        assert view.index == 0
        await pilot.click(Timeline, offset=(8 + 20, view.chart_line + 1))
        assert view.index == 20


async def test_a_token_is_chosen_by_keys_and_its_candidates_are_shown() -> None:
    app = Inspected(list(story(40)))
    async with app.run_test() as pilot:
        await pilot.press("2")
        view, candidates = app.query_one(Tokens), app.query_one(Candidates)
        await pilot.press("home")
        assert view.token.text == " Once" and candidates.token is view.token
        await pilot.press("right")
        assert view.token.text == " upon" and candidates.token is view.token
        text = shown(app)
        assert "▶ ·upon" in text and "cut by top_p" in text and "cut by top_k" in text and "61.0%" in text
        await pilot.press("down")
        assert view.flow.line_of[view.index] == 1
        await pilot.press("up", "left")
        assert view.token.text == " Once"
        await pilot.press("pagedown", "pageup", "end")
        assert view.selected is None and view.token.special and "<|end|>" in shown(app)


async def test_a_token_is_chosen_by_mouse() -> None:
    app = Inspected(list(story(40)))
    async with app.run_test() as pilot:
        await pilot.press("2")
        await pilot.click(Tokens, offset=(7, 0))
        assert app.query_one(Tokens).token.text == " upon"
        await pilot.click(Tokens, offset=(70, 5))  # behind the end of the text
        assert app.query_one(Tokens).selected is None


async def test_drafts_and_unlikely_tokens_are_marked_without_colour() -> None:
    app = Inspected(list(story(40)))
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.press("2")
        text, tokens = shown(app), app.inspector.record.tokens
        assert "✓,·there·was·little" in text and "✗·five·of" in text
        view = app.query_one(Tokens)
        for place, token in enumerate(tokens[:-1]):
            style = view.style_of(place)
            assert bool(style.strike) is (token.draft_status is DraftStatus.REJECTED)
            if probability_band(token) in ("unlikely", "rare"):
                assert style.underline
            assert bool(style.bold) is (probability_band(token) == "rare")


async def test_the_view_follows_the_answer_unless_a_token_is_selected(until) -> None:
    events = list(story(400))
    app = Inspected()
    async with app.run_test() as pilot:
        await pilot.press("2")
        view = app.query_one(Tokens)
        app.begin()
        app.tell(events[:300])
        await until(pilot, lambda: view.scroll_offset.y == view.max_scroll_y > 0)
        await pilot.press("home")
        assert view.scroll_offset.y == 0
        below = view.max_scroll_y
        app.tell(events[300:400])
        await until(pilot, lambda: view.max_scroll_y > below)
        assert view.scroll_offset.y == 0 and view.index == 0
        await pilot.press("end")
        app.tell(events[400:])
        await until(pilot, lambda: view.scroll_offset.y == view.max_scroll_y and view.token.special)


async def test_scrolling_back_stops_following() -> None:
    events = list(story(500))
    app = Inspected()
    async with app.run_test() as pilot:
        await pilot.press("2")
        view = app.query_one(Tokens)
        app.begin()
        app.tell(events[:400])
        await drawn(app, pilot)
        view.scroll_to(y=2, animate=False, immediate=True)
        await pilot.pause()
        app.tell(events[400:])
        await drawn(app, pilot)
        assert view.scroll_offset.y == 2 and view.selected is None and view.token.special


@pytest.mark.slow
async def test_old_tokens_are_dropped_while_selected() -> None:
    events = list(story(9300, drafts=False))
    app = Inspected()
    async with app.run_test() as pilot:
        await pilot.press("2")
        await pilot.pause()  # until the view has the focus
        view = app.query_one(Tokens)
        app.begin()
        app.tell(events[:9200])
        await drawn(app, pilot)  # until they are laid out
        await pilot.press("home", *["right"] * 5)
        looked_at = view.token
        app.tell(events[9200:])
        view.refresh()  # before it knows that the beginning is gone
        await drawn(app, pilot)
        assert app.inspector.record.dropped_tokens > 5
        assert view.index == 0 and view.token.number > looked_at.number
        await pilot.press("1", "home")
        assert "prefill 256 tokens" in shown(app)


async def test_a_resize_lays_the_tokens_out_again(until) -> None:
    app = Inspected(list(story(100)))
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.press("2", "home")
        view = app.query_one(Tokens)
        wide = len(view.flow.lines)
        await pilot.resize_terminal(60, 20)
        await until(pilot, lambda: len(view.flow.lines) > wide)
        assert view.flow.width <= 58 and view.index == 0


async def test_a_new_answer_replaces_the_last() -> None:
    app = Inspected(list(story(200)), list(story(3)))
    async with app.run_test() as pilot:
        await drawn(app, pilot)
        assert "3 steps" in shown(app)
        await pilot.press("2")
        assert app.query_one(Tokens).index == len(app.inspector.record.tokens) - 1 < 10


@pytest.mark.quick_every(13)
@pytest.mark.parametrize("size", [(40, 12), (60, 16), (80, 24), (200, 60)])
@pytest.mark.parametrize("steps", [1, 5, 5000])
async def test_views_fit_any_terminal_and_any_answer(size, steps) -> None:
    app = Inspected(list(story(steps)))
    async with app.run_test(size=size) as pilot:
        for key in "123":
            await pilot.press(key)
            await drawn(app, pilot)
            lines = shown(app).split("\n")
            assert len(lines) == size[1] and any(sign in shown(app) for sign in "█▶▊▌")


def filled(lines) -> str:
    return "".join(line.plain for line in lines).replace(" ", "")


def test_blocks_fill_one_by_one() -> None:
    steps = [event.step for _, event in story(40, prompt=100, found=32) if event.step]
    first, last = steps[0], steps[-1]
    early = filled(block_grid(first, 320, 16, 40, 1))
    assert early == "▒▒▓▓▓▓▎" + "·" * 13  # 100 tokens: 32 found, 64 more in whole blocks, 4 in the last
    late = filled(block_grid(last, 320, 16, 40, 1))
    assert late.count("▒") == 2 and late.count("·") == 20 - last.blocks


@pytest.mark.parametrize("context", [16, 512, 4096, 131072, 1048576])
@pytest.mark.parametrize(("width", "height"), [(40, 3), (76, 10), (156, 40)])
def test_every_context_fits_the_grid(context: int, width: int, height: int) -> None:
    newest = [event.step for _, event in story(5) if event.step][-1]
    lines = block_grid(newest, context, 16, width, height)
    assert 1 <= len(lines) <= height + 1
    assert all(line.cell_length <= width + 1 for line in lines)


async def test_blocks_and_bytes_are_shown() -> None:
    app = Inspected(list(story(40)))
    async with app.run_test() as pilot:
        await pilot.press("3")
        text = shown(app)
        assert "41 blocks of 16 tokens, 654 of 4,096 tokens, 42.9 MB" in text
        assert "cached" in text and "pool" not in text


async def test_moves_between_tiers_are_shown() -> None:
    moves = {"host_to_device": TierMove(5_000_000, 0.02), "disk_to_host": TierMove()}

    class Tiered(FakeModel):
        def stats(self) -> EngineStats:
            counts = {"running": 1, "waiting": 0, "most_waiting": 8, "context": 4096, "steps": 1}
            return EngineStats(**counts, prompt_tokens=650, cached_tokens=640, disk_tokens=640, moves=moves)

    app = Inspected(list(story(40)))
    app.inspector.model = Tiered()
    async with app.run_test() as pilot:
        await pilot.press("3")
        text = shown(app)
        assert "640 tokens from disk" in text
        assert "moved 5.00 MB host to device in 20.0 ms" in text and "disk to host" not in text


async def test_foreign_text_is_neither_markup_nor_control_codes() -> None:
    class Nasty(FakeModel):
        class tokenizer:
            @staticmethod
            def decode(ids, *, skip_special):
                return "[red]\x1b[2J[/]" * len(ids)

    app = Inspected(list(story(8)))
    app.inspector.model = Nasty()
    async with app.run_test() as pilot:
        for key in "12":
            await pilot.press(key)
            await drawn(app, pilot)
            assert "[red]␛[2J[/]" in shown(app) and "\x1b" not in shown(app)


async def test_tokens_without_names_show_the_answers_text() -> None:
    class Nameless(FakeModel):
        class tokenizer:
            @staticmethod
            def decode(ids, *, skip_special):
                raise KeyError(ids[0])

    app = Inspected()
    app.inspector.model = Nameless()
    async with app.run_test() as pilot:
        app.begin()
        app.tell([(100.1, GenerationEvent(1, "Hello", (3,)))])
        await pilot.press("2")
        assert "Hello" in shown(app) and "while the inspector was closed" in shown(app)


async def test_the_bundled_model_is_inspected(demo, until) -> None:
    """Renders a real answer: every token is among its candidates, whose probabilities sum to 1."""
    app = Inspected()
    app.inspector.model = app.strip.model = demo
    async with app.run_test(size=(100, 40)) as pilot:
        chat = Chat(demo, SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=1, max_tokens=40))
        chat.inspect = app.inspector.inspect
        answering = AnswerThread(lambda: chat.ask("Tell me a story"), chat.stop)
        app.inspector.begin(answering.began)
        ended = None
        while not ended:
            came, ended = answering.drain()
            app.inspector.follow(came)
            await pilot.pause(0.01)
        app.inspector.end(ended)
        record = app.inspector.record
        assert ended.error is None and record.output_count == record.metrics.output_tokens
        said = "".join(
            token.text
            for token in record.tokens
            if token.draft_status is not DraftStatus.REJECTED and not token.special
        )
        assert said.strip() == chat.current.answer.strip()
        for token in record.tokens:
            assert token.draft_status is DraftStatus.REJECTED or token.probability > 0
            assert sum(one.chance for one in token.candidates) <= 1 + 1e-4
        for key in "123":
            await pilot.press(key)
            await drawn(app, pilot)
        assert f"{demo.blocks:,} blocks in use" in shown(app)


@pytest.mark.slow
async def test_a_view_of_a_very_long_answer_is_drawn_soon() -> None:
    """It is drawn ten times a second, with nearly the same work for a long answer as for a shorter one."""
    lines: dict[type[Widget], list[int]] = {Timeline: [], Tokens: [], Blocks: []}
    for steps in (2000, 8000):
        app = Inspected(list(story(steps, drafts=False)))
        async with app.run_test(size=(160, 50)) as pilot:
            for key, (view, counts) in zip("123", lines.items(), strict=True):
                await pilot.press(key)
                await drawn(app, pilot)
                shown_view = app.query_one(view)
                with counted_lines() as count:
                    shown_view.show(app.inspector.record)
                    lines_shown = shown_view.render_lines(shown_view.size.region)
                assert any(line.text.strip() for line in lines_shown)
                counts.append(count.lines)
    assert all(many < 1.6 * few for few, many in lines.values()), lines
