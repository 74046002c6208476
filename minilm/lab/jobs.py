"""The runs of a study through Hydra's launchers: one after the other, several at once, or on a cluster."""

import os
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from minilm import config as command_line
from minilm.errors import ConfigError, first_line, one_line
from minilm.files import write_atomic
from minilm.lab.longer import evaluate_longer
from minilm.lab.results import FAILED, LOG, read
from minilm.lab.study import Job, Study
from minilm.words import as_text, as_typed, key_of


@dataclass(frozen=True)
class Work:
    """What a launcher runs for each job: training, in the folder that Hydra made, and the evaluations after it.

    What it prints goes to the folder's log.txt. A failure is written down there, and the other jobs go on.
    """

    evaluate_at: tuple[int, ...]

    def __call__(self, config: DictConfig) -> None:
        from minilm.launch import train

        command = command_line.command("train", config)
        with (
            open(command.out_dir / LOG, "a", encoding="utf-8") as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            try:
                trainer = train(command)
                stopped_by = trainer.stopped_by
                if not stopped_by and self.evaluate_at and trainer.world.main:
                    evaluate_longer(command.out_dir, self.evaluate_at)
            except Exception as error:
                traceback.print_exc()
                said = (
                    str(error)
                    if isinstance(error, ConfigError)
                    else f"{type(error).__name__}: {first_line(error)}"
                )
                write_atomic(command.out_dir / FAILED, one_line(said))
                return
        if stopped_by:
            sys.exit(128 + stopped_by)  # no failure of this run: the study was stopped


def launcher_words(study: Study, job: Job) -> list[str]:
    """What a launcher is told of a job, as Hydra reads it. Its names are texts, whatever stands in them."""
    words = [as_typed(word) for word in (*job.variant.words, f"seed={job.seed}", "resume=auto")]
    said = {key_of(word) for word in words}
    names = {"wandb.group": study.config.name, "wandb.name": f"{job.variant.name} {job.seed}"}
    names = {key: name for key, name in names.items() if key not in said}
    names["hydra.sweep.subdir"] = os.path.relpath(job.folder, study.folder)
    return words + [as_text(key, name) for key, name in names.items()]


def launch(study: Study) -> None:
    """Run the jobs that are not done yet. Returns when all have ended, well or not."""
    pending = [job for job in study.jobs if read(job, study.config.evaluate_at).state != "done"]
    if not pending:
        return
    for job in pending:
        (job.folder / FAILED).unlink(missing_ok=True)
    overrides = [launcher_words(study, job) for job in pending]
    loader = GlobalHydra.instance().config_loader()
    said = [word for word in HydraConfig.get().overrides.hydra if not word.startswith("hydra.mode=")]
    words = [as_typed(word) for word in said]
    words += ["hydra.mode=MULTIRUN", as_text("hydra.sweep.dir", str(study.folder.resolve()))]
    master = loader.load_configuration("train", overrides=words, run_mode=RunMode.MULTIRUN)
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=loader, callbacks=Callbacks(master)),
        task_function=Work(tuple(study.config.evaluate_at)),
        config=master,
    )
    try:
        launcher.launch(overrides, initial_job_idx=0)
    except Exception as error:  # a worker that was killed, a queue that is not there
        traceback.print_exc()
        for job in pending:
            if read(job, study.config.evaluate_at).state in ("waiting", "running"):
                job.folder.mkdir(parents=True, exist_ok=True)
                write_atomic(job.folder / FAILED, f"its launcher gave up: {first_line(error)}")
