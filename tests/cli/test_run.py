import json

import pytest

from localllm.request import SamplingParams


def asked(engine):
    """Prompt and parameters of the last request."""
    return engine.loaded[-1][0].asked[-1]


def test_stdout_is_the_text_and_nothing_else(localllm, model):
    assert localllm("run", model, "Tell", "me") == (0, "1:Tell me", "")


def test_piped_text_stands_before_the_instruction(localllm, model):
    assert localllm("run", model, "Summarise:", piped=b"note 1\nnote 2\n\n")[1] == "1:note 1\nnote 2\n\nSummarise:"


@pytest.mark.parametrize(
    ("piped", "prompt"), [(b"hi\n", "hi"), (b"hi\r\n", "hi"), (b"hi\n\n", "hi\n"), (b"hi", "hi")]
)
def test_piped_text_alone_is_the_prompt_less_its_last_line_end(localllm, model, piped, prompt):
    assert localllm("run", model, piped=piped)[1] == f"1:{prompt}"


def test_a_prompt_may_begin_with_a_dash(localllm, model):
    assert localllm("run", model, "--", "-1 is what?")[1] == "1:-1 is what?"


def test_without_a_model_the_error_says_how_to_name_one(localllm, engine):
    code, out, err = localllm("run", piped=b"Hello")
    assert (code, out, engine.loaded) == (2, "", [])
    assert "error: no model is named; name one: " in err
    assert "`localllm run demo` needs no download\n" in err


@pytest.mark.parametrize("piped", [b"", b"\n", b" \n\t\n"])
def test_an_empty_prompt_is_refused_before_the_model_loads(localllm, engine, model, piped):
    code, out, err = localllm("run", model, piped=piped)
    assert (code, out, engine.loaded) == (2, "", [])
    assert err == (
        "error: the prompt is empty; give one after the name of the model, or pipe one in: "
        "`echo Hello | localllm run MODEL`\n"
    )


def test_bytes_that_are_not_utf8_are_named_by_their_offset(localllm, engine, model):
    code, out, err = localllm("run", model, piped=b"caf\xe9")
    assert (code, out, engine.loaded) == (2, "", [])
    assert err.startswith("error: stdin is not valid UTF-8 at byte 3; ")
    assert err.count("\n") == 1


def test_an_argument_that_is_not_utf8_is_refused(localllm, model):
    code, _, err = localllm("run", model, "caf\udce9")
    assert code == 2
    assert "the prompt is not valid UTF-8" in err


FLAGS = {
    "--temperature=0": {"temperature": 0},
    "--top-k=3": {"top_k": 3},
    "--top-p=0.5": {"top_p": 0.5},
    "--min-p=0.1": {"min_p": 0.1},
    "--repetition-penalty=1.2": {"repetition_penalty": 1.2},
    "--repeat-last-n=-1": {"repeat_last_n": -1},
    "--presence-penalty=-0.5": {"presence_penalty": -0.5},
    "--frequency-penalty=0.5": {"frequency_penalty": 0.5},
    "--logit-bias=5=-inf --logit-bias 7=1.5": {"logit_bias": {5: float("-inf"), 7: 1.5}},
    "--seed=0": {"seed": 0},
    "--max-tokens=3": {"max_tokens": 3},
    "--min-tokens=2": {"min_tokens": 2},
    "--stop=a --stop=b": {"stop": ("a", "b")},
    "--stop-id=0 --stop-id=4": {"stop_ids": (0, 4)},
    "--ignore-eos": {"ignore_eos": True},
    "--logprobs=0 --json --seed=1": {"logprobs": 0, "seed": 1},
    "--prompt-logprobs=2 --json --seed=1": {"prompt_logprobs": 2, "seed": 1},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_flag_overrides_only_its_own_recommendation(localllm, engine, model, flags):
    code, _, err = localllm("run", model, "hello", *flags.split())
    assert (code, err) == (0, "")
    assert asked(engine)[1] == SamplingParams(**{"temperature": 0.7, "top_k": 40} | FLAGS[flags])


@pytest.mark.parametrize(
    "flags",
    [
        "--temperature=-1",
        "--top-p=0",
        "--top-k=1.5",
        "--seed=x",
        "--logit-bias=5",
        "--stop=",
        "--nonsense",
        "--temperature=nan",
    ],
)
def test_a_wrong_flag_is_reported_before_the_model_loads(localllm, engine, model, flags):
    code, out, err = localllm("run", model, "hello", flags)
    assert (code, out, engine.loaded) == (2, "", [])
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [("--raw", "--system=x"), ("--logprobs=1",), ("--prompt-logprobs=0",), ("--no-draft", "--draft-model=demo")],
)
def test_flags_that_contradict_each_other_are_refused(localllm, engine, model, flags):
    assert localllm("run", model, "hello", *flags)[0] == 2
    assert engine.loaded == []


def test_the_model_is_loaded_as_the_flags_say_and_closed(localllm, engine, model):
    localllm(
        "run", model, "hello", "--device", "cpu", "--dtype", "bfloat16", "--kv-dtype", "int8", "--context", "99"
    )
    llm, how = engine.loaded[-1]
    assert how == {"device": "cpu", "dtype": "bfloat16", "kv_dtype": "int8", "context": 99}
    assert llm.closed


def test_a_system_prompt_stands_first(localllm, model):
    assert localllm("run", model, "hello", "--system", "be brief")[1] == "2[be brief]:hello"


def test_raw_sends_the_prompt_as_it_is(localllm, base, model):
    assert localllm("run", model, "hello", "--raw") == (0, "raw:hello", "")
    assert localllm("run", base, "hello", "--raw") == (0, "raw:hello", "")
    assert localllm("run", base, "--raw", piped=b" \n")[:2] == (0, "raw: ")


def test_without_a_chat_template_the_prompt_is_continued_with_a_note(localllm, base):
    code, out, err = localllm("run", base, "hello")
    assert (code, out) == (0, "raw:hello")
    assert err.startswith("note: tiny-base has no chat template")
    code, out, err = localllm("run", base, "hello", "--system", "x")
    assert (code, out) == (2, "")
    assert "no chat template for a system prompt" in err
    code, out, err = localllm("run", base, "hello", "--tools=-", piped=b"[]")
    assert (code, out, "no chat template for tools" in err) == (2, "", True)


def test_json_is_one_object_with_everything(localllm, model):
    code, out, err = localllm(
        "run", model, "hi", "--json", "--seed=3", "--max-tokens=2", "--logprobs=1", "--prompt-logprobs=1"
    )
    answer = json.loads(out)
    metrics, receipt = answer.pop("metrics"), answer.pop("receipt")
    entry = {"token_id": 49, "token": "1", "logprob": -0.5}
    assert (code, err) == (0, "")
    assert answer.pop("logprobs")[0] == entry | {"top": [entry, {"token_id": 0, "token": "\0", "logprob": None}]}
    assert [entry["token"] for entry in answer.pop("prompt_logprobs")] == ["p"]
    assert answer == {
        "model": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "context": 4096,
        "text": "1:",
        "reasoning": "",
        "tool_calls": [],
        "token_ids": [49, 58],
        "finish_reason": "length",
        "seed": 3,
    }
    assert receipt["answer"] == {
        name: answer[name] for name in ("token_ids", "text", "reasoning", "finish_reason")
    }
    assert (metrics["load_s"], metrics["prompt_tokens"], metrics["output_tokens"]) == (1.5, 2, 2)
    assert out.count("\n") == 1


def test_log_probabilities_are_in_the_json_only_on_request(localllm, model):
    assert not {"logprobs", "prompt_logprobs"} & json.loads(localllm("run", model, "hi", "--json")[1]).keys()


@pytest.mark.parametrize("flag", ["--json", "--receipt={}"])
def test_a_receipt_fixes_the_seed_before_sampling(localllm, engine, model, tmp_path, flag):
    """A draft model samples differently without a seed."""
    code, out, _ = localllm("run", model, "hi", flag.format(tmp_path / "receipt"))
    told = json.loads(out if flag == "--json" else (tmp_path / "receipt").read_text())
    seed = told.get("receipt", told)["question"]["params"]["seed"]
    assert code == 0
    assert asked(engine)[1].seed == seed is not None


def test_verbose_prints_every_measurement_to_stderr(localllm, model):
    code, out, err = localllm("run", model, "hello", "--verbose")
    assert (code, out) == (0, "1:hello")
    loaded = "device weights cache workspace load load load activations"
    names = f"{loaded} load queue prompt prefill TTFT output ITL TPOT TPS"
    names += " drafts tokens/step E2E peak seed"
    assert [line.split()[0] for line in err.splitlines()] == names.split()
    assert "cache          4.10 MB for 4096 tokens\n" in err
    assert "load header    250 ms\n" in err
    assert "load          1.50 s\n" in err
    assert "prompt        5 tokens (0 cached)\n" in err
    assert "peak memory   300 MB\n" in err


def test_truncation_is_reported_on_request(localllm, model):
    assert localllm("run", model, "hello", "--max-tokens=2") == (0, "1:", "")
    code, out, err = localllm("run", model, "hello", "--max-tokens=2", "--fail-on-length")
    assert (code, out) == (6, "1:")
    assert err == "error: the answer was cut by --max-tokens (2); raise it for a longer answer\n"
    assert "note: the answer was cut" in localllm("run", model, "hello", "--max-tokens=2", "--verbose")[2]
    assert localllm("run", model, "hello", "--fail-on-length")[0] == 0


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ("fault", 7, "error: model.safetensors holds NaN; download it again\n"),
        ("x" * 5000, 4, "error: the prompt has 5000 tokens and the context holds 4096; raise --context\n"),
        (
            "bug",
            1,
            "error: ZeroDivisionError: division by zero; this is a bug in localllm, "
            "set LOCALLLM_DEBUG=1 for a traceback\n",
        ),
    ],
)
def test_an_error_is_one_line_and_its_own_exit_code(localllm, model, prompt, code, message):
    assert localllm("run", model, prompt) == (code, "", message)


def test_debug_shows_where_a_fault_lies(localllm, model, monkeypatch):
    monkeypatch.setenv("LOCALLLM_DEBUG", "1")
    assert "Traceback" in localllm("run", model, "bug")[2]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["run", "nothing", "hi"], 8), (["run", "./none", "hi"], 8), (["nope"], 2), (["run"], 2)],
)
def test_mistakes_in_the_command_line_are_one_line(localllm, arguments, code):
    got, out, err = localllm(*arguments)
    assert (got, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_thoughts_go_to_stderr_and_the_answer_to_stdout(localllm, model):
    assert localllm("run", model, "thinking") == (0, "1:thinking", "let me see\x07\n")
    assert localllm("run", model, "thinking calling")[2] == (
        'let me see\x07\ntool call: weather {"city": "Köln"}\n'
    )


def test_json_separates_the_parts_of_an_answer(localllm, model):
    code, out, err = localllm("run", model, "thinking calling", "--json")
    answer = json.loads(out)
    assert (code, err, answer["text"], answer["reasoning"]) == (0, "", "1:thinking calling", "let me see\x07")
    assert answer["tool_calls"] == [{"id": "id1", "name": "weather", "arguments": {"city": "Köln"}}]


def given(engine):
    """Tools and template arguments of the last request."""
    return engine.loaded[-1][0].given[-1]


def test_flags_reach_the_template(localllm, engine, model, tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    assert localllm("run", model, "hi")[0] == 0
    assert given(engine) == (None, {})
    assert localllm("run", model, "hi", "--no-think", "--tools", str(tmp_path / "tools.json"))[0] == 0
    assert given(engine) == (tools, {"enable_thinking": False})
    assert localllm("run", model, "hi", "--tools=-", piped=json.dumps(tools).encode())[0] == 0
    assert given(engine) == (tools, {})
    assert (
        localllm("run", model, "hi", "--think", "--template-arg", "depth=[3]", "--template-arg=depth=deep")[0] == 0
    )
    assert given(engine) == (None, {"enable_thinking": True, "depth": "deep"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--template-arg", "depth"], "'depth' is not NAME=VALUE; write for example enable_thinking=false"),
        (["--template-arg", "other=1"], "the chat template does not read other"),
        (["--tools", "none.json"], "none.json cannot be read: No such file or directory"),
        (["--tools", "-"], "stdin is not a list of tools; write"),
        (["--raw", "--think"], "--raw uses no chat template"),
        (["--raw", "--tools=-"], "--raw uses no chat template"),
        (["--raw", "--template-arg=a=1"], "--raw uses no chat template"),
    ],
)
def test_flags_that_cannot_reach_the_template_are_refused(localllm, model, flags, message):
    code, out, err = localllm("run", model, "hi", *flags, piped=b'{"a": 1}')
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["completion"],
            "missing argument 'SHELL'. Choose from: bash, zsh, fish; see `localllm completion --help`",
        ),
        (["completion", "tcsh"], "invalid value for 'SHELL': 'tcsh' is not one of 'bash', 'zsh', 'fish'; see"),
        (["plan", "demo", "--context", "32k"], "invalid value for '--context': give a whole number; see"),
        (["run", "demo", "--temperature", "hot"], "invalid value for '--temperature': give a number; see"),
    ],
    ids=str,
)
def test_a_mistyped_argument_is_one_plain_line(localllm, arguments, told):
    code, out, err = localllm(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {told}")
    assert err.count("\n") == 1
