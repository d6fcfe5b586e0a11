"""One cold start: prints as JSON the seconds of imports, of the phases of loading, of the first tokens, and of the
first tokens of a second prompt.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path

MARKS = ("import", "load", "first two tokens", "two tokens of another prompt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("device")
    options = parser.parse_args()
    times = [time.perf_counter()]
    import localllm

    load = localllm.load  # imports torch and the rest
    times.append(time.perf_counter())
    llm = load(options.folder, device=options.device, context=256)
    times.append(time.perf_counter())
    for prompt in ([5, 6, 7], [8, 9, 10]):
        params = localllm.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        assert llm.generate(prompt, params).metrics.output_tokens == 2
        times.append(time.perf_counter())
    phases = {f"load: {name}": seconds for name, seconds in llm.load_phases.items()}
    llm.close()
    marks = {name: end - start for name, (start, end) in zip(MARKS, pairwise(times), strict=True)}
    print(json.dumps(marks | phases))


if __name__ == "__main__":
    main()
