"""Measure, and hold it against what is expected: python scripts/bench.py bench=NAME …  (--help lists the names)"""

from minilm.config import Command, script


@script("bench")
def main(command: Command) -> None:
    from minilm.bench.run import run  # late: --help and a misspelt key need no torch

    run(command)


if __name__ == "__main__":
    main()
