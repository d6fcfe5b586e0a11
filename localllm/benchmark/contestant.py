"""A loaded model being measured: its warm-up, rounds and ceilings, and the results."""

from collections.abc import Sequence

from localllm.arch.cost import SequenceStep, bytes_read, parameter_count
from localllm.benchmark import ceilings, figures
from localllm.benchmark.ceilings import Ceilings
from localllm.benchmark.measure import Round, RoundRunner
from localllm.benchmark.prompts import PromptSource
from localllm.benchmark.result import Loaded, ModelResult, ScenarioResult
from localllm.benchmark.roofline import compute_roofline
from localllm.benchmark.scenario import Scenario
from localllm.checkpoint.facts import tensor_formats
from localllm.comparison.subject import Subject
from localllm.hardware.device import device_name, peak_bytes, reset_peak_bytes
from localllm.llm.llm import LLM
from localllm.plan.memory import BLOCK_SIZE
from localllm.plan.weights import representative_matrix
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes


class BenchmarkedModel:
    def __init__(self, subject: Subject, llm: LLM, prompts: PromptSource, scenarios: Sequence[Scenario]):
        self.subject = subject
        self.llm = llm
        self.runner = llm.worker.engine.runner
        self.prefill_chunk = llm.worker.engine.token_budget
        self.element_bytes = ELEMENT_BYTES[llm.dtype], kv_element_bytes(llm.kv_dtype)
        self.round_runner = RoundRunner(llm, prompts)
        self.rounds: dict[Scenario, list[Round]] = {scenario: [] for scenario in scenarios}
        self.ceilings: list[Ceilings] = []
        self.peak_bytes = 0

    def warm_up(self) -> None:
        for scenario in self.rounds:
            self.round_runner.warm_up(scenario)

    def run_round(self, scenario: Scenario) -> None:
        self.rounds[scenario].append(self.round_runner.run_round(scenario))

    def measure_ceilings(self) -> None:
        """Measure for the steps that scenarios will have and rounds had.

        Its memory does not count as the model's.
        """
        device = self.runner.device
        phases = [figures.decode_phase(phase) for rounds in self.rounds.values() for phase in rounds]
        step_tokens = {sum(share.tokens for share in phase.shares) for phase in phases if phase}
        self.peak_bytes = max(self.peak_bytes, peak_bytes(device))
        measured = ceilings.measure_ceilings(
            representative_matrix(self.subject.header),
            self.runner.model.dtype,
            device,
            self.llm.worker.threads,
            step_tokens.union(*((scenario.batch, self.prefill_rows(scenario)) for scenario in self.rounds)),
            max(map(self.step_bytes, self.rounds)),
        )
        self.ceilings.append(measured)
        reset_peak_bytes(device)

    def prefill_rows(self, scenario: Scenario) -> int:
        """Return the average tokens per prefill step; tokens that do not fill a cached block are computed
        again.
        """
        tokens = scenario.batch * (scenario.prompt + scenario.depth % BLOCK_SIZE)
        return -(-tokens // -(-tokens // self.prefill_chunk))

    def step_bytes(self, scenario: Scenario) -> int:
        """Return the bytes read by the last decoding step."""
        element, kv = self.element_bytes
        step = (SequenceStep(1, scenario.tokens, sequences=scenario.batch),)
        return bytes_read(self.llm.config, self.llm.memory.weights, step, element, kv)

    def scenario_result(self, scenario: Scenario, best: Ceilings) -> ScenarioResult:
        """Compute the rooflines of the median round, the faster one if their number is even."""
        rounds = self.rounds[scenario]
        cost = (self.llm.config, self.llm.memory.weights, *self.element_bytes)
        decode_phases = sorted(filter(None, map(figures.decode_phase, rounds)), key=lambda one: one.step_s)
        prefill_phases = sorted(map(figures.prefill_phase, rounds), key=lambda one: one.seconds)
        decode, prefill = (
            decode_phases[(len(decode_phases) - 1) // 2] if decode_phases else None,
            prefill_phases[(len(prefill_phases) - 1) // 2],
        )
        return ScenarioResult(
            scenario,
            tuple(rounds),
            decode and compute_roofline(figures.decode_work(decode, *cost), decode.step_s, best),
            compute_roofline(figures.prefill_work(prefill, *cost, self.prefill_chunk), prefill.seconds, best),
        )

    def model_result(self, left_out: Sequence[tuple[Scenario, str]], *, alone: bool) -> ModelResult:
        """Return the result after all rounds. alone: whether the process's peak memory is that of this model."""
        llm, header = self.llm, self.subject.header
        best = self.ceilings[0]
        for other in self.ceilings[1:]:
            best = best.merge_best(other)
        copies = [one.copy for one in self.ceilings]
        return ModelResult(
            Loaded(
                name=self.subject.name,
                parameters=parameter_count(llm.config),
                formats={form.name: form.nbytes for form in tensor_formats(header)},
                weight_bytes=llm.weight_bytes,
                dtype=llm.dtype,
                kv_dtype=llm.kv_dtype,
                device=llm.device,
                device_name=device_name(self.runner.device),
                threads=llm.worker.threads if llm.device == "cpu" else None,
                context=llm.context,
                load_s=llm.load_s,
                load_phases=dict(llm.load_phases),
            ),
            best,
            1 - min(copies) / max(copies),
            self.peak_bytes if alone else None,
            tuple(self.scenario_result(scenario, best) for scenario in self.rounds),
            tuple(left_out),
        )
