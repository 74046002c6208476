"""Draw what a model attends to: python scripts/attention.py key=value …  (--help lists the keys)"""

from minilm.config import Command, script


@script("maps", keeps=False)
def main(command: Command) -> None:
    from minilm.maps import draw  # late: --help and a misspelt key need no torch

    print(*draw(command.config), sep="\n")


if __name__ == "__main__":
    main()
