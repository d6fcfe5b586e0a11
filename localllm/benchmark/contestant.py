"""A loaded model under measurement: its warm-up, its rounds, its ceilings, and what they come to."""

from collections.abc import Sequence

from localllm.arch.cost import Share, bytes_read, parameters
from localllm.benchmark import ceilings, figures
from localllm.benchmark.ceilings import Ceilings
from localllm.benchmark.measure import Bench, Round
from localllm.benchmark.prompts import Prompts
from localllm.benchmark.result import Edition, Found, Loaded
from localllm.benchmark.roofline import roofline
from localllm.benchmark.scenario import Scenario
from localllm.checkpoint.facts import formats
from localllm.comparison.subject import Subject
from localllm.device import device_name, peak_bytes, restart_peak
from localllm.llm import LLM
from localllm.plan.memory import BLOCK_SIZE
from localllm.plan.weights import main_matrix
from localllm.quant.packing import ELEMENT_BYTES, kv_bytes


class Contestant:
    def __init__(self, subject: Subject, llm: LLM, prompts: Prompts, scenarios: Sequence[Scenario]):
        self.subject = subject
        self.llm = llm
        self.runner = llm.worker.engine.runner
        self.chunk = llm.worker.engine.scheduler.token_budget
        self.sizes = ELEMENT_BYTES[llm.dtype], kv_bytes(llm.kv_dtype)
        self.bench = Bench(llm, prompts)
        self.rounds: dict[Scenario, list[Round]] = {scenario: [] for scenario in scenarios}
        self.ceilings: list[Ceilings] = []
        self.peak = 0

    def warm_up(self) -> None:
        for scenario in self.rounds:
            self.bench.warm_up(scenario)

    def round(self, scenario: Scenario) -> None:
        self.rounds[scenario].append(self.bench.round(scenario))

    def measure_ceilings(self) -> None:
        """For the steps that scenarios will have and rounds had. The memory for it is not the model's."""
        device = self.runner.device
        decoded = [figures.decoding(one) for rounds in self.rounds.values() for one in rounds]
        seen = {sum(share.tokens for share in one.shares) for one in decoded if one}
        self.peak = max(self.peak, peak_bytes(device))
        found = ceilings.measure(
            main_matrix(self.subject.header),
            self.runner.model.dtype,
            device,
            self.llm.worker.threads,
            seen.union(*((scenario.batch, self.prefill_rows(scenario)) for scenario in self.rounds)),
            max(map(self.step_bytes, self.rounds)),
        )
        self.ceilings.append(found)
        restart_peak(device)

    def prefill_rows(self, scenario: Scenario) -> int:
        """Tokens of each step of its prefill, on average; what fills no block before is computed again."""
        tokens = scenario.batch * (scenario.prompt + scenario.depth % BLOCK_SIZE)
        return -(-tokens // -(-tokens // self.chunk))

    def step_bytes(self, scenario: Scenario) -> int:
        """That its last step of decoding reads."""
        element, kv = self.sizes
        step = (Share(1, scenario.tokens, sequences=scenario.batch),)
        return bytes_read(self.llm.config, self.llm.memory.weights, step, element, kv)

    def found(self, scenario: Scenario, best: Ceilings) -> Found:
        """Rooflines are those of the round in the middle, the faster of two."""
        rounds = self.rounds[scenario]
        cost = (self.llm.config, self.llm.memory.weights, *self.sizes)
        decoded = sorted(filter(None, map(figures.decoding, rounds)), key=lambda one: one.step_s)
        filled = sorted(map(figures.prefill, rounds), key=lambda one: one.seconds)
        decode, prefill = decoded[(len(decoded) - 1) // 2] if decoded else None, filled[(len(filled) - 1) // 2]
        return Found(
            scenario,
            tuple(rounds),
            decode and roofline(figures.work_of_decoding(decode, *cost), decode.step_s, best),
            roofline(figures.work_of_prefill(prefill, *cost, self.chunk), prefill.seconds, best),
        )

    def edition(self, left_out: Sequence[tuple[Scenario, str]], *, alone: bool) -> Edition:
        """After the rounds. alone: is the most memory of the process that of this model?"""
        llm, header = self.llm, self.subject.header
        best = self.ceilings[0]
        for other in self.ceilings[1:]:
            best = best.best(other)
        copies = [one.copy for one in self.ceilings]
        return Edition(
            Loaded(
                name=self.subject.name,
                parameters=parameters(llm.config),
                formats={form.name: form.nbytes for form in formats(header)},
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
            self.peak if alone else None,
            tuple(self.found(scenario, best) for scenario in self.rounds),
            tuple(left_out),
        )
