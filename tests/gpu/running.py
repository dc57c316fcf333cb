"""Buffers and comparisons for tests that execute plans."""

from __future__ import annotations

from typing import Any

TYPES = {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float32", "FP8_E4M3": "float8_e4m3fn"}


def poisoned(operand: Any) -> Any:
    """A buffer for an output as its plan declares it, every byte 0xFF: NaN in all these types."""
    import torch

    buffer = torch.empty_strided(operand.dim, operand.stride, dtype=getattr(torch, TYPES[operand.data_type]), device="cuda")
    extent = 1 + sum((size - 1) * step for size, step in zip(operand.dim, operand.stride, strict=True))
    torch.as_strided(buffer, (extent,), (1,)).view(torch.uint8).fill_(0xFF)
    return buffer


def outputs_of(plan: Any) -> dict[str, Any]:
    return {operand.name: poisoned(operand) for operand in plan.operands if operand.is_output}


def run(plan: Any, inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Executes a plan on poisoned outputs and returns them."""
    import torch

    outputs = outputs_of(plan)
    plan.execute({**inputs, **outputs}, **more)
    torch.cuda.synchronize()
    return outputs


def same_bits(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    import torch

    return all(torch.equal(_bytes(mine[name]), _bytes(theirs[name])) for name in mine)


def _bytes(buffer: Any) -> Any:
    import torch

    extent = 1 + sum((size - 1) * step for size, step in zip(buffer.shape, buffer.stride(), strict=True))
    return torch.as_strided(buffer, (extent,), (1,)).view(torch.uint8)


def assert_agrees(example: Any, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Outputs equal PyTorch's within the example's tolerance, every element written."""
    import torch

    for name, expected in example.reference(inputs).items():
        relative, absolute = example.tolerance(name)
        torch.testing.assert_close(
            outputs[name].float().reshape(expected.shape),
            expected,
            rtol=relative,
            atol=absolute,
            msg=lambda text, name=name: f"{name}: {text}",
        )
