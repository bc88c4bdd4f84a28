"""A parsed request: prompts as tokens, sampling parameters, and the syntax of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from stowage.engine.sampling_params import SamplingParams
from stowage.server.tools.parser import PLAIN, OutputSyntax
from stowage.server.tools.request_tools import NO_TOOLS, RequestTools

SEEDS: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as tokens; `text` is what `echo` repeats."""

    tokens: list[int]
    text: str
    new_tokens_max: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A parsed request for `n` choices of each prompt; choice i of prompt p has the index p * n + i.

    logprobs: how many top tokens are reported with each token; None: no log-probabilities. silent: `max_tokens` is 0;
    the engine cannot generate nothing, so it draws a token that is not shown. syntax: reasoning and calls in the
    answer's text; tools: the tools that it may call. said: fields that the API repeats in its answers.
    """

    model: str
    prompts: tuple[Prompt, ...]
    n: int
    params: SamplingParams
    cache_salt: str
    stream: bool
    include_usage: bool
    logprobs: int | None = None
    echo: bool = False
    silent: bool = False
    syntax: OutputSyntax = PLAIN
    tools: RequestTools = NO_TOOLS
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once, however many choices it has."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def params_of(self, choice: int) -> SamplingParams:
        """The parameters of one choice: choices of one prompt need different seeds."""
        prompt, number = divmod(choice, self.n)
        seed = self.params.seed
        return replace(
            self.params,
            max_new_tokens=max(1, self.prompts[prompt].new_tokens_max),
            seed=None if seed is None else (seed + number) % SEEDS,
            prompt_logprobs=None if number else self.params.prompt_logprobs,  # the same for all choices of a prompt
        )
