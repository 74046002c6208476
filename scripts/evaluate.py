"""How well a model predicts a text: python scripts/evaluate.py key=value …  (--help lists the keys)"""

from minilm.config import Command, script


@script("evaluate", keeps=False)
def main(command: Command) -> None:
    from minilm.score import score  # late: --help and a misspelt key need no torch

    for name, value in score(command.config):
        print(f"{name:<14}  {value}")


if __name__ == "__main__":
    main()
