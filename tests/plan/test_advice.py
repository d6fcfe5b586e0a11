"""Which division of a model is advised for devices and machines, and whether what a refusal proposes would fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.errors import DoesNotFit, UnsupportedModel, UsageError
from localllm.hardware.catalog import DeviceSpec, find_device, find_devices
from localllm.plan.advice import Advice, Pool, advise
from localllm.plan.expected import memory_of
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit, fit_model
from localllm.plan.parallel import Link, default_link
from localllm.plan.speed import ASSUMED_BANDWIDTH_SHARE
from localllm.quantize.quantizer import find_or_quantize
from localllm.runtime.step import StepShape
from localllm.settings import Settings
from localllm.simulate.target import roofline_target
from tests.plan.published import LLAMA_1B, LLAMA_8B, LLAMA_70B, MIXTRAL, header_of
from tests.plan.test_memory import write_tokenizer
from tests.tiny import make_checkpoint

FLAG = re.compile(r"--(tensor-parallel|pipeline-parallel|context|quant|users) (\w+)")
UNEVEN = MIXTRAL | {"intermediate_size": 14336 + 128}  # columns of an expert that are 113 groups of INT4
# No power of 2 divides the heads.
ODD = LLAMA_8B | {"num_attention_heads": 35, "num_key_value_heads": 5, "head_dim": 128}
GB = 10**9


def advice_for(
    model: dict[str, Any], devices: str, machines: int = 1, options: LoadOptions | None = None
) -> Advice:
    pool = Pool(find_devices(devices), machines)
    return advise(header_of(model), pool, options or LoadOptions(4096), name="model", prompt=512)


def with_flags(options: LoadOptions, text: str) -> LoadOptions:
    """Return the options with the flags of a text."""
    given = {name.replace("-", "_"): value for name, value in FLAG.findall(text)}
    changes = {name: int(value) if value.isdigit() else value for name, value in given.items()}
    return replace(options, **changes, expert_parallel="--expert-parallel" in text)


def divided(advice: Advice) -> list[tuple[int, int]]:
    return [(each.parallel.tensor, each.parallel.pipeline) for each in advice.arrangements]


def experts_of(advice: Advice) -> list[tuple[int, bool]]:
    return [(each.parallel.tensor, each.parallel.whole_experts) for each in advice.arrangements]


@pytest.mark.parametrize(
    ("model", "devices", "machines", "flags", "engines"),
    [
        (LLAMA_8B, "h100", 1, "", 1),
        (LLAMA_8B, "h100:8", 2, "", 16),
        (LLAMA_70B, "h100:8", 1, "--tensor-parallel 2", 4),
        (LLAMA_70B, "h100:3", 2, "--tensor-parallel 2", 2),  # an engine is on one machine
        (LLAMA_70B, "l40s:5", 1, "--tensor-parallel 4", 1),
        (ODD, "3080:4", 1, "--pipeline-parallel 2", 2),
        (MIXTRAL, "h100:4", 1, "--tensor-parallel 2", 2),
        (MIXTRAL | {"intermediate_size": 14337}, "h100:4", 1, "--tensor-parallel 2 --expert-parallel", 2),
    ],
)
def test_rule_of_choice(model: dict[str, Any], devices: str, machines: int, flags: str, engines: int) -> None:
    """One device, then tensor parallel within a machine, then stages; no row before the chosen one fits."""
    advice = advice_for(model, devices, machines)
    chosen = advice.chosen
    assert chosen and (chosen.flags, chosen.engines) == (flags, engines) and advice.needed is None
    before = advice.arrangements[: advice.arrangements.index(chosen)]
    assert not any(each.fits for each in before) and all(each.refusal for each in before)
    config, device = parse_config(header_of(model).config), find_device(devices.partition(":")[0])
    assert fit_model(header_of(model), config, device, with_flags(LoadOptions(4096), flags), name="model").fits


def test_stages_on_several_machines() -> None:
    """Each GPU but the first has a worker, and all messages pass the first machine."""
    advice = advice_for(LLAMA_70B, "4090", 7)
    assert divided(advice) == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    chosen = advice.chosen
    assert chosen and chosen is advice.arrangements[-1] and chosen.options.workers and chosen.engines == 1
    assert chosen.parallel.stage_link == advice.pool.network
    assert chosen.flags == "--workers HOST2:PORT,...,HOST7:PORT"
    assert advice.needed and advice.needed.flags == "--tensor-parallel 8"
    near = replace(advice.pool, network=default_link(advice.pool.device)).divide(chosen.options)
    config = parse_config(header_of(LLAMA_70B).config)
    sent = near.exchanged_bytes(config, 1, 1)[1]
    assert chosen.parallel.exchange_s(config, 1, 1) == pytest.approx(12 * advice.pool.network.seconds(sent))
    assert near.exchange_s(config, 1, 1) == pytest.approx(7 * default_link(advice.pool.device).seconds(sent))


def test_stages_on_machines_without_gpus() -> None:
    """Each has its own memory, and is one stage."""
    device = DeviceSpec("Processor", "cpu", 12 * GB, 5e10, 1e12, measured=True, source="a test")
    advice = advise(header_of(LLAMA_8B), Pool(device, 3), LoadOptions(4096), name="model", prompt=512)
    assert divided(advice) == [(1, 1), (1, 2)]
    chosen = advice.chosen
    assert chosen and chosen.fit and chosen.flags == "--workers HOST2:PORT"
    assert chosen.fit.weights.total < 0.6 * advice.arrangements[0].fit.weights.total  # type: ignore[union-attr]
    assert advice.needed is None


def test_gpus_of_a_machine_divide_its_stage() -> None:
    advice = advice_for(LLAMA_70B, "4090:2", 6)
    assert divided(advice) == [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3), (2, 4)]
    chosen = advice.chosen
    assert chosen and chosen.flags == "--workers HOST2:PORT,HOST3:PORT,HOST4:PORT --tensor-parallel 2"
    assert chosen.engines == 1 and chosen.parallel.stage_link == advice.pool.network != chosen.parallel.link
    alone = advice_for(LLAMA_70B, "4090", 7).chosen
    assert alone and alone.speed and chosen.speed
    assert chosen.speed.tokens_per_s > 1.8 * alone.speed.tokens_per_s  # two GPUs compute at a time
    refused = advice_for(LLAMA_70B, "4090:2", 4, LoadOptions(4096, tensor_parallel=4, pipeline_parallel=2))
    assert refused.arrangements[-1].refusal == "--tensor-parallel 4 needs 4 devices in each machine, which has 2"


def test_a_stage_that_gpus_of_a_machine_cannot_divide() -> None:
    advice = advice_for(ODD | {"num_hidden_layers": 200}, "4090:2", 4)
    chosen = advice.chosen
    assert chosen and (chosen.parallel.tensor, chosen.parallel.pipeline) == (1, 4)
    assert divided(advice).count((2, 3)) == 0  # it is as little divided as in two stages


def test_processes_of_machines_without_gpus_share_their_memory() -> None:
    device = DeviceSpec("Processor", "cpu", 12 * GB, 5e10, 1e12, measured=True, source="a test")
    options = LoadOptions(4096, tensor_parallel=2, pipeline_parallel=2)
    advice = advise(header_of(LLAMA_8B), Pool(device, 3), options, name="model", prompt=512)
    assert divided(advice) == [(1, 1), (1, 2), (2, 2)]
    [stages, both] = advice.arrangements[1:]
    assert both.flags == "--workers HOST2:PORT --tensor-parallel 2" and both.engines == 1
    assert stages.fit and both.fit and both.fit.weights.total < 0.51 * stages.fit.weights.total
    assert both.cached_tokens == pytest.approx(stages.cached_tokens, rel=0.05)


def test_what_would_be_needed() -> None:
    advice = advice_for(LLAMA_70B, "4090:2")
    assert advice.chosen is None and divided(advice) == [(1, 1), (2, 1), (1, 2)]
    assert advice.needed and advice.needed.flags == "--tensor-parallel 8" and advice.needed.fits


def test_the_requested_division_is_shown() -> None:
    advice = advice_for(LLAMA_8B, "h100:2", options=LoadOptions(4096, tensor_parallel=4))
    assert divided(advice) == [(1, 1), (2, 1), (4, 1)] and advice.arrangements[-1].engines == 0


def test_a_model_that_tensor_parallelism_cannot_divide() -> None:
    refused = advice_for(ODD, "3080:4").arrangements[1]
    assert not refused.fits and "5 key and value heads cannot be divided among 2" in (refused.refusal or "")


def test_whole_experts_where_columns_cannot_be_divided() -> None:
    """Groups of INT4 are not divided, as `load` refuses it; groups of one scale a row are."""
    advice = advice_for(UNEVEN, "l4:4", options=LoadOptions(4096, quant="int4"))
    assert experts_of(advice) == [(1, False), (2, False), (4, False), (2, True), (4, True)]
    assert advice.chosen and advice.chosen.flags == "--tensor-parallel 2 --expert-parallel"
    refusals = [each.refusal or "" for each in advice.arrangements]
    assert "cannot be divided among 4 processes: groups of 128 share a scale" in refusals[2]
    advice = advice_for(UNEVEN, "l4:4", options=LoadOptions(4096, quant="int8"))
    assert advice.chosen and advice.chosen.flags == "--tensor-parallel 4"
    assert not any(whole for _, whole in experts_of(advice_for(LLAMA_70B, "h100:4")))


@pytest.mark.slow
def test_a_plan_refuses_the_divisions_of_int4_that_loading_refuses(tmp_path: Path) -> None:
    """The 384 columns of an expert are three groups; those of attention are two."""
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 32}
    make_checkpoint(tmp_path / "model", "Mixtral", **shape, num_local_experts=4, num_experts_per_tok=2)
    write_tokenizer(tmp_path / "model")
    plain = read_header(tmp_path / "model")
    quantized = read_header(find_or_quantize(plain, "int4", tmp_path / "home"))
    for header, quant in ((plain, "int4"), (quantized, None)):
        config, memory = parse_config(header.config), FreeMemory("cuda", GB)
        columns = LoadOptions(64, quant=quant, tensor_parallel=2)
        with pytest.raises(UnsupportedModel, match=r"384 columns .*groups of 128") as refused:
            fit_model(header, config, memory, columns, name="model")
        assert "divide the experts with --expert-parallel" in (refused.value.remedy or "")
        assert fit_model(header, config, memory, replace(columns, expert_parallel=True), name="model").fits


def test_whole_experts_wait_for_the_busiest_device() -> None:
    """One token's two experts of eight are on one of two devices in 3 of 7 cases; a prompt selects all."""
    advice = advice_for(MIXTRAL, "h100:2")
    columns, whole = advice.arrangements[1:]
    assert columns.speed and whole.speed and whole.parallel.whole_experts
    assert whole.speed.ttft_s == pytest.approx(columns.speed.ttft_s, rel=1e-3)
    config, weights = parse_config(MIXTRAL), columns.fit and columns.fit.weights
    assert weights and len(config.layers) == 32
    more = weights.experts * 2 / 8 * (10 / 7 - 1) / (ASSUMED_BANDWIDTH_SHARE * find_device("h100").bandwidth)
    assert 1 / whole.speed.tokens_per_s - 1 / columns.speed.tokens_per_s == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (8, 1), (4, 2)])
def test_durations_are_those_of_simulate(tensor: int, stages: int) -> None:
    """The same roofline and links: a step that decodes reads all weights, and a prompt is one step."""
    header, pool = header_of(LLAMA_70B), Pool(find_devices("b200:8"), 2, network=Link(12.5e9, 2e-5))
    options = LoadOptions(4096, tensor_parallel=tensor, pipeline_parallel=stages)
    advice = advise(header, pool, options, name="model", prompt=1000)
    speed = next(
        e.speed for e in advice.arrangements if divided(advice)[advice.arrangements.index(e)] == (tensor, stages)
    )
    assert speed
    parallel = pool.divide(options)
    cost = roofline_target(header, find_device("b200"), LoadOptions(4096), name="model", parallel=parallel).cost
    assert 1 / speed.tokens_per_s == pytest.approx(cost.seconds(StepShape(1, 1, 4096, 0, 0, 0, 0), 0), rel=0.01)
    assert speed.ttft_s == pytest.approx(cost.seconds(StepShape(0, 0, 0, 1, 1000, 1000, 0), 0), rel=0.05)


@pytest.mark.parametrize(
    ("model", "device_type", "gigabytes", "count", "flag"),
    [
        (LLAMA_1B, "cpu", 3, 1, "--context"),
        (LLAMA_1B, "cpu", 0.5, 1, None),
        (LLAMA_8B, "cpu", 12, 1, "--quant"),
        (LLAMA_8B, "cuda", 12, 1, "--quant"),
        (LLAMA_8B, "cuda", 12, 3, "--tensor-parallel"),
        (LLAMA_8B, "cuda", 4, 1, "--tensor-parallel"),
        (LLAMA_70B, "cuda", 24, 8, "--tensor-parallel"),
        (LLAMA_70B, "cuda", 24, 1, "--tensor-parallel"),
        (ODD, "cuda", 12, 2, "--pipeline-parallel"),
        (ODD, "cuda", 5, 2, "--pipeline-parallel"),
        (LLAMA_70B, "cuda", 1, 1, None),
        (MIXTRAL | {"intermediate_size": 14337}, "cuda", 60, 2, "--expert-parallel"),
        (MIXTRAL | {"intermediate_size": 14337}, "cuda", 20, 1, "--expert-parallel"),
    ],
)
def test_a_refusal_names_what_fits(
    model: dict[str, Any], device_type: str, gigabytes: float, count: int, flag: str | None
) -> None:
    """The proposed flags are run through the same plan."""
    header, config = header_of(model), parse_config(header_of(model).config)
    bytes_each = int(gigabytes * GB)
    free = FreeMemory(device_type, bytes_each, find_machine_bytes=lambda: (bytes_each,) * count)
    options = LoadOptions(16_384)
    with pytest.raises(DoesNotFit) as refused:
        check_fit(header, free, options, name="model")
    remedy = refused.value.remedy or ""
    if flag is None:
        assert remedy == "use a smaller model, or a device with more free memory"
        return
    changed = with_flags(options, remedy)
    assert flag in remedy and changed != options
    assert fit_model(header, config, free, changed, name="model").fits, remedy
    assert ("of this machine" in remedy) == (1 < changed.processes <= count)


@pytest.mark.parametrize(
    ("model", "gigabytes", "machines"), [(LLAMA_8B, 4, 5), (LLAMA_70B, 24, 7), (LLAMA_1B, 1, 4)]
)
def test_a_refusal_names_machines(model: dict[str, Any], gigabytes: int, machines: int) -> None:
    header, config = header_of(model), parse_config(header_of(model).config)
    with pytest.raises(DoesNotFit) as refused:
        check_fit(header, FreeMemory("cpu", gigabytes * GB), LoadOptions(4096), name="model")
    expected = f"use a smaller model, or use {machines} machines with as much free memory and --workers"
    assert refused.value.remedy == expected
    for count in (machines - 1, machines):
        free = FreeMemory("cpu", gigabytes * GB, stage_bytes=(gigabytes * GB,) * count)
        options = LoadOptions(4096, pipeline_parallel=count)
        assert fit_model(header, config, free, options, name="model").fits == (count == machines)
    with pytest.raises(DoesNotFit, match="or add a machine to --workers"):
        few = FreeMemory("cpu", GB // 2, stage_bytes=(GB // 2,) * 2)
        check_fit(header, few, LoadOptions(4096, pipeline_parallel=2), name="model")


def test_gpus_with_less_free_memory_are_not_proposed() -> None:
    """Every process needs room on its own GPU, and the second has less than half of the weights."""
    header = header_of(LLAMA_8B)
    free = [12 * GB, 4 * GB, 12 * GB, 12 * GB]
    memory = FreeMemory("cuda", free[0], find_machine_bytes=lambda: tuple(free))
    with pytest.raises(DoesNotFit, match="--quant int8"):
        check_fit(header, memory, LoadOptions(4096), name="model")
    free[1] = 12 * GB
    with pytest.raises(DoesNotFit, match="--tensor-parallel 2 fits the GPUs of this machine"):
        check_fit(header, memory, LoadOptions(4096), name="model")


def test_a_cpu_is_one_device() -> None:
    memory = memory_of(torch.device("cpu"), GB, Settings.from_environment())
    assert memory.stage_bytes == () and len(memory.machine_bytes()) == 1


def test_numbers_of_devices() -> None:
    assert find_devices("h100:8") == replace(find_device("h100"), count=8)
    assert find_devices("h100").machine_bytes() == (find_device("h100").memory_bytes,)
    for text in ("h100:", "h100:0", "h100:-1", "h100:many", "h100:65"):
        with pytest.raises(UsageError, match="number of devices"):
            find_devices(text)
