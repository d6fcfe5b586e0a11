from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm.text.detokenizer import Detokenizer
from localllm.text.tokenizer import Tokenizer

Open = Callable[[str], Tokenizer]
BYTE_LEVEL = ["llama3", "qwen3"]
BYTE_FALLBACK = ["stories260K", "phi3"]
PROMPT = "Once upon a time, there was a little girl named"
TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n😁日é👨‍👩‍👧")), max_size=30)
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def stream(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()


def rest(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize("name", BYTE_LEVEL)
@relaxed
@given(st.data())
def test_any_ids_give_what_a_whole_decode_gives(tokenizer: Open, name: str, data: st.DataObject):
    model = tokenizer(name)
    # The first 256 tokens are the bytes: most sequences of them are no characters.
    token = st.one_of(st.integers(0, 255), st.integers(0, model.vocab_size + 10))
    prompt = model.encode(data.draw(TEXTS))
    ids = data.draw(st.lists(token, max_size=40))
    assert stream(model, prompt, ids) == rest(model, prompt, ids)


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize("answer", ["", "a", "\ufffd", " 日"])
def test_a_replacement_character_that_ends_the_prompt_is_not_part_of_the_answer(
    tokenizer: Open, name: str, answer: str
):
    model = tokenizer(name)
    prompt = model.encode("broken \ufffd")
    ids = model.encode(answer, special=False)
    assert stream(model, prompt, ids) == answer


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@relaxed
@given(st.data())
def test_ids_without_bad_bytes_give_what_a_whole_decode_gives(tokenizer: Open, name: str, data: st.DataObject):
    model = tokenizer(name)
    prompt = model.encode(data.draw(TEXTS))
    pieces = st.one_of(
        TEXTS.map(lambda text: model.encode(text, special=False)),
        st.lists(st.one_of(st.integers(0, 2), st.integers(259, model.vocab_size - 1)), max_size=10),
    )
    ids = [token for piece in data.draw(st.lists(pieces, max_size=5)) for token in piece]
    assert stream(model, prompt, ids) == rest(model, prompt, ids)


@pytest.mark.parametrize("name", BYTE_FALLBACK)
@relaxed
@given(st.data())
def test_bad_bytes_spoil_no_good_text(tokenizer: Open, name: str, data: st.DataObject):
    model = tokenizer(name)
    good = "".join(data.draw(st.lists(st.sampled_from(["日本", "a", "é", " b"]), min_size=1, max_size=4)))
    bad = data.draw(st.integers(1, 30))
    ids = model.encode(good, special=False) + [3 + 0xFF] * bad + model.encode("okay then", special=False)
    text = stream(model, model.encode(PROMPT), ids)
    assert text == " " + good + "\ufffd" * bad + " okay then"


@pytest.mark.parametrize("name", [*BYTE_LEVEL, *BYTE_FALLBACK])
@relaxed
@given(st.data())
def test_pieces_are_complete_characters_for_any_push_size(tokenizer: Open, name: str, data: st.DataObject):
    model = tokenizer(name)
    ids = model.encode(data.draw(TEXTS), special=False)
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = Detokenizer(model)
    pieces = [detokenizer.push(ids[:cut]), detokenizer.push(ids[cut:])]
    whole = model.decode(ids)
    assert "".join(pieces) + detokenizer.finish() == whole
    if "\ufffd" not in whole:
        assert "\ufffd" not in "".join(pieces)


def test_the_space_before_a_continuation_is_kept(tokenizer: Open):
    model = tokenizer("stories260K")
    prompt = model.encode(PROMPT)
    ids = model.encode(PROMPT + " Lily. She")[len(prompt) :]
    assert stream(model, prompt, ids) == " Lily. She"
    assert stream(model, [], ids) == "Lily. She"


def test_the_space_is_kept_after_a_prompt_that_ends_with_control_tokens(tokenizer: Open):
    model = tokenizer("phi3")
    prompt = model.encode("<|user|>\nHi<|end|>\n<|assistant|>\n")
    ids = model.encode("Yes", special=False)
    assert stream(model, prompt, ids) == rest(model, prompt, ids) == " Yes"


def test_special_tokens_are_skipped_or_shown(tokenizer: Open):
    model = tokenizer("qwen3")
    ids = model.encode("a<|im_end|>b")
    assert stream(model, [], ids) == "ab"
    shown = Detokenizer(model, skip_special=False)
    assert shown.push(ids) + shown.finish() == "a<|im_end|>b"


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
@relaxed
@given(st.data())
def test_some_special_tokens_are_shown_and_the_others_are_not_there(
    tokenizer: Open, name: str, data: st.DataObject
):
    model = tokenizer(name)
    shown = set(data.draw(st.lists(st.sampled_from(sorted(model.special_ids)), min_size=1, max_size=3)))
    special = st.sampled_from(sorted(model.special_ids)).map(lambda token: [token])
    pieces = st.lists(st.one_of(special, TEXTS.map(lambda text: model.encode(text, special=False))), max_size=6)
    ids = [token for piece in data.draw(pieces) for token in piece]
    detokenizer = Detokenizer(model, shown_ids=shown)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    kept = [token for token in ids if token in shown or token not in model.special_ids]
    assert text == model.decode(kept, skip_special=False)


def test_a_prompt_that_ends_within_a_character_is_completed(tokenizer: Open):
    model = tokenizer("qwen3")
    ids = model.encode("so 👨‍👩‍👧")
    for cut in range(1, len(ids)):
        text = stream(model, ids[:cut], ids[cut:])
        assert "\ufffd" not in text and "so 👨‍👩‍👧".endswith(text)


@pytest.mark.parametrize("name", [*BYTE_LEVEL, *BYTE_FALLBACK])
@pytest.mark.parametrize("kind", ["text", "garbage", "special"])
def test_the_cost_of_a_token_does_not_grow(tokenizer: Open, monkeypatch: pytest.MonkeyPatch, name: str, kind: str):
    model = tokenizer(name)
    special = model.encode("<s>" if name in BYTE_FALLBACK else "<|im_end|>", special=False)
    bad = 3 + 0xFF if name in BYTE_FALLBACK else model.encode("😁", special=False)[-1]
    ids = {"text": model.encode("日本 and é " * 100), "garbage": [bad] * 500, "special": special * 500}[kind]
    decoded = []

    def counted(ids: Sequence[int], *, skip_special: bool = True) -> str:
        decoded.append(len(ids))
        return Tokenizer.decode(model, ids, skip_special=skip_special)

    monkeypatch.setattr(model, "decode", counted)
    detokenizer = Detokenizer(model, ids)
    detokenizer.push(ids)
    detokenizer.finish()
    assert max(decoded) <= 17
    assert sum(decoded) <= 30 * len(ids) + 200
