"""A running answer can be stopped at any time, including while it waits."""

import threading
import time

import localllm
from localllm.conversation.chat import Chat
from localllm.request import SamplingParams
from localllm.tui.answer_thread import AnswerThread
from tests.tui.scripted import ScriptedModel, saying


def begun(chat: Chat, text: str) -> AnswerThread:
    return AnswerThread(lambda: chat.ask(text), chat.stop)


class SlowModel(ScriptedModel):
    """An answer that is slow to stop."""

    def __init__(self, *answers):
        super().__init__(*answers)
        self.go_on, self.asking = threading.Event(), threading.Event()

    def answer(self, chat):
        self.asking.set()
        assert self.go_on.wait(60)
        return super().answer(chat)


def ended(answering: AnswerThread):
    """Collect events until the end."""
    came, limit = [], time.monotonic() + 60
    while True:
        more, end = answering.drain()
        came += more
        if end:
            return [event for _, event in came], end
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_a_stalled_answer_keeps_its_text():
    chat = Chat(ScriptedModel([*saying("Once upon a time.")[:2], threading.Event()]))
    answering = begun(chat, "hello")
    while chat.current.answer != "Once upon":
        time.sleep(0.005)
    answering.stop()
    events, end = ended(answering)
    assert (end.stopped, end.error) == (True, None)
    assert chat.current.answer == "".join(event.text for event in events) == "Once upon"
    assert chat.current.finish_reason is None


def test_stopping_before_the_first_token_leaves_no_turn():
    chat = Chat(ScriptedModel([threading.Event()]))
    answering = begun(chat, "hello")
    answering.stop()
    events, end = ended(answering)
    assert (events, end.stopped, end.error, chat.turns) == ([], True, None, [])


def test_an_answer_stopped_before_it_starts_ends():
    model = SlowModel([threading.Event()])
    chat = Chat(model)
    answering = begun(chat, "hello")
    assert model.asking.wait(60)
    answering.stop()
    model.go_on.set()
    events, end = ended(answering)
    assert (events, end.stopped, end.error, chat.turns) == ([], True, None, [])


def test_leaving_before_the_start_waits_for_the_end():
    model = SlowModel([threading.Event()])
    answering = begun(Chat(model), "hello")
    assert model.asking.wait(60)
    threading.Timer(0.2, model.go_on.set).start()
    answering.stop_and_join(60)
    assert not answering.thread.is_alive()


def test_stopping_a_finished_answer_changes_nothing():
    chat = Chat(ScriptedModel(saying("Once upon a time.")))
    answering = begun(chat, "hello")
    _, end = ended(answering)
    answering.stop()
    assert (end.stopped, end.error, chat.current.answer) == (False, None, "Once upon a time.")
    assert chat.last_metrics


def test_a_long_prompt_that_a_model_reads_is_given_up_at_once():
    with localllm.load("demo") as llm:
        llm.worker.engine.scheduler.token_budget = 1  # which takes as long as a large model would
        chat = Chat(llm, SamplingParams(max_tokens=4))
        chat.inspect = 0
        answering = begun(chat, "one two three four five " * 100)
        while not (answering.pending and answering.pending[-1][1].step and answering.pending[-1][1].step.tokens):
            time.sleep(0.005)
        answering.stop()
        events, end = ended(answering)
        assert events[-1].step
        assert events[-1].step.computed < 500
        assert (end.stopped, end.error, chat.turns) == (True, None, [])
        llm.worker.call(lambda: None)
        assert (llm.stats().running, llm.stats().used_blocks) == (0, 0)
