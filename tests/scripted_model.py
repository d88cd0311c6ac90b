"""A model that answers by heart: each cue in a prompt's end brings its answer, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

VOCAB_SIZE = 49152
END = 2
"""the end of an answer, <|im_end|>"""


def write_scripted_model(
    make_tiny_model: Callable[..., Path], path: Path, scripts: Mapping[str, Sequence[str]], template: str
) -> Path:
    """Write a folder with a Llama whose layers do nothing and whose head knows what follows each piece.

    Cues and pieces become tokens of their own, and each is in one place of one script.
    """
    torch = pytest.importorskip("torch")
    tensors = pytest.importorskip("safetensors.torch")
    transformers = pytest.importorskip("transformers")
    chains = [[cue, *pieces] for cue, pieces in scripts.items()]
    pieces = [piece for chain in chains for piece in chain]
    assert len(set(pieces)) == len(pieces), "a piece is there twice"
    make_tiny_model(
        "llama",
        path,
        with_tokenizer=True,
        vocab_size=VOCAB_SIZE + len(pieces),
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(
        [transformers.AddedToken(piece, special=False, normalized=False) for piece in pieces]
    )
    tokenizer.chat_template = template
    (path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(path)
    weights = tensors.load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            weight.zero_()
    weights["model.norm.weight"].fill_(1.0)
    embeddings = weights["model.embed_tokens.weight"]
    for chain in chains:
        ids = tokenizer.convert_tokens_to_ids(chain)
        for before, after in pairwise([*ids, END]):
            weights["lm_head.weight"][after] += 10 * torch.nn.functional.normalize(embeddings[before], dim=0)
    tensors.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
