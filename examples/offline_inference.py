"""The offline Python API on the bundled model: the script of a vLLM user with one import changed.

python examples/offline_inference.py
"""

from __future__ import annotations

from blendserve import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]
RULES = (
    "You answer questions about geography for a quiz. Give the name that is asked for and nothing else: no "
    "explanation, no greeting, no other language than English. If you do not know the answer, say that you do not."
)
QUESTIONS = [
    [
        {"role": "system", "content": RULES},
        {"role": "user", "content": f"What is the capital of {country}?"},
    ]
    for country in ("Italy", "Japan", "France")
]


def main() -> None:
    # Without a model the bundled one runs; model= takes what vLLM's LLM takes.
    with LLM(max_model_len=1024) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
        greedy = SamplingParams(temperature=0.0, max_tokens=16)
        for index, output in llm.chat_iter(QUESTIONS, greedy):  # as they finish
            print(f"{index}: {output.outputs[0].text!r}, {output.num_cached_tokens} prompt tokens shared")


if __name__ == "__main__":
    main()
