"""Train a model: python scripts/train.py key=value …  (--help lists the keys)"""

import sys

from minilm.config import Command, script


@script("train")
def main(command: Command) -> None:
    from minilm.launch import train  # late: --help and a misspelt key need no torch

    stopped_by = train(command).stopped_by
    if stopped_by:
        sys.exit(128 + stopped_by)


if __name__ == "__main__":
    main()
