"""Architectures of torchvision, timm and transformers, and some by hand: small, with random weights, dropping nothing.

Each is a module, built when asked for, with inputs, and a loss between its one output and a target.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

# torchvision's compiled part does not load beside PyTorch's CPU build; what it lacks then has to be declared.
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms") if torch.version.cuda is None else ():
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm  # noqa: E402
import transformers  # noqa: E402
from timm.layers import DropPath, GatedMlp  # noqa: E402
from timm.models import byobnet, focalnet, metaformer, mlp_mixer, nfnet, volo, xception_aligned  # noqa: E402
from torchvision import models, ops  # noqa: E402

CLASSES, WORDS = 10, 50
BATCH, LENGTH = 4, 8


class Architecture(NamedTuple):
    """How to build a module, and what it is given."""

    module: Callable[[], nn.Module]
    inputs: Mapping[str, Callable[[], torch.Tensor]]  # by the names of forward's parameters
    loss: str = "cross-entropy"  # or "mse"
    axis: int = 1  # of the classes
    mode: str = "train"  # "eval" for modules that draw at random whether to skip layers, which the exporter refuses

    def made(self) -> nn.Module:
        """The module with the weights that it always has, in train mode, dropping nothing."""
        torch.manual_seed(0)
        module = self.module().train()
        for part in module.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd | ops.StochasticDepth):
                part.p = 0.0
            elif isinstance(part, DropPath):
                part.drop_prob = 0.0
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        _leave_the_start(module, list(self.batch().values()))
        return module.train(self.mode == "train")

    def batch(self, number: int = 0) -> dict[str, torch.Tensor]:
        """One of several batches, by the names of the inputs, the same one every time."""
        torch.manual_seed(1 + number)
        return {name: make() for name, make in self.inputs.items()}


def _leave_the_start(module: nn.Module, inputs: list[torch.Tensor]) -> None:
    """Gives a fresh module weights and statistics as training has them.

    Scales of 1 and biases of 0 hide mistakes, scales of 0 all that is behind them; a channel that is constant sits on
    the kink of the ReLU behind its BatchNorm. Running statistics become those of a batch.
    """
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all():
                parameter.add_(0.1 * torch.randn(parameter.shape))
        for norm in norms:
            norm.momentum = 1.0
        if norms:
            module(*inputs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


class Picked(nn.Module):
    """A module of which one result counts, `module(**{name: input})`."""

    def __init__(self, module: nn.Module, pick: Callable[[Any], torch.Tensor], names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.module, self._pick, self._names = module, pick, names

    def forward(self, x: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        if not self._names:
            return self._pick(self.module(x))
        return self._pick(self.module(**dict(zip(self._names, (x, second), strict=False))))


timm.layers.set_fused_attn(False)  # whose form with a bias that is trained the exporter refuses


# Inputs.


def _image(size: int = 32, channels: int = 3) -> dict[str, Callable[[], torch.Tensor]]:
    return {"x": lambda: torch.randn(BATCH, channels, size, size)}


def _numbers(*shape: int) -> dict[str, Callable[[], torch.Tensor]]:
    return {"x": lambda: torch.randn(BATCH, *shape)}


def _words(length: int = LENGTH) -> dict[str, Callable[[], torch.Tensor]]:
    return {"x": lambda: torch.randint(3, WORDS, (BATCH, length))}


# Families.


def _vision(name: str, size: int = 32, **options: Any) -> Architecture:
    return Architecture(lambda: getattr(models, name)(weights=None, num_classes=CLASSES, **options), _image(size))


def _timm(name: str, size: int = 32, **options: Any) -> Architecture:
    return Architecture(lambda: timm.create_model(name, num_classes=CLASSES, **options), _image(size))


def _mlp(**options: Any) -> Architecture:
    return Architecture(lambda: mlp_mixer.MlpMixer(CLASSES, 32, 3, 8, 2, 32, **options), _image())


def _with_head(features: nn.Module, channels: int) -> nn.Module:
    """Features with a small head: those that torchvision gives VGG and AlexNet have up to 120 million weights."""
    return nn.Sequential(
        features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(4 * channels, 32),
        nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def _vgg(batch_norm: bool) -> nn.Module:
    return _with_head(models.vgg.make_layers([8, "M", 16, "M", 32, 32, "M"], batch_norm), 32)


def _googlenet() -> nn.Module:
    """GoogLeNet's stem and two of its blocks, narrow; the whole has 5 million weights, and Inception v3 22."""
    googlenet = importlib.import_module("torchvision.models.googlenet")  # the name in the package is a function's
    return nn.Sequential(
        googlenet.BasicConv2d(3, 16, kernel_size=7, stride=2, padding=3), nn.MaxPool2d(3, 2, ceil_mode=True),
        googlenet.BasicConv2d(16, 32, kernel_size=3, padding=1), googlenet.Inception(32, 16, 8, 16, 4, 8, 8),
        nn.MaxPool2d(3, 2, ceil_mode=True), googlenet.Inception(48, 16, 8, 16, 4, 8, 8), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(), nn.Linear(48, CLASSES),
    )  # fmt: skip


def _inception_v3() -> nn.Module:
    blocks = models.inception
    return nn.Sequential(
        blocks.BasicConv2d(3, 16, kernel_size=3, stride=2), blocks.InceptionA(16, 16), blocks.InceptionB(240),
        blocks.InceptionC(720, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(768, CLASSES),
    )  # fmt: skip


def config(kind: str, **options: Any) -> Any:
    """A configuration of transformers, of few and narrow layers, that drops nothing."""
    config = getattr(transformers, f"{kind}Config")(**options)
    for name, value in vars(config).items():
        if ("drop" in name or name in ("activation_function_dropout", "layerdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**TINY, "vocab_size": WORDS, "max_position_embeddings": 32}


def _transformer(
    kind: str, head: str, inputs: Any = None, names: tuple[str, ...] = ("input_ids",), **options: Any
) -> Architecture:
    """A model of transformers with the head's logits."""

    def module() -> nn.Module:
        model = getattr(transformers, f"{kind}{head}")(config(kind, **options))
        return Picked(model, lambda result: result.logits, names)

    return Architecture(module, inputs or _words(), axis=-1)


def _encoder(kind: str, **options: Any) -> Architecture:
    return _transformer(kind, "ForSequenceClassification", **{**TEXT, "num_labels": CLASSES, **options})


def _decoder(kind: str, head: str = "ForCausalLM", **options: Any) -> Architecture:
    return _transformer(kind, head, **{**TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **options})


# Segmentation and detection.


def _small_resnet(**options: Any) -> nn.Module:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], **options)


def _segmentation(kind: Callable[..., nn.Module], head: Callable[[], nn.Module]) -> Architecture:
    def module() -> nn.Module:
        backbone = models._utils.IntermediateLayerGetter(_small_resnet(), {"layer4": "out"})
        return Picked(kind(backbone, head()), lambda result: result["out"])

    return Architecture(module, _image(64))


class RetinaNet(nn.Module):
    """A feature pyramid with RetinaNet's heads: scores and boxes of all anchors in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = models.detection.backbone_utils.BackboneWithFPN(
            _small_resnet(norm_layer=ops.FrozenBatchNorm2d), {"layer2": "0", "layer3": "1", "layer4": "2"},
            [128, 256, 512], 32, ops.feature_pyramid_network.LastLevelP6P7(32, 32),
        )  # fmt: skip
        self.head = models.detection.retinanet.RetinaNetHead(32, 3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(list(self.backbone(x).values()))
        return torch.cat([found["cls_logits"], found["bbox_regression"]], -1)


# By hand.


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.recurrent = kind(16, 24, batch_first=True, **options)
        self.head = nn.LazyLinear(CLASSES)
        self(torch.zeros(1, 2, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(x))[0].mean(1))


class _Cell(nn.Module):
    """A cell that forward steps through a sequence, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 8)
        for k in range(x.shape[1]):
            h = self.cell(x[:, k], h)
        return self.head(h)


class _Distances(nn.Module):
    """The distances of a detector's boxes, each the mean of a distribution, by a frozen convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, 2, 1)
        self.bins = nn.Conv2d(8, 1, 1, bias=False).requires_grad_(False)
        self.bins.weight.data[:] = torch.arange(8.0).view(1, 8, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).view(BATCH, 4, 8, -1)
        return self.bins(y.transpose(2, 1).softmax(1)).view(BATCH, 4, -1)


class _TransformerClassifier(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.position = nn.Parameter(torch.randn(1, LENGTH, 32) / 5)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x) + self.position)[:, 0])


def _double(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, bilinear: bool = False) -> None:
        super().__init__()
        self.down = nn.ModuleList([_double(3, 8), _double(8, 16), _double(16, 32)])
        up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.up = nn.ModuleList(
            nn.Sequential(up, nn.Conv2d(2 * n, n, 1)) if bilinear else nn.ConvTranspose2d(2 * n, n, 2, 2)
            for n in (16, 8)
        )
        self.after = nn.ModuleList([_double(32, 16), _double(16, 8)])
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for k, down in enumerate(self.down):
            x = down(x if k == 0 else functional.max_pool2d(x, 2))
            kept.append(x)
        for up, after, other in zip(self.up, self.after, kept[-2::-1], strict=True):
            x = after(torch.cat([other, up(x)], 1))
        return self.head(x)


class _Capsules(nn.Module):
    """A capsule net with three rounds of routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 5)
        self.primary = nn.Conv2d(16, 32, 5, stride=2)
        self.weight = nn.Parameter(torch.randn(1, 4 * 4 * 8, CLASSES, 8, 4) / 10)

    @staticmethod
    def _squashed(s: torch.Tensor) -> torch.Tensor:
        squares = (s * s).sum(-1, keepdim=True)
        return squares / (1 + squares) * s / torch.sqrt(squares + 1e-8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.primary(torch.relu(self.conv(x)))
        u = self._squashed(u.reshape(-1, 8, 4, 16).permute(0, 1, 3, 2).reshape(-1, 4 * 4 * 8, 4))
        votes = (self.weight @ u[:, :, None, :, None]).squeeze(-1)
        agreement = torch.zeros_like(votes[..., :1])
        for _ in range(3):
            v = self._squashed((torch.softmax(agreement, 2) * votes).sum(1, keepdim=True))
            agreement = agreement + (votes * v).sum(-1, keepdim=True)
        return v.squeeze(1).norm(dim=-1)


class _Sinkhorn(nn.Module):
    """Points matched by an entropic transport plan: ten rounds of normalizing rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.register_buffer("sharpness", torch.tensor(5.0))

    def forward(self, x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        plan = self.sharpness * self.first(x) @ self.second(second).transpose(1, 2)
        for _ in range(10):
            plan = plan - plan.logsumexp(1, keepdim=True)
            plan = plan - plan.logsumexp(2, keepdim=True)
        return plan.exp() @ second


class _WaveNet(nn.Module):
    """Dilated, causal convolutions with gates, residues and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Conv1d(1, 16, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**k) for k in range(5))
        self.mixed = nn.ModuleList(nn.Conv1d(16, 32, 1) for _ in range(5))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(16, 16, 1), nn.ReLU(), nn.Conv1d(16, CLASSES, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.start(x), 0
        for k, (dilated, mixed) in enumerate(zip(self.dilated, self.mixed, strict=True)):
            content, gate = dilated(functional.pad(x, (2**k, 0))).chunk(2, 1)
            residue, skip = mixed(torch.tanh(content) * torch.sigmoid(gate)).chunk(2, 1)
            x, total = x + residue, total + skip
        return self.head(total)


class _Autoencoder(nn.Module):
    """A variational one without its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(40, 32), nn.GELU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, deviation = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + functional.softplus(deviation))


def _generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def _video() -> nn.Module:
    """With biases: for a Conv3d without one the exporter writes what onnxruntime refuses."""
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(inplace=True), nn.MaxPool3d(2),
        nn.Conv3d(8, 16, (1, 3, 3), padding=(0, 1, 1)), nn.BatchNorm3d(16), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


def _resnet(*blocks: int, block: Any = models.resnet.BasicBlock, **options: Any) -> Architecture:
    return Architecture(lambda: models.ResNet(block, list(blocks), num_classes=CLASSES, **options), _image(64))


def _efficientnet(name: str, **options: Any) -> nn.Module:
    setting, channels = models.efficientnet._efficientnet_conf(name, **options)
    return models.EfficientNet(setting, 0.0, last_channel=channels or 64, num_classes=CLASSES)


FusedMBConv, MBConv = models.efficientnet.FusedMBConvConfig, models.efficientnet.MBConvConfig
CNBlock = models.convnext.CNBlockConfig
SWIN = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
SPEECH = {**TINY, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}

TORCHVISION = {
    "alexnet": Architecture(lambda: _with_head(models.AlexNet().features, 256), _image(64)),
    "vgg": Architecture(functools.partial(_vgg, False), _image()),
    "vgg_bn": Architecture(functools.partial(_vgg, True), _image()),
    "resnet": _resnet(1, 1, 1, 1),
    "resnext": _resnet(1, 1, 1, 1, block=models.resnet.Bottleneck, groups=4, width_per_group=8),
    "mobilenet_v2": _vision("mobilenet_v2", 64, width_mult=0.25),
    "mobilenet_v3": _vision("mobilenet_v3_small", 64, width_mult=0.35),
    "mnasnet": Architecture(lambda: models.MNASNet(0.35, num_classes=CLASSES), _image(64)),
    "shufflenet_v2": _vision("shufflenet_v2_x0_5", 64),
    "squeezenet": _vision("squeezenet1_1"),
    "densenet": Architecture(
        lambda: models.DenseNet(8, (2, 2, 2, 2), num_init_features=16, num_classes=CLASSES), _image(64)
    ),
    "efficientnet": Architecture(
        functools.partial(_efficientnet, "efficientnet_b0", width_mult=0.25, depth_mult=0.3), _image(64)
    ),
    "efficientnet_v2": Architecture(
        lambda: models.EfficientNet(
            [FusedMBConv(1, 3, 1, 8, 8, 1), FusedMBConv(4, 3, 2, 8, 16, 2), MBConv(4, 3, 2, 16, 24, 2)],
            0.0,
            last_channel=64,
            num_classes=CLASSES,
        ),
        _image(),
    ),
    "regnet": Architecture(
        lambda: models.RegNet(
            models.regnet.BlockParams.from_init_params(4, 16, 8.0, 2.0, 8, se_ratio=0.25), num_classes=CLASSES
        ),
        _image(),
    ),
    "convnext": Architecture(
        lambda: models.ConvNeXt([CNBlock(16, 32, 1), CNBlock(32, 64, 1), CNBlock(64, None, 1)], num_classes=CLASSES),
        _image(),
    ),
    "swin": Architecture(lambda: models.SwinTransformer(**SWIN, num_classes=CLASSES), _image()),
    "swin_v2": Architecture(
        lambda: models.SwinTransformer(
            **SWIN,
            num_classes=CLASSES,
            block=models.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=models.swin_transformer.PatchMergingV2,
        ),
        _image(),
    ),
    "vit": Architecture(lambda: models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES), _image()),
    "maxvit": Architecture(
        lambda: models.MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, 0.0, num_classes=CLASSES), _image()
    ),
    "googlenet": Architecture(_googlenet, _image(32)),
    "inception_v3": Architecture(_inception_v3, _image(48)),
    "fcn": _segmentation(models.segmentation.fcn.FCN, functools.partial(models.segmentation.fcn.FCNHead, 512, 5)),
    "deeplab_v3": _segmentation(
        models.segmentation.DeepLabV3,
        functools.partial(models.segmentation.deeplabv3.DeepLabHead, 512, 5, (2, 3, 4)),
    ),
    "lraspp": Architecture(
        lambda: Picked(
            models.segmentation.lraspp._lraspp_mobilenetv3(models.mobilenet_v3_small(dilated=True, width_mult=0.5), 5),
            lambda result: result["out"],
        ),
        _image(64),
    ),
    "retinanet": Architecture(RetinaNet, _image(64), "mse"),
}

TIMM = {
    "mobilenet_v4": _timm("mobilenetv4_conv_small_035", 64),
    "ghostnet": _timm("ghostnet_050", 64, drop_rate=0.0),
    "deit": _timm("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "pvt_v2": _timm("pvt_v2_b0", embed_dims=(8, 16, 20, 32), depths=(1, 1, 1, 1)),
    "nfnet": Architecture(
        lambda: nfnet.NormFreeNet(
            nfnet.NfCfg(
                depths=(1, 1, 1, 1),
                channels=(16, 32, 32, 64),
                stem_type="3x3",
                group_size=8,
                act_layer="silu",
                extra_conv=True,
                attn_layer="se",
                attn_kwargs={"rd_ratio": 0.5},
            ),
            num_classes=CLASSES,
        ),
        _image(),
    ),
    "mlp_mixer": _mlp(),
    "gmlp": _mlp(block_layer=mlp_mixer.SpatialGatingBlock, mlp_ratio=4, mlp_layer=GatedMlp),
    "resmlp": _mlp(block_layer=mlp_mixer.ResBlock, norm_layer=mlp_mixer.Affine, mlp_ratio=4),
    "convmixer": Architecture(lambda: timm.models.convmixer.ConvMixer(24, 3, 5, 4, num_classes=CLASSES), _image()),
    "poolformer": Architecture(
        lambda: metaformer.MetaFormer(
            num_classes=CLASSES, depths=(1, 1, 1), dims=(8, 16, 24), norm_layers=metaformer.GroupNorm1
        ),
        _image(),
    ),
    "levit": _timm("levit_128s", 64, img_size=64, embed_dim=(32, 48, 64), depth=(1, 1, 1), num_heads=(2, 3, 4)),
    "mobilevit": _timm("mobilevit_xxs", 64),
    "edgenext": _timm("edgenext_xx_small", 64, depths=(1, 1, 2, 1)),
    "repvgg": Architecture(
        lambda: byobnet.ByobNet(
            byobnet.ByoModelCfg(byobnet._rep_vgg_bcfg((1, 2, 1), (0.25,) * 3), stem_type="rep", stem_chs=16),
            num_classes=CLASSES,
        ),
        _image(),
    ),
    "res2net": _timm("res2net50_26w_4s", 64, layers=(1, 1, 1, 1)),
    "resnest": _timm("resnest14d", 64, layers=(1, 1, 1, 1)),
    "skresnet": _timm("skresnet18", 64, layers=(1, 1, 1, 1)),
    "hrnet": _timm("hrnet_w18_small", 64),
    "vovnet": _timm("ese_vovnet19b_slim", 64),
    "xception": Architecture(
        lambda: xception_aligned.XceptionAligned(
            [{"in_chs": 64, "out_chs": 64, "stride": 2}, {"in_chs": 64, "out_chs": (64, 96, 128), "stride": 1}],
            num_classes=CLASSES,
        ),
        _image(),
    ),
    "convnext_v2": _timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "davit": _timm("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(16, 32, 32, 64), num_heads=(2, 2, 4, 4)),
    "focalnet": Architecture(
        lambda: focalnet.FocalNet(num_classes=CLASSES, embed_dim=16, depths=(1, 1, 1, 1)), _image()
    ),
    "sequencer": _timm(
        "sequencer2d_s", img_size=64, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), hidden_sizes=(8, 16, 16, 16)
    ),
    "xcit": _timm("xcit_nano_12_p8_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
    "cait": _timm("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "beit": _timm("beit_base_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "eva02": _timm("eva02_tiny_patch14_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "coatnet": _timm("coatnet_nano_rw_224", 64, img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 64, 64)),
    "efficientformer": _timm("efficientformer_l1", 224, depths=(1, 1, 1, 2), embed_dims=(8, 16, 24, 32)),
    "fastvit": _timm("fastvit_t8", 64, layers=(1, 1, 1, 1)),
    "repvit": _timm("repvit_m0_9", 64, embed_dim=(16, 24, 32, 48), depth=(1, 1, 1, 1)),
    "starnet": _timm("starnet_s050", 64, depths=(1, 1, 1, 1)),
    "twins": _timm(
        "twins_svt_small", img_size=64, embed_dims=(16, 32, 32, 64), depths=(2, 2, 2, 2), num_heads=(2, 2, 4, 4)
    ),
    "volo": Architecture(
        lambda: volo.VOLO(
            (1, 1),
            64,
            3,
            CLASSES,
            "token",
            8,
            16,
            (16, 32),
            (2, 4),
            (True, False),
            (True, False),
            (2.0, 2.0),
            post_layers=("ca", "ca"),
            use_aux_head=False,
            use_mix_token=False,
        ),
        _image(64),
    ),
}

TRANSFORMERS = {
    "bert": _encoder("Bert"),
    "bert_masked_lm": _decoder("Bert", "ForMaskedLM"),
    "roberta": _encoder("Roberta", pad_token_id=1),
    "distilbert": _encoder("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "albert": _encoder("Albert", embedding_size=16),
    "electra": _encoder("Electra", embedding_size=16),
    "mobilebert": _encoder("MobileBert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "deberta": _encoder("Deberta"),
    "deberta_v2": _encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, share_att_key=True
    ),
    "funnel": _transformer(
        "Funnel", "ForSequenceClassification", vocab_size=WORDS, num_labels=CLASSES, block_sizes=[1, 1], d_model=32,
        n_head=4, d_head=8, d_inner=64, num_decoder_layers=1,
    ),
    "big_bird": _encoder("BigBird", attention_type="original_full"),
    "roformer": _encoder("RoFormer", embedding_size=16),
    "mpnet": _encoder("MPNet"),
    "squeezebert": _encoder("SqueezeBert", embedding_size=32, q_groups=2, k_groups=2, v_groups=1),
    "convbert": _encoder("ConvBert", embedding_size=16, head_ratio=2, conv_kernel_size=3),
    "fnet": _encoder("FNet", tpu_short_seq_length=LENGTH),
    "modernbert": _encoder("ModernBert", pad_token_id=0, cls_token_id=1, sep_token_id=2, reference_compile=False),
    "xlnet": _transformer(
        "XLNet", "ForSequenceClassification", vocab_size=WORDS, num_labels=CLASSES, d_model=32, n_layer=2, n_head=4,
        d_inner=64,
    ),
    "gpt2": _decoder("GPT2", "LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "gpt_neo": _decoder("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    "gpt_neox_japanese": _decoder("GPTNeoXJapanese", intermediate_multiple_size=2),
    "gptj": _decoder("GPTJ", n_embd=32, n_layer=2, n_head=4, n_positions=32, rotary_dim=4),
    "gpt_neox": _decoder("GPTNeoX"),
    "opt": _decoder("OPT", ffn_dim=64, word_embed_proj_dim=32)._replace(mode="eval"),
    "bloom": _decoder("Bloom", n_layer=2, n_head=4),
    "llama": _decoder("Llama", num_key_value_heads=2),
    "mistral": _decoder("Mistral", num_key_value_heads=2, sliding_window=4),
    "qwen2": _decoder("Qwen2", num_key_value_heads=2),
    "qwen3": _decoder("Qwen3", num_key_value_heads=2, head_dim=8),
    "gemma": _decoder("Gemma", num_key_value_heads=2, head_dim=8),
    "gemma2": _decoder("Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=4),
    "phi": _decoder("Phi"),
    "phi3": _decoder("Phi3"),
    "falcon": _decoder("Falcon"),
    "stablelm": _decoder("StableLm", num_key_value_heads=4),
    "olmo2": _decoder("Olmo2"),
    "mamba": _decoder("Mamba", state_size=4, time_step_rank=4),
    "t5": _transformer(
        "T5", "ForConditionalGeneration", {**_words(), "second": _words(6)["x"]}, ("input_ids", "decoder_input_ids"),
        vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        attn_implementation="eager",
    ),
    "bart": _transformer(
        "Bart", "ForConditionalGeneration", {**_words(), "second": _words(6)["x"]}, ("input_ids", "decoder_input_ids"),
        vocab_size=WORDS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32,
    )._replace(mode="eval"),
    "whisper": _transformer(
        "Whisper", "ForConditionalGeneration", {**_numbers(8, 32), "second": _words(6)["x"]},
        ("input_features", "decoder_input_ids"), vocab_size=WORDS, num_mel_bins=8, max_source_positions=16,
        max_target_positions=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )._replace(mode="eval"),
    "wav2vec2": _transformer(
        "Wav2Vec2", "ForSequenceClassification", _numbers(400), ("input_values",), **SPEECH, vocab_size=WORDS,
        num_labels=CLASSES, apply_spec_augment=False, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
    )._replace(mode="eval"),
    "hubert": _transformer(
        "Hubert", "ForSequenceClassification", _numbers(400), ("input_values",), **SPEECH, vocab_size=WORDS,
        num_labels=CLASSES, apply_spec_augment=False, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
    )._replace(mode="eval"),
    "ast": _transformer(
        "AST", "ForAudioClassification", _numbers(24, 16), ("input_values",), **TINY, num_labels=CLASSES, max_length=24,
        num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8,
    ),
    "vit_hf": _transformer(
        "ViT", "ForImageClassification", _image(), ("pixel_values",), **TINY, image_size=32, patch_size=8,
        num_labels=CLASSES,
    ),
    "dinov2": _transformer(
        "Dinov2", "ForImageClassification", _image(), ("pixel_values",), hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, image_size=32, patch_size=8, num_labels=CLASSES,
    ),
    "segformer": _transformer(
        "Segformer", "ForSemanticSegmentation", _image(), ("pixel_values",), hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=16, num_labels=5,
    )._replace(axis=1),
    "perceiver": _transformer(
        "Perceiver", "ForMaskedLM", _words(), ("inputs",), vocab_size=WORDS, d_model=32, d_latents=32, num_latents=4,
        num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4,
        max_position_embeddings=LENGTH, qk_channels=32, v_channels=32,
    ),
    "clip": Architecture(
        lambda: Picked(
            transformers.CLIPModel(
                config("CLIP", text_config={**TEXT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
                        vision_config={**TINY, "image_size": 32, "patch_size": 8}, projection_dim=16)
            ),
            lambda result: result.logits_per_image, ("input_ids", "pixel_values"),
        ),
        {**_words(), "second": _image()["x"]},
    ),
    "time_series": Architecture(
        lambda: Picked(
            transformers.PatchTSTForClassification(
                config("PatchTST", num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16,
                        num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, num_targets=CLASSES,
                        positional_encoding_type="random")
            ),
            lambda result: result.prediction_logits, ("past_values",),
        ),
        _numbers(16, 2),
    ),
}  # fmt: skip

BY_HAND = {
    "lstm": Architecture(functools.partial(_Recurrent, nn.LSTM, num_layers=2), _words()),
    "lstm_bidirectional": Architecture(functools.partial(_Recurrent, nn.LSTM, bidirectional=True), _words()),
    "gru": Architecture(functools.partial(_Recurrent, nn.GRU, num_layers=2), _words()),
    "rnn": Architecture(functools.partial(_Recurrent, nn.RNN), _words()),
    "transformer_encoder": Architecture(_TransformerClassifier, _words()),
    "transformer_norm_first": Architecture(
        functools.partial(_TransformerClassifier, norm_first=True, activation="gelu"), _words()
    ),
    "gru_cell": Architecture(_Cell, _numbers(6, 5)),
    "distances": Architecture(_Distances, _image(16), "mse"),
    "unet": Architecture(UNet, _image(16)),
    "unet_bilinear": Architecture(functools.partial(UNet, bilinear=True), _image(16)),
    "autoencoder": Architecture(_Autoencoder, _numbers(40), "mse"),
    "capsules": Architecture(_Capsules, _image(16, 1)),
    "sinkhorn": Architecture(_Sinkhorn, {**_numbers(6, 3), "second": _numbers(6, 3)["x"]}, "mse"),
    "dcgan": Architecture(_generator, _numbers(16, 1, 1), "mse"),
    "video": Architecture(_video, _numbers(3, 4, 16, 16)),
    "wavenet": Architecture(_WaveNet, _numbers(1, 40)),
}

ARCHITECTURES = {**TORCHVISION, **TIMM, **TRANSFORMERS, **BY_HAND}
