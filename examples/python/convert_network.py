"""A network of PyTorch converted: what is swapped, what stays and why, and that results and gradients are PyTorch's.
Run: ``python examples/python/convert_network.py``."""

import torch
from torch import nn

import verdigris.torch as vt


def main():
    torch.manual_seed(20)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(16),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))

    converted, report = vt.convert(network)  # a copy of the modules that shares parameters
    print(report)
    assert {"0", "2", "3", "5"} <= set(report.swapped), report
    assert "4" in report.kept, report  # a view computes nothing

    def step(model):
        network.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss.item(), [parameter.grad.clone() for parameter in network.parameters()]

    (theirs, their_gradients), (ours, our_gradients) = step(network), step(converted)
    print(f"loss {ours:.6f}, PyTorch's {theirs:.6f}")
    assert abs(ours - theirs) < 1e-5
    for got, want in zip(our_gradients, their_gradients, strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5), (got - want).abs().max()
    return ours


if __name__ == "__main__":
    main()
