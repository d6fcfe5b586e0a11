"""A model in a server answers as the same model in this process does, piece by piece."""

import json
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from localllm import LLM, SamplingParams
from localllm.client.model import ServedModel, open_model
from localllm.client.server import NoServer, OtherServer, Server, url_of
from localllm.errors import ContextOverflow, LocalLLMError, ModelNotFound, UsageError
from localllm.request import Grammar, GrammarKind

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a cat?"}]
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=16, logprobs=2, prompt_logprobs=1)


@pytest.fixture
def served(demo_url):
    with closing(open_model(Server(demo_url), "demo", path=None, load=False)) as model:
        yield model


def joined(events):
    """What pieces come to, without times."""
    events = list(events)
    return {
        "text": "".join(event.text for event in events),
        "ids": [token for event in events for token in event.token_ids],
        "logprobs": [entry for event in events for entry in event.logprobs],
        "prompt_logprobs": [entry for event in events for entry in event.prompt_logprobs],
        "end": (events[-1].finish_reason, events[-1].seed, events[-1].metrics.output_tokens),
    }


def test_it_says_what_it_is(served: ServedModel, demo: LLM):
    for name in ("name", "device", "dtype", "kv_dtype", "context", "weight_bytes", "deterministic"):
        assert getattr(served, name) == getattr(demo, name)
    assert (served.has_chat_template, served.default_params) == (True, demo.default_params)
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
def test_every_piece_comes_through(served: ServedModel, demo: LLM, prompt, params):
    request, expected = served.prepare(prompt, params), demo.prepare(prompt, params)
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


def test_measurements_have_every_field(served: ServedModel, demo: LLM):
    *_, last = served.stream("Once", SamplingParams(max_tokens=1, ignore_eos=True))
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
def test_errors_are_those_of_the_model(served: ServedModel, demo: LLM, prompt, params, kind):
    with pytest.raises(kind) as told:
        served.prepare(prompt, params)
    with pytest.raises(kind) as own:
        demo.prepare(prompt, params)
    assert (str(told.value), told.value.exit_code) == (str(own.value), own.value.exit_code)
    assert served.stream("Once", GREEDY), "the connection goes on"


def test_template_arguments_are_checked_there(served: ServedModel, demo: LLM):
    assert served.template_arguments({}) == demo.template_arguments({}) == {}
    with pytest.raises(UsageError) as told:
        served.template_arguments({"wings": 2})
    with pytest.raises(UsageError) as own:
        demo.template_arguments({"wings": 2})
    assert str(told.value) == str(own.value)


def test_closing_an_answer_ends_it_there_and_the_next_one_is_answered(served: ServedModel, demo: LLM):
    stream = served.stream("Once", SamplingParams(temperature=0, max_tokens=900, ignore_eos=True))
    next(stream)
    assert demo.stats().running == 1
    stream.close()
    end = time.monotonic() + 10
    while demo.stats().running:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert joined(served.stream("Once", GREEDY)) == joined(demo.stream("Once", GREEDY))


def test_a_path_means_only_what_is_loaded_from_there(demo_url, demo):
    with closing(open_model(Server(demo_url), "x", path=str(demo.path.resolve()), load=False)) as model:
        assert model.name == "demo"
    with pytest.raises(ModelNotFound, match="/etc/passwd is not loaded here"):
        open_model(Server(demo_url), "x", path="/etc/passwd", load=False)


def test_names_that_are_not_loaded_are_told(stories_url):
    for name in ("demo", "no-such-model"):
        with pytest.raises(ModelNotFound, match=name):
            open_model(Server(stories_url), name, path=None, load=False)


def answering(status, content, kind="application/json", broken=False):
    """A server that answers everything so."""

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
        (404, b"404 page not found", False, OtherServer),
        (404, b'{"error":"model \'demo\' not found"}', False, OtherServer),
        (200, b'{"models":[]}', False, OtherServer),
        (200, b"<html>", False, OtherServer),
        (200, b'{"server":"localllm"}', False, LocalLLMError),
        (200, b'{"server":', True, NoServer),
        (
            500,
            json.dumps({"error": {"kind": "__class__", "message": "x", "remedy": None}}).encode(),
            False,
            LocalLLMError,
        ),
    ],
)
def test_servers_of_another_kind_are_told_from_ours(status, content, broken, kind):
    with answering(status, content, broken=broken) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,)).start()
        try:
            with pytest.raises(kind):
                open_model(Server(f"127.0.0.1:{other.server_port}"), "demo", path=None, load=False)
        finally:
            other.shutdown()


def test_nobody_there_is_told():
    with pytest.raises(NoServer, match=r"no server of localllm answers at http://127\.0\.0\.1:1 "):
        open_model(Server("127.0.0.1:1"), "demo", path=None, load=False)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("localhost", "http://localhost:11434"),
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::1]:5", "http://[::1]:5"),
        ("https://example.org/", "https://example.org:11434"),
    ],
)
def test_addresses_are_read_as_people_write_them(address, url):
    assert url_of(address) == url


@pytest.mark.parametrize("address", ["ftp://x", "http://", "x:port", "x:99999", "http://x/path", "x?y"])
def test_what_is_no_address_is_told(address):
    with pytest.raises(UsageError, match="is no address of a server"):
        url_of(address)
