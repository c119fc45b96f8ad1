"""A model that costs next to nothing, in place of ``torchvision.models.get_model``."""

from torch import nn


def get_model(name, num_classes=10):
    """With batch statistics, and with dropout, which draws random numbers."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=4, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, num_classes),
    )
