"""Length extrapolation: a trained model read in longer windows than it was trained on."""

import json
from pathlib import Path

from minilm import checkpoint as checkpoints
from minilm.attention.positions import Learned
from minilm.build import build_model, load_weights
from minilm.evaluation import evaluate
from minilm.files import write_atomic
from minilm.launch import Parts
from minilm.runtime import autocast

LONGER = "longer.json"


def evaluate_longer(run: Path, multiples: tuple[int, ...]) -> None:
    """Write RUN/longer.json: for each multiple of block_size the validation loss in windows of that length, in nats
    per token, or the reason why there is none.
    """
    saved = checkpoints.load(run, state=False)
    parts = Parts.of(saved.config, saved)
    data = parts.tokens(1)
    found: dict[str, float | str] = {}
    for multiple in multiples:
        size = saved.config["model"]["block_size"] * multiple
        config = saved.config | {"model": saved.config["model"] | {"block_size": size}}
        model = build_model(config, parts.tokenizer.vocab_size, parts.tokenizer.end_token)
        if isinstance(model.position, Learned) and multiple > 1:
            found[str(multiple)] = f"cannot: learned positions end at {size // multiple}"
        elif len(data.val) <= size:
            found[str(multiple)] = f"the validation text has only {len(data.val)} tokens"
        else:
            load_weights(model, saved)
            found[str(multiple)] = evaluate(
                model.to(parts.device),
                data.val,
                block_size=size,
                batch_size=max(1, parts.train.eval_batch_size // multiple),
                autocast=autocast(parts.device, parts.precision),
            )
    write_atomic(run / LONGER, json.dumps(found))
