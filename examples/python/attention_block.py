"""Attention with the products around it as one plan, and a decoder's step that appends to its cache within the plan.
Run: ``python examples/python/attention_block.py``."""

import torch

import verdigris.torch as vt

HEADS, KV_HEADS, ELEMENTS, FEATURES = 8, 2, 32, 128


def angles(positions):
    """Cosines and sines of rotary positions: `[1, positions, pairs of a head's elements]`."""
    speed = 10000.0 ** (-torch.arange(ELEMENTS // 2) / (ELEMENTS // 2))
    angle = torch.as_tensor(positions, dtype=torch.float32)[:, None] * speed
    return angle.cos()[None], angle.sin()[None]


def main():
    torch.manual_seed(20)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    qkv = (torch.randn((HEADS + 2 * KV_HEADS) * ELEMENTS, FEATURES) / FEATURES**0.5).to(device)
    out = (torch.randn(FEATURES, HEADS * ELEMENTS) / (HEADS * ELEMENTS) ** 0.5).to(device)
    x = torch.randn(2, 12, FEATURES, device=device)
    words = dict(heads=HEADS, kv_heads=KV_HEADS, is_causal=True)

    with torch.no_grad():
        rope = tuple(angle.to(device) for angle in angles(range(12)))
        whole = vt.attention_block(x, qkv, out, residual=x, rope=rope, **words)
        print(vt.explain("attention_block", "scale=0.1767766952966369 causal=bottom_right heads=8 kv_heads=2", x, qkv, None, out))

        # The same, position by position: each call stores its keys and values where `lengths` says, and attends to all before.
        k_cache, v_cache = (torch.zeros(2, 16, KV_HEADS, ELEMENTS, device=device) for _ in range(2))
        lengths = torch.zeros(2, dtype=torch.int32, device=device)
        for place in range(12):
            lengths += 1
            token = x[:, place : place + 1].contiguous()
            rope = tuple(angle.to(device) for angle in angles([place]))
            cache = dict(k_cache=k_cache, v_cache=v_cache, kv_lengths=lengths)
            step = vt.attention_block(token, qkv, out, residual=token, rope=rope, **cache, **words)
            assert torch.allclose(step, whole[:, place : place + 1], rtol=1e-4, atol=1e-4), place
    assert k_cache[:, 12:].abs().max() == 0
    return whole


if __name__ == "__main__":
    main()
