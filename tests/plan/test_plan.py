"""Plans of published models against figures of the literature; a plan fits exactly if `load` accepts it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.arch.cost import why_not_4_bit_cache
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.errors import DoesNotFit, UsageError
from localllm.hardware.catalog import DeviceSpec, find_device
from localllm.hub.resolve import resolve_model
from localllm.plan.fit import LoadOptions, check_fit, model_needs
from localllm.plan.plan import Expectation, Plan, plan_model
from localllm.plan.weights import weight_bytes
from tests.models.families import FAMILIES
from tests.plan.published import LLAMA_1B, LLAMA_8B, LLAMA_70B, header_of, write_sparse
from tests.plan.test_memory import write_model
from tests.tiny import make_checkpoint
from tests.work import lines_of

H100 = find_device("h100 sxm")


def plan_of(config: dict[str, Any], hardware: DeviceSpec = H100, **wish: Any) -> Plan:
    return plan_model(header_of(config), hardware, LoadOptions(**wish), name="a model")


def small(memory_bytes: int, kind: str = "cpu") -> DeviceSpec:
    return DeviceSpec("small", kind, memory_bytes, 1e9, 1e11, measured=False, source="a test")


# --- the figures of the literature ---


def test_keys_and_values_of_llama_3_1_70b() -> None:
    found = plan_of(LLAMA_70B, context=4096)
    assert found.kv_bytes_per_sequence == 1.25 * 2**30
    assert f"{found.kv_bytes_per_sequence / 1e9:.2f}" == "1.34"


def test_keys_and_values_of_llama_3_8b_take_131_kb_a_token() -> None:
    assert plan_of(LLAMA_8B).kv_bytes_per_token == 131_072


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_and_values_in_8_bits_take_little_more_than_half(kv_dtype: str) -> None:
    plain, found = plan_of(LLAMA_8B, context=65536), plan_of(LLAMA_8B, context=65536, kv_dtype=kv_dtype)
    of_token = 32 * 2 * 8 * (128 + 2)  # layers, keys and values, heads, numbers and a scale
    assert found.kv_bytes_per_token == plain.kv_bytes_per_token_in_8_bits == of_token
    assert found.kv_bytes_read == found.kv_bytes_per_sequence == 65536 * of_token
    assert (found.fit.kv_dtype, plain.fit.kv_dtype) == (kv_dtype, "bfloat16")
    assert found.fit.max_users >= 1.9 * plain.fit.max_users
    assert found.chosen.ceiling.tokens_per_s > 1.15 * plain.chosen.ceiling.tokens_per_s
    assert found.fit.memory and found.fit.memory.block_bytes == 16 * of_token


@pytest.mark.parametrize(
    ("kv_dtype", "of_token"),
    [("k8v4", 32 * 8 * ((128 + 2) + (64 + 4))), ("int4", 32 * 2 * 8 * (64 + 4))],
)
def test_keys_and_values_in_4_bits(kv_dtype: str, of_token: int) -> None:
    plain, found = plan_of(LLAMA_8B, context=65536), plan_of(LLAMA_8B, context=65536, kv_dtype=kv_dtype)
    assert found.kv_bytes_per_token == of_token and plain.kv_bytes_per_token_in_4_bits == 34_816
    assert found.kv_bytes_read == found.kv_bytes_per_sequence == 65536 * of_token
    assert found.fit.memory and found.fit.memory.block_bytes == 16 * of_token
    assert found.fit.max_users >= 2.5 * plain.fit.max_users


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
def test_models_without_4_bit_keys_and_values_are_refused(tmp_path: Path, kv_dtype: str) -> None:
    latent = read_header(write_model(tmp_path, "DeepSeek-V3"))
    config = parse_config(latent.config)
    with pytest.raises(
        UsageError, match=f"of 'x' cannot be in {kv_dtype}: it caches latents.*; use --kv-dtype int8"
    ):
        model_needs(latent, config, "cpu", LoadOptions(kv_dtype=kv_dtype), name="x")
    model_needs(latent, config, "cpu", LoadOptions(kv_dtype="int8"), name="x")
    llama = parse_config(LLAMA_8B)
    odd = replace(llama, layers=tuple(replace(x, mixer=replace(x.mixer, head_dim=7)) for x in llama.layers))
    assert "its heads have 7" in (why_not_4_bit_cache(odd) or "") and why_not_4_bit_cache(llama) is None


@pytest.mark.parametrize(
    ("kv_dtype", "message"),
    [
        ("int2", "no dtype 'int2' for keys and values; use auto, bfloat16, int8, fp8, k8v4 or int4"),
        ("float32", "cannot be in float32, as the model computes in bfloat16"),
    ],
)
def test_an_unknown_kv_dtype(kv_dtype: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(LLAMA_8B, kv_dtype=kv_dtype)
    assert plan_of(LLAMA_8B, kv_dtype="bfloat16").kv_bytes_per_token == 131_072


def test_llama_3_1_70b_in_int4_decodes_at_most_95_tokens_a_second_on_an_h100() -> None:
    found = plan_of(LLAMA_70B, context=4096, quant="int4")
    assert (H100.bandwidth, found.fit.fits, found.chosen.ceiling.bound) == (3.35e12, True, "memory")
    assert found.chosen.ceiling.first_tokens_per_s == pytest.approx(95, rel=0.03)


@pytest.mark.parametrize(
    ("config", "quant", "published"),
    [
        (LLAMA_8B, "q8_0", 7.95 * 2**30),  # llama.cpp, tools/quantize/README.md
        (LLAMA_8B, "q4_k_m", 4.58 * 2**30),
        (LLAMA_1B, "q4_k_m", 807_694_464),  # bartowski/Llama-3.2-1B-Instruct-GGUF
    ],
    ids=["8B q8_0", "8B q4_k_m", "1B q4_k_m"],
)
def test_published_gguf_files_of_llama_have_about_the_planned_bytes(
    config: dict[str, Any], quant: str, published: float
) -> None:
    told = weight_bytes(header_of(config), parse_config(config), "bfloat16", "cuda", quant)
    assert told.total == pytest.approx(published, rel=0.02)


def test_rows_that_are_no_whole_blocks_take_more_bits_in_q4_k_m() -> None:
    even, odd = (
        weight_bytes(header_of(config), parse_config(config), "bfloat16", "cuda", "q4_k_m").head * 8
        for config in (LLAMA_1B, LLAMA_1B | {"hidden_size": 2048 + 128})
    )
    assert (even / (128_256 * 2048), odd / (128_256 * 2176)) == (6.5625, 8.5)


def test_int4_takes_what_the_rule_says() -> None:
    header = header_of(LLAMA_8B)
    weights = weight_bytes(header, parse_config(LLAMA_8B), "bfloat16", "cuda", "int4")
    matrices = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert weights.layers == matrices * (4 + 16 / 128) / 8 + 65 * 4096 * 4
    assert weights.head == 128_256 * (4096 + 2)  # INT8, a scale a row
    assert weights.tables == 128_256 * 4096 * 2


# --- fits is what load does ---


@pytest.mark.parametrize("family", ["Llama 3.x", "Gemma 3", "Qwen3-Next"])
def test_a_plan_fits_exactly_where_load_does_not_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = write_model(tmp_path, family)
    header = read_header(folder)
    fit = plan_model(header, small(10**9), LoadOptions(dtype="float32"), name="tiny").fit
    taken, step = fit.weights.total, fit.needs.workspace(16)
    verdicts = []
    for spare in (-1000, 0, step, *(step + more for more in (1000, 20_000, 50_000, 200_000, 400_000, 2_000_000))):
        monkeypatch.setattr("localllm.llm.find.free_bytes", lambda _, spare=spare: taken + spare)
        for context in (None, 16, 100, 256):
            found = plan_model(
                header, small(taken + spare), LoadOptions(context, dtype="float32"), name=folder.name
            )
            verdicts.append(found.fit.fits)
            try:
                with localllm.load(folder, device="cpu", dtype="float32", context=context) as llm:
                    assert found.fit.fits
                    assert llm.memory == found.fit.memory
            except DoesNotFit as refused:
                assert found.fit.refusal and found.fit.refusal.message == refused.message
    assert {True, False} == set(verdicts)


def test_the_largest_context_and_the_most_users_fit_and_one_more_does_not() -> None:
    hardware = find_device("4090")
    found = plan_of(LLAMA_8B, hardware, context=1024)
    most = found.fit.max_context
    assert plan_of(LLAMA_8B, hardware, context=most).fit.fits
    assert not plan_of(LLAMA_8B, hardware, context=most + 1).fit.fits
    users = found.fit.max_users
    assert plan_of(LLAMA_8B, hardware, context=1024, users=users).fit.fits
    assert not plan_of(LLAMA_8B, hardware, context=1024, users=users + 1).fit.fits
    together = plan_of(LLAMA_8B, hardware, users=users)
    assert 1024 <= together.context < most
    assert together.kv_bytes == users * together.kv_bytes_per_sequence


def test_recurrent_states_bound_the_users(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, FAMILIES["Qwen3.5"][0], **FAMILIES["Qwen3.5"][1])
    header = read_header(tmp_path)
    found = plan_model(header, small(10**9), LoadOptions(16), name="tiny")
    assert found.fit.max_users == 256
    assert found.state_bytes_per_sequence > 0
    refused = plan_model(header, small(10**9), LoadOptions(16, users=257), name="tiny")
    assert refused.remedy == "--users 256 fits"


def test_a_model_that_leaves_too_little_for_a_step_does_not_fit() -> None:
    taken = plan_of(LLAMA_8B).fit.weights.total
    close, roomy = (plan_of(LLAMA_8B, small(taken + spare, "cuda")) for spare in (300_000_000, 900_000_000))
    assert (close.fit.fits, roomy.fit.fits) == (False, True)
    assert roomy.total_bytes < roomy.hardware.memory_bytes


# --- what to do about it ---


def test_a_model_that_does_not_fit_is_refused_with_what_would() -> None:
    header = header_of(LLAMA_70B)
    with pytest.raises(DoesNotFit) as refused:
        check_fit(header, H100, LoadOptions(4096), name="llama")
    assert str(refused.value) == (
        "the weights of llama need 141 GB in bfloat16, 79.5 GB are free; --quant int8 takes 71.6 GB and fits"
    )
    with pytest.raises(DoesNotFit, match=r"--quant int4 takes 38\.5 GB and fits"):
        check_fit(header, H100, LoadOptions(32_768), name="llama")
    assert not check_fit(header, H100, LoadOptions(4096), name="llama", force=True).fits
    with pytest.raises(DoesNotFit, match="use a smaller model"):
        check_fit(header, find_device("4090"), LoadOptions(4096), name="llama")
    assert check_fit(header, find_device("b200"), LoadOptions(4096), name="llama").fits


def test_a_context_that_does_not_fit_is_refused_with_one_that_does() -> None:
    header, hardware = header_of(LLAMA_8B), find_device("4090")
    with pytest.raises(DoesNotFit) as refused:
        check_fit(header, hardware, LoadOptions(131072), name="llama")
    assert refused.value.remedy
    named = int(refused.value.remedy.split()[1])
    assert check_fit(header, hardware, LoadOptions(named), name="llama").fits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "most"), [("Llama 3.x", 400_000), ("Qwen3-Next", 1_400_000), ("LFM2", 500_000)]
)
def test_a_remedy_is_not_named_where_it_would_not_help(tmp_path: Path, family: str, most: int) -> None:
    header = read_header(write_model(tmp_path, family))
    for spare in range(0, most, 7_001):
        for users in (1, 3, 70):
            room = small(spare)
            refused = check_fit(header, room, LoadOptions(128, users), name="tiny", force=True)
            if refused.fits:
                continue
            with pytest.raises(DoesNotFit) as caught:
                check_fit(header, room, LoadOptions(128, users), name="tiny")
            match (caught.value.remedy or "").split():
                case ["--context", tokens, "fits"]:
                    assert check_fit(header, room, LoadOptions(int(tokens), users), name="tiny").fits
                case ["--users", count, "fits"]:
                    assert check_fit(header, room, LoadOptions(128, int(count)), name="tiny").fits
                case ["--users", "1", "--context", tokens, "fits"]:
                    assert check_fit(header, room, LoadOptions(int(tokens)), name="tiny").fits
                case ["--quant", quant, "takes", *_, "fits"]:
                    assert check_fit(header, room, LoadOptions(128, users, quant), name="t").fits
                case words:
                    assert words[:2] in (["use", "a"], ["free", "memory"])


def test_the_best_quantization_is_the_finest_that_fits() -> None:
    found = plan_of(LLAMA_70B, context=4096)
    assert found.best and found.best.fit.quant == "int8"
    assert [c.fit.quant for c in found.choices] == [None, "q8_0", "int8", "q4_k_m", "int4"]
    taken = [c.fit.weights.total for c in found.choices]
    assert taken == sorted(taken, reverse=True)
    assert plan_of(LLAMA_8B).best == plan_of(LLAMA_8B).chosen
    assert plan_of(LLAMA_70B, find_device("4090")).best is None


@pytest.mark.parametrize(
    "wish",
    [
        {"context": 0},
        {"context": 131_073},
        {"users": 0},
        {"users": 1.5},
        {"quant": "int3"},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_invalid_options(wish: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan_of(LLAMA_8B, **wish)


def test_quantized_checkpoints_are_not_quantized_again() -> None:
    header = read_header(resolve_model("demo").path)
    with pytest.raises(UsageError, match="already quantized"):
        plan_model(header, H100, LoadOptions(quant="int4"), name="demo")
    assert [c.fit.quant for c in plan_model(header, H100, LoadOptions(), name="demo").choices] == [None]


# --- speed ---


def test_a_prompt_takes_at_least_its_products_and_reading_the_weights_in_each_step() -> None:
    header, wish = header_of(LLAMA_8B), LoadOptions(4096)
    found = plan_model(header, H100, wish, name="llama", prompt=4096)
    parameters = 8.03e9 - 2 * 128_256 * 4096
    assert found.chosen.ceiling.ttft_s == pytest.approx(2 * parameters * 4096 / H100.flops, rel=0.1)
    slow = DeviceSpec("slow", "cuda", 10**11, 1e9, 1e15, measured=False, source="a test")
    found = plan_model(header, slow, wish, name="llama", prompt=4096)
    assert found.chosen.ceiling.ttft_s == pytest.approx(14 + 15, rel=0.05)  # the head in the last step
    assert plan_model(header, slow, wish, name="llama").prompt == 512


def test_a_prompt_is_no_longer_than_the_context() -> None:
    header, hardware = header_of(LLAMA_8B), find_device("4090")
    assert plan_model(header, hardware, LoadOptions(1024), name="llama", prompt=1024).prompt == 1024
    for wish, prompt in ((LoadOptions(1024), 1025), (LoadOptions(), 131_072), (LoadOptions(1024), 0)):
        with pytest.raises(UsageError, match=f"a prompt of {prompt} tokens"):
            plan_model(header, hardware, wish, name="llama", prompt=prompt)


def test_no_more_users_are_expected_than_the_engine_answers_at_once() -> None:
    rates = Expectation(bandwidth=1e12, flops=1e14, step_s=0.0, source="a test")
    found = plan_model(header_of(LLAMA_8B), H100, LoadOptions(1024, users=64), name="llama", expectation=rates)
    assert (found.fit.concurrent_users, found.chosen.ceiling.users) == (8, 64)
    assert found.expected and found.expected.users == 8
    assert found.expected.all_tokens_per_s <= 8 * found.expected.tokens_per_s


def test_sampled_steps_represent_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = plan_of(LLAMA_8B, context=131_072).chosen.ceiling.ttft_s
    monkeypatch.setattr("localllm.plan.speed.MAX_STEPS", 1000)
    assert sampled == pytest.approx(plan_of(LLAMA_8B, context=131_072).chosen.ceiling.ttft_s, rel=0.01)


def test_a_plan_costs_as_much_for_billions_of_tokens_as_for_thousands() -> None:
    header = header_of(LLAMA_8B | {"max_position_embeddings": 2**31 - 1})

    def plan(context: int) -> Plan:
        return plan_model(header, H100, LoadOptions(context=context), name="a model", prompt=context)

    assert not plan(2**31 - 1).fit.fits
    assert lines_of(lambda: plan(2**31 - 1)) < 2 * lines_of(lambda: plan(2**17))


def test_a_plan_costs_as_much_for_a_million_users_as_for_one() -> None:
    assert plan_of(LLAMA_8B, users=10**6).remedy == "--users 26934 fits"
    one, many = (lines_of(lambda users=users: plan_of(LLAMA_8B, users=users)) for users in (1, 10**6))
    assert many < 2 * one


def test_users_share_weight_reads_until_compute_bound() -> None:
    one, many = (plan_of(LLAMA_8B, context=256, users=users).chosen.ceiling for users in (1, 64))
    assert one.all_tokens_per_s == one.tokens_per_s
    assert 20 * one.tokens_per_s < many.all_tokens_per_s < 64 * one.tokens_per_s
    weak = DeviceSpec("weak", "cuda", 10**11, 3e12, 1e13, measured=False, source="a test")
    assert plan_of(LLAMA_8B, weak, context=256, users=64).chosen.ceiling.bound == "compute"


def test_a_plan_for_a_named_gpu_imports_no_torch(tmp_path: Path) -> None:
    folder = write_sparse(tmp_path / "llama", LLAMA_8B)
    code = (
        "import sys; from pathlib import Path; from localllm.checkpoint.header import read_header;"
        "from localllm.hardware.catalog import find_device; from localllm.plan.plan import plan_model;"
        "from localllm.plan.fit import LoadOptions;"
        "p = plan_model(read_header(Path(sys.argv[1])), find_device('4090'), LoadOptions(), name='llama');"
        "print(p.fit.weights.total, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(2 * 8_030_261_248 + 2 * 65 * 4096), "False"]
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 4096
