"""Start-up of a transformer block, written in cuDNN's frontend. Run it twice: the second start builds nothing."""

import time

import cudnn
import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

import plancache

BF16, FLOAT = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
BATCH, TOKENS, WIDTH, HEADS, HEAD = 4, 1024, 768, 12, 64


class Fused:
    """One graph: `describe` makes its output from the graph and tensors like the values given."""

    def __init__(self, handle, describe, *values):
        self.handle = handle
        self.graph = cudnn.pygraph(io_data_type=BF16, intermediate_data_type=FLOAT, compute_data_type=FLOAT, handle=handle)
        self.inputs = [self.graph.tensor(list(value.shape), list(value.stride())) for value in values]
        self.output = describe(self.graph, *self.inputs).set_output(True)
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.workspace = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def __call__(self, *values):
        y = torch.empty_strided(self.output.get_dim(), self.output.get_stride(), dtype=torch.bfloat16, device="cuda")
        self.graph.execute({**dict(zip(self.inputs, values, strict=True)), self.output: y}, self.workspace, handle=self.handle)
        return y


def attend(graph, q, k, v):
    o, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=HEAD**-0.5, is_inference=True)
    return o.set_dim([BATCH, HEADS, TOKENS, HEAD]).set_stride([TOKENS * WIDTH, HEAD, WIDTH, 1])


def main():
    rows, shapes = BATCH * TOKENS, ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    x, wide = (torch.randn(1, rows, columns, device="cuda", dtype=torch.bfloat16) for columns in (WIDTH, 4 * WIDTH))
    wqkv, wo, w1, w2 = (torch.randn(1, *shape, device="cuda", dtype=torch.bfloat16).mul(shape[0] ** -0.5) for shape in shapes)
    qkv = (x @ wqkv).view(BATCH, TOKENS, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
    handle, started = cudnn.create_handle(), time.perf_counter()
    with plancache.startup("transformer-block") as start:
        project = Fused(handle, lambda g, a, w: g.matmul(a, w), x, wqkv)
        attention = Fused(handle, attend, *qkv)
        add = Fused(handle, lambda g, a, w, r: g.add(g.matmul(a, w), r), x, wo, x)
        widen = Fused(handle, lambda g, a, w: g.gelu(g.matmul(a, w)), x, w1)
        narrow = Fused(handle, lambda g, a, w, r: g.add(g.matmul(a, w), r), wide, w2, x)
    heads = attention(*project(x, wqkv).view(BATCH, TOKENS, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4))
    h = add(heads.transpose(1, 2).reshape(x.shape), wo, x)
    y = narrow(widen(h, w1), w2, h)
    torch.cuda.synchronize()
    print(f"ready and run once after {time.perf_counter() - started:.3f} s\n{start.summary()}")
    expected = scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(x.shape) @ wo + x
    torch.testing.assert_close(y, gelu(expected @ w1) @ w2 + expected, rtol=5e-2, atol=5e-2)


if __name__ == "__main__":
    main()
