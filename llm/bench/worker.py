"""One model's timings in a process of its own: ``python -m llm.bench.worker JOB``, JOB and what it prints as JSON.

A process a model keeps memory, patches of peers and the first step's time apart.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llm.bench.timing import Timing

MARK = "TIMING "  # begins the lines that hold a timing; libraries print too


def main() -> None:
    """Time the model of the job in each of its contexts and packings, a line each."""
    job = json.loads(sys.argv[1])
    for context in job["contexts"]:
        for packed in job["packed"]:
            print(MARK + json.dumps(asdict(run(job, context, packed=packed))), flush=True)


def run(job: dict[str, Any], context: int, *, packed: bool) -> Timing:
    """Time a peer, or the configuration of some words."""
    if "peer" in job:
        from llm.bench.peers import time_peer

        return time_peer(job["peer"], context=context, tokens=job["tokens"], steps=job["steps"])
    from llm.bench.steps import bench_config, time_steps

    config = bench_config(job["words"], context=context, tokens=job["tokens"])
    into = Path(job["profile"]) / f"{job['name']}_{context}_{packed}" if job["profile"] else None
    return time_steps(config, packed=packed, steps=job["steps"], by_part=job["split"], profile_into=into)


if __name__ == "__main__":
    main()
