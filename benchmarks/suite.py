"""The graphs that tuning is measured on: those of `plancache.graphs`, ResNet-50's convolutions, a transformer's parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

BATCH = 32

# ResNet-50's unique convolutions (He et al., 2015, table 1, with the stride on the 3x3 as torchvision has it):
# in channels, out channels, extent of the input, filter, stride
RESNET50 = (
    (64, 64, 56, 1, 1),
    (64, 64, 56, 3, 1),
    (64, 256, 56, 1, 1),
    (256, 128, 56, 1, 1),
    (128, 128, 56, 3, 2),
    (256, 512, 56, 1, 2),
    (128, 128, 28, 3, 1),
    (512, 256, 28, 1, 1),
    (256, 256, 14, 3, 1),
    (1024, 512, 14, 1, 1),
    (512, 512, 7, 3, 1),
    (512, 2048, 7, 1, 1),
)
GRADIENTS = ((64, 64, 56, 3, 1), (256, 256, 14, 3, 1))


class Case(NamedTuple):
    """A graph and its name. `example`: of `plancache.graphs`, where it is one; else `gradient` says what it is."""

    name: str
    graph: Any
    example: Any = None
    gradient: tuple[Any, ...] = ()


def cases() -> Iterator[Case]:
    """All graphs, described anew."""
    from plancache import graphs

    for example in graphs.examples():
        yield Case(example.name, example.graph, example)
    for channels, out, extent, taps, stride in RESNET50:
        example = graphs.conv_bias_relu(
            batch=BATCH,
            in_channels=channels,
            out_channels=out,
            height=extent,
            width=extent,
            filter_height=taps,
            filter_width=taps,
            padding=taps // 2,
            stride=stride,
            data_type="HALF",
        )
        yield Case(example.name, example.graph, example)
    for kind in ("dgrad", "wgrad"):
        for shape in GRADIENTS:
            yield gradient(kind, *shape)
    for rows, n, k, activation in ((4096, 3072, 768, "gelu"), (4096, 768, 3072, "identity"), (8192, 4096, 1024, "swish")):
        example = graphs.matmul_scale_bias_activation(batch=1, m=rows, n=n, k=k, activation=activation, transpose_b=True)
        yield Case(example.name, example.graph, example)
    for length, heads in ((256, 16), (2048, 16), (4096, 8)):
        example = graphs.sdpa(batch=2, heads=heads, sequence_length=length, head_dim=128)
        yield Case(example.name, example.graph, example)
    for example in (graphs.layer_norm(rows=4096, features=4096), graphs.rms_norm(rows=16384, features=2048, training=True)):
        yield Case(example.name, example.graph, example)
    example = graphs.fp8_matmul(batch=1, m=4096, n=4096, k=4096)
    yield Case(example.name, example.graph, example)


def gradient(kind: str, channels: int, out: int, extent: int, taps: int, stride: int) -> Case:
    """A convolution's gradient of its input (`dgrad`) or its filter (`wgrad`), channels-last, HALF."""
    import cudnn

    padding = taps // 2
    after = (extent + 2 * padding - taps) // stride + 1
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, compute_data_type=cudnn.data_type.FLOAT)
    image, filters, response = (BATCH, channels, extent, extent), (out, channels, taps, taps), (BATCH, out, after, after)
    window = {"padding": [padding] * 2, "stride": [stride] * 2, "dilation": [1, 1]}
    dy = _tensor(graph, "dy", response)
    if kind == "dgrad":
        result, dim = graph.conv_dgrad(loss=dy, filter=_tensor(graph, "w", filters), **window), image
    else:
        result, dim = graph.conv_wgrad(image=_tensor(graph, "x", image), loss=dy, **window), filters
    result.set_output(True).set_dim(dim).set_stride(_channels_last(dim))
    name = f"conv_{kind}-{'x'.join(map(str, image))}-{'x'.join(map(str, filters))}-s{stride}-half"
    return Case(name, graph, gradient=(kind, image, filters, response, stride, padding))


def _tensor(graph: Any, name: str, dim: tuple[int, int, int, int]) -> Any:
    return graph.tensor(dim=dim, stride=_channels_last(dim), name=name)


def _channels_last(dim: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    _, channels, height, width = dim
    return height * width * channels, 1, width * channels, channels
