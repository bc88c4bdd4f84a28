"""Questions with passages, as a RAG application asks them: what all of them share is computed once, by the server.

stowage serve MODEL --host-memory 1GiB
python docs/examples/rag_server.py [URL]
"""

import sys

import openai

PASSAGES = {
    "deck": "The upper deck takes timber, which may get wet. Nothing heavy lies there. " * 4,
    "hold": "The lower hold takes iron, because it is heavy. The upper hold takes tea and cotton. " * 4,
    "crew": "The crew counts the crates twice, and writes the numbers into the plan. " * 4,
}
SYSTEM = "You answer questions about ships, in one sentence, from the passages that you are given. " * 8
QUESTIONS = {"What lies in the lower hold?": ("hold", "deck"), "Where does tea lie?": ("hold", "crew")}


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    for question, names in QUESTIONS.items():
        # What is the same comes first: a shared prefix ends where prompts differ.
        told = "\n\n".join([SYSTEM, *(PASSAGES[name] for name in names)])
        messages = [{"role": "system", "content": told}, {"role": "user", "content": question}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
        usage = answer.usage
        print(f"{usage.prompt_tokens} tokens, {usage.prompt_tokens_details.cached_tokens} of them not computed again:")
        print(f"  {question} {answer.choices[0].message.content!r}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["http://127.0.0.1:8000"]))
