"""What a training run will cost, before it trains: python scripts/plan.py key=value …  (--help lists the keys)"""

from minilm.config import Command, script


@script("plan", keeps=False)
def main(command: Command) -> None:
    from minilm.plan import plan  # late: --help and a misspelt key need no torch

    plan(command)


if __name__ == "__main__":
    main()
