"""The Python API on trained models: exact texts through every entry point, and errors."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import localllm
from localllm import LLM, FinishReason, SamplingParams
from localllm.errors import ContextOverflow, DamagedModel, DoesNotFit, LocalLLMError, NoSuchDevice, UsageError
from localllm.llm import build
from localllm.request import ChatRequest
from localllm.settings import Settings
from tests.shared import shared

GREEDY = SamplingParams(temperature=0, max_tokens=80)
PROMPT = "Once upon a time, there was a little girl named"
STORY = (
    " Lily. She loved to play outside in the park. One day, she saw a big, red ball. She wanted to play with it, "
    "but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" Lily was sad and did"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with localllm.load(shared("stories260K")) as loaded:
        yield loaded


def test_the_known_story_to_the_letter(llm: LLM) -> None:
    done = llm.generate(PROMPT, GREEDY)
    assert done.text == STORY
    assert done.finish_reason == FinishReason.LENGTH
    assert len(done.token_ids) == done.metrics.output_tokens == 80


def test_a_model_stored_in_bfloat16_gives_the_greedy_text_of_transformers_in_float32() -> None:
    folder = shared("TinyStories-656K-hf")
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with localllm.load(folder, dtype="float32") as llm:
        for prompt in ("Once upon a time", "The dog and the cat", "Tom had a red ball."):
            ids = llm.tokenizer.encode(prompt)
            expected = theirs.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=120, do_sample=False
            )[0].tolist()
            done = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=120))
            assert [*ids, *done.token_ids] == expected
            assert done.text == tokenizer.decode(expected[len(ids) :], skip_special_tokens=True)


def test_logits_are_those_of_transformers(llm: LLM) -> None:
    ids = llm.tokenizer.encode(STORY)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(shared("stories260K"), dtype=torch.float32)
    expected = theirs(torch.tensor([ids])).logits[0]
    got = llm.logits(ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_stream_concatenates_to_the_answer_and_ends_with_metrics(llm: LLM) -> None:
    events = list(llm.stream(PROMPT, GREEDY))
    assert "".join(e.text for e in events) == STORY
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    metrics = events[-1].metrics
    assert metrics
    assert metrics.prompt_tokens == len(llm.tokenizer.encode(PROMPT))
    assert len(metrics.itl_s) == 79
    assert metrics.cached_tokens == 0  # the prompt is shorter than a block
    assert llm.generate(PROMPT + STORY, GREEDY).metrics.cached_tokens >= 80
    assert metrics.ttft_s >= metrics.queue_s >= 0
    assert metrics.e2e_s == pytest.approx(metrics.ttft_s + sum(metrics.itl_s))


def test_the_phases_of_loading_are_most_of_its_time() -> None:
    shares = []
    for _ in range(3):  # whatever else this process does may come between two of them
        with localllm.load(shared("stories260K")) as llm:
            assert list(llm.load_phases) == [
                "header",
                "tokenizer",
                "device",
                "weights",
                "repack",
                "cache",
                "compile",
            ]
            assert all(took >= 0 for took in llm.load_phases.values())
            assert llm.read_bytes_per_s is None  # mapped
            shares.append(sum(llm.load_phases.values()) / llm.load_s)
    assert 0.5 < max(shares) <= 1


def test_weights_are_loaded_with_the_threads_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    before, used = torch.get_num_threads(), []
    real = build.load_decoder

    def load_decoder(*arguments: Any) -> Any:
        used.append(torch.get_num_threads())
        return real(*arguments)

    monkeypatch.setattr(build, "load_decoder", load_decoder)
    for threads in (1, 3):
        with localllm.load(shared("stories260K"), settings=replace(Settings.from_environment(), threads=threads)):
            pass
    assert used == [1, 3] and torch.get_num_threads() == before


def test_only_the_first_request_waited_for_the_load() -> None:
    with localllm.load(shared("stories260K")) as llm:
        first, second = (llm.generate("A", SamplingParams(max_tokens=1)).metrics.load_s for _ in range(2))
    assert first > 0
    assert second == 0


def test_a_second_turn_computes_only_its_new_tokens() -> None:
    messages = [{"role": "user", "content": "Tell me of " + ", ".join(f"bird {n}" for n in range(60))}]
    with localllm.load("demo") as llm:
        first = llm.chat(messages, GREEDY)
        assert first.metrics.prompt_tokens > 250
        assert first.metrics.cached_tokens == 0
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        second = llm.chat(messages, GREEDY)
        known = first.metrics.prompt_tokens + first.metrics.output_tokens
        assert known - 32 <= second.metrics.cached_tokens <= known
        assert llm.stats().hits == 1


@pytest.mark.parametrize("stop", [["the park"], ["ar", "zzz"], ["d big, r", "red", "big"], [" Lily. S"]])
def test_stop_strings_work_across_token_borders(llm: LLM, stop: list[str]) -> None:
    done = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=80, stop=tuple(stop)))
    assert done.text == STORY[: min(STORY.index(s) for s in stop if s in STORY)]
    assert done.finish_reason == FinishReason.STOP
    assert len(done.token_ids) < 80


def test_a_stop_string_that_never_comes_holds_nothing_back(llm: LLM) -> None:
    done = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=80, stop=("did not",)))
    assert done.text == STORY
    assert done.finish_reason == FinishReason.LENGTH


def test_the_same_seed_gives_the_same_text_in_any_batch(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=60)
    alone = llm.generate(PROMPT, params).text
    others = [
        threading.Thread(target=llm.generate, args=(f"{n} dogs", SamplingParams(max_tokens=80))) for n in range(4)
    ]
    for thread in others:
        thread.start()
    together = llm.generate(PROMPT, params)
    for thread in others:
        thread.join()
    assert together.text == alone
    assert together.seed == 7
    assert llm.generate(PROMPT, SamplingParams(temperature=1.0, seed=8, max_tokens=60)).text != alone


def test_a_random_seed_is_reported_and_reusable(llm: LLM) -> None:
    done = llm.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=30))
    again = llm.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=30, seed=done.seed))
    assert again.text == done.text


def test_an_abandoned_stream_frees_its_memory(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(temperature=0))
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert llm.worker.call(lambda: llm.worker.engine.has_unfinished_requests) is False
    assert llm.worker.engine.pool.free_count == len(llm.worker.engine.pool.ref_counts)


def test_ids_may_come_as_a_tensor(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    assert llm.generate(torch.tensor(ids), GREEDY).text == STORY  # pyright: ignore[reportArgumentType]


def test_a_bias_for_an_unknown_token(llm: LLM) -> None:
    with pytest.raises(UsageError, match="512"):
        llm.generate(PROMPT, SamplingParams(logit_bias={512: 1.0}))


def test_zero_tokens_can_be_requested(llm: LLM) -> None:
    done = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert done.text == ""
    assert done.finish_reason == FinishReason.LENGTH
    assert [p.token_id for p in done.prompt_logprobs] == llm.tokenizer.encode(PROMPT)[1:]


def test_an_answer_ends_where_the_context_does(llm: LLM) -> None:
    prompt = [5] * 500
    done = llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True))
    assert len(done.token_ids) == 12
    assert done.finish_reason == FinishReason.LENGTH
    full = llm.generate([5] * 512, SamplingParams(max_tokens=0))
    assert full.metrics.prompt_tokens == 512


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    with localllm.load(shared("stories260K"), context=64) as llm:
        with pytest.raises(ContextOverflow, match=r"100 tokens and the context holds 64.*--context") as caught:
            llm.generate([5] * 100)
        assert (caught.value.prompt_tokens, caught.value.context) == (100, 64)
        with pytest.raises(ContextOverflow, match="supports 512"):
            llm.generate([5] * 600)
        with pytest.raises(ContextOverflow, match="--context 512"):
            llm.generate([5] * 400)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([5, 512], "512 is not a token"),
        ([-1], "-1 is not a token"),
        (b"Once", "neither text nor token ids"),
        ([True, False], "neither text nor token ids"),
        ([1.5], "neither text nor token ids"),
        (None, "neither text nor token ids"),
        ([{"role": "user"}, 3], "neither text nor token ids"),
        ([{"role": "user"}], "chat template"),
    ],
)
def test_an_invalid_prompt(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        list(llm.stream(prompt))


def test_a_closed_model_raises_an_error() -> None:
    llm = localllm.load(shared("stories260K"))
    stream = llm.stream(PROMPT, SamplingParams(temperature=0))
    next(stream)
    llm.close()
    with pytest.raises(LocalLLMError, match="closed"):
        list(stream)
    with pytest.raises(LocalLLMError, match="closed"):
        llm.generate(PROMPT)
    with pytest.raises(LocalLLMError, match="closed"):
        llm.logits([3, 4])
    llm.close()


def test_one_request_can_run_twice_concurrently(llm: LLM) -> None:
    request = llm.prepare(ChatRequest(PROMPT, GREEDY))
    streams = [llm.submit(request), llm.submit(request)]
    texts = ["".join(e.text for e in stream) for stream in streams]
    assert texts == [STORY, STORY]


def test_an_abandoned_stream_is_cancelled(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, ignore_eos=True))
    del stream
    assert llm.worker.call(lambda: llm.worker.engine.has_unfinished_requests) is False


def test_a_dropped_model_ends_its_thread_unless_a_stream_holds_it() -> None:
    llm = localllm.load(shared("stories260K"))
    thread, stream = llm.worker.thread, llm.stream(PROMPT, GREEDY)
    del llm
    gc.collect()
    assert "".join(event.text for event in stream) == STORY
    del stream
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_an_answer() -> None:
    code = (
        "import localllm, sys; llm = localllm.load(sys.argv[1]);"
        "s = llm.stream('Once', localllm.SamplingParams(ignore_eos=True)); print(next(s).text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(shared("stories260K"))], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_failing_callback_ends_only_its_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    good = llm.stream(PROMPT, GREEDY)
    bad = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=10))

    def fail(ids: object) -> str:
        raise RuntimeError("no such token")

    monkeypatch.setattr(bad.output.detokenizer, "push", fail)
    with pytest.raises(RuntimeError, match="no such token"):
        list(bad)
    assert "".join(event.text for event in good) == STORY


def test_a_failed_load_leaves_no_process(tmp_path: Path) -> None:
    shutil.copytree(shared("stories260K"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    before = set(psutil.Process().children())  # of which some may end meanwhile
    with pytest.raises(DamagedModel, match=r"layers\.5"):
        localllm.load(tmp_path)
    assert set(psutil.Process().children()) <= before


def test_a_fault_in_a_step_ends_its_answers_and_not_the_model(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = llm.worker.engine.runner.launch

    def fail(batch: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(llm.worker.engine.runner, "launch", fail)
    with pytest.raises(
        DoesNotFit, match=r"cpu is out of memory; .* were planned: 1\.04 MB for weights, .* less with"
    ):
        llm.generate(PROMPT, GREEDY)
    monkeypatch.setattr(llm.worker.engine.runner, "launch", launch)
    assert llm.generate(PROMPT, GREEDY).text == STORY


@pytest.mark.parametrize("asked", ["while answering", "beside it"])
def test_a_failed_gpu_ends_every_answer_and_the_model(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    def fail(batch: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with ...")

    said = r"the GPU failed \(CUDA error: device-side assert triggered\); load"
    with localllm.load(shared("stories260K")) as llm:
        monkeypatch.setattr(llm.worker.engine.runner, "launch", fail)
        with pytest.raises(LocalLLMError, match=said):
            llm.generate(PROMPT, GREEDY) if asked == "while answering" else llm.logits([1, 2])
        llm.worker.thread.join()
        with pytest.raises(LocalLLMError, match=r"the GPU failed .*; load it again"):
            llm.generate(PROMPT, GREEDY)


def test_running_out_of_memory_while_loading_reports_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("localllm.runtime.runner.make_caches", fail)
    before = psutil.Process().children()  # of models that other tests share
    with pytest.raises(
        DoesNotFit, match=r"were planned: 1\.04 MB for weights, .* for a cache of \d+ tokens"
    ) as told:
        localllm.load(shared("stories260K"))
    assert told.value.exit_code == 3
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"device": "tpu"}, UsageError),
        ({"device": "cuda:99"}, NoSuchDevice),
        ({"dtype": "int3"}, UsageError),
        ({"context": 0}, UsageError),
        ({"context": 513}, UsageError),
        ({"context": 64.5}, UsageError),
        ({"context": True}, UsageError),
        ({"device": "cpu:1"}, UsageError),
        ({"quant": "int3"}, UsageError),
    ],
    ids=str,
)
def test_invalid_options(options: dict[str, str], kind: type[LocalLLMError]) -> None:
    with pytest.raises(kind):
        localllm.load(shared("stories260K"), **options)  # pyright: ignore[reportArgumentType]


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.llm.find.free_bytes", lambda device: 1_000_000)
    with pytest.raises(DoesNotFit, match=r"need 1\.04 MB in float32, 1\.00 MB are free") as caught:
        localllm.load(shared("stories260K"))
    assert caught.value.exit_code == 3


def test_end_tokens_come_from_all_three_files(tmp_path: Path) -> None:
    folder = shared("stories260K")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.25}))
    with localllm.load(tmp_path) as llm:
        assert llm.eos_ids == {2, 7}
        assert llm.default_params.temperature == 0.25


def program(code: str, **environment: str) -> str:
    """Run the code in a new process, and return its output, which must be on stdout only."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_without_triton_a_model_answers(interpreted: str) -> None:
    """Includes devices where its kernels would be used."""
    hidden = "import sys; sys.modules['triton'] = None; import localllm; llm = localllm.load('demo');"
    asked = "llm.generate('Hi', localllm.SamplingParams(max_tokens=2, ignore_eos=True))"
    assert program(f"{hidden} print({asked}.finish_reason)", TRITON_INTERPRET=interpreted) == "length\n"


@pytest.mark.slow
def test_on_a_cpu_triton_is_not_imported() -> None:
    code = (
        "import localllm.llm.loader, sys, torch; print('triton' in sys.modules and not torch.cuda.is_available())"
    )
    assert program(code, TRITON_INTERPRET="0") == "False\n"


def test_importing_the_package_needs_no_torch() -> None:
    program("import localllm, sys; localllm.SamplingParams(); assert 'torch' not in sys.modules")
    assert set(dir(localllm)) == set(localllm.__all__)
    assert all(getattr(localllm, name) for name in localllm.__all__)
    with pytest.raises(AttributeError):
        _ = localllm.nothing
