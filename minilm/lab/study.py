"""A study: variants of one training run, each with several seeds. All of it is checked before the first run."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from minilm.bench.measure import median_seconds
from minilm.bench.setting import Run, Setting
from minilm.bench.training import TrainingStep
from minilm.build import build_model, check
from minilm.config import Command, compose, differences
from minilm.cost import Cost
from minilm.errors import ConfigError
from minilm.files import write_atomic
from minilm.finetune import start_from
from minilm.launch import Parts
from minilm.resume import rooted
from minilm.runtime import check_seed
from minilm.words import as_text, choices, key_of

MOST_SEEDS = 1000
TOLERANCE = 0.02  # of matched costs
ASIDE = {
    "resume",
    "out_dir",
    "wandb",
    "tensorboard",
    "threads",
}  # runs that differ in these alone are the same
UNITS = {"steps": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "seconds of training"}


@dataclass(frozen=True)
class StudyConfig:
    """configs/study/own.yaml, which says what each key is."""

    name: str
    question: str
    theory: str
    predict: dict[str, Literal["lower", "higher", "same"]]
    base: list[str]
    variants: dict[str, str | list[str]]
    seeds: int | list[int]
    budget: Literal["steps", "tokens", "flops", "seconds"]
    match: Literal["params", "flops"] | None
    evaluate_at: list[int]

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ConfigError(f"study.name={self.name}: it names a folder, give it without /")
        if any(n < 1 for n in self.evaluate_at):
            raise ConfigError(
                f"study.evaluate_at={self.evaluate_at}: whole numbers from 1 on, such as [1,2,4]"
            )
        for name in self.predict:
            if name not in self.variants:
                known = ", ".join(self.variants)
                raise ConfigError(f"study.predict: there is no variant {name}; there are {known}")


def parameters(cost: Cost) -> int:
    return sum(cost.parameters().values())


def flops_per_token(cost: Cost) -> float:
    """Of training, the optimizer's share aside."""
    return cost.flops(cost.model.block_size, training=True).total


@dataclass(frozen=True)
class Variant:
    """One side of the comparison.

    own: the words that make it. words: all words of train.py but the seed, those that the study chose included.
    config: what they compose to. cost: the run's costs. source: the hash of its text. floor: the entropy of the
    validation text, nats per token, where it is known. lookahead: how far past itself a position sees.
    """

    name: str
    own: tuple[str, ...]
    words: tuple[str, ...]
    config: dict[str, Any] = field(repr=False)
    cost: Run = field(repr=False)
    source: str
    floor: float | None
    lookahead: float

    @property
    def folder(self) -> str:
        return re.sub(r"[^\w.=+-]+", "_", self.name)

    @property
    def parameters(self) -> int:
        return parameters(self.cost.setting.cost)

    @property
    def flops_per_token(self) -> float:
        return flops_per_token(self.cost.setting.cost)

    @property
    def steps(self) -> int:
        return self.cost.train.max_steps


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    variant: Variant
    seed: int
    folder: Path

    @property
    def words(self) -> list[str]:
        """Of train.py, with the seed and the folder."""
        return [*self.variant.words, f"seed={self.seed}", f"out_dir={self.folder}"]


@dataclass(frozen=True)
class Study:
    """config: as it was said. variants: the first is the base. chosen: what was picked so that variants compare."""

    config: StudyConfig
    variants: list[Variant]
    seeds: list[int]
    folder: Path
    chosen: list[str]

    @property
    def base(self) -> Variant:
        return self.variants[0]

    @property
    def jobs(self) -> list[Job]:
        """Seed by seed, so that a study which is stopped early has each variant about as often."""
        return [
            Job(variant, seed, self.folder / variant.folder / f"seed_{seed}")
            for seed in self.seeds
            for variant in self.variants
        ]

    def save(self) -> None:
        """study.yaml: what is compared. A study that goes on reads back what was chosen by the clock."""
        said = {key: value for key, value in vars(self.config).items() if value not in ("", [], {}, None)}
        variants = {
            v.name: {"own": list(v.own), "words": list(v.words), "steps": v.steps} for v in self.variants
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = said | {"seeds": self.seeds, "chosen": self.chosen, "variants": variants}
        write_atomic(
            self.folder / "study.yaml", yaml.safe_dump(whole, sort_keys=False, allow_unicode=True, width=110)
        )


def plan(command: Command) -> Study:
    """The study that a command asks for. Raises ConfigError, which names the variant, for any that cannot run."""
    section, vary = dict(command.config["study"]), command.config["vary"]
    section["seeds"] = command.config["seeds"]
    folder = command.out_dir
    if vary is not None:
        if section["variants"]:
            raise ConfigError(f"vary={vary}: the study has variants of its own; leave study=… or vary=… out")
        section["variants"] = _combinations(vary)
        if section["name"] == "own":
            section["name"] = re.sub(r"[^\w.]+", "_", " ".join(re.findall(r"[\w./@]+(?==)", vary)))
            if "out_dir" not in command.said:
                folder = folder.with_name(section["name"])
        section["question"] = section["question"] or f"What does {section['name']} change?"
    config = StudyConfig(**check(StudyConfig, section, "study"))
    if len(config.variants) < 2:
        raise ConfigError("study: it has fewer than two variants; say study=NAME, or vary='KEY=[A,B]'")
    seeds = _seeds(config.seeds)
    variants = []
    for name, own in config.variants.items():
        own = [own] if isinstance(own, str) else own
        words = [*config.base, *command.others, *own]
        for word in words:
            if key_of(word) in ("seed", "out_dir", "resume"):
                raise ConfigError(f"{word}: a study sets it for each run; say seeds=[…] and out_dir=…")
        with _named(name):
            variants.append(_variant(name, own, words, seeds[0]))
    folders = [v.folder for v in variants]
    if len(set(folders)) < len(folders):
        raise ConfigError(f"study.variants: two names make one folder: {', '.join(sorted(folders))}")
    chosen: list[str] = []
    if config.match:
        variants = [_matched(v, variants[0], config.match, seeds[0], chosen) for v in variants]
    if config.budget != "steps":
        variants = _budgeted(variants, config.budget, seeds[0], folder, chosen)
    study = Study(config, variants, seeds, folder, chosen)
    for job in study.jobs:
        _check_folder(job)
    return study


def _combinations(vary: str) -> dict[str, str | list[str]]:
    """`a=[1,2] b=[3,4]` -> four variants, each named by what it sets."""
    words = re.findall(r"[^\s\[\]]*(?:\[(?:[^\[\]]|\[[^\[\]]*\])*\])?[^\s\[\]]*", str(vary))
    sets = [choices(word) for word in words if word]
    if not sets:
        raise ConfigError("vary is empty: say vary='KEY=[A,B]'")
    named: list[tuple[str, str | list[str]]]
    if len(sets) == 1:
        named = [(word.partition("=")[2].strip("'\""), [word]) for word in sets[0]]
    else:
        named = [(" ".join(map(_short, words)), list(words)) for words in itertools.product(*sets)]
    if len(dict(named)) < len(named):
        raise ConfigError(f"vary={vary}: two variants are the same; say different values")
    return dict(named)


def _short(word: str) -> str:
    """`model.n_head=2` -> `n_head=2`"""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _seeds(said: int | list[int]) -> list[int]:
    if isinstance(said, int) and not 1 <= said <= MOST_SEEDS:
        raise ConfigError(f"seeds={said}: how many, from 1 to {MOST_SEEDS}, or a list of different ones")
    seeds = list(range(1, said + 1)) if isinstance(said, int) else said
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds={said}: how many, or a list of different ones")
    for seed in seeds:
        check_seed(seed)
    return seeds


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Mistakes within are those of a variant."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"variant {name}: {error}") from None


def _variant(name: str, own: list[str], words: list[str], seed: int) -> Variant:
    """A variant composed and checked as train.py checks it, its model built without numbers.

    init_from is pinned to one checkpoint: runs/latest, say, leads elsewhere once the first run has begun.
    """
    last = {key_of(word): word for word in words}  # the last word on a key counts
    composed = compose("train", [*last.values(), f"seed={seed}", "out_dir=unused"])
    config, begins = start_from(Command(composed, list(last), Path("unused"), default_out_dir=False))
    parts = Parts.of(config, begins)
    if begins:
        plain = re.fullmatch(r"[\w./-]+", str(begins.path))
        last["init_from"] = f"init_from={begins.path}" if plain else as_text("init_from", str(begins.path))
    words = list(last.values())
    with torch.device("meta"):
        model = build_model(config, parts.tokenizer.vocab_size, parts.tokenizer.end_token)
    data = parts.tokens(model.config.block_size)
    if len(data.val) < 2:
        raise ConfigError(
            f"data.val_fraction={config['data'].get('val_fraction')}: a study compares validation losses"
        )
    setting = Setting.of(config | {"vocab_size": parts.tokenizer.vocab_size})
    run = Run(setting, parts.train, type(parts.optim).__name__)
    return Variant(
        name, tuple(own), tuple(words), rooted(config), run, data.source, data.floor, model.mask.lookahead
    )


def _again(variant: Variant, word: str, seed: int) -> Variant:
    with _named(variant.name):
        return _variant(variant.name, list(variant.own), [*variant.words, word], seed)


# ---- fair comparison ----


def _matched(variant: Variant, base: Variant, what: str, seed: int, chosen: list[str]) -> Variant:
    """The variant with a width of its feed-forward layers at which it costs what the base does."""
    unit = {"params": "parameters", "flops": "FLOPs per token"}[what]

    def price(cost: Cost, n_inner: int | None = None) -> float:
        cost = replace(cost, model=replace(cost.model, n_inner=n_inner)) if n_inner else cost
        return parameters(cost) if what == "params" else flops_per_token(cost)

    cost, wanted = variant.cost.setting.cost, price(base.cost.setting.cost)
    if price(cost) != wanted:
        least, more = price(cost, 1), price(cost, 2)  # it grows by as much with each further channel
        width = max(1, round(1 + (wanted - least) / (more - least))) if more > least else 1
        if abs(price(cost, width) / wanted - 1) > TOLERANCE:
            raise ConfigError(
                f"variant {variant.name}: study.match={what} finds no model.n_inner: with 1 it has {least:,.0f} "
                f"{unit}, {base.name} has {wanted:,.0f}; compare variants that are nearer"
            )
        variant = _again(variant, f"model.n_inner={width}", seed)
    cost = variant.cost.setting.cost
    off = price(cost) / wanted - 1
    chosen.append(f"{variant.name}: model.n_inner={cost.mlp.hidden}, {price(cost):,.0f} {unit} ({off:+.2%})")
    return variant


def _budgeted(
    variants: list[Variant], budget: str, seed: int, folder: Path, chosen: list[str]
) -> list[Variant]:
    """The variants with steps enough to spend what the base spends in its own train.max_steps."""
    base = variants[0]
    if budget == "seconds":
        steps = _timed_before(variants, budget, folder) or _timed(variants)
    else:
        price: dict[str, float] = {
            v.name: v.cost.tokens if budget == "tokens" else v.cost.flops for v in variants
        }
        steps = {v.name: _whole(base.steps * price[base.name] / price[v.name]) for v in variants}
    chosen += [
        f"{name}: train.max_steps={n}, for as many {UNITS[budget]} as {base.name}"
        for name, n in steps.items()
    ]
    return [
        v if steps[v.name] == v.steps else _again(v, f"train.max_steps={steps[v.name]}", seed)
        for v in variants
    ]


def _timed(variants: list[Variant]) -> dict[str, int]:
    """Steps that take as long as the base's, by real steps of each, timed in turn."""
    base = variants[0]
    cases = {v.name: TrainingStep(v.cost.setting) for v in variants}
    seconds = median_seconds(cases, base.cost.setting.device, repeats=9, budget=5)
    return {v.name: _whole(base.steps * seconds[base.name] / seconds[v.name]) for v in variants}


def _whole(steps: float) -> int:
    return max(1, math.floor(steps + 0.5))


def _timed_before(variants: list[Variant], budget: str, folder: Path) -> dict[str, int] | None:
    """The steps that an earlier start of this very study found, so that it goes on as it began."""
    base = variants[0]
    try:
        study = yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))
        saved = study["variants"]
        same = study["budget"] == budget and saved[base.name]["steps"] == base.steps
        same &= all(_but_for_steps(saved[v.name]["words"]) == _but_for_steps(v.words) for v in variants)
        return {v.name: int(saved[v.name]["steps"]) for v in variants} if same else None
    except (OSError, LookupError, TypeError, ValueError, yaml.YAMLError):
        return None


def _but_for_steps(words: Iterable[str]) -> list[str]:
    return [word for word in words if key_of(word) != "train.max_steps"]


# ---- going on ----


def _check_folder(job: Job) -> None:
    """A folder that holds a run of the same words goes on; one that holds another run is refused."""
    path = job.folder / "config.yaml"
    if not path.exists():
        return
    then = rooted(yaml.safe_load(path.read_text(encoding="utf-8")))
    now = job.variant.config | {"seed": job.seed}
    for section in sorted((set(then) | set(now)) - ASIDE):
        for key, old, new in differences(section, then.get(section), now.get(section)):
            raise ConfigError(
                f"{job.folder} holds a run with {key}={old}, and this study says {new}: name another out_dir=…"
            )
