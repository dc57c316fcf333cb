"""Start-up of a residual block of convolutions, written in cuDNN's frontend. Run it twice: the second start builds nothing."""

from __future__ import annotations

import time
from typing import Any

import cudnn
import torch

import plancache

HALF, FLOAT = cudnn.data_type.HALF, cudnn.data_type.FLOAT
N, C, SIZE = 32, 128, 28


class ConvBiasReLU:
    """relu(conv(x, w) + b [+ residual]): one fused graph, built when the model is made."""

    def __init__(self, handle: Any, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        self.handle = handle
        self.graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle)
        given = [value for value in (x, w, b, residual) if value is not None]
        self.inputs = [self.graph.tensor(list(value.shape), list(value.stride())) for value in given]
        y = self.graph.conv_fprop(image=self.inputs[0], weight=self.inputs[1], padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        y = self.graph.bias(input=y, bias=self.inputs[2])
        if residual is not None:
            y = self.graph.add(y, self.inputs[3])
        self.output = self.graph.relu(y).set_output(True)
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.workspace = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def __call__(self, *values: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(values[0])
        self.graph.execute({**dict(zip(self.inputs, values, strict=True)), self.output: y}, self.workspace, handle=self.handle)
        return y


def main() -> None:
    last = {"memory_format": torch.channels_last}
    x = torch.randn(N, C, SIZE, SIZE, device="cuda", dtype=torch.half).to(**last)
    w1, w2 = (torch.randn(C, C, 3, 3, device="cuda", dtype=torch.half).mul(0.03).to(**last) for _ in range(2))
    b1, b2 = (torch.randn(1, C, 1, 1, device="cuda", dtype=torch.half) for _ in range(2))
    handle, started = cudnn.create_handle(), time.perf_counter()
    with plancache.startup("conv-block") as start:
        first, second = ConvBiasReLU(handle, x, w1, b1), ConvBiasReLU(handle, x, w2, b2, residual=x)
    y = second(first(x, w1, b1), w2, b2, x)
    torch.cuda.synchronize()
    print(f"ready and run once after {time.perf_counter() - started:.3f} s\n{start.summary()}")
    conv = torch.nn.functional.conv2d
    expected = torch.relu(conv(torch.relu(conv(x, w1, padding=1) + b1), w2, padding=1) + b2 + x)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    main()
