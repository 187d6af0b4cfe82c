"""ResNet-50 and ConvNeXt-T, layer by layer, name by name and draw by draw those of torchvision, so that the bench needs no torchvision.

Sources: torchvision 0.26, ``models/resnet.py`` (v1.5: the stride stands in the 3x3) and ``models/convnext.py``.
"""

from typing import List

import torch
from torch import nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with batch normalization, and the shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


class ResNet50(nn.Module):
    """ResNet-50 v1.5."""

    def __init__(self, classes: int = 1000, blocks=(3, 4, 6, 3), width: int = 64):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = width
        for i, count in enumerate(blocks):
            stage: List[nn.Module] = []
            for j in range(count):
                stage.append(Bottleneck(inputs, width << i, 2 if i > 0 and j == 0 else 1))
                inputs = (width << i) * Bottleneck.expansion
            setattr(self, f"layer{i + 1}", nn.Sequential(*stage))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class LayerNorm2d(nn.LayerNorm):
    """Layer normalization over the channels of [n, c, h, w]."""

    def forward(self, x):
        x = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Permute(nn.Module):
    """The dims in another order."""

    def __init__(self, dims: List[int]):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return torch.permute(x, self.dims)


class StochasticDepth(nn.Module):
    """Drops whole images of a residual branch in training, and scales those that stay."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        keep = 1.0 - self.p
        noise = torch.empty([x.shape[0]] + [1] * (x.dim() - 1), dtype=x.dtype, device=x.device).bernoulli_(keep)
        return x * noise.div_(keep)


class ConvNeXtBlock(nn.Module):
    """7x7 depthwise, layer normalization, two linear layers with GELU between, layer scale."""

    def __init__(self, width: int, depth_p: float, scale: float = 1e-6):
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(width, width, 7, padding=3, groups=width, bias=True),
            Permute([0, 2, 3, 1]),
            nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            Permute([0, 3, 1, 2]),
        )
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1) * scale)
        self.stochastic_depth = StochasticDepth(depth_p)

    def forward(self, x):
        return x + self.stochastic_depth(self.layer_scale * self.block(x))


class ConvNeXtTiny(nn.Module):
    """ConvNeXt-T. ``depth_p`` is the greatest probability of stochastic depth; 0 makes training deterministic."""

    def __init__(self, classes: int = 1000, widths=(96, 192, 384, 768), blocks=(3, 3, 9, 3), depth_p: float = 0.1):
        super().__init__()
        layers: List[nn.Module] = [nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0], eps=1e-6))]
        total, seen = sum(blocks), 0
        for i, (width, count) in enumerate(zip(widths, blocks)):
            stage: List[nn.Module] = []
            for _ in range(count):
                stage.append(ConvNeXtBlock(width, depth_p * seen / (total - 1.0)))
                seen += 1
            layers.append(nn.Sequential(*stage))
            if i + 1 < len(widths):
                layers.append(nn.Sequential(LayerNorm2d(width, eps=1e-6), nn.Conv2d(width, widths[i + 1], 2, 2)))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(LayerNorm2d(widths[-1], eps=1e-6), nn.Flatten(1), nn.Linear(widths[-1], classes))
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)))


#: Makers by name; the argument says whether training has to be deterministic.
MODELS = {
    "resnet50": lambda deterministic: ResNet50(),
    "convnext_tiny": lambda deterministic: ConvNeXtTiny(depth_p=0.0 if deterministic else 0.1),
}
