"""A training step as the trainer makes it, to be timed or weighed."""

import torch
import torch.nn.functional as F
from torch import nn

from minilm.bench.setting import Setting
from minilm.build import check, construct
from minilm.evaluation import at_least_float32
from minilm.optim import Optim
from minilm.runtime import autocast
from minilm.training import TrainConfig


class TrainingStep:
    """A call is one update of a fresh model on random tokens: forward, loss, backward, clipping, optimizers."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.config = TrainConfig(**check(TrainConfig, setting.config["train"], "train"))
        self.model = setting.model()
        self.optimizers = construct(setting.config, "optim", Optim).build(self.model)
        self.scaler = torch.amp.GradScaler(setting.device.type, enabled=setting.precision == "fp16")
        self.windows = setting.tokens(self.config.batch_size, self.model.config.block_size + 1)

    def __call__(self) -> None:
        c, setting = self.config, self.setting
        counted = self.windows[:, 1:].numel()
        for piece in self.windows.split(c.micro_batch_size or c.batch_size):
            with autocast(setting.device, setting.precision):
                logits = self.model(piece[:, :-1])
            targets = piece[:, 1:].flatten()
            loss = F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets, reduction="sum")
            self.scaler.scale(loss / counted).backward()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), c.grad_clip or float("inf"))
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
