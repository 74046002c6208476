"""Models in Hugging Face's format, both ways: config.json, safetensors, a tokenizer, all of them plain files.

What a model is made of decides which stock architecture of transformers it becomes:

    layernorm, learned positions                    GPT2LMHeadModel
    rmsnorm, rope, swiglu                           LlamaForCausalLM; with a sliding window MistralForCausalLM
    rmsnorm, rope, swiglu, qk_norm                  Qwen3ForCausalLM, the norms' weights all 1
    rmsnorm, rope, relu2 or gelu                    ArceeForCausalLM
    rmsnorm, rope, relu2 or gelu, qk_norm           ApertusForCausalLM, the norms' weights all 1

All of these are read back, and Qwen2ForCausalLM, too. What has no exact counterpart is refused by its key. Tensors are
read, turned and written one at a time, in float32: memory holds no more than the largest of them, twice.
"""

from minilm.interop.from_hf import import_model
from minilm.interop.to_hf import export

__all__ = ["export", "import_model"]
