"""minilm: train, change and measure small transformer language models."""

__version__ = "0.1.0"
