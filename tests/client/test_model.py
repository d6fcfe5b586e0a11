"""A model behind a server answers exactly as the same model in this process."""

import json
import threading
import time
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from localllm import LLM, SamplingParams
from localllm.client.model import RemoteModel, open_model
from localllm.client.server import Response, ServerClient, parse_address
from localllm.errors import (
    ContextOverflow,
    LocalLLMError,
    ModelNotFound,
    NotLocalLLMServer,
    ServerUnreachable,
    UsageError,
)
from localllm.request import ChatRequest, Grammar, GrammarKind
from localllm.sampling import params_to_json

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a cat?"}]
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=16, logprobs=2, prompt_logprobs=1)


@pytest.fixture
def served(demo_url):
    with closing(open_model(ServerClient(demo_url), "demo", path=None, load=False)) as model:
        yield model


def joined(events):
    """Text, ids and log probabilities of all events together, without times."""
    events = list(events)
    return {
        "text": "".join(event.text for event in events),
        "ids": [token for event in events for token in event.token_ids],
        "logprobs": [entry for event in events for entry in event.logprobs],
        "prompt_logprobs": [entry for event in events for entry in event.prompt_logprobs],
        "end": (events[-1].finish_reason, events[-1].seed, events[-1].metrics.output_tokens),
    }


def test_model_properties_match(served: RemoteModel, demo: LLM):
    for name in ("name", "device", "dtype", "kv_dtype", "context", "weight_bytes", "deterministic"):
        assert getattr(served, name) == getattr(demo, name)
    assert (served.has_chat_template, served.default_params) == (True, demo.default_params)
    assert (served.blocks, served.block_tokens, served.reads) == (demo.blocks, demo.block_tokens, demo.reads)
    assert served.provenance() == demo.provenance()
    assert served.kernels() == demo.kernels()


@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 6, 7], MESSAGES])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(seed=3, max_tokens=12, stop=("e",)),
        SamplingParams(seed=2**53 + 7, max_tokens=4, logprobs=1, logit_bias={5: -float("inf")}),
        SamplingParams(
            temperature=0, seed=1, max_tokens=40, grammar=Grammar(GrammarKind.REGEX, "[a-z]{3} [0-9]{2}")
        ),
    ],
)
def test_every_event_passes_through(served: RemoteModel, demo: LLM, prompt, params):
    request, expected = served.prepare(ChatRequest(prompt, params)), demo.prepare(ChatRequest(prompt, params))
    assert (request.prompt_ids, request.is_chat, request.params) == (
        expected.prompt_ids,
        expected.is_chat,
        expected.params,
    )
    found = joined(served.submit(request))
    assert found == joined(demo.submit(expected))
    for entry in (*found["logprobs"], *found["prompt_logprobs"]):
        for token in (entry.token_id, *(token for token, _ in entry.top)):
            text = demo.tokenizer.decode([token], skip_special=False)
            assert served.tokenizer.decode([token], skip_special=False) == text


def test_lines_that_were_received_together_are_known_to_be_there():
    class Received:
        def iter_bytes(self):
            yield from (b"one\ntwo\nthr", b"ee\n", b"four")

    response = Response.__new__(Response)
    response.iter_bytes = Received().iter_bytes
    assert [(line, response.unread_lines) for line in response.iter_lines()] == [
        (b"one", 1),
        (b"two", 0),
        (b"three", 0),
        (b"four", 0),
    ]


def test_measurements_have_every_field(served: RemoteModel, demo: LLM):
    *_, last = served.answer(ChatRequest("Once", SamplingParams(max_tokens=1, ignore_eos=True)))
    *_, own = demo.stream("Once", SamplingParams(max_tokens=1, ignore_eos=True))
    found, expected = last.metrics.as_dict(), own.metrics.as_dict()
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] is None} == {name for name in expected if expected[name] is None}


@pytest.mark.parametrize(
    ("prompt", "params", "kind"),
    [
        ("x " * 5000, None, ContextOverflow),
        ("", None, UsageError),
        ([10**6], None, UsageError),
        ([{"role": "king", "content": "x"}], None, UsageError),
        ("x", SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(?=a)")), UsageError),
    ],
)
def test_errors_are_those_of_the_model(served: RemoteModel, demo: LLM, prompt, params, kind):
    with pytest.raises(kind) as told:
        served.prepare(ChatRequest(prompt, params))
    with pytest.raises(kind) as own:
        demo.prepare(ChatRequest(prompt, params))
    assert (str(told.value), told.value.exit_code) == (str(own.value), own.value.exit_code)
    assert served.answer(ChatRequest("Once", GREEDY)), "the connection goes on"


def test_template_arguments_are_checked_there(served: RemoteModel, demo: LLM):
    assert served.template_arguments({}) == demo.template_arguments({}) == {}
    with pytest.raises(UsageError) as told:
        served.template_arguments({"wings": 2})
    with pytest.raises(UsageError) as own:
        demo.template_arguments({"wings": 2})
    assert str(told.value) == str(own.value)


def test_closing_an_answer_ends_it_there_and_the_next_one_is_answered(served: RemoteModel, demo: LLM):
    stream = served.answer(ChatRequest("Once", SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)))
    next(stream)
    assert demo.stats().running == 1
    stream.close()
    end = time.monotonic() + 60
    while demo.stats().running:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert joined(served.answer(ChatRequest("Once", GREEDY))) == joined(demo.stream("Once", GREEDY))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=16, top_k=3)])
def test_step_reports_pass_through_the_server(served: RemoteModel, demo: LLM, params):
    events = list(served.answer(ChatRequest(MESSAGES, params, inspect=3)))
    assert joined(events)["ids"] == joined(served.answer(ChatRequest(MESSAGES, params)))["ids"]
    steps = [event.step for event in events if event.step]
    assert (steps[0].tokens, steps[0].place) == (0, 1)
    assert {step.prompt for step in steps} == {events[-1].metrics.prompt_tokens}
    candidates = [of for step in steps for of in step.candidates]
    own = [of for event in demo.stream(MESSAGES, params, inspect=3) if event.step for of in event.step.candidates]
    assert candidates == own
    assert len(candidates) == len(joined(events)["ids"])
    for token in {each.token_id for of in candidates for each in of}:
        text = demo.tokenizer.decode([token], skip_special=False)
        assert served.tokenizer.decode([token], skip_special=False) == text


def test_step_reports_are_sent_only_on_request(served: RemoteModel):
    assert not any(event.step for event in served.answer(ChatRequest(MESSAGES, GREEDY)))


@pytest.mark.parametrize("inspect", [-1, 65, 10**9])
def test_too_many_candidates_are_rejected(served: RemoteModel, demo: LLM, inspect):
    for model in (served, demo):
        with pytest.raises(UsageError, match=f"inspect is {inspect}; give a whole number up to 64"):
            model.prepare(ChatRequest("Once", GREEDY, inspect=inspect))


def test_a_client_without_step_reports_is_answered(demo_url):
    with closing(ServerClient(demo_url)) as server:
        body = {"model": "demo", "prompt": "Once", "params": params_to_json(GREEDY), "tools": None}
        first, *pieces = server.stream_json("/localllm/answer", body | {"template_arguments": {}})
        assert "prompt_ids" in first
        assert "finish_reason" in pieces[-1]


def test_a_server_without_step_reports_is_another_version(demo_url):
    with closing(ServerClient(demo_url)) as server:
        facts = server.request_json("/localllm/open", {"model": "demo"})
        for name in ("reads", "blocks", "block_tokens"):
            with pytest.raises(LocalLLMError, match="another version of localllm; update the older one"):
                RemoteModel(server, {key: value for key, value in facts.items() if key != name})
        for told in ({}, {"weights": "x"}, [], None, facts["reads"] | {"windows": [1]}):
            with pytest.raises(LocalLLMError, match="another version of localllm"):
                _ = RemoteModel(server, facts | {"reads": told}).reads


def reading(stream):
    """Start a thread that reads the stream; return it and the list of events it has read."""
    events = []
    thread = threading.Thread(target=lambda: events.extend(stream))
    thread.start()
    return thread, events


@pytest.mark.parametrize("said", [0, 3])
def test_closing_from_another_thread_unblocks_the_reader(served: RemoteModel, demo: LLM, said):
    """Works even while the engine is idle."""
    stream = served.answer(ChatRequest("Once", SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)))
    for _ in range(said):
        next(stream)
    begun, go_on = threading.Event(), threading.Event()
    holding = threading.Thread(target=demo.worker.call, args=(lambda: begun.set() or go_on.wait(60),))
    holding.start()
    assert begun.wait(60)
    thread, _ = reading(stream)
    time.sleep(0.1)
    start = time.monotonic()
    stream.close()
    thread.join(60)
    took = time.monotonic() - start
    go_on.set()
    holding.join()
    assert took < 30  # half of how long the engine is held
    assert joined(served.answer(ChatRequest("Once", GREEDY))) == joined(demo.stream("Once", GREEDY))
    end = time.monotonic() + 60
    while demo.stats().running:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "request_beside",
    [
        lambda model: model.template_arguments({"enable_thinking": True}),
        lambda model: model.template_arguments({}, think=False),
        lambda model: model.template_arguments({}, with_tools=True),
        lambda model: model.provenance(),
        lambda model: model.kernels(),
        lambda model: model.server.request_json("/localllm/ps"),
        lambda model: list(model.answer(ChatRequest("Twice", SamplingParams(temperature=0, max_tokens=2)))),
    ],
)
def test_a_request_during_a_stream_leaves_the_answer_intact(served: RemoteModel, demo: LLM, request_beside):
    """The app's settings, or a receipt, send requests while an answer streams."""
    params = SamplingParams(temperature=0, seed=1, max_tokens=24, ignore_eos=True)
    stream = served.answer(ChatRequest("Once upon a time", params))
    events = [next(stream)]
    with suppress(UsageError):  # of what this template does not read
        request_beside(served)
    events += stream
    assert joined(events) == joined(demo.stream("Once upon a time", params))
    assert len(served.server.in_use) == 0


def test_closing_one_of_two_streams_leaves_the_other(served: RemoteModel, demo: LLM):
    params = SamplingParams(temperature=0, seed=1, max_tokens=24, ignore_eos=True)
    first, second = (served.answer(ChatRequest("Once", params)) for _ in range(2))
    next(first)
    first.close()
    assert joined(second) == joined(demo.stream("Once", params))


def test_a_path_matches_only_the_model_loaded_from_it(demo_url, demo):
    with closing(open_model(ServerClient(demo_url), "x", path=str(demo.path.resolve()), load=False)) as model:
        assert model.name == "demo"
    with pytest.raises(ModelNotFound, match="/etc/passwd is not loaded"):
        open_model(ServerClient(demo_url), "x", path="/etc/passwd", load=False)


def test_unloaded_names_are_reported(stories_url):
    for name in ("demo", "no-such-model"):
        with pytest.raises(ModelNotFound, match=name):
            open_model(ServerClient(stories_url), name, path=None, load=False)


def answering(status, content, kind="application/json", broken=False):
    """A server that answers everything with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content) + (9 if broken else 0)))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = True

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.mark.parametrize(
    ("status", "content", "broken", "kind"),
    [
        (404, b"404 page not found", False, NotLocalLLMServer),
        (404, b'{"error":"model \'demo\' not found"}', False, NotLocalLLMServer),
        (200, b'{"models":[]}', False, NotLocalLLMServer),
        (200, b"<html>", False, NotLocalLLMServer),
        (200, b'{"server":"localllm"}', False, LocalLLMError),
        (200, b'{"server":', True, ServerUnreachable),
        (
            500,
            json.dumps({"error": {"kind": "__class__", "message": "x", "remedy": None}}).encode(),
            False,
            LocalLLMError,
        ),
    ],
)
def test_other_servers_are_distinguished_from_ours(status, content, broken, kind):
    with answering(status, content, broken=broken) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,)).start()
        try:
            with pytest.raises(kind):
                open_model(ServerClient(f"127.0.0.1:{other.server_port}"), "demo", path=None, load=False)
        finally:
            other.shutdown()


def test_an_unreachable_server_is_reported():
    with pytest.raises(ServerUnreachable, match=r"cannot reach a localllm server at http://127\.0\.0\.1:1 "):
        open_model(ServerClient("127.0.0.1:1"), "demo", path=None, load=False)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("localhost", "http://localhost:11434"),
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::1]:5", "http://[::1]:5"),
        ("https://example.org/", "https://example.org:11434"),
    ],
)
def test_addresses_are_parsed_as_users_write_them(address, url):
    assert parse_address(address) == url


@pytest.mark.parametrize("address", ["ftp://x", "http://", "x:port", "x:99999", "http://x/path", "x?y"])
def test_an_invalid_address_is_reported(address):
    with pytest.raises(UsageError, match="is not a server address"):
        parse_address(address)
