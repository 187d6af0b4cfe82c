"""The peers' bench: the same operation on the same buffers in the same run, ours beside PyTorch's (cuDNN, cuBLAS and its own kernels).

    python -m verdigris.bench conv --json FILE       measures convolutions (`gemm`: matrix products); `--help` tells the rest
    python -m verdigris.bench train --model resnet50 a network's training, converted and not
    python -m verdigris.bench nets                   torchvision's networks, inference and training, plain and converted
    python -m verdigris.bench transformers           Hugging Face's: a decoder and a ViT, inference, decoding and training
    python -m verdigris.bench norm                   what lies between the products; `memory` and `fused` likewise (`layers`)
    python -m verdigris.bench latency                what a fresh process, a new shape and a call cost
    python -m verdigris.bench telemetry              what metrics cost in training, and of a call
    python -m verdigris.bench check NEW [OLD]        the regression gate
    python -m verdigris.bench render                 docs/performance.md and its plots, from the records

What is measured stands in `problems` and `drawn` (which), `judge` (right before fast), `row` and `measure` (how), `peers` (beside whom),
`columns` (what our times mean) and `bars` (how fast is asked for).
"""
