"""One model's timings in a process of its own: ``python -m llm.bench.worker JOB``, JOB and what it prints as JSON.

A process a model keeps memory, patches of peers and the first step's time apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm.bench.timing import Timing

MARK = "TIMING "  # begins the lines that hold a timing; libraries print too


def main() -> None:
    """Import, wait for a line, then time the model of the job in each of its contexts and packings, a line each."""
    job = json.loads(sys.argv[1])
    time_model = peer(job) if "peer" in job else configuration(job)
    sys.stdin.readline()
    for context in job["contexts"]:
        for packed in job["packed"]:
            print(MARK + json.dumps(asdict(time_model(context, packed))), flush=True)


def peer(job: dict[str, Any]) -> Callable[[int, bool], Timing]:
    """What times a peer."""
    from llm.bench.peers import time_peer

    return lambda context, packed: time_peer(job["peer"], context=context, tokens=job["tokens"], steps=job["steps"])


def configuration(job: dict[str, Any]) -> Callable[[int, bool], Timing]:
    """What times the configuration of some words."""
    from llm.bench.steps import bench_config, time_steps

    configs = {
        context: bench_config(job["words"], context=context, tokens=job["tokens"]) for context in job["contexts"]
    }

    def run(context: int, packed: bool) -> Timing:
        into = Path(job["profile"]) / f"{job['name']}_{context}_{packed}" if job["profile"] else None
        settings = {"steps": job["steps"], "by_part": job["split"], "profile_into": into}
        return time_steps(configs[context], packed=packed, **settings)

    return run


if __name__ == "__main__":
    main()
