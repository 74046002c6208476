"""Generate text from a trained model: python scripts/generate.py key=value …  (--help lists the keys)"""

from minilm.config import Command, script


@script("generate", keeps=False)
def main(command: Command) -> None:
    from minilm.say import say  # late: --help and a misspelt key need no torch

    say(command.config)


if __name__ == "__main__":
    main()
