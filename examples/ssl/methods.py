"""SimCLR and DINO, each with its views, its loss, and what it does after a step."""

import copy
import math
from itertools import pairwise

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torchvision.transforms import v2

from gpuprefetch import RandomResizedCrop, Views

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def view(size, scale, jitter, *, blur, solarize=0.0):
    """The transforms of one view: crop and flip are one launch, what follows is one program.

    ``blur`` and ``solarize`` are shares of the images.
    """
    kernel_size = 2 * (size // 20) + 1  # a tenth of the image, and odd
    policies = [
        v2.RandomApply([v2.ColorJitter(*jitter)], p=0.8),
        v2.RandomGrayscale(p=0.2),
        v2.RandomApply([v2.GaussianBlur(kernel_size, sigma=(0.1, 2.0))], p=blur),
    ]
    if solarize:
        policies.append(v2.RandomSolarize(threshold=0.5, p=solarize))
    crop = RandomResizedCrop(size, scale=scale, interpolation="bicubic")
    return [crop, v2.RandomHorizontalFlip(), *policies, v2.Normalize(MEAN, STD)]


def build_backbone(name):
    """A ResNet of torchvision's without its classifier, and the width of its features.

    "tiny" is four convolutions, for small and simple pictures.
    """
    if name == "tiny":
        layers = []
        widths = (3, 32, 64, 128, 128)
        for before, after in pairwise(widths):
            conv = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), widths[-1]
    model = torchvision.models.get_model(name)
    width = model.fc.in_features
    model.fc = nn.Identity()
    return model, width


class SimCLR(nn.Module):
    """Views of one image attract each other, those of others repel (Chen et al., 2020)."""

    def __init__(self, args):
        super().__init__()
        self.backbone, width = build_backbone(args.model)
        hidden = [nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        self.head = nn.Sequential(*hidden, nn.Linear(width, 128))
        self.temperature = args.temperature

    @staticmethod
    def transforms(args):
        jitter = [args.strength * most for most in (0.8, 0.8, 0.8, 0.2)]
        either = view(args.image_size, (args.min_area, 1.0), jitter, blur=0.5)
        return Views(either, either)

    def forward(self, views):
        return self.head(self.backbone(torch.cat(views))).chunk(2)

    def loss(self, first, second):
        return nt_xent(first, second, self.temperature)

    def after_step(self, progress):
        pass


def nt_xent(first, second, temperature):
    """Cross-entropy of finding an image's other view among all 2 N - 1; both are ``(N, D)``."""
    embeddings = F.normalize(torch.cat([first, second]).float(), dim=1)
    logits = embeddings @ embeddings.T / temperature
    itself = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    other = torch.arange(len(logits), device=logits.device).roll(len(first))
    return F.cross_entropy(logits.masked_fill(itself, -math.inf), other)


class DINO(nn.Module):
    """A student tells from any crop what its mean over time tells from a large one (Caron, 2021).

    The teacher is that mean. Centering and a low temperature keep it from giving one answer to
    everything.
    """

    def __init__(self, args):
        super().__init__()
        backbone, width = build_backbone(args.model)
        self.student = nn.Sequential(backbone, DINOHead(width, args.prototypes))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(args.prototypes))
        self.momentum = args.momentum

    @property
    def backbone(self):
        return self.teacher[0]

    @staticmethod
    def transforms(args):
        between = max(0.4, args.min_area)  # the least of a large crop, the most of a small one
        large = (between, 1.0)
        small = (0.6 * args.min_area, between)
        jitter = [args.strength * most for most in (0.4, 0.4, 0.2, 0.1)]
        first = view(args.image_size, large, jitter, blur=1.0)
        second = view(args.image_size, large, jitter, blur=0.1, solarize=0.2)
        local = view(args.local_size, small, jitter, blur=0.5)
        return Views(first, second, *[local] * 8)

    def forward(self, views):
        """Logits of the student, ``(10, N, K)``, and of the teacher, ``(2, N, K)``."""
        sizes = views[:2], views[2:]  # a forward for each size
        student = [self.student(torch.cat(crops)).chunk(len(crops)) for crops in sizes]
        with torch.no_grad():
            teacher = self.teacher(torch.cat(views[:2])).chunk(2)
        return torch.stack(student[0] + student[1]), torch.stack(teacher)

    def loss(self, student, teacher, student_temperature=0.1, teacher_temperature=0.04):
        student = student.float()
        teacher = teacher.float()
        targets = ((teacher - self.center) / teacher_temperature).softmax(-1)
        found = (student / student_temperature).log_softmax(-1)
        losses = -torch.einsum("tnk,snk->ts", targets, found) / targets.shape[1]
        same = torch.eye(*losses.shape, dtype=torch.bool, device=losses.device)
        self.center.lerp_(teacher.mean((0, 1)), 0.1)
        return losses[~same].mean()

    @torch.no_grad()
    def after_step(self, progress):
        """Move the teacher, at the end of the training no more."""
        share = (1 - self.momentum) * (1 + math.cos(math.pi * progress)) / 2
        for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(new, share)


class DINOHead(nn.Module):
    """Features to logits of K prototypes of norm 1."""

    def __init__(self, width, prototypes, hidden=512, bottleneck=128):
        super().__init__()
        first = nn.Linear(width, hidden)
        second = nn.Linear(hidden, hidden)
        third = nn.Linear(hidden, bottleneck)
        self.layers = nn.Sequential(first, nn.GELU(), second, nn.GELU(), third)
        self.last = weight_norm(nn.Linear(bottleneck, prototypes, bias=False))
        norm = self.last.parametrizations.weight.original0
        norm.data.fill_(1.0)
        norm.requires_grad_(False)

    def forward(self, features):
        return self.last(F.normalize(self.layers(features), dim=-1))


METHODS = {"simclr": SimCLR, "dino": DINO}
