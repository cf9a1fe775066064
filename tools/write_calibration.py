"""Writes calibration.txt: text that the dense source model wrote itself, chat turns and plain prose.

Run once, by hand, when the text is to be made anew; its output is committed. The only part of tools/ that needs
torch and transformers. The documents are separated by the end-of-text token; the last token of a document that
was cut for length is dropped with the incomplete word it may belong to.

    python tools/write_calibration.py tools/calibration.txt
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from smallmodel.calibration import SEPARATOR
from smallmodel.layout import EMBEDDING, FINAL_NORM, layer_prefix, layer_tensors
from smallmodel.source import DenseSource, find_gguf
from smallmodel.tokenizer import write_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

SEED = 20
N_NEW_TOKENS = 96

OPENINGS = (
    "The capital of Italy is",
    "The city of Paris lies on",
    "When ice melts, it",
    "Rivers carry water from",
    "The printing press changed",
    "A healthy breakfast might include",
    "The old lighthouse keeper looked out at",
    "An operating system is",
    "Electricity flows through",
    "The violin belongs to",
    "Farmers rotate their crops because",
    "The speed of light is",
    "Birds migrate in winter because",
    "In economics, supply and demand",
    "The library was quiet until",
    "Copyright law protects",
    "This agreement is made between the licensor and the licensee, and",
    "Redistribution and use of the software are permitted provided that",
    "The committee decided on Monday that",
    "To install the package, run",
    "def is_prime(n):",
    "A triangle has three sides, and",
    "The heart and the lungs work together to",
    "Dear customer, thank you for",
)
QUESTIONS = (
    "What is the capital of Spain?",
    "What is the capital of France?",
    "Which river flows through London?",
    "Why does the moon have phases?",
    "Tell me a short story about a lost key.",
    "How can I learn to cook rice?",
    "What is 7 times 8?",
    "Who painted the Mona Lisa?",
    "Give me two reasons to read books.",
    "What does a compiler do?",
    "Explain what a volcano is to a child.",
    "Write a polite letter to a neighbour about noise.",
    "How do plants drink water?",
    "What is the difference between a comet and an asteroid?",
    "List three animals that live in the sea.",
    "Describe a rainy day in one paragraph.",
)
FOLLOW_UPS = ("Thank you. Can you say more about that?", "And what about Germany?", "Please say it in one sentence.")


def load_dense(directory: Path) -> tuple[Any, Any]:
    """(model in f32, its tokenizer), built from the GGUF."""
    source = DenseSource(find_gguf())
    shape = source.shape
    write_tokenizer(source.tokenizer(), directory)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
    )
    state = {EMBEDDING: source.embedding(), FINAL_NORM: source.final_norm()}
    for i in range(shape.n_layers):
        state |= {layer_prefix(i) + name: values for name, values in layer_tensors(source.layer(i))}
    tensors = {name: torch.from_numpy(values.copy()) for name, values in state.items()}
    tensors["lm_head.weight"] = tensors[EMBEDDING]
    model: Any = LlamaForCausalLM(config)
    model.load_state_dict(tensors)
    model.eval()
    return model, AutoTokenizer.from_pretrained(directory, padding_side="left")


def write_on(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Each prompt with the model's sampled continuation, up to the end of the turn or N_NEW_TOKENS."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    rows = model.generate(
        **batch,
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=1.0,
        max_new_tokens=N_NEW_TOKENS,
        eos_token_id=[0, 2],
        pad_token_id=2,
    )
    new_ids = [row[batch.input_ids.shape[1] :].tolist() for row in rows]
    return [finish(prompt, ids, tokenizer) for prompt, ids in zip(prompts, new_ids, strict=True)]


def finish(prompt: str, new_ids: list[int], tokenizer: Any) -> str:
    """`prompt` and its continuation: to the end-of-turn token, or to the last whole word if cut for length."""
    ends = [i for i, token in enumerate(new_ids) if token in (0, 2)]
    if ends:
        kept = new_ids[: ends[0] + (new_ids[ends[0]] == 2)]
        return prompt + str(tokenizer.decode(kept, skip_special_tokens=False))
    return prompt + str(tokenizer.decode(new_ids, skip_special_tokens=False)).rsplit(" ", 1)[0]


def chat(tokenizer: Any, question: str) -> str:
    """The chat template's text for one user turn, ready for the answer."""
    turns = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def main() -> None:
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as directory:
        model, tokenizer = load_dense(Path(directory))
    with torch.no_grad():
        documents = write_on(model, tokenizer, [*OPENINGS, *(chat(tokenizer, q) for q in QUESTIONS)])
        answered = [text for text in documents[len(OPENINGS) :] if text.endswith("<|im_end|>")]
        longer = [
            f"{text}\n<|im_start|>user\n{FOLLOW_UPS[i % len(FOLLOW_UPS)]}<|im_end|>\n<|im_start|>assistant\n"
            for i, text in enumerate(answered)
        ]
        continued = write_on(model, tokenizer, longer) if longer else []
    replaced = dict(zip(answered, continued, strict=True))
    documents = [replaced.get(text, text) for text in documents]
    Path(sys.argv[1]).write_text(SEPARATOR.join(documents), encoding="utf-8")


if __name__ == "__main__":
    main()
