"""Attention with functions of the score and of the mask, written in Python: documents behind each other, a bias that is learned, and a score that no option says.
Run: ``python examples/python/flex_attention.py``."""

import torch
from torch.nn.attention.flex_attention import create_block_mask

import verdigris.torch as vt


def main():
    torch.manual_seed(20)
    b, h, s, d = 2, 4, 70, 16
    q, k, v = (torch.randn(b, h, s, d, requires_grad=True) for _ in range(3))
    document = torch.tensor([0] * 20 + [1] * 35 + [2] * 15)
    near = torch.zeros(h, 2 * s - 1, requires_grad=True)

    def of_documents(b, h, q_idx, kv_idx):
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    def relative(score, b, h, q_idx, kv_idx):
        return score + near[h, q_idx - kv_idx + s - 1]  # gradients reach the table

    def leaky(score, b, h, q_idx, kv_idx):
        return torch.where(score > 0, score, 0.1 * score)  # no option of attention: computed between its products

    mask = create_block_mask(of_documents, b, h, s, s, device="cpu")
    at = torch.arange(s)
    attended = of_documents(None, None, at[:, None], at[None])
    for score_mod in (None, relative, leaky):
        o, log_sum_exp = vt.flex_attention(q, k, v, score_mod, mask, return_lse=True)
        o.square().sum().backward()

        # The formula, with all scores in memory.
        scores = q @ k.mT * d**-0.5
        if score_mod is not None:
            scores = score_mod(scores, *(torch.arange(n).reshape([n if i == axis else 1 for i in range(4)]) for axis, n in enumerate((b, h, s, s))))
        scores = scores.masked_fill(~attended, -torch.inf)
        assert torch.allclose(o, scores.softmax(-1) @ v, atol=1e-5)
        assert torch.allclose(log_sum_exp, scores.logsumexp(-1), atol=1e-5)
    assert near.grad.abs().max() > 0

    # What has no form is refused before anything is computed, by the operation and the function.
    def by_parity(score, b, h, q_idx, kv_idx):
        return score if q_idx % 2 else -score

    try:
        vt.flex_attention(q, k, v, by_parity)
    except NotImplementedError as error:
        print(error)
        assert "by_parity" in str(error) and "torch.where" in str(error)
    else:
        raise AssertionError("a decision of Python's over a value was not refused")
    return o


if __name__ == "__main__":
    main()
