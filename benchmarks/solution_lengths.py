"""Lengths of real solutions: what makes stragglers in the simulation of scaling.

    python benchmarks/solution_lengths.py gsm8k_train.jsonl.gz

Reads a JSON-lines file whose lines have a `solution` (GSM8K's worked solutions), and writes the
lengths in characters. The simulation stretches them to a mean in tokens, so the unit does not
matter; the form of the distribution does.
"""

import argparse
import gzip
import json
from pathlib import Path

OUTPUT = Path(__file__).parent / "data" / "solution_lengths.json"


def main() -> None:
    """Read, count, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="JSON lines with `solution`, gzipped or not")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    opened = gzip.open if options.data.suffix == ".gz" else open
    with opened(options.data, "rt", encoding="utf-8") as lines:
        lengths = [len(json.loads(line)["solution"]) for line in lines]
    result = {"source": options.data.name, "unit": "characters", "lengths": lengths}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result) + "\n")
    print(f"{len(lengths)} lengths, mean {sum(lengths) / len(lengths):.0f}: {options.output}")


if __name__ == "__main__":
    main()
