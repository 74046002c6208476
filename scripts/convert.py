"""A model from one format into another: python scripts/convert.py key=value …  (--help lists the keys)"""

from minilm.config import Command, script


@script("convert", keeps=False)
def main(command: Command) -> None:
    from minilm.convert import convert  # late: --help and a misspelt key need no torch

    print(*convert(command.config), sep="\n")


if __name__ == "__main__":
    main()
