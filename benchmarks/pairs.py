"""Every trainer with every engine, model family by family: does what is trained arrive?

    OMP_NUM_THREADS=1 python benchmarks/pairs.py --json pairs.json

Each cell is laws P1 to P3 of docs/behaviour.md, on a tiny model: the largest difference of `score` from the trainer's
log-probs after an update and a sync (in nats), how far the first PPO ratio is from 1, and twenty syncs at learning rate 0.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from verl_adaptor.registry import get_spec
from verl_adaptor.testing.bench import WORKERS, Bench
from verl_adaptor.testing.pairs import ENGINES, FAMILIES, TRAINERS, check_pair, make_engine
from verl_adaptor.tracking.environment import environment


def measure(family: str) -> dict[str, dict[str, Any]]:
    """Engine -> trainer -> what was found, or how it failed."""
    bench = Bench(get_spec("hf"), family=family, model=FAMILIES[family])
    table: dict[str, dict[str, Any]] = {}
    for name in ENGINES:
        with make_engine(name, bench) as engine:
            table[name] = {trainer: cell(trainer, engine, bench) for trainer in TRAINERS}
        print(family, name, json.dumps(table[name]), flush=True)
    bench.close()
    return table


def cell(trainer: str, engine: Any, bench: Bench) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        found: dict[str, Any] = {"keeps": True, **check_pair(trainer, engine, bench)}
    except Exception as error:
        found = {"keeps": False, "failed": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=list(FAMILIES), help="which (default: all)")
    options = parser.parse_args()
    table = {family: measure(family) for family in options.family}
    WORKERS.close()
    cells = [found for engines in table.values() for trainers in engines.values() for found in trainers.values()]
    result = {
        "pairs": len(cells),
        "pairs_that_keep_the_laws": sum(found["keeps"] for found in cells),
        "largest_difference": max((found["largest_difference"] for found in cells if found["keeps"]), default=None),
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps({**result, "table": table, **environment()}, indent=2) + "\n")
    sys.exit(0 if all(found["keeps"] for found in cells) else 1)


if __name__ == "__main__":
    main()
