"""Compares engines that only prefill and others that only decode with engines that do both, on the same devices:
for `serve --prefill`.

Both are simulated with the default load of `simulate`, and objectives relative to an idle engine on the whole
device.
"""

from dataclasses import dataclass, replace

from localllm.formatting import format_bytes, format_seconds, three_digits
from localllm.simulate.capacity import Objective, find_capacity, scaled_cost
from localllm.simulate.fleet import FleetSetup, Link
from localllm.simulate.load import LoadPlan
from localllm.simulate.simulation import simulate
from localllm.simulate.target import Target

REQUESTS = 300
IDLE_RATE = 1e-6  # requests per second
TTFT_FACTOR, TPOT_FACTOR = 2.0, 1.5  # of an idle engine's 95th percentile, up to which the objectives are met
P95 = 1  # index in PERCENTILES
SHARED_MEMORY = Link(5e9, 0.005)  # copies from a device, into shared memory and to the other device: assumed


@dataclass(frozen=True)
class Comparison:
    """The highest loads within objectives, in requests per second."""

    target: Target
    load: LoadPlan
    limits: dict[str, float]  # seconds by measure
    prefill: int
    decode: int
    together: float  # of engines that compute prompts and answers
    apart: float
    link: Link = SHARED_MEMORY
    on_machines: bool = False  # one for each engine

    @property
    def pays(self) -> bool:
        return self.apart > self.together

    def sentence(self) -> str:
        """Return the result as text."""
        beside = f"--prefill {self.prefill}" + (f" --decode {self.decode}" if self.decode > 1 else "")
        if self.on_machines:
            together = f"{self.prefill + self.decode} engines on a machine each"
            workers = "a worker" if self.prefill == 1 else f"{self.prefill} workers"
            beside = f"{workers} for prompts and a link of {format_bytes(self.link.bandwidth)}/s"
        elif self.target.setup.asynchronous:
            together = f"{self.prefill + self.decode} engines with a GPU each"
        else:
            together = "one engine"
        limits = " and ".join(f"{name}={format_seconds(limit)}" for name, limit in self.limits.items())
        apart = three_digits(self.apart) if self.apart else "none"
        return (
            f"on the {self.target.device}, {together} would serve {three_digits(self.together)} requests/s within "
            f"{limits}, and with {beside} {apart} (simulated: prompts of {self.load.prompt.median:g} and answers "
            f"of {self.load.output.median:g} tokens; {self.target.cost.source})"
        )


def compare_apart(
    target: Target,
    load: LoadPlan,
    prefill: int,
    decode: int = 1,
    *,
    link: Link = SHARED_MEMORY,
    on_machines: bool = False,
    requests: int = REQUESTS,
) -> Comparison:
    """Find the highest loads of both. load: whose rate does not count; prefill, decode: engines for prompts and
    for answers; link: between the engines; on_machines: each has a machine; requests: of a simulation"""
    engines = prefill + decode
    on_cpu = not (target.setup.asynchronous or on_machines)  # on which they share the cores
    idle_load = replace(load, rate=IDLE_RATE, requests=requests)
    idle = simulate(idle_load, target.setup, target.cost)
    ttft, tpot = (idle.percentiles(name)[P95] for name in ("ttft", "tpot"))
    objective = Objective({"ttft": TTFT_FACTOR * ttft, "tpot": TPOT_FACTOR * tpot})
    fleet = FleetSetup(replicas=engines, most_replicas=engines, token_bytes=target.token_bytes, link=link)
    apart = replace(target, setup=replace(target.setup, fleet=replace(fleet, prefill=prefill)))
    together = target if on_cpu else replace(target, setup=replace(target.setup, fleet=fleet))
    if on_cpu:  # each engine has a share of the cores and of the memory
        setup = replace(apart.setup, blocks=max(1, target.setup.blocks // engines))
        apart = replace(apart, make_cost=lambda: scaled_cost(target, engines), setup=setup)
    start = idle_load.scaled_to(1 / (ttft + tpot * load.output.median))

    def capacity(each: Target) -> float:
        if not objective.is_met(simulate(idle_load, each.setup, each.cost)):
            return 0.0
        return find_capacity(start, objective, each).amount

    return Comparison(
        target, load, objective.limits, prefill, decode, capacity(together), capacity(apart), link, on_machines
    )
