"""A training step as the trainer makes it, to be timed or weighed."""

import torch

from minilm.bench.setting import Setting
from minilm.build import check, construct
from minilm.optim import Optim
from minilm.runtime import compile_model
from minilm.training import TrainConfig
from minilm.update import gradients, step


class TrainingStep:
    """A call is one update of a fresh model on random tokens: forward, loss, backward, clipping, optimizers."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.config = TrainConfig(**check(TrainConfig, setting.config["train"], "train"))
        self.model = setting.model()
        self.forward = compile_model(self.model, setting.config["compile"])
        self.optimizers = construct(setting.config, "optim", Optim).build(self.model)
        self.scaler = torch.amp.GradScaler(setting.device.type, enabled=setting.precision == "fp16")
        self.windows = setting.tokens(self.config.batch_size, self.model.config.block_size + 1)

    def __call__(self) -> None:
        c, setting = self.config, self.setting
        gradients(
            self.forward,
            self.windows[:, :-1],
            self.windows[:, 1:],
            windows=c.micro_batch_size or c.batch_size,
            precision=setting.precision,
            scaler=self.scaler,
        )
        step(self.optimizers, self.model.parameters(), self.scaler, c.grad_clip)
