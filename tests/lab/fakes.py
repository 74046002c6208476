"""Studies planned without running, and folders as finished runs leave them."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from minilm.config import Command
from minilm.lab.findings import Findings
from minilm.lab.results import read
from minilm.lab.study import Job, Study
from minilm.words import as_typed, key_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = (
    "device=cpu",
    "precision=fp32",
    "data=file",
    "schedule.warmup=2",
    "model.n_embd=32",
    "model.n_layer=2",
)
SMALL += ("model.block_size=16", "model.ngrams=[]", "train.max_steps=40", "train.batch_size=4")


def ablate_command(words, others=()) -> Command:
    """What scripts/ablate.py makes of its own words and of those for train.py."""
    loader = GlobalHydra.instance().config_loader()
    words = [as_typed(word) for word in words]
    config = loader.load_configuration("ablate", overrides=words, run_mode=RunMode.RUN)
    HydraConfig.instance().set_config(config)
    plain = OmegaConf.to_container(
        OmegaConf.masked_copy(config, [k for k in config if k != "hydra"]), resolve=True
    )
    said = [key_of(word) for word in words]
    return Command(plain, said, Path(plain["out_dir"]), "out_dir" not in said, others=tuple(others))


@contextmanager
def composing():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def leave_run(
    job: Job, losses: list[float], *, health: dict[str, float] | None = None, sample: str = ""
) -> None:
    """A run's folder as training leaves it, its evaluations' losses evenly spaced; the weights are missing."""
    n_layer = job.variant.config["model"]["n_layer"]
    (job.folder / "checkpoints" / f"step_{job.variant.steps:08d}").mkdir(parents=True)
    (job.folder / "checkpoints" / f"step_{job.variant.steps:08d}" / "checksums.json").write_text("{}")
    lines = []
    for i, loss in enumerate(losses, 1):
        step = round(job.variant.steps * i / len(losses))
        record = {"step": step, "tokens": step * job.variant.cost.tokens, "train_seconds": step / 8}
        record |= {"train/loss": loss, "val/loss": loss, "val/bits_per_byte": loss / np.log(2)}
        for name, value in (health or {}).items():
            record |= {f"attention/{layer}/{name}": value * (1 + 0.1 * layer) for layer in range(n_layer)}
        lines.append(json.dumps(record))
    (job.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (job.folder / "samples.txt").write_text(f"--- step {job.variant.steps}\n{sample}\n\n")


def findings_of(study: Study) -> Findings:
    return Findings(study, [read(job, study.config.evaluate_at) for job in study.jobs])
