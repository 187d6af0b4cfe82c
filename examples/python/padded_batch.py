"""Training on a batch of sequences that are padded at their end: attention is told how many keys count, and reads no mask.
Run: ``python examples/python/padded_batch.py``."""

import torch

import verdigris.torch as vt


def main():
    torch.manual_seed(20)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # As a tokenizer gives it: ones in front.
    attention_mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], device=device)
    q, k, v = (torch.randn(3, heads, 6, 16, device=device, requires_grad=True) for heads in (4, 2, 2))

    lengths = attention_mask.sum(1, dtype=torch.int32)  # on the device: the host waits for nothing
    o = vt.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, kv_lengths=lengths)
    gradients = torch.autograd.grad(o.square().sum(), (q, k, v))

    # The same by a mask of all pairs.
    mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril() & attention_mask.bool()[:, None, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert torch.allclose(o, wanted, atol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(wanted.square().sum(), (q, k, v))):
        assert torch.allclose(one, other, atol=1e-4)
    assert (gradients[1][1, :, 3:] == 0).all(), "padding has the gradient 0"

    # Sequences behind each other have offsets, and lengths beside them where not all of their keys count.
    rows = [x.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for x in (q, k, v)]
    ends = torch.arange(0, 19, 6, dtype=torch.int32, device=device)
    ragged = vt.flash_attn_varlen_func(*rows, ends, ends, 6, 6, seqused_k=lengths)
    whole = vt.scaled_dot_product_attention(q, k, v, enable_gqa=True, kv_lengths=lengths)
    assert torch.allclose(ragged.reshape(3, 6, 4, 16).transpose(1, 2), whole, atol=1e-5)
    ragged.square().sum().backward()
    assert (rows[1].grad.reshape(3, 6, 2, 16)[2, 1:] == 0).all()
    print(f"{int(lengths.sum())} of {attention_mask.numel()} keys count")


if __name__ == "__main__":
    main()
