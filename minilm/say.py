"""What scripts/generate.py does: prompts in, text to standard output as it comes, the rest to standard error."""

import itertools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minilm.build import Name, check, restore
from minilm.data import normalise_newlines, read_text
from minilm.decoding import CompiledStep
from minilm.errors import ConfigError
from minilm.generation import Generator, Speed, encode_prompt
from minilm.runtime import DTYPES, Compile, check_seed, resolve_device, set_up_cpu
from minilm.sampling import Sampler
from minilm.streaming import write
from minilm.trouble import machine_trouble

MOST_SAMPLES = 1 << 16


@dataclass(frozen=True)
class GenerateConfig:
    """configs/generate.yaml."""

    checkpoint: Name
    prompt: str | list[str]
    prompt_file: str | None
    samples: int
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: str | list[str]
    seed: int | None
    cache: bool
    overflow: Literal["slide", "error"]
    keep: float
    device: str
    precision: Literal["fp32", "bf16"]
    threads: int | None
    compile: Compile

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ConfigError(f"samples={self.samples}: a whole number from 1 to {MOST_SAMPLES:,}")
        if self.seed is not None:
            check_seed(self.seed)


def say(config: dict[str, Any]) -> None:
    """Generate as the configuration says. Raises ConfigError before anything is written."""
    options = GenerateConfig(**check(GenerateConfig, config, ""))
    lower = f"samples={options.samples}, max_new_tokens={options.max_new_tokens}"
    with machine_trouble(f"{lower}: lower them, give fewer prompts at a time, or say precision=bf16"):
        _say(options)


def _say(options: GenerateConfig) -> None:
    sampler = Sampler(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )
    set_up_cpu(options.threads)
    device = resolve_device(options.device)
    prompts = read_prompts(options)
    model, tokenizer, saved = restore(options.checkpoint, device)
    model.to(DTYPES[options.precision])  # weights are held so, not cast at each step
    generator = Generator(
        model,
        sampler,
        cache=options.cache,
        overflow=options.overflow,
        keep=options.keep,
        step=CompiledStep(model, options.compile) if options.compile else None,
    )
    for prompt in prompts:
        encode_prompt(tokenizer, prompt)  # an unknown character is refused before anything is printed
    rows = [prompt for prompt in prompts for _ in range(options.samples)]
    stops = [options.stop] if isinstance(options.stop, str) else options.stop
    stops = [stop.replace("\\n", "\n") for stop in stops]  # a shell passes \n on as two characters
    speed = Speed()
    pieces = generator.text(
        tokenizer, rows, options.max_new_tokens, stop=stops, seed=options.seed, speed=speed
    )
    first = next(pieces, (0, ""))  # what the generator refuses, it refuses before anything is printed
    try:
        _print(rows, itertools.chain([first], pieces))
    except BrokenPipeError:  # the reader (head, less) has had enough; nor must Python flush to it at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(closing_line(saved.path, speed), file=sys.stderr)


def _print(rows: list[str], pieces: Iterable[tuple[int, str]]) -> None:
    """One text as it comes, several whole."""
    if len(rows) == 1:
        write(sys.stdout, rows[0])
        for _, piece in pieces:
            write(sys.stdout, piece)
        write(sys.stdout, "\n")
    else:
        texts = list(rows)
        for row, piece in pieces:
            texts[row] += piece
        write(sys.stdout, "\n---\n".join(texts) + "\n")


def read_prompts(options: GenerateConfig) -> list[str]:
    """The prompts from the command line, a file or standard input; line ends become LF as in training text."""
    if options.prompt_file is not None:
        if options.prompt:
            raise ConfigError("prompt and prompt_file are both given: say one of them")
        return [read_text(options.prompt_file, "prompt_file")]
    if options.prompt == "-":
        try:
            return [normalise_newlines(sys.stdin.buffer.read().decode("utf-8-sig"))]
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompt=-: standard input is not UTF-8 at byte {error.start}") from None
    prompts = [options.prompt] if isinstance(options.prompt, str) else options.prompt
    if not prompts:
        raise ConfigError("prompt=[]: give at least one prompt")
    return [normalise_newlines(prompt) for prompt in prompts]


def closing_line(path: Path, speed: Speed) -> str:
    """What was read and written, and how fast."""
    parts = [str(path)]
    if speed.prefill_seconds:
        rate = speed.prefill_tokens / speed.prefill_seconds
        parts.append(f"prefill {speed.prefill_tokens} tokens, {rate:,.0f} tokens/s")
    if speed.decode_seconds:
        parts.append(
            f"decode {speed.decode_tokens} tokens, {speed.decode_tokens / speed.decode_seconds:,.0f} tokens/s"
        )
    if speed.cache_bytes:
        parts.append(f"cache {speed.cache_bytes / 2**20:.2f} MiB")
    return "; ".join(parts)
