"""Model shapes for the optimizer probe: dense Qwen2 without weights of its own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A dense Qwen2: RMSNorm, SwiGLU, biases on query, key and value alone, input and output embedding apart."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Trainable elements, counted from the shape."""
        kv = self.kv_heads * (self.hidden // self.heads)
        attention = self.hidden * (self.hidden + 2 * kv) + (self.hidden + 2 * kv) + self.hidden * self.hidden
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


# qwen2_7b is Qwen/Qwen2-7B-Instruct's config.json. qwen2_7b_24l is the same with 24 of its 28 layers: the largest that
# leaves room on a 141 GB device for the fp32 copies of bf16 moments that TransformerEngine makes in each step.
SHAPES = {
    "tiny": Shape(layers=2, hidden=128, heads=4, kv_heads=2, ffn=192, vocabulary=64),
    "177m": Shape(layers=8, hidden=896, heads=14, kv_heads=2, ffn=4864, vocabulary=32000),
    "qwen2_7b": Shape(layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocabulary=152064),
    "qwen2_7b_24l": Shape(layers=24, hidden=3584, heads=28, kv_heads=4, ffn=18944, vocabulary=152064),
}
