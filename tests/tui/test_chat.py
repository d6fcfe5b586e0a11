"""A conversation in the app."""

from tests.tui.scripted import ScriptedModel, app_with, saying


async def test_a_question_is_answered(tmp_path, opened, until):
    model = ScriptedModel(saying("Hello to you."))
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hello", "enter")
        await until(pilot, lambda: app.screen.chat.last and not app.screen.answering)
        assert app.screen.chat.messages == [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hello to you."},
        ]
    assert model.closed


async def test_the_model_in_the_box_answers(demo, tmp_path, opened, until):
    app = app_with(demo, tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hello", "enter")
        await until(pilot, lambda: app.screen.chat.last and not app.screen.answering)
        assert app.screen.chat.at.answer
