"""Compare variants of a run over several seeds: python scripts/ablate.py study=NAME …  (--help lists the keys)"""

import sys

from minilm.config import Command, script


@script("ablate", for_others=True, keeps=False)
def main(command: Command) -> None:
    from minilm.lab.run import ablate  # late: --help and a misspelt key need no torch

    if not ablate(command):
        sys.exit(1)


if __name__ == "__main__":
    main()
