import pytest
from torch.nn.attention import flex_attention


@pytest.fixture(autouse=True)
def plain_flex(monkeypatch):
    """FlexAttention without the tracing that it does even uncompiled: the same numbers, 20 times sooner."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
